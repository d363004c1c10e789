"""The demo, as `make demo` runs it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_shows_a_hang_and_ends_quietly(number: signal.Signals, tmp_path: Path) -> None:
    """With its port taken the demo serves the example incident on another one, and a signal ends it without a trace."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # taken by somebody else: all the same
            taken.bind(("127.0.0.1", 19140))
            taken.listen()
        command = [sys.executable, str(DEMO)]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as demo:
            assert demo.stdout is not None
            shown = ""
            while "Ctrl-C" not in shown and (line := demo.stdout.readline()):
                shown += line
            address = re.search(r"http://(127\.0\.0\.1:\d+)/metrics", shown)
            assert address is not None, shown
            with urllib.request.urlopen(f"http://{address[1]}/metrics", timeout=10) as response:
                metrics = response.read().decode()
            demo.send_signal(number)
            rest, errors = demo.communicate(timeout=20)
    assert shown.startswith("Port 19140 is taken")
    assert "\nHANG: " in shown
    assert "  rank 12: host_stall" in shown
    assert "  rank 14: host_stall" in shown
    assert re.search(r'^fr_hang\{[^}]*training_job="demo"[^}]*\} 1\.0$', metrics, re.MULTILINE)
    assert (demo.returncode, rest, errors) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
