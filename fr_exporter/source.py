"""What stands between a job and where its dumps come from, a directory or a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fr_exporter.dumpset import Outcome
from fr_exporter.model import DumpFile, UnreadableFile


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """Whether a source can be read, and how its changes are noticed.

    `tells` is whether its dumps are known well enough to say that there is no hang.
    """

    up: bool
    backend: str
    tells: bool


class Sink(Protocol):
    """What a source tells of the dumps it reads."""

    def seen(self, file: DumpFile, outcome: Outcome) -> None:
        """Take in a file that is new or has changed."""

    def found(self, files: Iterable[tuple[DumpFile, Outcome]]) -> None:
        """Take in files that changed when their mtimes say: before the start, or long before they came."""

    def gone(self, path: str) -> None:
        """Take in that a file is no longer there."""

    def refused(self, path: str, why: UnreadableFile | None) -> None:
        """Take in why what holds the files of many ranks cannot be read; None: it can be again, or is gone."""

    def is_due(self) -> bool:
        """Tell whether to stop reading for now: the analysis must not wait for the last of thousands."""


class Source(Protocol):
    """Where the dumps of one job come from. `name` is how it is shown."""

    name: str

    @property
    def pending(self) -> bool:
        """Whether there is something to read."""

    @property
    def status(self) -> SourceStatus:
        """How things stand with it."""

    def read(self, sink: Sink) -> None:
        """Read what changed, until the analysis is due."""
