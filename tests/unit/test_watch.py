"""The watcher keeps directories watched, whatever happens to them."""

from __future__ import annotations

import logging
import os
import queue
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fr_exporter.config import Watch
from fr_exporter.watch import Watcher

OPTIONS = Watch(backend="inotify", poll_interval_s=2.0, rescan_interval_s=30.0)


@pytest.fixture
def changes() -> queue.Queue[str]:
    """Return the queue that changed paths land in."""
    return queue.Queue()


@pytest.fixture
def watcher(changes: queue.Queue[str]) -> Iterator[Watcher]:
    """Return a watcher that uses inotify."""
    watcher = Watcher(OPTIONS, changes.put)
    yield watcher
    watcher.close()


def wait_for(changes: queue.Queue[str], path: Path) -> None:
    """Wait until a change of `path` is reported."""
    while changes.get(timeout=10) != str(path):
        pass


def test_each_way_a_file_changes_is_reported(tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]) -> None:
    """Creating, rewriting in place, renaming onto and deleting a file each wake the worker with that file's path."""
    dump = tmp_path / "_dump_0"
    watcher.require([str(tmp_path)])
    assert watcher.check(0.0) == {str(tmp_path): True}

    dump.write_bytes(b"created")
    wait_for(changes, dump)
    drain(changes)
    with dump.open("r+b") as stream:
        stream.write(b"changed")
    wait_for(changes, dump)
    drain(changes)
    (tmp_path / "new").write_bytes(b"renamed")
    wait_for(changes, tmp_path / "new")
    (tmp_path / "new").rename(dump)
    wait_for(changes, dump)
    drain(changes)
    dump.unlink()
    wait_for(changes, dump)


def drain(changes: queue.Queue[str]) -> None:
    """Take what is queued, and what the observer is still about to queue for it."""
    while True:
        try:
            changes.get(timeout=0.2)
        except queue.Empty:
            return


def test_reading_a_file_is_no_change(tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]) -> None:
    """Reading the dumps wakes nobody: else the exporter would keep itself awake."""
    (tmp_path / "_dump_0").write_bytes(b"old")
    watcher.require([str(tmp_path)])
    watcher.check(0.0)

    (tmp_path / "_dump_0").read_bytes()
    (tmp_path / "_dump_1").write_bytes(b"new")

    assert changes.get(timeout=10) == str(tmp_path / "_dump_1")


def test_a_file_that_grows_wakes_nobody_before_it_is_closed(
    tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]
) -> None:
    """However many writes a dump takes, it is reported when it is new and when its writer is done, and not between."""
    watcher.require([str(tmp_path)])
    watcher.check(0.0)

    with (tmp_path / "_dump_0").open("wb", buffering=0) as writer:
        assert changes.get(timeout=10) == str(tmp_path / "_dump_0")
        for _ in range(100):
            writer.write(b"more")
        (tmp_path / "_dump_1").touch()
        assert changes.get(timeout=10) == str(tmp_path / "_dump_1")
        drain(changes)
    assert changes.get(timeout=10) == str(tmp_path / "_dump_0")


def test_a_watched_directory_is_listed_at_the_rescan_interval(tmp_path: Path, watcher: Watcher) -> None:
    """With inotify a directory is listed once, then every rescan interval: inotify can lose events."""
    watcher.require([str(tmp_path)])

    listed = {now: due for now in range(0, 62, 2) if (due := watcher.check(float(now)))}

    assert listed == {0: {str(tmp_path): True}, 30: {str(tmp_path): False}, 60: {str(tmp_path): False}}


def test_a_polled_directory_is_listed_at_the_poll_interval(tmp_path: Path, changes: queue.Queue[str]) -> None:
    """With polling each check lists the directory."""
    watcher = Watcher(replace(OPTIONS, backend="polling"), changes.put)
    watcher.require([str(tmp_path)])

    assert [now for now in range(7) if watcher.check(float(now))] == [0, 2, 4, 6]
    assert watcher.backend(str(tmp_path)) == "polling"


def test_an_absent_directory_is_told_once_and_watched_when_it_comes(
    tmp_path: Path, watcher: Watcher, changes: queue.Queue[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that does not exist is down with one log line, however often it is tried, and recovers by itself."""
    directory = tmp_path / "dumps"
    watcher.require([str(directory)])
    for now in range(0, 10, 2):
        assert watcher.check(float(now)) == {}
    assert not watcher.up(str(directory))
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot watch {directory}: No such file or directory; trying again every 2 s until it can be read"
    ]

    directory.mkdir()
    assert watcher.check(10.0) == {str(directory): True}
    assert watcher.up(str(directory))
    (directory / "_dump_0").write_bytes(b"new")
    wait_for(changes, directory / "_dump_0")


def test_a_replaced_directory_is_watched_anew(tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]) -> None:
    """A directory removed and made again under its name is another directory: it is listed and watched again."""
    directory = tmp_path / "dumps"
    directory.mkdir()
    watcher.require([str(directory)])
    watcher.check(0.0)

    directory.rename(tmp_path / "old")
    directory.mkdir()
    assert watcher.check(2.0) == {str(directory): True}
    drain(changes)
    (tmp_path / "old" / "_dump_0").write_bytes(b"not here any more")
    (directory / "_dump_1").write_bytes(b"new")

    assert changes.get(timeout=10) == str(directory / "_dump_1")


def test_a_directory_made_again_at_once_is_watched_anew(
    tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]
) -> None:
    """A directory deleted and made again between two checks may have its old inode, and is still watched anew."""
    directory = tmp_path / "dumps"
    directory.mkdir()
    watcher.require([str(directory)])
    watcher.check(0.0)

    directory.rmdir()
    directory.mkdir()
    wait_for(changes, directory)
    assert watcher.check(2.0) == {str(directory): True}
    (directory / "_dump_0").write_bytes(b"new")

    wait_for(changes, directory / "_dump_0")


def test_that_a_transient_directory_is_gone_is_no_news(
    tmp_path: Path, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that may go is down without a word when it goes; any other trouble with it is told."""
    caplog.set_level(logging.INFO)
    directory = tmp_path / "job"
    directory.mkdir()
    watcher.require([str(directory)], transient=[str(directory)])
    watcher.check(0.0)

    directory.rmdir()
    watcher.check(2.0)
    assert not watcher.up(str(directory))
    assert caplog.records == []

    directory.write_text("not a directory")
    watcher.check(4.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_directory_that_vanishes_is_down_until_it_is_back(
    tmp_path: Path, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Every time a directory goes it is told once, every time it comes back it is told once."""
    caplog.set_level(logging.INFO)
    directory = tmp_path / "dumps"
    watcher.require([str(directory)])
    ups = []
    for now in range(0, 24, 2):
        if now in (4, 16):
            directory.mkdir()
        if now == 10:
            directory.rmdir()
        watcher.check(float(now))
        ups.append(watcher.up(str(directory)))

    assert ups == [False, False, True, True, True, False, False, False, True, True, True, True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]


def test_a_file_in_place_of_the_directory_is_down(tmp_path: Path, watcher: Watcher) -> None:
    """A path that is no directory is not watched, and is once it has become one."""
    path = tmp_path / "dumps"
    path.write_text("not a directory")
    watcher.require([str(path)])
    watcher.check(0.0)
    assert not watcher.up(str(path))

    path.unlink()
    path.mkdir()
    assert watcher.check(2.0) == {str(path): True}


def test_a_symbolic_link_is_followed_to_its_directory(
    tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]
) -> None:
    """Files that land behind a link are reported under the link's path; a link turned elsewhere is watched anew."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "dumps"
    link.symlink_to("first")
    watcher.require([str(link)])
    watcher.check(0.0)
    (tmp_path / "first" / "_dump_0").write_bytes(b"new")
    wait_for(changes, link / "_dump_0")

    os.symlink("second", tmp_path / "swap")
    (tmp_path / "swap").rename(link)
    assert watcher.check(2.0) == {str(link): True}
    (tmp_path / "second" / "_dump_1").write_bytes(b"new")
    wait_for(changes, link / "_dump_1")


def test_a_directory_no_longer_required_wakes_nobody(
    tmp_path: Path, watcher: Watcher, changes: queue.Queue[str]
) -> None:
    """After a reload without a target its directory is left alone, and the others stay watched."""
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    for directory in (kept, removed):
        directory.mkdir()
    watcher.require([str(kept), str(removed)])
    watcher.check(0.0)
    watcher.require([str(kept)])
    assert watcher.check(2.0) == {}

    (removed / "_dump_0").write_bytes(b"nobody looks")
    (kept / "_dump_1").write_bytes(b"new")

    assert changes.get(timeout=10) == str(kept / "_dump_1")
    shutil.rmtree(removed)


def test_without_inotify_auto_polls_and_warns_once(
    tmp_path: Path,
    changes: queue.Queue[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no inotify instance is left, `auto` polls every directory and says so once."""

    def no_instance_left() -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr("fr_exporter.watch.Observer", no_instance_left)
    directories = [str(tmp_path / name) for name in ("a", "b")]
    for directory in directories:
        os.mkdir(directory)
    watcher = Watcher(replace(OPTIONS, backend="auto"), changes.put)
    watcher.require(directories)

    assert sorted(watcher.check(0.0)) == directories
    assert {watcher.backend(directory) for directory in directories} == {"polling"}
    assert [record.getMessage() for record in caplog.records] == [
        "inotify cannot be used (inotify instance limit reached): polling every 2 s instead"
    ]
