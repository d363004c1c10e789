"""What the three dashboards share: panels, variables, links, and the JSON that Grafana loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import bargauge as bargauge_builder
from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders import prometheus as prometheus_builder
from grafana_foundation_sdk.builders import stat as stat_builder
from grafana_foundation_sdk.builders import table as table_builder
from grafana_foundation_sdk.builders import timeseries as timeseries_builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.source.queries import open_incidents

OVERVIEW = "fr-hang-overview"
INCIDENT = "fr-incident"
EXPORTER = "fr-exporter"
TAG = "fr_exporter"

RED, ORANGE, YELLOW, GREEN, BLUE, PLAIN = "red", "orange", "yellow", "green", "blue", "text"

Steps: TypeAlias = Sequence[tuple[float | None, str]]
"""Colours with the value from which each holds; the first has none."""

NEUTRAL: Steps = ((None, PLAIN),)
RED_FROM_1: Steps = ((None, PLAIN), (1, RED))
ORANGE_FROM_1: Steps = ((None, PLAIN), (1, ORANGE))

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")

Panel: TypeAlias = stat_builder.Panel | table_builder.Panel | bargauge_builder.Panel | timeseries_builder.Panel


# Panels


def stat(
    title: str,
    description: str,
    expr: str,
    *,
    width: int,
    steps: Steps = NEUTRAL,
    unit: str = "none",
    decimals: int | None = 0,
    label: str | None = None,
    texts: Sequence[dashboard.ValueMapping] = (),
    no_value: str = "0",
) -> stat_builder.Panel:
    """Return one large number, or with `label` the text of that label instead."""
    panel = (
        stat_builder.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .with_target(_instant(expr) if label is None else _instant(expr).format(PromQueryFormat.TABLE))
        .unit(unit)
        .mappings(list(texts))
        .thresholds(_thresholds(steps))
        .color_scheme(_by_thresholds())
        .no_value(no_value)
        .reduce_options(_last("" if label is None else f"/^{label}$/"))
        .graph_mode(common.BigValueGraphMode.NONE)
        .color_mode(common.BigValueColorMode.VALUE)
        .text_mode(common.BigValueTextMode.VALUE)
        .span(width)
        .height(4)
    )
    return panel if decimals is None else panel.decimals(decimals)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: `field` is a label, or the `Value #X` of query X. Colours fill the cell."""

    field: str
    title: str
    width: int | None = None
    unit: str = "string"
    decimals: int | None = None
    steps: Steps = ()
    texts: Sequence[dashboard.ValueMapping] = ()
    link: Mapping[str, str] | None = None

    def properties(self) -> list[dashboard.DynamicConfigValue]:
        """Return the overrides of the column's field."""
        # The text of an empty table would else stand in every cell without a value.
        found: dict[str, Any] = {"unit": self.unit, "noValue": "-"}
        if self.width is not None:
            found["custom.width"] = self.width
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.texts:
            found["mappings"] = list(self.texts)
            found["custom.align"] = "center"
        if self.steps or self.texts:
            found["thresholds"] = _thresholds(self.steps or ((None, "transparent"),)).build()
            found["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
        if self.link is not None:
            found["links"] = [self.link]
        return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in found.items()]


def table(
    title: str,
    description: str,
    queries: Sequence[str],
    columns: Sequence[Column],
    *,
    width: int,
    height: int,
    no_value: str,
    sort: Sequence[tuple[str, bool]] = (),
) -> table_builder.Panel:
    """Return a table of what the queries answer now: a row for each set of labels, a column for each of `columns`.

    `sort` holds titles of columns, each with True for descending. A cluster and a namespace come last, where there are.
    """
    panel = (
        table_builder.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([_instant(expr, chr(ord("A") + n)).format(PromQueryFormat.TABLE) for n, expr in enumerate(queries)])
        .thresholds(_thresholds(NEUTRAL))
        .color_scheme(_by_thresholds())
        .no_value(no_value)
        .show_header(True)
        .cell_height(common.TableCellHeight.SM)
        .sort_by([common_builder.TableSortByFieldState().display_name(name).desc(desc) for name, desc in sort])
        .span(width)
        .height(height)
    )
    if len(queries) > 1:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    values = ["Value"] if len(queries) == 1 else [f"Value #{chr(ord('A') + n)}" for n in range(len(queries))]
    shown = {column.field: column for column in columns}
    hidden = [field for field in ("Time", "training_job", *values) if field not in shown]
    panel.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(hidden, True),
                "indexByName": {field: place for place, field in enumerate(shown)},
                "renameByName": {field: column.title for field, column in shown.items()},
            },
        )
    )
    for column in columns:
        panel.override_by_name(column.title, column.properties())
    return panel


def bars(
    title: str,
    description: str,
    series: Sequence[tuple[str, str, Steps]],
    *,
    width: int,
    height: int,
    no_value: str,
    unit: str = "none",
) -> bargauge_builder.Panel:
    """Return a horizontal bar for each answer to each (PromQL, legend, colours), in this order."""
    panel = (
        bargauge_builder.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .decimals(0)
        .min(0)
        .thresholds(_thresholds(NEUTRAL))
        .color_scheme(_by_thresholds())
        .no_value(no_value)
        .reduce_options(_last())
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .value_mode(common.BarGaugeValueMode.COLOR)
        .name_placement(common.BarGaugeNamePlacement.LEFT)
        .sizing(common.BarGaugeSizing.MANUAL)
        .min_viz_height(18)
        .max_viz_height(30)
        .show_unfilled(True)
        .span(width)
        .height(height)
    )
    for n, (expr, legend, steps) in enumerate(series):
        ref_id = chr(ord("A") + n)
        panel.with_target(_instant(expr, ref_id, legend))
        thresholds = dashboard.DynamicConfigValue(id_val="thresholds", value=_thresholds(steps).build())
        panel.override_by_query(ref_id, [thresholds])
    return panel


def lines(
    title: str,
    description: str,
    series: Sequence[tuple[str, str]],
    *,
    width: int,
    height: int = 8,
    unit: str = "none",
    decimals: int | None = None,
    colors: Mapping[str, str] | None = None,
    stacked: bool = False,
    points: bool = False,
    no_value: str = "No data",
) -> timeseries_builder.Panel:
    """Return the course of each (PromQL, legend); `colors` are those of names. Stacked series are bars."""
    panel = (
        timeseries_builder.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .targets([_query(expr, chr(ord("A") + n), legend) for n, (expr, legend) in enumerate(series)])
        .unit(unit)
        .min(0)
        .no_value(no_value)
        .draw_style(common.GraphDrawStyle.BARS if stacked else common.GraphDrawStyle.LINE)
        .line_width(0 if stacked else 2)
        .bar_width_factor(1)
        .fill_opacity(80 if stacked else 0)
        .show_points(common.VisibilityMode.ALWAYS if points else common.VisibilityMode.NEVER)
        .stacking(
            common_builder.StackingConfig().mode(common.StackingMode.NORMAL if stacked else common.StackingMode.NONE)
        )
        .legend(
            common_builder.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(
            common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
        )
        .span(width)
        .height(height)
    )
    for name, color in (colors or {}).items():
        panel.override_by_name(
            name,
            [dashboard.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})],
        )
    return panel if decimals is None else panel.decimals(decimals)


def value_texts(texts: Mapping[str, tuple[str, str | None]]) -> list[dashboard.ValueMapping]:
    """Return the mapping of values to a text and its colour."""
    return [
        dashboard.ValueMap(
            options={
                value: dashboard.ValueMappingResult(text=text, color=color, index=index)
                for index, (value, (text, color)) in enumerate(texts.items())
            }
        )
    ]


def any_text(color: str) -> list[dashboard.ValueMapping]:
    """Return the mapping that colours a text, and leaves a panel without one as it is."""
    return [
        dashboard.RegexMap(
            options=dashboard.DashboardRegexMapOptions(
                pattern="/.+/", result=dashboard.ValueMappingResult(color=color, index=0)
            )
        )
    ]


def _query(expr: str, ref_id: str, legend: str) -> prometheus_builder.Dataquery:
    return prometheus_builder.Dataquery().expr(expr).datasource(DATASOURCE).ref_id(ref_id).range().legend_format(legend)


def _instant(expr: str, ref_id: str = "A", legend: str = "__auto") -> prometheus_builder.Dataquery:
    return _query(expr, ref_id, legend).instant()


def _thresholds(steps: Steps) -> builder.ThresholdsConfig:
    return (
        builder.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=color) for value, color in steps])
    )


def _by_thresholds() -> builder.FieldColor:
    return builder.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS)


def _last(fields: str = "") -> common_builder.ReduceDataOptions:
    return common_builder.ReduceDataOptions().calcs(["lastNotNull"]).fields(fields).values(False)


# What values say

VERDICTS = value_texts(
    {
        "4": ("Hang", RED),
        "3": ("Inconclusive", ORANGE),
        "2": ("Hang, over", BLUE),
        "1": ("Healthy", GREEN),
        "0": ("No dumps", None),
    }
)


# The dashboard around them


def training_job(*, several: bool) -> builder.QueryVariable:
    """Return the variable for one job, or with `several` for any number of them."""
    variable = _variable("training_job", "Training job", "label_values(fr_verdict, training_job)")
    return variable.multi(True).include_all(True).all_value(".*").current(_ALL) if several else variable


def instance() -> builder.QueryVariable:
    """Return the variable for exporters, as Prometheus names them."""
    variable = _variable("instance", "Exporter", "label_values(fr_exporter_build_info, instance)")
    return variable.multi(True).include_all(True).current(_ALL)


_ALL = dashboard.VariableOption(selected=True, text="All", value="$__all")


def _variable(name: str, label: str, values: str) -> builder.QueryVariable:
    return (
        builder.QueryVariable(name)
        .label(label)
        .query({"query": values, "refId": name})
        .datasource(DATASOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )


# From a cell of a table that holds a training job.
JOB_LINK = {
    "title": "Open the incident",
    "url": f"/d/{INCIDENT}?var-training_job=${{__value.raw}}&${{datasource:queryparam}}&${{__url_time_range}}",
}


def board(
    uid: str,
    title: str,
    description: str,
    *,
    variables: Sequence[builder.QueryVariable],
    sections: Sequence[tuple[str | None, Sequence[Panel]]],
    incidents_of: str,
    hours: int,
) -> builder.Dashboard:
    """Return a dashboard: the sections one under the other, each under its heading.

    `incidents_of` selects the jobs whose incidents are marked on every graph.
    """
    found = (
        builder.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .refresh("10s")
        .time(f"now-{hours}h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(builder.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .annotation(_incidents(incidents_of))
    )
    for variable in variables:
        found.with_variable(variable)
    for target, text in ((OVERVIEW, "Hang overview"), (INCIDENT, "Incident"), (EXPORTER, "Exporter")):
        if target != uid:
            found.link(_link(target, text))
    number = 0
    for heading, content in sections:
        if heading is not None:
            number += 1
            found.with_row(builder.Row(heading).id(number))
        for panel in content:
            number += 1
            found.with_panel(panel.id(number))
    return found


# Grafana's data source for Prometheus reads these, and the SDK does not know them.
ANNOTATION_TEXTS = {
    "titleFormat": "{{training_job}} hangs: {{cause}}",
    "textFormat": "Suspect ranks: {{suspects}}",
    "tagKeys": "training_job,cause",
}


def _incidents(selector: str) -> builder.AnnotationQuery:
    return (
        builder.AnnotationQuery()
        .name("Incidents")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(RED)
        .expr(f"max by (training_job, cause, suspects) ({open_incidents(selector)})")
    )


def _link(target: str, title: str) -> builder.DashboardLink:
    link = builder.DashboardLink(title).type(dashboard.DashboardLinkType.LINK).icon("dashboard").keep_time(True)
    # The incident is of one job: "all jobs" must not follow there. Its tables link with the job of the row.
    if target == INCIDENT:
        return link.url(f"/d/{target}?${{datasource:queryparam}}")
    return link.url(f"/d/{target}").include_vars(True)


def to_json(dashboard: builder.Dashboard) -> str:
    """Return the JSON that Grafana loads; the same dashboard always gives the same text."""
    content = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    for variable in content["templating"]["list"]:
        for of_intervals_only in ("auto", "auto_min", "auto_count"):
            del variable[of_intervals_only]
    for panel in content["panels"]:
        # Where the footer stands differs between versions of Grafana, and no table has one.
        panel.get("options", {}).pop("footer", None)
    for annotation in content["annotations"]["list"]:
        annotation.update(ANNOTATION_TEXTS)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
