"""Diagnosis -> the text that an on-call person reads first, and the JSON of the command line.

Everything a dump says is untrusted: `printable` takes out what could move the cursor or forge a line of the report.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import get_args

from fr_exporter.diagnosis import (
    AttributionState,
    Call,
    Confidence,
    Diagnosis,
    HungGroup,
    RankProgress,
    Suspect,
    rfc3339,
)
from fr_exporter.model import Frame, Kind, ProcessGroup
from fr_exporter.ranges import format_ranges, name_ranks
from fr_exporter.text import printable, span

WIDTH = 100
MAX_FRAMES = 6
MAX_BLOCKS = 16
MAX_RANGES = 400
_DAY_NS = 86_400 * 1_000_000_000

RESTART: Mapping[AttributionState, str] = {
    AttributionState.CONTINUE: "can help once the suspects are isolated",
    AttributionState.STOP: "would meet the same fault, or there is nobody to isolate",
}
_CONFIDENCES = get_args(Confidence)


def render_text(diagnosis: Diagnosis, *, verbose: bool = False, health_check: bool = False) -> str:
    """Return the report as text, the answer first.

    `verbose` adds the state of each rank and the progress of each process group, `health_check` the health checks.
    """
    sections = [
        _head(diagnosis),
        _suspects(diagnosis.suspects),
        _hung_groups(diagnosis),
        _mismatches(diagnosis),
        _not_read(diagnosis),
        _warnings(diagnosis),
    ]
    text = _join(sections)
    if health_check:
        text += f"\n\n{render_health(diagnosis)}"
    if verbose:
        text += f"\n\n{render_ranks(diagnosis)}"
    return text


def render_json(diagnosis: Diagnosis) -> str:
    """Return the report as JSON in ASCII: a name in a dump may hold a lone surrogate, which UTF-8 cannot."""
    return json.dumps(diagnosis.to_dict(), indent=2)


def render_ranks(diagnosis: Diagnosis) -> str:
    """Return the state of each rank and the progress of each process group, as tables."""
    return _join([_ranks(diagnosis), _progress(diagnosis)])


def render_health(diagnosis: Diagnosis) -> str:
    """Return which ranks have which `health_check_results`."""
    return "\n".join(_health(diagnosis))


def render_sizes(sizes: Iterable[Sequence[int]]) -> str:
    """Return shapes as text, one a tensor: `[4027, 5120] [8]`."""
    return " ".join(str(list(shape)) for shape in sizes)


def render_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, separator: str = "  ") -> list[str]:
    """Return the lines of a table, columns padded to their widest cell; None reads `-`."""
    cells = [header, *([printable("-" if cell is None else str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        separator.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def _head(diagnosis: Diagnosis) -> list[str]:
    partial = " (partial: ranks may still be writing)" if diagnosis.partial else ""
    incident = "" if diagnosis.incident is None else f", incident {diagnosis.incident}"
    facts: dict[str, str] = {}
    state = diagnosis.attribution_state
    if diagnosis.cause is not None:
        facts["cause"] = diagnosis.cause.value
        facts["restart"] = f"{state.value}: a restart {RESTART[state]}"
    facts["job"] = f"{diagnosis.training_job}, scope {diagnosis.scope}{incident}"
    facts["dumps"] = _dumps(diagnosis)
    facts["source"] = diagnosis.source
    lines = _paragraph(f"{diagnosis.verdict.upper()}{partial}: {diagnosis.summary}", indent=0)
    lines.append("")
    for name, fact in facts.items():
        lines += _paragraph(f"{name}:".ljust(10) + fact, hanging=10)
    return lines


def _dumps(diagnosis: Diagnosis) -> str:
    parts = [f"{len(diagnosis.dumped_ranks)} of {diagnosis.expected_ranks} ranks"]
    if diagnosis.first_dump_time_ns is not None:
        first, last = _moment(diagnosis.first_dump_time_ns), _moment(diagnosis.last_dump_time_ns)
        parts.append(f"written {first}" if first == last else f"written {first} to {last}")
    if diagnosis.dump_versions:
        parts.append(f"version {', '.join(diagnosis.dump_versions)}")
    if diagnosis.comm_lib_versions:
        parts.append(f"communication library {', '.join(diagnosis.comm_lib_versions)}")
    return "; ".join(parts)


def same_finding(suspects: Iterable[Suspect]) -> list[list[Suspect]]:
    """Return suspects of which the same is to be said together, the surest first.

    A communication fault has every member of its group as a suspect.
    """
    by_finding: dict[tuple[object, ...], list[Suspect]] = defaultdict(list)
    for suspect in suspects:
        by_finding[_finding(suspect)].append(suspect)
    return sorted(by_finding.values(), key=lambda block: _CONFIDENCES.index(block[0].confidence))


def evidence_of(same: Sequence[Suspect]) -> str:
    """Return what suspects with the same finding did, as a predicate to their ranks."""
    return same[0].evidence if len(same) == 1 else f"each {same[0].evidence}"


def _finding(suspect: Suspect) -> tuple[object, ...]:
    health = tuple(sorted(suspect.health.items()))
    return suspect.cause, suspect.confidence, suspect.evidence, suspect.waiting_ranks, health


def _suspects(suspects: Iterable[Suspect]) -> list[str]:
    blocks = same_finding(suspects)
    lines = [line for block in blocks[:MAX_BLOCKS] for line in _block(block)]
    lines += _left_out("suspects", [suspect for block in blocks[MAX_BLOCKS:] for suspect in block])
    return _section("Suspects", lines)


def _block(suspects: Sequence[Suspect]) -> list[str]:
    """Return what is to be said of suspects with the same finding."""
    first = suspects[0]
    nodes = sorted({suspect.node for suspect in suspects if suspect.node is not None})
    where = f" on {', '.join(nodes)}" if nodes else ""
    ranks = _rank_list(suspect.rank for suspect in suspects)
    lines = _paragraph(f"{ranks}{where}: {first.cause.value}, {first.confidence} confidence")
    lines += _paragraph(evidence_of(suspects), indent=4)
    if first.waiting_ranks:
        lines += _paragraph(f"waited for by {_rank_list(first.waiting_ranks)}", indent=4)
    if first.health:
        lines += _paragraph(f"health: {', '.join(f'{k} {v}' for k, v in sorted(first.health.items()))}", indent=4)
    if first.last_call is not None:
        of_rank = f" of rank {first.rank}" if len(suspects) > 1 else ""
        lines += _paragraph(f"last call{of_rank}: {_call(first.last_call)}", indent=4)
        lines += _stack(first.last_call.frames)
    return lines


def _hung_groups(diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    for hung in diagnosis.hung_process_groups[:MAX_BLOCKS]:
        what = [_position(hung.kind, hung.seq_id)]
        if hung.input_sizes:
            what.append(f"size {render_sizes(hung.input_sizes)}")
        if hung.dtypes:
            what.append(", ".join(hung.dtypes))
        members = "" if hung.group.ranks is None else f" of {_rank_list(hung.group.ranks)}"
        lines += _paragraph(f"{_group(hung.group)}{members}: {hung.operation or 'unknown call'}, {', '.join(what)}")
        lines += _paragraph(_who_waits(hung, diagnosis.last_dump_time_ns), indent=4)
        lines += _stack(hung.frames)
    lines += _left_out("process groups", diagnosis.hung_process_groups[MAX_BLOCKS:])
    return _section("Hung process groups (look at the first one first)", lines)


def _who_waits(hung: HungGroup, last_dump_time_ns: int | None) -> str:
    who = _rank_list(hung.waiting_ranks) if hung.waiting_ranks else "nobody here"
    text = f"{who} waiting for {_rank_list(hung.waiting_on)}" if hung.waiting_on else f"{who} stuck"
    if hung.since_ns is None:
        return text
    text += f" since {_moment(hung.since_ns)}"
    # A copied file has the time of the copy, and the span would be nonsense.
    if last_dump_time_ns is not None and 0 <= last_dump_time_ns - hung.since_ns <= _DAY_NS:
        text += f", {span((last_dump_time_ns - hung.since_ns) // 1_000_000_000)} before the last dump"
    return text


def _mismatches(diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    for mismatch in diagnosis.mismatches[:MAX_BLOCKS]:
        call = _position("collective", mismatch.collective_seq_id)
        lines += _paragraph(f"{_group(mismatch.group)}: {call}, not the same {mismatch.kind} everywhere")
        for camp in mismatch.camps:
            lines += _paragraph(f"{camp.value}: {_rank_list(camp.ranks)}", indent=4)
    lines += _left_out("mismatches", diagnosis.mismatches[MAX_BLOCKS:])
    return _section("Mismatches", lines)


def without_dump(diagnosis: Diagnosis) -> list[str]:
    """Return a line for each state of ranks that have no usable dump, such as `missing: ranks 3, 5 (no dump)`."""
    states = (
        ("missing", "no dump", diagnosis.missing_ranks),
        ("pending", "may still write", diagnosis.pending_ranks),
        ("stale", "only a dump of an earlier time, left out", diagnosis.stale_ranks),
        ("remote", "outside this node", diagnosis.remote_ranks),
    )
    return [f"{name}: {_rank_list(ranks)} ({meaning})" for name, meaning, ranks in states if ranks]


def _not_read(diagnosis: Diagnosis) -> list[str]:
    lines = [line for state in without_dump(diagnosis) for line in _paragraph(state)]
    for unreadable in diagnosis.unreadable_files[:MAX_BLOCKS]:
        lines += _paragraph(f"unreadable: {unreadable.file}: {unreadable.error}")
    lines += _left_out("unreadable files", diagnosis.unreadable_files[MAX_BLOCKS:])
    return _section("Not read", lines)


def _warnings(diagnosis: Diagnosis) -> list[str]:
    return _section("Warnings", [line for warning in diagnosis.warnings for line in _paragraph(warning)])


def _health(diagnosis: Diagnosis) -> list[str]:
    """Rare statuses come first: the odd one out is what one looks for."""
    ranks_by_status: dict[tuple[str, str], list[int]] = defaultdict(list)
    for report in diagnosis.ranks:
        for device, status in report.health.items():
            ranks_by_status[device, status].append(report.rank)
    lines: list[str] = []
    for (device, status), ranks in sorted(ranks_by_status.items(), key=lambda item: (len(item[1]), item[0])):
        lines += _paragraph(f"{device} {status}: {_rank_list(ranks)}")
    return _section("Health checks", lines or ["  no dump holds health_check_results"])


def _ranks(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            report.rank,
            report.node,
            _moment(report.dump_time_ns),
            "nothing" if report.front is None else _call(report.front),
        )
        for report in diagnosis.ranks
    ]
    return _section("Ranks", _indented(render_table(("rank", "node", "dump written", "stuck in"), rows)))


def _progress(diagnosis: Diagnosis) -> list[str]:
    """Show how far each group got, the hung ones first; ranks with the same counters share a row, laggards first."""
    ranks_of: dict[tuple[ProcessGroup, Kind, tuple[int | None, ...]], list[int]] = defaultdict(list)
    for report in diagnosis.ranks:
        for entry in report.progress:
            ranks_of[entry.group, entry.kind, _counters(entry)].append(report.rank)
    hung = {entry.group for entry in diagnosis.hung_process_groups}
    keys = sorted(ranks_of, key=lambda key: (key[0] not in hung, *_name_order(key[0]), key[1], _lag(key[2])))
    rows = [
        (group.name, group.desc, kind, *counters, format_ranges(ranks_of[group, kind, counters], max_length=MAX_RANGES))
        for group, kind, counters in keys
    ]
    header = ("process group", "description", "kind", "enqueued", "started", "completed", "open", "ranks")
    return _section("Progress", _indented(render_table(header, rows)) if rows else [])


def _name_order(group: ProcessGroup) -> tuple[int, str, str]:
    """Sort the usual names, which are numbers, as such."""
    return len(group.name), group.name, group.key


def _counters(entry: RankProgress) -> tuple[int | None, ...]:
    return entry.last_enqueued, entry.last_started, entry.last_completed, entry.open_operations


def _lag(counters: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(-1 if counter is None else counter for counter in counters)


def _call(call: Call) -> str:
    """Return one call on one line, without its stack."""
    seq_id = call.p2p_seq_id if call.kind == "p2p" else call.collective_seq_id
    parts = [f"{call.operation or 'unknown call'} in {_group(call.group)}", _position(call.kind, seq_id)]
    if call.state is not None:
        parts.append(call.state)
    if call.issued_ns is not None:
        parts.append(f"issued {_moment(call.issued_ns)}")
    return ", ".join(parts)


def _group(group: ProcessGroup) -> str:
    return f"process group {group.name}" + (f" ({group.desc})" if group.desc not in ("", group.name) else "")


def _position(kind: Kind, seq_id: int | None) -> str:
    return f"{'send/recv' if kind == 'p2p' else 'collective'} {'unknown' if seq_id is None else seq_id}"


def _rank_list(ranks: Iterable[int]) -> str:
    return name_ranks(ranks, max_length=MAX_RANGES)


def _moment(time_ns: int | None) -> str:
    """Return a time to the second: nobody reads microseconds off a page at night."""
    text = rfc3339(time_ns)
    return "unknown" if text is None else f"{text[:19]}Z"


def _stack(frames: Sequence[Frame]) -> list[str]:
    """Innermost frame first, as the recorder writes them."""
    lines = [
        line
        for frame in frames[:MAX_FRAMES]
        for line in _paragraph(f"at {frame.name} ({frame.filename}:{frame.line})", indent=6)
    ]
    return lines + ([f"      ... {len(frames) - MAX_FRAMES} more frames"] if len(frames) > MAX_FRAMES else [])


def _join(sections: Iterable[list[str]]) -> str:
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [printable(title), *lines] if lines else []


def _left_out(what: str, items: Sequence[object]) -> list[str]:
    return [f"  and {len(items)} more {what}: --format json has them all"] if items else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _paragraph(text: str, *, indent: int = 2, hanging: int = 2) -> list[str]:
    """Return text as lines of at most WIDTH columns where words allow it, continued `hanging` columns further in."""
    margin = " " * indent
    return wrap(
        printable(text),
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin + " " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
