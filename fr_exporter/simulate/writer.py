"""Write a simulated job's dumps as its ranks would, and the truth beside them.

Nothing is dated back: dumps carry times at which they could have been written just now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fr_exporter.errors import FRExporterError, UsageError
from fr_exporter.simulate import formats
from fr_exporter.simulate.job import Job

TRUTH = "truth.json"
DEFAULT_PREFIX = "_dump_"

# How each form is named, as torch and NVIDIA's collector do, and made.
_FORMATS: dict[str, tuple[str, Callable[[Any], bytes]]] = {
    "pickle": ("", formats.to_pickle),
    "json": (".json", formats.to_json),
}
FORMATS = tuple(_FORMATS)

_NO_PREFIX = frozenset("/*?[")


@dataclass(frozen=True, slots=True)
class Output:
    """Where dumps go and in which form; `write_delay_s` seconds pass between one file and the next.

    Raises:
        UsageError: no dump could be found again under the prefix, or the form does not exist in that version.
    """

    directory: Path
    prefix: str = DEFAULT_PREFIX
    format: str = "pickle"
    version: str = formats.VERSIONS[0]
    write_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prefix[-1:].isdigit() or not self.prefix.isprintable() or not _NO_PREFIX.isdisjoint(self.prefix):
            raise UsageError(f"prefix {self.prefix!r}: must be printable, not end in a digit, nor hold / * ? or [")
        if self.format == "json" and self.version == formats.UNVERSIONED:
            raise UsageError("dumps without a version are pickles; choose another version or format")

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        suffix, _ = _FORMATS[self.format]
        return self.directory / f"{self.prefix}{rank}{suffix}"

    def encode(self, dump: formats.Dump) -> bytes:
        """Return the content of the file of a dump of version 2.10."""
        _, encode = _FORMATS[self.format]
        return encode(formats.as_version(dump, self.version))


def check_directory(directory: Path, *, force: bool) -> None:
    """Check that dumps can be written to a directory, which need not exist; write nothing.

    Raises:
        UsageError: it is none, may not be written to, or holds something and `force` is not given.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UsageError(f"{existing}: is not a directory")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{existing}: no permission to write here")
    if existing == directory and not force and any(directory.iterdir()):
        raise UsageError(f"{directory}: is not empty; choose another directory, or --force to write into this one")


def write_job(job: Job, output: Output, *, clock: Callable[[], int], sleep: Callable[[float], object]) -> None:
    """Write the dumps in the order in which the ranks dump, then the truth: once it is there, all is there.

    Files are written in place, as torch does; those of ranks that leave no dump are removed. `clock` gives nanoseconds
    since the epoch, `sleep` takes seconds.

    Raises:
        FRExporterError: a file cannot be written.
    """
    truth = output.directory / TRUTH
    try:
        output.directory.mkdir(parents=True, exist_ok=True)
        for path in (truth, *(output.path(rank) for rank in range(job.truth.world_size) if rank not in job.moments)):
            path.unlink(missing_ok=True)
        _write_dumps(job, output, clock, sleep)
        # Under another name first: a reader that waits for the truth must not see half of it.
        unfinished = truth.with_suffix(".tmp")
        unfinished.write_text(f"{json.dumps(job.truth.to_dict(), indent=2)}\n", encoding="ascii")
        unfinished.replace(truth)
    except OSError as error:
        raise FRExporterError(f"{output.directory}: cannot write: {error.strerror or error}") from error


def _write_dumps(job: Job, output: Output, clock: Callable[[], int], sleep: Callable[[float], object]) -> None:
    hang_epoch_ns = clock() - min(job.moments.values())
    for number, (rank, moment_ns) in enumerate(sorted(job.moments.items(), key=lambda dump: dump[1])):
        if number and output.write_delay_s:
            sleep(output.write_delay_s)
        # The ranks of a hang stand still, however late a file lands. Those of a job that goes on must be dumped as they
        # are when the file is written: later on, their calls in flight would look stuck.
        epoch_ns = hang_epoch_ns if job.truth.verdict == "hang" else clock() - moment_ns
        output.path(rank).write_bytes(output.encode(job.dump(rank, epoch_ns)))
