"""The exceptions fr_exporter raises on purpose; everything else is a bug.

Each message is one line that a user can act on. The exit code of the command line follows from the class.
"""

from __future__ import annotations


class FRExporterError(Exception):
    """Any failure that fr_exporter foresees."""


class UsageError(FRExporterError):
    """The caller asked for something that cannot be done: a wrong flag, a directory that is not there."""


class ConfigError(FRExporterError):
    """A configuration that cannot be used; the message names the key and, where known, its line."""


class StoreError(FRExporterError):
    """An object store that failed; `denied` says that it refused the credentials, or found none."""

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied


class DumpError(FRExporterError):
    """One dump file that could not be used. Never ends the work on the other files.

    `result` is the value of the label `result` of `fr_exporter_dump_files_total`.
    """

    result = "unreadable"


class PartialDump(DumpError):
    """The file ends before the dump does: it is being written, or its writer was killed."""

    result = "partial"


class RejectedDump(DumpError):
    """The file is refused: it would run code, is too large, or is of a version we do not know."""

    result = "rejected"


class MalformedDump(DumpError):
    """The file is readable but is no flight-recorder dump."""
