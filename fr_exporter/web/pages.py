"""The landing page: what an engineer on call reads first. Works without JavaScript, on a phone, in the dark."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from urllib.parse import quote

from fr_exporter.diagnosis import Camp, Diagnosis, HungGroup, Mismatch, Suspect, rfc3339
from fr_exporter.ranges import format_ranges, name_ranks
from fr_exporter.report import RESTART, evidence_of, same_finding, without_dump
from fr_exporter.store import Snapshot, TargetState
from fr_exporter.text import printable, span

REFRESH_S = 5
MAX_ROWS = 32
MAX_RANGES = 160

_STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--dim:#59636e;--bg:#fff;--card:#f6f8fa;--line:#d1d9e0;--bad:#b3261e;
--warn:#8a5a00;--good:#1a7f37;--link:#0550ae}
@media (prefers-color-scheme:dark){:root{--fg:#e6edf3;--dim:#9da7b1;--bg:#0d1117;--card:#161b22;--line:#30363d;
--bad:#ff8178;--warn:#e3b341;--good:#56d364;--link:#79c0ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
a{color:var(--link)}
h1{font-size:1rem;margin:0;color:var(--dim);font-weight:600}
header,footer{display:flex;flex-wrap:wrap;gap:.3rem 1rem;align-items:baseline;color:var(--dim);font-size:.9rem}
section{margin:1rem 0;padding:1rem;background:var(--card);border:1px solid var(--line);
border-left:.4rem solid var(--dim);border-radius:.4rem;overflow-x:auto}
section.bad{border-left-color:var(--bad)}section.warn{border-left-color:var(--warn)}
section.good{border-left-color:var(--good)}
h2{font-size:1.3rem;margin:0;line-height:1.3}
h2 b{margin-right:.6rem}.bad h2 b,.down{color:var(--bad)}
.partial,.warn h2 b{color:var(--warn)}.good h2 b{color:var(--good)}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0}.summary{font-size:1.1rem}.dim{color:var(--dim)}.down{font-weight:600}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.6rem 0}dt{color:var(--dim)}dd{margin:0}
ul{margin:.3rem 0;padding-left:1.2rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .8rem .35rem 0;border-top:1px solid var(--line);
overflow-wrap:break-word}
td:last-child{overflow-wrap:anywhere}
th{color:var(--dim);font-weight:600;font-size:.85rem;border-top:0}
td:first-child{font-weight:600;white-space:nowrap}
@media (max-width:44rem){thead{display:none}table,tbody,tr{display:block}
tr{border-top:1px solid var(--line);padding:.4rem 0}
td{display:block;border:0;padding:.1rem 0;overflow-wrap:anywhere}td:first-child{white-space:normal}
td::before{content:attr(data-label) ": ";color:var(--dim);font-weight:400}}
"""

# The hash lets the page's own style through its Content-Security-Policy, and nothing that a dump might smuggle in.
STYLE_SOURCE = f"'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'"


def landing(snapshot: Snapshot, *, now_ns: int, version: str) -> str:
    """Return the landing page: every job, the ones that hang first."""
    targets = sorted(snapshot.targets, key=_urgency)
    hanging = sum(bool(target.hang) for target in targets)
    named = sum(bool(target.training_job) for target in targets)
    title = f"{hanging} of {named} jobs hanging" if hanging else "no hang"
    jobs = "".join(_job(target, now_ns) for target in targets)
    return _page(
        f"{title} - fr_exporter",
        f"""<header><h1>fr_exporter</h1><span>{_moment(rfc3339(now_ns))}, reloads every {REFRESH_S} s</span></header>
<main>{jobs or "<section><h2>No training job is watched</h2></section>"}</main>
<footer><a href="/metrics">/metrics</a> <a href="/api/v1/diagnoses">all diagnoses (JSON)</a>
<a href="/api/v1/incidents">incidents (JSON)</a> <a href="/config">configuration</a>
<span>fr_exporter {_text(version)}</span></footer>""",
        refresh=True,
    )


def not_found(path: str) -> str:
    """Return the page for a path that is not there."""
    return _page(
        "not found - fr_exporter",
        f'<section><h2>There is no page {_text(path)}</h2><p><a href="/">Back to the verdict</a></p></section>',
        refresh=False,
    )


def _page(title: str, body: str, *, refresh: bool) -> str:
    meta = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if refresh else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">{meta}
<title>{_text(title)}</title><style>{_STYLE}</style></head>
<body>{body}</body></html>
"""


def _urgency(target: TargetState) -> tuple[bool, bool, bool]:
    uncertain = target.diagnosis is not None and target.diagnosis.verdict != "healthy"
    return not target.hang, target.watch_up, not uncertain


def _job(target: TargetState, now_ns: int) -> str:
    tone, words = _verdict(target)
    node = " (this node only)" if target.scope == "node" else ""
    parts = [f"<h2><b>{_text(words)}</b> {_text(target.training_job)}{node}</h2>"]
    if not target.watch_up:
        consequence = "no dump is seen" if target.diagnosis is None else "what is shown here may be out of date"
        parts.append(f'<p class="down">{_text(target.path)} cannot be watched: {consequence}.</p>')
    elif target.diagnosis is None:
        parts.append(f"<p>No dumps yet: watching {_text(target.path)}</p>")
    if target.diagnosis is not None:
        parts += _findings(target, target.diagnosis, now_ns)
    return f'<section class="{tone}">{"".join(parts)}</section>'


def _verdict(target: TargetState) -> tuple[str, str]:
    """Return the tone of a job's section and its verdict in words."""
    diagnosis = target.diagnosis
    if target.hang:
        return "bad", "Hang"
    if diagnosis is None:
        return ("idle", "Watching") if target.watch_up else ("warn", "Not watched")
    if diagnosis.verdict == "hang":
        return "warn", "Past hang, no incident open"
    if diagnosis.verdict == "inconclusive":
        return "warn", "Inconclusive"
    return "good" if target.watch_up else "warn", "No hang"


def _findings(target: TargetState, diagnosis: Diagnosis, now_ns: int) -> list[str]:
    link = f"/api/v1/diagnosis?training_job={quote(target.training_job, safe='', errors='surrogateescape')}"
    partial = (
        '<p class="partial">Ranks may still be writing their dumps: this can change.</p>' if diagnosis.partial else ""
    )
    return [
        f'<p class="summary">{_text(diagnosis.summary)}</p>{partial}',
        _facts(target, diagnosis, now_ns),
        _suspects(diagnosis.suspects),
        _hung_groups(diagnosis.hung_process_groups),
        _mismatches(diagnosis.mismatches),
        _not_read(diagnosis),
        _list("Warnings", diagnosis.warnings),
        f'<p><a href="{escape(link)}">This diagnosis as JSON</a></p>',
    ]


def _facts(target: TargetState, diagnosis: Diagnosis, now_ns: int) -> str:
    facts: dict[str, str] = {}
    if diagnosis.cause is not None:
        state = diagnosis.attribution_state
        facts["Cause"] = diagnosis.cause.value
        facts["Restart"] = f"{RESTART[state]} ({state.value})"
    for headline in diagnosis.hung_process_groups[:1]:
        facts["Stuck since"] = _since(headline.since_ns, now_ns)
    if target.incident is not None:
        name = _text(target.incident.id)
        facts["Open incident"] = f'<a href="/api/v1/incidents/{name}">{name}</a>'
    last_dump = _since(diagnosis.last_dump_time_ns, now_ns)
    facts["Dumps"] = f"{len(diagnosis.dumped_ranks)} of {diagnosis.expected_ranks} ranks, the last {last_dump}"
    facts["Read from"] = _text(target.path)
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in facts.items())}</dl>"


def _suspects(suspects: Sequence[Suspect]) -> str:
    rows = []
    for same in same_finding(suspects):
        first = same[0]
        nodes = ", ".join(sorted({suspect.node for suspect in same if suspect.node}))
        ranks = _ranks(suspect.rank for suspect in same)
        rows.append((ranks, nodes, first.cause.value, first.confidence, evidence_of(same)))
    return _table("Suspects", ("Rank", "Node", "Cause", "Confidence", "Evidence"), rows)


def _hung_groups(hung_groups: Sequence[HungGroup]) -> str:
    columns = ("Process group", "Description", "Operation", "Sequence ID", "Waiting ranks", "Waiting on")
    rows = [
        (
            hung.group.name,
            hung.group.desc,
            hung.operation or "unknown call",
            "unknown" if hung.seq_id is None else str(hung.seq_id),
            _ranks(hung.waiting_ranks),
            _ranks(hung.waiting_on),
        )
        for hung in hung_groups
    ]
    return _table("Hung process groups", columns, rows)


def _mismatches(mismatches: Sequence[Mismatch]) -> str:
    rows = [
        (
            mismatch.group.name,
            mismatch.group.desc,
            str(mismatch.collective_seq_id),
            mismatch.kind,
            "; ".join(map(_camp, mismatch.camps[:MAX_ROWS])),
        )
        for mismatch in mismatches
    ]
    return _table("Not the same on all ranks", ("Process group", "Description", "Sequence ID", "What", "Who"), rows)


def _camp(camp: Camp) -> str:
    return f"{camp.value} on {name_ranks(camp.ranks, max_length=MAX_RANGES)}"


def _not_read(diagnosis: Diagnosis) -> str:
    unreadable = (f"unreadable: {file.file}: {file.error}" for file in diagnosis.unreadable_files)
    return _list("Not read", [*without_dump(diagnosis), *unreadable])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table under its title, without the columns that are empty in every row; nothing for no rows."""
    if not rows:
        return ""
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    head = "".join(f"<th>{columns[index]}</th>" for index in shown)
    body = "".join(
        "<tr>" + "".join(f'<td data-label="{columns[index]}">{_text(row[index])}</td>' for index in shown) + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    return f"<h3>{title}</h3><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{_left_out(rows)}"


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{_text(line)}</li>" for line in lines[:MAX_ROWS])
    return f"<h3>{title}</h3><ul>{items}</ul>{_left_out(lines)}"


def _left_out(lines: Sequence[object]) -> str:
    return f'<p class="dim">and {len(lines) - MAX_ROWS} more: see the JSON</p>' if len(lines) > MAX_ROWS else ""


def _ranks(ranks: Iterable[int]) -> str:
    return format_ranges(ranks, max_length=MAX_RANGES).replace(",", ", ")


def _since(time_ns: int | None, now_ns: int) -> str:
    moment = rfc3339(time_ns)
    if time_ns is None or moment is None:
        return "at an unknown time"
    ago = f", {span((now_ns - time_ns) // 1_000_000_000)} ago" if now_ns >= time_ns else ""
    return f"{_moment(moment)}{ago}"


def _moment(moment: str | None) -> str:
    return "" if moment is None else f"{moment[:19].replace('T', ' ')} UTC"


def _text(value: str) -> str:
    """Return untrusted text as HTML; what would not print, or would turn the reading direction, shows as its escape."""
    return escape(printable(value))
