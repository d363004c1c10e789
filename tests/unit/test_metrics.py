"""The metrics: what a snapshot becomes on /metrics, and the page that describes it."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from fr_exporter.config import Limits
from fr_exporter.diagnosis import Cause, Diagnosis, RankProgress
from fr_exporter.metrics import docs
from fr_exporter.metrics.catalog import CATALOG, CAUSE
from fr_exporter.metrics.collector import DomainCollector
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.model import ProcessGroup
from fr_exporter.store import TargetState
from tests.unit import diagnosis_values as values

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "metrics.prom"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(targets: Iterable[TargetState], *, max_rank_series: int = 20_000, max_suspects: int = 64) -> str:
    """Return the page a scrape of these targets gets."""
    limits = Limits(1, 1, 1, max_rank_series=max_rank_series, max_suspects=max_suspects)
    registry = CollectorRegistry()
    registry.register(DomainCollector(lambda: values.snapshot(targets), limits))
    return generate_latest(registry).decode("utf-8")


def read(page: str) -> Samples:
    """Return the samples of a page; fails where two have the same labels."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def find(page: str, name: str, **labels: str) -> list[float]:
    """Return the values of the samples of one metric that carry these labels."""
    wanted = labels.items()
    return [value for (found, have), value in read(page).items() if found == name and wanted <= dict(have).items()]


def label_values(page: str, name: str, label: str) -> list[str]:
    """Return the values one label has on the samples of one metric."""
    return [dict(labels)[label] for found, labels in read(page) if found == name]


ALL_STATES = (values.target(values.device_stall()), values.target(values.mismatch()), values.target())


def test_a_hang_names_its_suspects_and_its_group() -> None:
    """The worked example: 12 and 14 made 13 and 15 wait in call 20537 of group 74; all 16 ranks show their progress."""
    page = scrape([values.target(values.device_stall())])
    job = {"training_job": "llm-70b", "scope": "job"}
    group = {"process_group": "74", "process_group_desc": "EXPERT_MODEL_PARALLEL_GROUP"}
    assert find(page, "fr_hang", **job) == [1]
    assert find(page, "fr_suspect_ranks", cause="device_stall", **job) == [2]
    assert find(page, "fr_suspect_rank", rank="12", rank_node="node01", confidence="high", **job) == [1]
    assert find(page, "fr_suspect_rank", rank="14", cause="device_stall", **job) == [1]
    assert find(page, "fr_hung_process_group", operation="nccl:all_to_all", cause="device_stall", **group) == [1]
    assert find(page, "fr_hung_collective_seq_id", kind="collective", **group) == [20537]
    assert find(page, "fr_hang_start_timestamp_seconds", **job) == [1_758_610_505]
    assert find(page, "fr_waiting_ranks", **job) == [16]
    assert find(page, "fr_rank_last_completed_seq_id", rank="14", **group) == [20530]
    completed = label_values(page, "fr_rank_last_completed_seq_id", "rank")
    assert {int(rank) for rank in completed} == set(range(16))
    assert find(page, "fr_rank_health", rank="12", device="gpu") == [0]
    assert find(page, "fr_rank_health", rank="12", device="nic") == [1]


def test_an_incident_is_one_series() -> None:
    """`fr_incident_info` alone says who, where, in what call, and whether a restart can help."""
    page = scrape([values.target(values.device_stall())])
    expected = {
        "training_job": "llm-70b",
        "scope": "job",
        "incident": "20250923T065505Z-a1b2c3",
        "cause": "device_stall",
        "attribution_state": "CONTINUE",
        "suspects": "12,14",
        "suspect_nodes": "node01",
        "process_group": "74",
        "process_group_desc": "EXPERT_MODEL_PARALLEL_GROUP",
        "operation": "nccl:all_to_all",
        "seq_id": "20537",
    }
    assert read(page)["fr_incident_info", frozenset(expected.items())] == 1


def test_incident_values_are_cut_at_256_characters_and_say_how_much_is_missing() -> None:
    """Of 200 suspects on 200 nodes whole ranges and nodes are kept, and the rest is counted."""
    ranks = range(0, 400, 2)
    found = values.diagnosis(
        verdict="hang",
        cause=Cause.HOST_STALL,
        hung_process_groups=(values.hung(ProcessGroup.of("g" * 300, "", (0, 1))),),
        suspects=tuple(values.suspect(rank, node=f"n{rank:03}") for rank in ranks),
    )
    page = scrape([values.target(found)])
    for label in ("suspects", "suspect_nodes"):
        kept, left_out = label_values(page, "fr_incident_info", label)[0].split("…+")
        assert len(kept) <= 256
        assert kept.count(",") + 1 + int(left_out) == 200
    assert label_values(page, "fr_incident_info", "process_group") == ["g" * 256 + "…+44"]


@pytest.mark.parametrize("verdict", ["none", "healthy", "hang", "inconclusive"])
def test_exactly_one_verdict_holds(verdict: str) -> None:
    """One sample for each verdict, 1 for the present one and 0 for the others."""
    state = values.target() if verdict == "none" else values.target(values.diagnosis(verdict=verdict))
    verdicts = {
        dict(labels)["verdict"]: value
        for (name, labels), value in read(scrape([state])).items()
        if name == "fr_verdict"
    }
    assert verdicts == {name: float(name == verdict) for name in ("none", "healthy", "hang", "inconclusive")}


def test_a_directory_of_jobs_that_cannot_be_listed_is_no_job() -> None:
    """It shows as not watched, and in no series of a job: a rule for every job would count one that does not exist."""
    page = scrape([values.target(training_job="", watch_up=False)])
    assert find(page, "fr_exporter_watch_up", path="/dumps") == [0]
    assert {name for name, _ in read(page)} == {"fr_exporter_watch_up", "fr_exporter_series_dropped"}


@pytest.mark.parametrize("state", ALL_STATES, ids=lambda state: state.training_job)
def test_every_cause_is_always_present(state: TargetState) -> None:
    """A rule can compare with 0 whatever the verdict: each cause has a series."""
    assert set(label_values(scrape([state]), "fr_suspect_ranks", "cause")) == {cause.value for cause in Cause}


def test_what_the_dump_does_not_tell_is_absent() -> None:
    """A counter that reads none yet, an unknown dump time and an unknown rank's health give no sample, not 0 or -1."""
    page = scrape([values.target(values.mismatch())])
    assert find(page, "fr_rank_last_enqueued_seq_id") == [1, 1, 1]
    assert find(page, "fr_rank_last_completed_seq_id") == []
    assert find(page, "fr_rank_dump_timestamp_seconds") == []
    assert find(page, "fr_rank_health") == []


def test_ranks_are_counted_by_the_state_of_their_dump() -> None:
    """Each state of a rank is counted, in a job of which one node's ranks dump here."""
    page = scrape([values.target(values.mismatch())])
    expected = {"dumped": 3, "missing": 1, "pending": 1, "stale": 2, "unreadable": 1, "remote": 8}
    assert {state: find(page, "fr_dump_set_ranks", state=state) for state in expected} == {
        state: [count] for state, count in expected.items()
    }
    assert find(page, "fr_dump_set_expected_ranks") == [8]


def test_an_incident_outlives_the_partial_set_that_follows_it() -> None:
    """While the next set is partial the open incident keeps its own suspects, not those of the set being written."""
    state = values.target(values.diagnosis(partial=True), incident=values.incident(values.device_stall()), hang=True)
    page = scrape([state])
    assert label_values(page, "fr_incident_info", "suspects") == ["12,14"]
    assert find(page, "fr_hang") == [1]
    assert find(page, "fr_suspect_rank") == []


def test_groups_of_one_name_are_told_apart_by_their_members() -> None:
    """Two groups `tp` get 6 digits of their members each; a name that stands alone stays as it is."""
    first, second = ProcessGroup.of("tp", "", (0, 1)), ProcessGroup.of("tp", "", (2, 3))
    found = values.diagnosis(
        ranks=(
            values.report(0, values.progress(first, 5, 5), values.progress(values.WORLD, 9, 9)),
            values.report(2, values.progress(second, 7, 7)),
        )
    )
    page = scrape([values.target(found)])
    assert find(page, "fr_rank_last_enqueued_seq_id", rank="0", process_group=first.key[: len("tp#") + 6]) == [5]
    assert find(page, "fr_rank_last_enqueued_seq_id", rank="2", process_group=second.key[: len("tp#") + 6]) == [7]
    assert find(page, "fr_rank_last_enqueued_seq_id", process_group="0") == [9]


def test_groups_whose_six_digits_agree_get_twelve() -> None:
    """Many groups of one name can agree in six digits by chance; none of them may disappear for it."""
    twins = [ProcessGroup.of("tp", "", (rank,), digest=f"abcdef00000{rank}") for rank in (0, 1)]
    found = values.diagnosis(ranks=tuple(values.report(0, values.progress(twin, 5, 5)) for twin in twins))
    labels = label_values(scrape([values.target(found)]), "fr_rank_last_enqueued_seq_id", "process_group")
    assert sorted(labels) == ["tp#abcdef000000", "tp#abcdef000001"]


def test_open_calls_of_both_kinds_are_summed() -> None:
    """`fr_rank_open_operations` has no kind: collectives and send/recv of a group are one sample."""
    entries = [values.progress(values.PIPELINE, 9, 8, kind=kind, open_operations=3) for kind in ("collective", "p2p")]
    page = scrape([values.target(values.diagnosis(ranks=(values.report(0, *entries),)))])
    assert find(page, "fr_rank_open_operations") == [6]


def test_hostile_names_cannot_break_the_page() -> None:
    """Quotes, line ends, NUL and lone surrogates in names, nodes and paths leave a page that parses as UTF-8."""
    nasty = 'a"} 1\nfr_hang 0\\\udcff\0é'
    group = ProcessGroup.of(nasty, nasty, (0, 1))
    found = replace(
        values.diagnosis(
            training_job=nasty,
            verdict="hang",
            cause=Cause.HOST_STALL,
            hung_process_groups=(values.hung(group, operation=nasty),),
            suspects=(values.suspect(0, node=nasty),),
            ranks=(values.report(0, values.progress(group, 1, 1), node=nasty),),
        )
    )
    page = scrape([values.target(found, path=nasty)])
    assert label_values(page, "fr_hung_process_group", "process_group") == ['a"} 1\nfr_hang 0\\?\0é']
    assert find(page, "fr_hang") == [1]


def test_the_cap_on_rank_series_keeps_what_matters_and_counts_the_rest() -> None:
    """Suspects first, then who waits in the headline group, then laggards of hung groups, then anybody."""
    found = values.device_stall()
    lagging = values.hung(values.WORLD, seq_id=10, waiting_ranks=())
    behind = {3: 5, 7: 2}
    found = replace(
        found,
        hung_process_groups=(*found.hung_process_groups[:1], lagging),
        ranks=tuple(
            values.report(rank, values.progress(values.WORLD, 9 - behind.get(rank, 0), 9 - behind.get(rank, 0)))
            for rank in range(16)
        ),
    )
    per_rank = len({"enqueued", "completed", "open", "dump timestamp"})
    page = scrape([values.target(found)], max_rank_series=6 * per_rank)
    kept = label_values(page, "fr_rank_last_enqueued_seq_id", "rank")
    assert kept == ["12", "14", "13", "15", "3", "7"]
    assert find(page, "fr_exporter_series_dropped", metric="fr_rank_last_enqueued_seq_id") == [10]
    assert find(page, "fr_exporter_series_dropped", metric="fr_rank_dump_timestamp_seconds") == [10]
    assert find(page, "fr_exporter_series_dropped", metric="fr_rank_last_started_seq_id") == [0]


@pytest.mark.parametrize("cap", [0, 1, 7, 50])
def test_the_cap_on_rank_series_is_hard(cap: int) -> None:
    """Over all jobs together no more per-rank series than the limit, and what is missing adds up."""
    wanted = read(scrape(ALL_STATES))
    total = sum(name.startswith("fr_rank_") for name, _ in wanted)
    page = scrape(ALL_STATES, max_rank_series=cap)
    assert sum(name.startswith("fr_rank_") for name, _ in read(page)) == cap
    assert sum(find(page, "fr_exporter_series_dropped")) == total - cap


def test_the_cap_on_suspects_keeps_the_surer_ones() -> None:
    """Of three suspects two get a series; all three are counted, and the one left out is told."""
    found = values.diagnosis(
        verdict="hang",
        suspects=(values.suspect(1, confidence="low"), values.suspect(2), values.suspect(3, confidence="medium")),
    )
    page = scrape([values.target(found)], max_suspects=2)
    assert label_values(page, "fr_suspect_rank", "rank") == ["2", "3"]
    assert find(page, "fr_suspect_ranks", cause="device_stall") == [3]
    assert find(page, "fr_exporter_series_dropped", metric="fr_suspect_rank") == [1]


def test_nothing_stale_stays() -> None:
    """Each scrape shows the present snapshot: a hang that is over and a job that is gone leave no series."""
    targets = [values.target(values.device_stall()), values.target()]
    registry = CollectorRegistry()
    registry.register(DomainCollector(lambda: values.snapshot(targets), Limits(1, 1, 1, 100, 10)))
    assert find(generate_latest(registry).decode(), "fr_suspect_rank", rank="12") == [1]
    targets[:] = [values.target(values.diagnosis())]
    page = generate_latest(registry).decode()
    assert find(page, "fr_suspect_rank") == []
    assert label_values(page, "fr_hang", "training_job") == ["llm-70b"]


GROUPS = st.builds(
    ProcessGroup.of,
    st.sampled_from(["tp", "0", "tp#abc", "\ud800", "\udfff"]),
    st.sampled_from(["", "TP", "DP"]),
    st.sampled_from([None, (0, 1), (2, 3), (1, 0)]),
)
PROGRESS = st.builds(
    RankProgress,
    GROUPS,
    st.sampled_from(["collective", "p2p"]),
    *[st.none() | st.integers(0, 9)] * 3,
    st.integers(0, 3),
)
DIAGNOSES = st.builds(
    lambda job, groups, suspects, mismatches, ranks: values.diagnosis(
        training_job=job,
        verdict="hang",
        cause=Cause.DESYNC,
        hung_process_groups=tuple(values.hung(group) for group in groups),
        suspects=tuple(values.suspect(rank, node=node) for rank, node in suspects),
        mismatches=tuple(replace(values.mismatch().mismatches[0], group=group) for group in mismatches),
        ranks=tuple(values.report(rank, *entries) for rank, entries in ranks),
    ),
    st.sampled_from(["a", "b"]),
    st.lists(GROUPS, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, "n", "\ud800"])), max_size=4),
    st.lists(GROUPS, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.lists(PROGRESS, max_size=4)), max_size=4),
)


@given(st.lists(DIAGNOSES, max_size=3), st.integers(0, 30))
def test_no_two_samples_have_the_same_labels(diagnoses: list[Diagnosis], cap: int) -> None:
    """Whatever groups, ranks and jobs repeat in a snapshot, Prometheus never sees a series twice."""
    page = scrape([values.target(found) for found in diagnoses], max_rank_series=cap)
    series = Counter(line.rsplit(" ", 1)[0] for line in page.splitlines() if not line.startswith("#"))
    assert [line for line, count in series.items() if count > 1] == []
    assert sum(line.startswith("fr_rank_") for line in series) <= cap


def full_registry() -> CollectorRegistry:
    """Return the registry of a daemon that has done a little of everything."""
    registry = CollectorRegistry()
    registry.register(DomainCollector(lambda: values.snapshot(ALL_STATES), Limits(1, 1, 1, 20_000, 64)))
    ProcessCollector(registry=registry)
    telemetry = Telemetry(registry)
    telemetry.job_added("llm-70b", "job")
    telemetry.incident_opened("llm-70b", "job", Cause.DEVICE_STALL)
    telemetry.observe_stage("parse", 0.01, True)
    telemetry.file_read("rejected", 512)
    telemetry.clock_offset("llm-70b", 300.0)
    telemetry.detection_latency(-3.0)
    telemetry.reloaded(success=True, time_s=1_758_610_000.0)
    telemetry.reloaded(success=False, time_s=1_758_620_000.0)
    return registry


def openmetrics(registry: CollectorRegistry) -> str:
    """Return the page in the other format."""
    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    return encode(registry).decode("utf-8")


def test_the_catalogue_and_the_page_hold_the_same_metrics() -> None:
    """Each family on the page has its type, labels and help from the catalogue, and each of the catalogue is shown."""
    shown = {}
    for family in text_string_to_metric_families(generate_latest(full_registry()).decode()):
        shown[f"{family.name}_total" if family.type == "counter" else family.name] = family
    assert shown.keys() == CATALOG.keys()
    for name, family in shown.items():
        spec = CATALOG[name]
        assert (family.type, family.documentation) == (spec.type, spec.help)
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(spec.label_names), sample


def test_fixed_label_values_are_those_of_the_catalogue() -> None:
    """A value that the catalogue does not list for a label never shows."""
    for family in text_string_to_metric_families(generate_latest(full_registry()).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for label in CATALOG[name].labels:
            if label.values:
                assert {sample.labels[label.name] for sample in family.samples} <= set(label.values), name


def test_the_page_is_as_it_was(request: pytest.FixtureRequest) -> None:
    """The whole page of a hang, a mismatch and an empty directory, down to the byte."""
    page = scrape(ALL_STATES)
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(page, encoding="utf-8")
    assert page == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [scrape(ALL_STATES), generate_latest(full_registry()).decode()], ids=["golden", "all"])
def test_promtool_finds_nothing_to_say(page: str, require_tool: Callable[[str], str]) -> None:
    """Prometheus' own linter accepts every name, type and help."""
    promtool = require_tool("promtool")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_openmetrics_is_valid_too() -> None:
    """The stricter format's own parser reads the page."""
    page = openmetrics(full_registry())
    names = {family.name for family in parse_openmetrics(page)}  # type: ignore[no-untyped-call]
    assert {"fr_hang", "fr_incidents", "fr_exporter_stage_duration_seconds"} <= names


def test_counters_start_at_zero_and_count() -> None:
    """Every label value is there before its first event; a job's incidents count by cause and go with the job."""
    registry = CollectorRegistry()
    telemetry = Telemetry(registry)
    telemetry.job_added("a", "job")
    page = generate_latest(registry).decode()
    assert find(page, "fr_exporter_dump_files_total") == [0] * 4
    assert find(page, "fr_exporter_stage_failures_total") == [0] * 3
    assert find(page, "fr_incidents_total", training_job="a", scope="job") == [0] * len(CAUSE.values)
    telemetry.incident_opened("a", "job", Cause.DESYNC)
    telemetry.file_read("partial", 100)
    page = generate_latest(registry).decode()
    assert find(page, "fr_incidents_total", cause="desync") == [1]
    assert find(page, "fr_exporter_dump_files_total", result="partial") == [1]
    assert find(page, "fr_exporter_dump_bytes_total") == [100]
    telemetry.job_forgotten("a", "job")
    assert find(generate_latest(registry).decode(), "fr_incidents_total") == []


def test_a_latency_is_never_below_zero() -> None:
    """A file server whose clock is ahead makes the detection look instant, not negative."""
    page = generate_latest(full_registry()).decode()
    assert find(page, "fr_exporter_detection_latency_seconds_sum") == [0]
    assert find(page, "fr_exporter_detection_latency_seconds_count") == [1]


def test_a_failed_reload_keeps_the_time_of_the_last_good_one() -> None:
    """The two reload gauges say that the last load failed, and how old the configuration in force is."""
    page = generate_latest(full_registry()).decode()
    assert find(page, "fr_exporter_config_last_reload_successful") == [0]
    assert find(page, "fr_exporter_config_last_reload_success_timestamp_seconds") == [1_758_610_000]


def test_no_created_series() -> None:
    """Creation times double the histograms' series and tell nothing; they are left out without a global switch."""
    assert "_created" not in generate_latest(full_registry()).decode()
    assert "_created" not in openmetrics(full_registry())


def test_the_documentation_is_up_to_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """docs/metrics.md is what the catalogue gives; an outdated copy fails the check in one line."""
    assert docs.main(["--check", str(ROOT / "docs" / "metrics.md")]) == 0
    outdated = tmp_path / "metrics.md"
    outdated.write_text("# Metrics\n")
    assert docs.main(["--check", str(outdated)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert docs.main([str(outdated)]) == 0
    assert docs.main(["--check", str(outdated)]) == 0
