"""The store, on a real S3-compatible server and on a real directory."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fr_exporter.errors import StoreError, UsageError
from fr_exporter.fleet import objectstore
from fr_exporter.fleet.objectstore import ObjectStore
from fr_exporter.text import shown_url
from tests.e2e.s3 import S3Server


def set_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """Let this process reach a server."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return a store below a prefix of the server's bucket."""
    set_environment(monkeypatch, s3.env)
    return ObjectStore(f"{s3.url}/fleet")


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Return an empty store of each kind."""
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/")
    found = request.getfixturevalue("s3_store")
    assert isinstance(found, ObjectStore)
    return found


def test_what_is_written_is_listed_and_read(store: ObjectStore) -> None:
    """Folders and objects are those directly in a folder, by name, whatever is quoted in it; absent ones are empty."""
    assert (store.folders(""), store.objects("job/0")) == ([], [])
    before = time.time_ns()
    store.write("job/0/gpu-1", b"one")
    store.write("job/0/rack%2F7%20%C3%A9", b"seven")
    store.write("job/12/gpu-1", b"")
    store.write("%2E%2E/0/gpu-1", b"")
    assert sorted(store.folders("")) == ["%2E%2E", "job"]
    assert sorted(store.folders("job")) == ["0", "12"]
    assert (store.objects("job"), store.folders("job/0"), store.objects("absent/0")) == ([], [], [])
    objects = {info.name: info for info in store.objects("job/0")}
    assert {name: info.size for name, info in objects.items()} == {"gpu-1": 3, "rack%2F7%20%C3%A9": 5}
    # Stores count whole seconds, and the clock of files moves in steps.
    assert all(before - 2e9 <= info.mtime_ns <= time.time_ns() + 2e9 for info in objects.values())
    assert store.read("job/0/rack%2F7%20%C3%A9", 5) == b"seven"
    assert store.objects("job/0/gpu-1") == []


def test_every_change_shows_in_the_next_listing(store: ObjectStore) -> None:
    """A token stays while its object does, and changes when the object is written anew, though it be as long."""
    tokens = []
    for data in (b"first", b"other"):
        store.write("job/0/gpu-1", data)
        tokens += [store.objects("job/0")[0].token for _ in range(2)]
    first, same, other, same_other = tokens
    assert (first, other) == (same, same_other)
    assert first != other
    store.remove("job/0/gpu-1")
    assert (store.objects("job/0"), store.folders("")) == ([], [])
    store.remove("job/0/gpu-1")


def test_an_object_that_is_too_large_or_gone_is_not_read(store: ObjectStore) -> None:
    """Reading takes no more memory than it may, and each failure is one line that names the object."""
    store.write("job/0/gpu-1", bytes(1000))
    assert len(store.read("job/0/gpu-1", 1000)) == 1000
    for name, max_bytes in (("gpu-1", 999), ("gpu-2", 1000)):
        with pytest.raises(StoreError, match=rf"/job/0/{name}: [^\n]+$") as failure:
            store.read(f"job/0/{name}", max_bytes)
        assert not failure.value.denied


def test_many_threads_read_at_once(store: ObjectStore) -> None:
    """Each of 16 threads gets the object that it asked for, never a part of one that is being written."""
    names = [f"job/0/gpu-{number}" for number in range(32)]
    for name in names:
        store.write(name, name.encode() * 1000)

    def read_or_write(number: int) -> bool:
        name = names[number % 32]
        if number % 5 == 0:
            store.write(name, name.encode() * 2000)
        return store.read(name, 100_000) in (name.encode() * 1000, name.encode() * 2000)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(read_or_write, range(320)))


def test_a_listing_has_no_end_at_a_page(s3_store: ObjectStore, tmp_path: Path) -> None:
    """More objects than the thousand of one answer are listed all."""
    folder = tmp_path / "s3/records/fleet/job/0"
    folder.mkdir(parents=True)
    for number in range(2100):
        (folder / f"gpu-{number}").touch()
    assert {info.name for info in s3_store.objects("job/0")} == {f"gpu-{number}" for number in range(2100)}


@pytest.mark.parametrize(
    "env", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "UNKNOWNKEYOFTHETESTS"}, None]
)
def test_refused_credentials_are_denied(
    s3: S3Server, env: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong secret, an unknown key and no key at all are told from a store that is down, and shown to nobody."""
    set_environment(monkeypatch, s3.env | (env or {}))
    if env is None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = ObjectStore(s3.url)
    actions: list[Callable[[], object]] = [
        lambda: store.folders(""),
        lambda: store.objects("job/0"),
        lambda: store.read("job/0/n", 10),
        lambda: store.write("job/0/n", b""),
        lambda: store.remove("job/0/n"),
    ]
    for action in actions:
        with pytest.raises(StoreError) as failure:
            action()
        assert failure.value.denied
        assert not {*s3.env.values(), *(env or {}).values()} & set(str(failure.value).split())


def test_a_store_that_is_killed_and_comes_back_is_used_again(s3_store: ObjectStore, s3: S3Server) -> None:
    """While it is down each operation fails, and is no refusal; once it is back the same store works."""
    s3_store.write("job/0/gpu-1", b"kept")
    s3.kill()
    with pytest.raises(StoreError, match=r"records/fleet/job/0: .*[Cc]onnect") as failure:
        s3_store.objects("job/0")
    assert not failure.value.denied
    assert "?list-type" not in str(failure.value)
    s3.start()
    assert s3_store.read("job/0/gpu-1", 10) == b"kept"


def test_a_store_that_never_answers_fails_in_time(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and says nothing holds an operation up no longer than the deadline."""
    monkeypatch.setattr(objectstore, "_DEADLINE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        set_environment(monkeypatch, s3.env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        store = ObjectStore(s3.url)
        with pytest.raises(StoreError, match=r"no answer in 1 s$"):
            store.objects("job/0")


@pytest.mark.parametrize("url", ["s3://absent", "s3://absent/fleet"])
def test_a_missing_bucket_is_not_an_empty_one(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is not there yields no listing: nothing ends because of it."""
    set_environment(monkeypatch, s3.env)
    store = ObjectStore(url)
    with pytest.raises(StoreError, match=f"{url}: the bucket does not exist"):
        store.folders("")
    with pytest.raises(StoreError, match="bucket"):
        store.write("job/0/gpu-1", b"")
    with pytest.raises(StoreError, match="bucket"):
        store.remove("job/0/gpu-1")


def test_a_missing_base_directory_is_neither_empty_nor_made(tmp_path: Path) -> None:
    """What was not mounted is no empty store, and nothing is written into the place where it should be."""
    store = ObjectStore(f"file://{tmp_path}/share")
    actions: list[Callable[[], object]] = [
        lambda: store.folders("job"),
        lambda: store.write("job/0/gpu-1", b""),
        lambda: store.remove("job/0/gpu-1"),
    ]
    for action in actions:
        with pytest.raises(StoreError, match=rf"file://{tmp_path}/share: the directory does not exist"):
            action()
    assert not (tmp_path / "share").exists()


def test_a_volume_that_is_unmounted_is_not_empty(tmp_path: Path) -> None:
    """A base directory that is empty all at once, and on another device, is where a volume was mounted."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as volume:
        base = tmp_path / "base"
        base.symlink_to(volume)
        assert os.stat(volume).st_dev != os.stat(tmp_path).st_dev
        store = ObjectStore(f"file://{base}")
        store.write("job/0/gpu-1", b"data")
        assert store.folders("") == ["job"]

        base.unlink()
        base.mkdir()
        for listing in (lambda: store.folders(""), lambda: store.objects("job/0")):
            with pytest.raises(StoreError, match="not mounted any more"):
                listing()

        base.rmdir()
        base.symlink_to(volume)
        assert [info.name for info in store.objects("job/0")] == ["gpu-1"]


def test_a_failed_write_leaves_the_former_object_and_nothing_else(tmp_path: Path) -> None:
    """A file that cannot be replaced stays as it was, without the temporary file beside it."""
    store = ObjectStore(f"file://{tmp_path}")
    (tmp_path / "job/0/gpu-1").mkdir(parents=True)
    with pytest.raises(StoreError, match="Is a directory"):
        store.write("job/0/gpu-1", b"data")
    assert os.listdir(tmp_path / "job/0") == ["gpu-1"]


def test_a_shared_file_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    """The fleet exporter may be another user than the node's."""
    ObjectStore(f"file://{tmp_path}").write("job/0/gpu-1", b"data")
    (tmp_path / "plain").touch()
    assert (tmp_path / "job/0/gpu-1").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_removing_the_last_object_keeps_the_base_directory(tmp_path: Path) -> None:
    """Folders go with their last object, as in an object store, but a store never removes itself."""
    store = ObjectStore(f"file://{tmp_path}/share")
    (tmp_path / "share").mkdir()
    store.write("job/0/gpu-1", b"")
    store.write("job/1/gpu-1", b"")
    store.remove("job/0/gpu-1")
    assert store.folders("job") == ["1"]
    store.remove("job/1/gpu-1")
    assert store.folders("") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/mnt/fleet", "not a URL"),
        ("file://mnt/fleet", "names no store"),
        ("file:///", "names no store"),
        ("s3://", "names no store"),
        ("nfs4://server/fleet", "'nfs4' is no protocol"),
        ("gs://bucket/fleet", r"pip install 'fr-exporter\[gcs\]'"),
        ("abfs://bucket/fleet", r"pip install 'fr-exporter\[azure\]'"),
        ("oss://user:password@host/fleet", r"^oss://\*\*\*@host/fleet: .*install the fsspec driver for oss"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str, message: str) -> None:
    """One line says what to write or to install."""
    with pytest.raises(UsageError, match=message) as refusal:
        ObjectStore(url)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/fleet", "s3://bucket/fleet"),
        ("sftp://user:pass@host/fleet", "sftp://***@host/fleet"),
        ('at "https://host/fleet?sig=abc&x=1", twice', 'at "https://host/fleet?***", twice'),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    """User, password and signature stay out of logs and pages."""
    assert shown_url(url) == shown
