"""One snapshot of the store -> metric families.

Each metric has one function that says its samples, in tables keyed by the catalogue's names. A family is a dict from
label values to value, so that no two samples can have the same labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeVar

from prometheus_client.core import GaugeMetricFamily

from fr_exporter.config import Limits
from fr_exporter.diagnosis import Diagnosis, RankProgress, RankReport, Suspect
from fr_exporter.metrics.catalog import CATALOG, CAUSE, CONFIDENCE, DEVICE, VERDICT
from fr_exporter.metrics.labels import MAX_LENGTH, GroupLabels, clean, group_labels, shorten
from fr_exporter.ranges import format_ranges, join_within
from fr_exporter.store import Snapshot, TargetState

T = TypeVar("T")

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
Families = dict[str, dict[Labels, float]]


class DomainCollector:
    """Gives a registry the metrics of the latest snapshot, and nothing of any former one.

    The families are kept until the snapshot holds another state: states are immutable, so a scrape without news
    builds nothing.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], limits: Limits) -> None:
        self._snapshot = snapshot
        self._limits = limits
        self._built: tuple[tuple[TargetState, ...], list[GaugeMetricFamily]] = ((), _to_metrics(_families((), limits)))

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the families without samples: what the registry checks names by."""
        return _to_metrics(_families((), self._limits))

    def collect(self) -> list[GaugeMetricFamily]:
        """Return all families, in the catalogue's order."""
        targets = self._snapshot().targets
        known, families = self._built
        if len(known) != len(targets) or any(a is not b for a, b in zip(known, targets, strict=True)):
            families = _to_metrics(_families(targets, self._limits))
            self._built = targets, families
        return families


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A job's diagnosis with what several metrics need of it. `suspects` are those that get a series of their own."""

    job: tuple[str, str]
    diagnosis: Diagnosis
    groups: GroupLabels
    suspects: list[Suspect]

    @classmethod
    def of(cls, target: TargetState, diagnosis: Diagnosis, max_suspects: int) -> _Verdict:
        return cls(
            job=_job(target),
            diagnosis=diagnosis,
            groups=group_labels(diagnosis),
            suspects=sorted(diagnosis.suspects, key=_by_confidence)[:max_suspects],
        )


def _by_confidence(suspect: Suspect) -> int:
    return CONFIDENCE.values.index(suspect.confidence)


def _families(targets: Sequence[TargetState], limits: Limits) -> Families:
    verdicts = [
        _Verdict.of(target, target.diagnosis, limits.max_suspects) for target in targets if target.diagnosis is not None
    ]
    # A directory of jobs that cannot be listed is watched, or not, and is no job.
    jobs = [target for target in targets if target.training_job]
    families = {name: _family(samples_of, jobs) for name, samples_of in _OF_JOB.items()}
    families["fr_exporter_watch_up"] = _family(_watch_up, targets)
    families |= {name: _family(samples_of, verdicts) for name, samples_of in _OF_VERDICT.items()}
    rank_families, dropped = _rank_families(verdicts, limits.max_rank_series)
    dropped["fr_suspect_rank"] = sum(len(verdict.diagnosis.suspects) - len(verdict.suspects) for verdict in verdicts)
    families["fr_exporter_series_dropped"] = {(name,): count for name, count in dropped.items()}
    return families | rank_families


def _family(samples_of: Callable[[T], Iterable[Sample]], sources: Iterable[T]) -> dict[Labels, float]:
    return {labels: value for source in sources for labels, value in samples_of(source)}


def _rank_families(verdicts: Iterable[_Verdict], max_series: int) -> tuple[Families, dict[str, int]]:
    """Return the per-rank families, at most `max_series` samples in all, and how many each metric had to leave out."""
    families: Families = {name: {} for name in _OF_RANK}
    dropped = dict.fromkeys(_OF_RANK, 0)
    room = max_series
    for verdict, report in _by_interest(verdicts):
        for name, samples_of in _OF_RANK.items():
            samples = dict(samples_of(verdict, report))
            kept = dict(list(samples.items())[:room])
            families[name].update(kept)
            dropped[name] += len(samples) - len(kept)
            room -= len(kept)
    return families, dropped


def _by_interest(verdicts: Iterable[_Verdict]) -> list[tuple[_Verdict, RankReport]]:
    """Return every rank: suspects, waiters of the headline, other ranks of hung groups by lag, then the rest."""
    keyed = [(key, verdict, report) for verdict in verdicts for key, report in _interest(verdict.diagnosis)]
    return [(verdict, report) for _, verdict, report in sorted(keyed, key=lambda entry: entry[0])]


def _interest(diagnosis: Diagnosis) -> Iterator[tuple[tuple[int, int, int], RankReport]]:
    suspects = set(diagnosis.suspect_ranks)
    waiters = {rank for hung in diagnosis.hung_process_groups[:1] for rank in hung.waiting_ranks}
    lags = _lags(diagnosis)
    for report in diagnosis.ranks:
        if report.rank in suspects:
            yield (0, 0, 0), report
        elif report.rank in waiters:
            yield (1, 0, 0), report
        elif report.rank in lags:
            completed, enqueued = lags[report.rank]
            yield (2, -completed, -enqueued), report
        else:
            yield (3, 0, 0), report


def _lags(diagnosis: Diagnosis) -> dict[int, tuple[int, int]]:
    """Return how far each rank of a hung group is behind the group's furthest, in calls completed and enqueued."""
    hung = {entry.group.key for entry in diagnosis.hung_process_groups}
    points = [
        (report.rank, progress.group.key, *_comparable(progress))
        for report in diagnosis.ranks
        for progress in report.progress
        if progress.group.key in hung
    ]
    completed: dict[str, int] = {}
    enqueued: dict[str, int] = {}
    for _, key, done, issued in points:
        completed[key] = max(done, completed.get(key, 0))
        enqueued[key] = max(issued, enqueued.get(key, 0))
    lags: dict[int, tuple[int, int]] = {}
    for rank, key, done, issued in points:
        lags[rank] = max((completed[key] - done, enqueued[key] - issued), lags.get(rank, (0, 0)))
    return lags


def _comparable(progress: RankProgress) -> tuple[int, int]:
    """Return calls completed and enqueued; send/recv counters do not compare between ranks."""
    if progress.kind == "p2p":
        return 0, 0
    return progress.last_completed or 0, progress.last_enqueued or 0


def _to_metrics(families: Families) -> list[GaugeMetricFamily]:
    metrics = []
    for spec in CATALOG.values():
        if spec.name in families:
            metric = GaugeMetricFamily(spec.name, spec.help, labels=spec.label_names)
            for labels, value in families[spec.name].items():
                metric.add_metric(labels, value)
            metrics.append(metric)
    return metrics


def _job(target: TargetState) -> tuple[str, str]:
    return clean(target.training_job), target.scope


def _hang(target: TargetState) -> Iterator[Sample]:
    if target.hang is not None:
        yield _job(target), target.hang


def _verdict(target: TargetState) -> Iterator[Sample]:
    current = "none" if target.diagnosis is None else target.diagnosis.verdict
    for verdict in VERDICT.values:
        yield (*_job(target), verdict), verdict == current


def _partial(target: TargetState) -> Iterator[Sample]:
    yield _job(target), target.diagnosis is not None and target.diagnosis.partial


def _incident_info(target: TargetState) -> Iterator[Sample]:
    if target.incident is None:
        return
    diagnosis = target.incident.diagnosis
    nodes = sorted({suspect.node for suspect in diagnosis.suspects if suspect.node})
    headline = next(iter(diagnosis.hung_process_groups), None)
    group = ("", "") if headline is None else group_labels(diagnosis)[headline.group.key]
    operation = "" if headline is None else clean(headline.operation or "")
    seq_id = "" if headline is None or headline.seq_id is None else str(headline.seq_id)
    yield (
        (
            *_job(target),
            target.incident.id,
            "" if diagnosis.cause is None else diagnosis.cause.value,
            diagnosis.attribution_state.value,
            format_ranges(diagnosis.suspect_ranks, max_length=MAX_LENGTH),
            join_within(((clean(node), 1) for node in nodes), MAX_LENGTH),
            *map(shorten, (*group, operation, seq_id)),
        ),
        1,
    )


def _suspect_ranks(target: TargetState) -> Iterator[Sample]:
    suspects = () if target.diagnosis is None else target.diagnosis.suspects
    counts = Counter(cause for cause, _ in {(suspect.cause.value, suspect.rank) for suspect in suspects})
    for cause in CAUSE.values:
        yield (*_job(target), cause), counts[cause]


def _waiting_ranks(target: TargetState) -> Iterator[Sample]:
    yield _job(target), 0 if target.diagnosis is None else len(target.diagnosis.waiting_ranks)


def _last_analysis(target: TargetState) -> Iterator[Sample]:
    if target.last_analysis_ns is not None:
        yield (clean(target.training_job),), target.last_analysis_ns / 1e9


def _watch_up(target: TargetState) -> Iterator[Sample]:
    yield (clean(target.training_job), clean(target.path), target.backend), target.watch_up


def _hung_process_group(verdict: _Verdict) -> Iterator[Sample]:
    for hung in verdict.diagnosis.hung_process_groups:
        yield (*verdict.job, *verdict.groups[hung.group.key], clean(hung.operation or ""), hung.cause.value), 1


def _hung_collective_seq_id(verdict: _Verdict) -> Iterator[Sample]:
    # One group can hang in two calls of one kind; the first to look at stands first, and the last in a dict wins.
    for hung in reversed(verdict.diagnosis.hung_process_groups):
        if hung.seq_id is not None:
            yield (*verdict.job, *verdict.groups[hung.group.key], hung.kind), hung.seq_id


def _hang_start(verdict: _Verdict) -> Iterator[Sample]:
    for headline in verdict.diagnosis.hung_process_groups[:1]:
        if headline.since_ns is not None:
            yield verdict.job, headline.since_ns / 1e9


def _suspect_rank(verdict: _Verdict) -> Iterator[Sample]:
    for suspect in verdict.suspects:
        rank = (str(suspect.rank), clean(suspect.node or ""))
        yield (*verdict.job, *rank, suspect.cause.value, suspect.confidence), 1


def _expected_ranks(verdict: _Verdict) -> Iterator[Sample]:
    yield verdict.job, verdict.diagnosis.expected_ranks


def _dump_set_ranks(verdict: _Verdict) -> Iterator[Sample]:
    diagnosis = verdict.diagnosis
    counts = {
        "dumped": len(diagnosis.dumped_ranks),
        "missing": len(diagnosis.missing_ranks),
        "pending": len(diagnosis.pending_ranks),
        "stale": len(diagnosis.stale_ranks),
        "unreadable": len({file.rank for file in diagnosis.unreadable_files if file.rank is not None}),
        "remote": len(diagnosis.remote_ranks),
    }
    for state, count in counts.items():
        yield (*verdict.job, state), count


def _collective_mismatches(verdict: _Verdict) -> Iterator[Sample]:
    counts = Counter((entry.group.key, entry.kind) for entry in verdict.diagnosis.mismatches)
    for (key, kind), count in counts.items():
        yield (*verdict.job, *verdict.groups[key], kind), count


def _rank(verdict: _Verdict, report: RankReport) -> Labels:
    return (*verdict.job, str(report.rank), clean(report.node or ""))


def _last(counter: Callable[[RankProgress], int | None], verdict: _Verdict, report: RankReport) -> Iterator[Sample]:
    rank = _rank(verdict, report)
    for progress in report.progress:
        value = counter(progress)
        if value is not None:
            yield (*rank, *verdict.groups[progress.group.key], progress.kind), value


def _open_operations(verdict: _Verdict, report: RankReport) -> Iterator[Sample]:
    rank = _rank(verdict, report)
    counts: Counter[str] = Counter()
    for progress in report.progress:
        counts[progress.group.key] += progress.open_operations
    for key, count in counts.items():
        yield (*rank, *verdict.groups[key]), count


def _dump_timestamp(verdict: _Verdict, report: RankReport) -> Iterator[Sample]:
    if report.dump_time_ns is not None:
        yield _rank(verdict, report), report.dump_time_ns / 1e9


def _health(verdict: _Verdict, report: RankReport) -> Iterator[Sample]:
    for device in DEVICE.values:
        if device in report.health:
            yield (*_rank(verdict, report), device), report.health[device].lower() == "healthy"


_OF_JOB: dict[str, Callable[[TargetState], Iterator[Sample]]] = {
    "fr_hang": _hang,
    "fr_verdict": _verdict,
    "fr_diagnosis_partial": _partial,
    "fr_incident_info": _incident_info,
    "fr_suspect_ranks": _suspect_ranks,
    "fr_waiting_ranks": _waiting_ranks,
    "fr_exporter_last_analysis_timestamp_seconds": _last_analysis,
}

_OF_VERDICT: dict[str, Callable[[_Verdict], Iterator[Sample]]] = {
    "fr_hung_process_group": _hung_process_group,
    "fr_hung_collective_seq_id": _hung_collective_seq_id,
    "fr_hang_start_timestamp_seconds": _hang_start,
    "fr_suspect_rank": _suspect_rank,
    "fr_dump_set_expected_ranks": _expected_ranks,
    "fr_dump_set_ranks": _dump_set_ranks,
    "fr_collective_mismatches": _collective_mismatches,
}

_OF_RANK: dict[str, Callable[[_Verdict, RankReport], Iterator[Sample]]] = {
    "fr_rank_last_enqueued_seq_id": partial(_last, attrgetter("last_enqueued")),
    "fr_rank_last_started_seq_id": partial(_last, attrgetter("last_started")),
    "fr_rank_last_completed_seq_id": partial(_last, attrgetter("last_completed")),
    "fr_rank_open_operations": _open_operations,
    "fr_rank_dump_timestamp_seconds": _dump_timestamp,
    "fr_rank_health": _health,
}
