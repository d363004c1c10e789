"""`fr-exporter analyze` on the records of a job in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fr_exporter import cli
from fr_exporter.analysis.progress import with_accounts
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectStore
from fr_exporter.model import NodeRecords
from fr_exporter.parsing import record
from tests.builders import SECOND, START_NS, Job, encode
from tests.records import RECENT_CALLS, read_dump

JOB = "team/llm"


def publish(root: Path, attempt: int, guilty: int) -> None:
    """Publish the records of two nodes of two ranks each, all of which wait for one."""
    job = Job(4)
    job.collective(job.world)
    job.collective(job.world, by=job.world.without(guilty))
    dumps = job.dumps()
    for node, ranks in {"n0": (0, 1), "n1": (2, 3)}.items():
        read = tuple(
            with_accounts(read_dump(encode(dumps[rank]), rank, mtime_ns=START_NS + 60 * SECOND)) for rank in ranks
        )
        place = Place(JOB, attempt, node)
        data = record.encode(NodeRecords(JOB, attempt, node, read), RECENT_CALLS)
        ObjectStore(f"file://{root}").write(object_name(place), data)


def test_the_records_of_a_job_give_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The URL of a job gives the verdict over its last attempt, with the node of the suspect, and its exit code."""
    publish(tmp_path, attempt=0, guilty=3)
    publish(tmp_path, attempt=1, guilty=1)

    code = cli.main(["analyze", f"file://{tmp_path}/team%2Fllm", "--format", "json"])

    said = json.loads(capsys.readouterr().out)
    assert (code, said["verdict"], said["dumped_ranks"]) == (1, "hang", [0, 1, 2, 3])
    assert [(suspect["rank"], suspect["node"]) for suspect in said["suspects"]] == [(1, "n0")]


def test_an_object_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other node's records are analysed; its own ranks are not accused, since they may lie in the broken object."""
    publish(tmp_path, attempt=0, guilty=3)
    (tmp_path / "team%2Fllm/0/n1").write_bytes(b"broken")

    code = cli.main(["analyze", f"file://{tmp_path}/team%2Fllm", "--format", "json"])

    said = json.loads(capsys.readouterr().out)
    assert (code, said["verdict"], said["suspect_ranks"]) == (3, "inconclusive", [])
    assert [file["file"].rpartition("/")[2] for file in said["unreadable_files"]] == ["n1"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://{root}/nobody", "no records; give the URL that nodes publish to, and behind it the training job"),
        ("file://{root}/gone/llm", "the directory does not exist"),
        ("s4://bucket/llm", "'s4' is no protocol of fsspec"),
    ],
)
def test_a_url_without_records_is_one_clear_line(
    tmp_path: Path, url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is not there, a store that is not there and a URL of nothing: one line, exit code 2."""
    code = cli.main(["analyze", url.format(root=tmp_path)])

    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert message in told.err
    assert told.err.count("\n") == 1
