"""The log that operators read: one line an event, on stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

from fr_exporter.config import Log
from fr_exporter.text import printable


def configure(options: Log, env: Mapping[str, str]) -> None:
    """Send the log to stderr as `options` say; `FR_DEBUG=1` in `env` lowers the level to debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if options.format == "json" else _TextFormatter())
    level = logging.DEBUG if env.get("FR_DEBUG") == "1" else logging.getLevelName(options.level.upper())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("fr_exporter").setLevel(level)
    # It warns of every scrape that waits for another one.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)


def _utc(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        # A file's name may hold a line break, or what a terminal takes for a command.
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002
        return _utc(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
