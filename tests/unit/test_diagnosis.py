"""The JSON form of a diagnosis: the keys that programs rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fr_exporter.diagnosis import Call, Diagnosis
from fr_exporter.model import Frame
from tests.unit import diagnosis_values as values

CALL_KEYS = "operation process_group desc kind collective_seq_id p2p_seq_id state issued issued_ns frames"
KEYS = {
    "": "schema_version training_job incident verdict partial scope source generated_at generated_at_ns"
    " first_dump_time first_dump_time_ns last_dump_time last_dump_time_ns cause attribution_state summary"
    " hung_process_groups suspect_ranks suspects mismatches world_size dumped_ranks missing_ranks pending_ranks"
    " stale_ranks remote_ranks unreadable_files warnings ranks versions",
    "hung_process_groups": "process_group desc ranks cause operation kind collective_seq_id p2p_seq_id input_sizes"
    " dtypes waiting_ranks waiting_on since since_ns frames",
    "hung_process_groups.frames": "name filename line",
    "suspects": "rank node cause confidence evidence waiting_ranks last_call health",
    "suspects.last_call": CALL_KEYS,
    "suspects.last_call.frames": "name filename line",
    "mismatches": "process_group desc collective_seq_id kind camps",
    "mismatches.camps": "value ranks",
    "unreadable_files": "file error",
    "ranks": "rank node dump_time dump_time_ns front progress health",
    "ranks.front": CALL_KEYS,
    "ranks.progress": "process_group desc kind last_enqueued last_started last_completed open_operations",
    "versions": "dump comm_lib",
}


def everything() -> Diagnosis:
    """Return a diagnosis in which no part is empty."""
    frames = (Frame("step", "train.py", 7),)
    call = Call("nccl:all_reduce", values.EXPERT, "collective", 5, None, "completed", values.SINCE, frames)
    suspect = values.suspect(0, evidence="has nothing open", last_call=call, health={"gpu": "Failed"})
    found = values.mismatch()
    return replace(found, suspects=(suspect,), hung_process_groups=(values.hung(frames=frames),))


def nothing_known() -> Diagnosis:
    """Return a diagnosis in which all that can be unknown is."""
    call = Call(None, values.EXPERT, "p2p", None, None, None, None)
    hung = values.hung(seq_id=None, operation=None, input_sizes=(), dtypes=(), since_ns=None)
    return replace(
        everything(),
        cause=None,
        first_dump_time_ns=None,
        last_dump_time_ns=None,
        hung_process_groups=(hung,),
        suspects=(values.suspect(0, node=None, last_call=call),),
    )


def keys(value: Any, path: str = "") -> dict[str, set[str]]:
    """Return the keys of each object, by the path to it without list indices; `health` has those of the devices."""
    found: dict[str, set[str]] = {}
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and not path.endswith("health"):
            found.setdefault(path, set()).update(item)
            for key, inner in item.items():
                found |= keys(inner, f"{path}.{key}".lstrip("."))
    return found


def test_the_documented_keys_are_all_there_and_no_others() -> None:
    """A program may read any key of the documented object without asking first."""
    assert keys(everything().to_dict()) == {path: set(words.split()) for path, words in KEYS.items()}


def test_what_is_unknown_is_null_and_present() -> None:
    """An object has the same keys whatever is known of it."""
    known = keys(everything().to_dict())
    assert all(words == known[path] for path, words in keys(nothing_known().to_dict()).items())
    found = nothing_known().to_dict()
    assert [found[key] for key in ("incident", "cause", "first_dump_time", "last_dump_time_ns")] == [None] * 4
    assert found["suspects"][0]["last_call"]["issued"] is None
    assert found["hung_process_groups"][0]["since"] is None


def test_evidence_is_a_sentence_that_names_its_rank() -> None:
    """A suspect read alone, in a page or a ticket, says of whom it speaks."""
    assert everything().to_dict()["suspects"][0]["evidence"] == "Rank 0 has nothing open."


def test_times_are_told_twice() -> None:
    """Each time stands there as RFC 3339 UTC for people and in nanoseconds for programs, of the same moment."""
    document = replace(everything(), generated_at_ns=values.SINCE + 1_234_567_891).to_dict()
    assert (document["generated_at"], document["generated_at_ns"]) == (
        "2025-09-23T06:55:06.234567Z",
        1_758_610_506_234_567_891,
    )
