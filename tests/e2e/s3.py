"""An S3-compatible server on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.e2e.exporter import wait_until


class S3Server:
    """A server of one bucket, whose objects are files in a directory, that can be killed and started again.

    `env` is what a client's environment must hold to reach it.
    """

    url = "s3://records"

    def __init__(self, directory: Path) -> None:
        (directory / "records").mkdir(parents=True)
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            self.port: int = reserved.getsockname()[1]
        self.env = {
            "AWS_ACCESS_KEY_ID": "ACCESSKEYOFTHETESTS",
            "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-tests",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            # Only what stands here counts, whatever the machine has.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, on the same port each time, and wait until it answers."""
        command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", str(self._directory), "--config", ""]
        keys = f"{self.env['AWS_ACCESS_KEY_ID']},{self.env['AWS_SECRET_ACCESS_KEY']}"
        # A store shows no object before it is whole; rclone shows what it has begun to write.
        options = ["--addr", f"127.0.0.1:{self.port}", "--auth-key", keys, "--exclude", "*.partial"]
        self._process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
        wait_until(self._answers)

    def kill(self) -> None:
        """End it as a crash would; without effect where it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True
