"""The spool: what a process leaves to the next, whatever happens to the disk. Real directories, real locks."""

from __future__ import annotations

import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_exporter.fleet.spool import Spool

URL = "s3://bucket/fleet"
ENOUGH = 2**20


@contextmanager
def opened(directory: Path | str, url: str = URL, max_bytes: int = ENOUGH) -> Iterator[Spool]:
    """Open a spool, and close it as the end of its process does."""
    spool = Spool(str(directory), url, max_bytes)
    try:
        yield spool
    finally:
        spool.close()


def contents(spool: Spool) -> list[tuple[str, bytes]]:
    """Take all that waits out of a spool, in the order in which it would be tried."""
    found = []
    while spool:
        waiting = spool.next()
        found.append((waiting.name, waiting.data))
        spool.remove(waiting.name)
    return found


def files(directory: Path) -> list[Path]:
    """Return the files on the disk."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let the system write no file beyond a size, as a disk does that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_next_process_finds_what_waits_oldest_first(tmp_path: Path) -> None:
    """Names of any length and any bytes come back; an object put anew is as young as its newest form."""
    written = [(f"job/0/n{number}", b"records") for number in range(8)] + [("job/0/" + "n" * 400, b"\x00\n\xff")]
    with opened(tmp_path) as spool:
        spool.put(written[-1][0], b"old", 1.0)
        spool.put("job/0/gone", b"published", 1.0)
        spool.remove("job/0/gone")
        for second, (name, data) in enumerate(written):
            spool.put(name, data, 1.0)
            (file,) = (path for path in files(tmp_path) if name.encode() + b"\n" in path.read_bytes())
            os.utime(file, (second, second))
    with opened(tmp_path) as spool:
        assert spool.next().read_at is None
        assert contents(spool) == written
    assert files(tmp_path) == []


def test_nobody_else_can_read_what_waits(tmp_path: Path) -> None:
    """Directories have mode 0700 and files 0600, also where the umask allows more."""
    before = os.umask(0)
    try:
        with opened(tmp_path / "spool") as spool:
            spool.put("job/0/n1", b"records", 1.0)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {path.is_dir(): mode for path, mode in modes.items()} == {True: 0o700, False: 0o600}


def test_two_processes_share_a_directory_without_sharing_files(tmp_path: Path) -> None:
    """Neither sees nor removes what the other has, even of one name; when both have ended, nothing is lost."""
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.put("job/0/n1", b"first", 1.0)
        assert second.get("job/0/n1") is None
        second.put("job/0/n1", b"second", 1.0)
        first.remove("job/0/n1")
        first.put("job/0/n2", b"first", 1.0)
    with opened(tmp_path) as third, opened(tmp_path) as fourth:
        assert contents(third) + contents(fourth) == [("job/0/n2", b"first"), ("job/0/n1", b"second")]


def test_what_waits_for_one_url_is_never_published_to_another(tmp_path: Path) -> None:
    """An exporter of another store takes nothing over, and leaves it to those whom it concerns."""
    with opened(tmp_path, "file:///a") as spool:
        spool.put("job/0/n1", b"a", 1.0)
    with opened(tmp_path, "file:///b") as spool:
        assert len(spool) == 0
    with opened(tmp_path, "file:///a") as spool:
        assert contents(spool) == [("job/0/n1", b"a")]


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    """SIGKILL frees the directory; as long as the process lived it was its own."""
    code = f"""
from fr_exporter.fleet.spool import Spool
spool = Spool({str(tmp_path)!r}, {URL!r}, {ENOUGH})
spool.put("job/0/n1", b"records", 1.0)
print("ready", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with opened(tmp_path) as spool:
            assert len(spool) == 0
        process.send_signal(signal.SIGKILL)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert contents(first) + contents(second) == [("job/0/n1", b"records")]


def test_damage_is_never_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file cut anywhere, changed, copied or foreign is ignored, with one warning for all; the others are found."""
    with opened(tmp_path) as spool:
        for number in range(40):
            spool.put(f"job/0/n{number}", b"records", 1.0)
    whole, copied, changed, *cut = files(tmp_path)
    copied.rename(copied.with_name("copy"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    for length, path in enumerate(cut):
        path.write_bytes(path.read_bytes()[:length])
    (whole.parent / "foreign").mkdir()
    # What a process that is killed while it writes leaves is no damage.
    (whole.parent / ".new").write_bytes(whole.read_bytes()[:9])
    with opened(tmp_path) as spool:
        assert [data for _, data in contents(spool)] == [b"records"]
    assert warnings(caplog) == [
        f"publish.spool_dir: ignored 40 damaged or foreign files in {whole.parent}",
    ]


def test_beyond_the_bound_the_oldest_go(tmp_path: Path) -> None:
    """As many go as must, from the disk too; the newest stays even if it alone is beyond the bound."""
    with opened(tmp_path, max_bytes=10) as spool:
        assert [spool.put(name, b"1234", 1.0) for name in ("a", "b", "a")] == [0, 0, 0]
        assert spool.put("c", b"1234", 1.0) == 1
        assert [spool.get(name) is not None for name in "abc"] == [True, False, True]
        assert len(files(tmp_path)) == 2
        assert spool.put("d", b"1" * 11, 1.0) == 2
    with opened(tmp_path) as spool:
        assert contents(spool) == [("d", b"1" * 11)]


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Below a regular file there is no directory: objects wait in memory, within the bound."""
    (tmp_path / "file").touch()
    directory = f"{tmp_path}/file/spool"
    with opened(directory, max_bytes=10) as spool:
        assert [spool.put(name, b"1234", 1.0) for name in "abc"] == [0, 0, 1]
        assert contents(spool) == [("b", b"1234"), ("c", b"1234")]
    assert warnings(caplog) == [
        f"publish.spool_dir: {directory}: Not a directory; until it works a restart loses what waits"
    ]


def test_a_disk_that_fails_later_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its directory gone the spool works on in memory."""
    with opened(tmp_path) as spool:
        spool.put("a", b"old", 1.0)
        for path in files(tmp_path):
            path.unlink()
            path.parent.rmdir()
        spool.put("a", b"new", 1.0)
        spool.put("b", b"b", 1.0)
        assert contents(spool) == [("a", b"new"), ("b", b"b")]
    assert len(warnings(caplog)) == 1


def test_a_full_disk_keeps_what_was_written_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that ends halfway leaves the former file whole; the object itself waits in memory."""
    with opened(tmp_path) as spool:
        spool.put("a", b"old", 1.0)
        with small_files(500):
            spool.put("a", b"new" * 1000, 1.0)
            spool.put("b", b"new" * 1000, 1.0)
        assert [waiting.data for name in "ab" if (waiting := spool.get(name)) is not None] == [b"new" * 1000] * 2
    assert len(warnings(caplog)) == 1
    with opened(tmp_path) as spool:
        assert contents(spool) == [("a", b"old")]
        spool.put("a", b"new", 1.0)
        with small_files(500):
            spool.put("b", b"new" * 1000, 1.0)
    assert len(warnings(caplog)) == 2, "each time the disk begins to fail"


def test_a_directory_of_somebody_else_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that all may write to nobody can plant records, by a directory of their own or by a link."""
    with opened(tmp_path) as spool:
        spool.put("a", b"planted", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with opened(tmp_path) as spool:
            assert len(spool) == 0
    (directory,) = tmp_path.iterdir()
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to("elsewhere")
    with opened(tmp_path) as spool:
        assert len(spool) == 0
    assert "belongs to another user" in warnings(caplog)[0]
    assert len(warnings(caplog)) == 2


NAMES = st.sampled_from(["a", "b", "c"])
ACTIONS = st.tuples(st.just("put"), NAMES, st.binary(max_size=3)) | st.tuples(
    st.sampled_from(["remove", "restart"]), NAMES, st.just(b"")
)


@given(st.lists(ACTIONS, max_size=20))
def test_the_spool_is_a_dictionary_that_survives(actions: list[tuple[str, str, bytes]]) -> None:
    """After any puts, removals and restarts it holds what a dictionary would."""
    expected: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        spool = Spool(directory, URL, ENOUGH)
        for action, name, data in actions:
            if action == "put":
                spool.put(name, data, 1.0)
                expected[name] = data
            elif action == "remove" and name in expected:
                spool.remove(name)
                del expected[name]
            elif action == "restart":
                spool.close()
                spool = Spool(directory, URL, ENOUGH)
            found = {name: waiting.data for name in "abc" if (waiting := spool.get(name)) is not None}
            assert found == expected
        spool.close()
