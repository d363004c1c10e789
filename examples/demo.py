"""Serve the example incident: print the verdict, the suspects and the URL, until interrupted."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import incident

PORT = 19140
START_TIMEOUT_S = 60.0


def main() -> int:
    """Run the demo and return its exit code; Ctrl-C and SIGTERM end it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="fr-demo-") as folder:
            return _serve(Path(folder))
    except KeyboardInterrupt:
        return 0


def _serve(folder: Path) -> int:
    dumps = folder / "dumps"
    dumps.mkdir()
    incident.write(dumps, time.time_ns())
    address = f"127.0.0.1:{_port()}"
    config = folder / "config.yaml"
    # JSON is YAML, and quotes any path.
    config.write_text(
        json.dumps(
            {
                "targets": [{"training_job": "demo", "path": str(dumps)}],
                "web": {"listen": address},
                "log": {"level": "error"},
            }
        )
    )
    command = [sys.executable, "-m", "fr_exporter", "serve", "--config", str(config)]
    # In a session of its own: Ctrl-C reaches the demo alone, which then ends the exporter as an init system would.
    with subprocess.Popen(command, start_new_session=True) as exporter:
        try:
            _present(_diagnosis(f"http://{address}/api/v1/diagnosis", exporter), address)
            return exporter.wait()
        finally:
            exporter.terminate()
            # On a KeyboardInterrupt Popen's own exit waits for a quarter of a second only.
            exporter.wait()


def _port() -> int:
    """Return the usual port where it is free, else another one, and say so."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            print(f"Port {PORT} is taken, serving on another one.")
        return int(probe.getsockname()[1])


def _diagnosis(url: str, exporter: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the first verdict."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while exporter.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  our own loopback address
                diagnosis: dict[str, Any] = json.load(response)
                return diagnosis
        except OSError:  # not listening yet, or 404: no verdict yet
            time.sleep(0.1)
    raise SystemExit("The exporter gave no verdict; its log above says why.")


def _present(diagnosis: dict[str, Any], address: str) -> None:
    print(f"\n{diagnosis['verdict'].upper()}: {diagnosis['summary']}\n")
    for suspect in diagnosis["suspects"]:
        print(f"  rank {suspect['rank']}: {suspect['cause']}, {suspect['confidence']} confidence")
        print(f"    {suspect['evidence']}")
    print(f"\nhttp://{address}/         the verdict in words")
    print(f"http://{address}/metrics  what Prometheus scrapes")
    print("\nCtrl-C ends it.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
