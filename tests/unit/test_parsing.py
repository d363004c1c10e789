"""From the bytes of one file to what the dump says, or to the reason why it says nothing."""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import json
import pickle
import pickletools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from fr_exporter.errors import DumpError, MalformedDump, PartialDump, RejectedDump
from fr_exporter.model import RankDump
from fr_exporter.parsing import DumpReader
from fr_exporter.simulate.formats import UNVERSIONED, as_json, as_version
from tests.builders import Dump, Job, as_collected, as_torchcomms, encode, encode_json

MAX_BYTES = 1 << 20


def read(content: bytes, *, reader: DumpReader | None = None, rank: int = 0, source: str = "_dump_0") -> RankDump:
    """Read one file's content."""
    file = io.BytesIO(content)
    return (reader or DumpReader(MAX_BYTES)).read(
        file, size=len(content), rank=rank, node=None, source=source, mtime_ns=None
    )


def pipeline_job() -> Job:
    """Return a job whose rank 0 has done an all_reduce and a send, and is in a second all_reduce."""
    job = Job(4)
    pipeline = job.group("3", "mesh_pp", [0, 2])
    job.collective(job.world)
    job.send(pipeline, 0, 2)
    job.recv(pipeline, 2, 0)
    job.collective(job.world, by=[0, 1])
    return job


@pytest.fixture
def dump() -> Dump:
    """Return rank 0's dump of `pipeline_job`."""
    return pipeline_job().dumps()[0]


WRITERS: dict[str, Callable[[Dump], bytes]] = {
    "2.10": encode,
    "2.10 as JSON": lambda dump: encode_json(as_json(dump)),
    "NVIDIA's collector": lambda dump: encode_json(as_collected(dump)),
    "2.9": lambda dump: encode(as_version(dump, "2.9")),
    "2.4": lambda dump: encode(as_version(dump, "2.4")),
    "2.1": lambda dump: encode(as_version(dump, "2.1")),
    "1.4": lambda dump: encode(as_version(dump, "1.4")),
    "torchcomms": lambda dump: encode(as_torchcomms(dump)),
    "torch 2.2's list": lambda dump: encode(as_version(dump, UNVERSIONED)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_version_gives_the_calls(dump: Dump, writer: str) -> None:
    """Each format tells the calls in order: their names without peers, kinds, peers, sizes, states and times."""
    parsed = read(WRITERS[writer](dump))

    reduce, send, stuck = parsed.operations
    assert [op.operation for op in parsed.operations] == ["nccl:all_reduce", "nccl:send", "nccl:all_reduce"]
    assert [op.kind for op in parsed.operations] == ["collective", "p2p", "collective"]
    assert (send.source, send.destination, reduce.source) == (0, 1, None)
    assert (reduce.collective_seq_id, stuck.collective_seq_id) == (1, 2)
    assert (reduce.state, stuck.state) == ("completed", "scheduled")
    assert reduce.input_sizes == ((256,),)
    assert reduce.issued_ns == dump["entries"][0]["time_created_ns"]


@pytest.mark.parametrize("writer", [name for name in WRITERS if "list" not in name])
def test_every_version_but_the_list_gives_the_members(dump: Dump, writer: str) -> None:
    """A dict names the members of each group; the calls' groups are these."""
    parsed = read(WRITERS[writer](dump))

    assert {group.ranks for group in parsed.groups} == {(0, 1, 2, 3), (0, 2)}
    assert [op.group.ranks for op in parsed.operations] == [(0, 1, 2, 3), (0, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize("writer", ["2.10", "2.10 as JSON", "NVIDIA's collector", "2.9", "2.4"])
def test_counters_belong_to_the_group_that_the_entries_name(dump: Dump, writer: str) -> None:
    """`pg_status` goes by rank-local id, which the entries tie to a group; strings and numbers read alike."""
    parsed = read(WRITERS[writer](dump))

    assert parsed.has_counters
    assert {
        entry.group.desc: (entry.last_enqueued, entry.last_started, entry.last_completed) for entry in parsed.progress
    } == {"default_pg": (2, None, 1), "mesh_pp": (1, None, 1)}


@pytest.mark.parametrize("writer", ["2.1", "1.4", "torch 2.2's list", "torchcomms"])
def test_writers_without_counters_are_known_to_have_none(dump: Dump, writer: str) -> None:
    """No `pg_status` means that nothing was counted, not that nothing was done."""
    parsed = read(WRITERS[writer](dump))

    assert not parsed.has_counters
    assert parsed.progress == ()


def test_torch_22_knows_no_members(dump: Dump) -> None:
    """The bare list names groups by local id alone: their members are unknown, which is not the same as none."""
    assert {op.group.ranks for op in read(encode(as_version(dump, UNVERSIONED))).operations} == {None}


def test_gloo_says_retired_and_nothing_else() -> None:
    """A gloo call stays scheduled and has no times; its group's desc stands in the entries alone."""
    job = Job(2, backend="gloo")
    job.collective(job.world)
    job.collective(job.world, by=[0])

    done, stuck = read(encode(job.dumps()[0])).operations

    assert [(op.operation, op.state, op.retired) for op in (done, stuck)] == [
        ("gloo:all_reduce", "scheduled", True),
        ("gloo:all_reduce", "scheduled", False),
    ]
    assert (done.completed_ns, done.group.desc) == (None, "default_pg")


def test_times_of_zero_are_unknown(dump: Dump) -> None:
    """JSON writes 0 for a time that never came; nothing was started in 1970."""
    *_, stuck = read(encode_json(as_json(dump))).operations

    assert (stuck.started_ns, stuck.completed_ns) == (None, None)


def test_health_checks_are_read(dump: Dump) -> None:
    """NVIDIA's collector adds a status word for each device."""
    assert dict(read(encode_json(as_collected(dump, gpu="Failed"))).health) == {"gpu": "Failed", "nic": "Healthy"}


@pytest.mark.parametrize("ranks", ["[0, 1, 2, 3]", "[0,1,2,3]", [0, 1, 2, 3]])
@pytest.mark.parametrize("encoder", [encode, encode_json])
def test_members_in_every_spelling(dump: Dump, ranks: object, encoder: Callable[[Any], bytes]) -> None:
    """A member list is a string, with spaces or without, or a list: it is the same group."""
    as_torch_writes = read(encode(dump)).operations[0].group
    dump["pg_config"]["0"]["ranks"] = ranks

    parsed = read(encoder(dump)).operations[0].group

    assert (parsed, parsed.ranks) == (as_torch_writes, (0, 1, 2, 3))


@pytest.mark.parametrize("missing", ["absent", "empty"])
def test_dump_without_entries(dump: Dump, missing: str) -> None:
    """A rank may dump no call at all; its counters are read, each mapped by the order in which groups are made."""
    if missing == "absent":
        del dump["entries"]
    else:
        dump["entries"] = []

    parsed = read(encode(dump))

    assert list(parsed.operations) == []
    assert {entry.group.desc: entry.last_enqueued for entry in parsed.progress} == {"default_pg": 2, "mesh_pp": 1}


def test_counters_that_nothing_explains_are_left_out_and_said(dump: Dump) -> None:
    """Without entries and with more local ids than groups no counter can be given to a group for certain."""
    dump["entries"] = []
    dump["pg_status"]["7"] = dump["pg_status"]["0"]

    parsed = read(encode(dump))

    assert parsed.progress == ()
    assert parsed.warnings


@pytest.mark.parametrize("source", ["_dump_0", "_dump_0.json"])
@pytest.mark.parametrize("encoder", [encode, encode_json])
def test_content_tells_the_format(dump: Dump, source: str, encoder: Callable[[Any], bytes]) -> None:
    """Pickle under a .json name and JSON under none are read for what they are."""
    assert len(read(encoder(dump), source=source).operations) == 3


@pytest.mark.parametrize(("version", "newer"), [("2.9", False), ("2.10", False), ("2.11", True), ("2.99", True)])
def test_versions_compare_by_number(dump: Dump, version: str, newer: bool) -> None:
    """2.10 follows 2.9. A newer minor version is read, with a warning that says so."""
    parsed = read(encode(dump | {"version": version}))

    assert len(parsed.operations) == 3
    assert [version in warning for warning in parsed.warnings] == [True] * newer


@pytest.mark.parametrize("version", ["3.0", "20.1", "next", ""])
def test_unknown_major_version_is_refused(dump: Dump, version: str) -> None:
    """A format of another major version may mean other things by the same keys."""
    with pytest.raises(RejectedDump, match="version"):
        read(encode(dump | {"version": version}))


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x01\x01", b"<html>", encode("text"), encode(7), encode_json({}), b"{]"]
)
def test_other_files_are_no_dumps(content: bytes) -> None:
    """A file that is something else gives an error of one line, never a guess."""
    with pytest.raises(MalformedDump) as caught:
        read(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("entries", {"0": 1}),
        ("entries", [{"no": "name"}]),
        ("pg_config", {"0": {"ranks": "[0, 1"}}),
        ("pg_config", {"0": {"ranks": "[0, 0]"}}),
        ("pg_status", {"zero": {}}),
        ("pg_status", {"0": {"last_enqueued_collective": "many"}}),
    ],
)
def test_keys_of_another_shape_are_errors(dump: Dump, key: str, value: object) -> None:
    """A dump with a part that is not as any writer writes it is refused whole, in one line."""
    with pytest.raises(DumpError) as caught:
        read(encode(dump | {key: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spelled", ["pickle", "JSON"])
def test_half_a_dump_is_never_a_shorter_dump(dump: Dump, spelled: str) -> None:
    """Wherever a write stops, inside a UTF-8 character too, the file is partial."""
    dump["pg_config"]["0"]["desc"] = "défaut"
    content = encode(dump) if spelled == "pickle" else json.dumps(as_json(dump), ensure_ascii=False).encode()
    umlaut = content.index("é".encode())

    for end in {*range(0, len(content), 7), umlaut + 1, len(content) - 1}:
        with pytest.raises(PartialDump):
            read(content[:end])


class Untouchable(io.BytesIO):
    """A file that must not be read."""

    def read(self, *_: object) -> NoReturn:
        """Fail: the size alone should have decided."""
        raise AssertionError("read before its size was checked")

    readinto = readline = read


def test_size_is_checked_before_anything_is_read() -> None:
    """A file above the limit is refused unread, and the message names the limit's key."""
    with pytest.raises(RejectedDump, match="max_dump_bytes"):
        DumpReader(100).read(Untouchable(), size=101, rank=0, node=None, source="_dump_0", mtime_ns=None)


def test_ranks_share_what_they_repeat() -> None:
    """A member list that two ranks both write is one tuple in memory, and so are a stack's frames."""
    reader = DumpReader(MAX_BYTES)
    dumps = pipeline_job().dumps()
    first, second = (read(encode(dumps[rank]), reader=reader, rank=rank) for rank in (0, 1))

    assert first.operations[0].group.ranks is second.operations[0].group.ranks
    assert first.operations[-1].frames[0] is second.operations[-1].frames[0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("content", [encode(pipeline_job().dumps()[0]), b"\x80\x02}"], ids=["whole", "half"])
def test_garbage_collector_is_left_as_it_was(enabled: bool, content: bytes) -> None:
    """Whether a read succeeds or fails, the collector is on or off as before."""
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(PartialDump):
            read(content)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


# --- hostile files ---

ran: list[str] = []


def canary(*_: object) -> None:
    """Note that a pickle ran code."""
    ran.append("canary")


class Canary:
    """A class that notes each way in which a pickle can wake it."""

    def __new__(cls, *_: object) -> Canary:
        """Note that an instance is made."""
        canary()
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        canary()


PROTO = b"\x80\x05"
CANARY = f"c{__name__}\ncanary\n".encode()
CANARY_CLASS = f"c{__name__}\nCanary\n".encode()
NAMES = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (__name__, "canary"))
STRING = b"\x8c\x04evil"
EXTENSION = 0xF0

REACHES_OUTSIDE = {
    "GLOBAL": CANARY,
    "STACK_GLOBAL": NAMES + b"\x93",
    "INST": b"(i" + CANARY_CLASS[1:],
    "OBJ": b"(" + CANARY_CLASS + b"o",
    "NEWOBJ": CANARY_CLASS + b")\x81",
    "NEWOBJ_EX": CANARY_CLASS + b")}\x92",
    "REDUCE": CANARY + b")R",
    "BUILD": CANARY_CLASS + b")\x81}b",
    "PERSID": b"Pname\n",
    "BINPERSID": STRING + b"Q",
    "EXT1": b"\x82" + EXTENSION.to_bytes(1, "little") + b")R",
    "EXT2": b"\x83" + EXTENSION.to_bytes(2, "little") + b")R",
    "EXT4": b"\x84" + EXTENSION.to_bytes(4, "little") + b")R",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x97\x98",
}
CALLS = ["REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4"]
ON_PLAIN_DATA = {
    "OBJ": b"(" + STRING + b"o",
    "NEWOBJ": STRING + b")\x81",
    "NEWOBJ_EX": STRING + b")}\x92",
    "REDUCE": STRING + b")R",
    "BUILD": b"}}" + STRING + b"K\x01sb",
    "READONLY_BUFFER": STRING + b"\x98",
}
# Each of these pushes, builds or fills plain data, or moves it between stack, memo and frame.
PLAIN = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "UNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "FLOAT",
    "BINFLOAT",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "LIST",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "EMPTY_SET",
    "ADDITEMS",
    "FROZENSET",
    "POP",
    "DUP",
    "MARK",
    "POP_MARK",
    "GET",
    "BINGET",
    "LONG_BINGET",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "PROTO",
    "STOP",
    "FRAME",
}


@pytest.fixture
def registered_canary() -> Iterator[None]:
    """Register the canary as a pickle extension."""
    copyreg.add_extension(__name__, "canary", EXTENSION)
    yield
    # A pickle that is loaded leaves what an extension stands for in this cache, and the next asks nobody.
    copyreg._extension_cache.pop(EXTENSION, None)  # type: ignore[attr-defined]
    copyreg.remove_extension(__name__, "canary", EXTENSION)


def test_every_opcode_is_accounted_for() -> None:
    """An opcode of a future Python fails here until it is known whether it can reach outside."""
    assert {opcode.name for opcode in pickletools.opcodes} == PLAIN | REACHES_OUTSIDE.keys()


@pytest.mark.usefixtures("registered_canary")
@pytest.mark.parametrize("opcode", REACHES_OUTSIDE)
def test_opcode_that_reaches_outside_is_rejected(opcode: str) -> None:
    """Whatever would look up a name, call, build an object or fetch from elsewhere is rejected before it does."""
    ran.clear()
    with pytest.raises(RejectedDump):
        read(PROTO + REACHES_OUTSIDE[opcode] + b".")
    assert ran == []


@pytest.mark.usefixtures("registered_canary")
@pytest.mark.parametrize("opcode", CALLS)
def test_the_canary_does_sing(opcode: str) -> None:
    """The same bytes do run code in a plain `pickle.loads`: the rejection above is worth something."""
    ran.clear()
    pickle.loads(PROTO + REACHES_OUTSIDE[opcode] + b".")
    assert ran


@pytest.mark.parametrize("opcode", ON_PLAIN_DATA)
def test_opcode_that_calls_finds_nothing_to_call(opcode: str) -> None:
    """Given plain data instead of a name, the opcodes that call or set state give an error too."""
    with pytest.raises(DumpError):
        read(PROTO + ON_PLAIN_DATA[opcode] + b".")


@pytest.mark.parametrize(
    "value", [b"bytes", {1}, frozenset({1}), bytearray(b"array")], ids=["bytes", "set", "frozenset", "bytearray"]
)
def test_other_types_are_rejected(dump: Dump, value: object) -> None:
    """A dump holds dicts, lists, tuples, strings, numbers, booleans and None, under keys we do not know as well."""
    with pytest.raises(RejectedDump):
        read(pickle.dumps(dump | {"extra": [value]}, protocol=5))


DEPTH = 100_000


@pytest.mark.parametrize(
    "content",
    [
        b"[" * DEPTH + b"]" * DEPTH,
        b'{"version": "2.10", "extra": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
        b"\x80\x02" + b"]" * DEPTH + b"a" * (DEPTH - 1) + b".",
        b"\x80\x02]q\x00h\x00a.",
    ],
    ids=["JSON list", "JSON under a key", "pickled list", "list that holds itself"],
)
def test_nesting_without_end_is_an_error(content: bytes) -> None:
    """A file nested deeper than any stack, or into itself, gives an error like any other."""
    with pytest.raises(DumpError):
        read(content)


BOMBS = {
    "LONG_BINPUT": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "BINBYTES8": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "BINUNICODE8": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "BYTEARRAY8": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA bounds memory on Linux only")
def test_memory_bomb_is_rejected() -> None:
    """A few bytes that ask for gigabytes end in an error where the process has a memory limit, not in its death."""
    script = f"""
        import io, resource
        from fr_exporter.errors import DumpError
        from fr_exporter.parsing import DumpReader

        reader = DumpReader(1 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))
        for name, content in {BOMBS!r}.items():
            try:
                reader.read(io.BytesIO(content), size=len(content), rank=0, node=None, source="", mtime_ns=None)
            except DumpError as error:
                print(name, type(error).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    assert outcomes.keys() == BOMBS.keys()
    assert outcomes["LONG_BINPUT"] == "RejectedDump"
