"""The log is for operators: one line an event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from fr_exporter import logs
from fr_exporter.config import Log

log = logging.getLogger("fr_exporter.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Give the loggers their levels and handlers back."""
    root, own, web = logging.getLogger(), logging.getLogger("fr_exporter"), logging.getLogger("waitress.queue")
    before = root.handlers[:], root.level, own.level, web.level
    yield
    root.handlers[:], levels = before[0], before[1:]
    for logger, level in zip((root, own, web), levels, strict=True):
        logger.setLevel(level)


def test_text_lines_begin_with_time_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    """A line says when in UTC, how grave, and what; what lies below the level is left out, and line breaks shown."""
    logs.configure(Log(level="info", format="text"), env={})

    log.debug("not shown")
    log.warning("cannot read %s", "/dumps/a\nb")

    time, rest = capsys.readouterr().err.split(" ", 1)
    assert rest == "WARNING cannot read /dumps/a\\nb\n"
    assert time.endswith("Z")


def test_json_lines_hold_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    """Each event is one JSON object on one line, a traceback included."""
    logs.configure(Log(level="info", format="json"), env={})

    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("internal error in %s", "rank\n3")

    [line] = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["level"], event["logger"], event["message"]) == (
        "error",
        "fr_exporter.test",
        "internal error in rank\n3",
    )
    assert "ZeroDivisionError" in event["exception"]


def test_the_environment_turns_debugging_on(capsys: pytest.CaptureFixture[str]) -> None:
    """`FR_DEBUG=1` shows debug lines, whatever the configuration says."""
    logs.configure(Log(level="error", format="text"), env={"FR_DEBUG": "1"})

    log.debug("shown")

    assert "DEBUG shown" in capsys.readouterr().err
