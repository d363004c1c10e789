"""Stand in for a chat: print each message that Alertmanager posts, under the name of who would have been told."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Pager(BaseHTTPRequestHandler):
    """Takes what is meant for Slack."""

    def do_POST(self) -> None:
        """Print the message and answer as Slack does."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for attachment in message["attachments"]:
            print(f"\n=== {self.path[1:]}: {attachment['title']}\n{attachment['text']}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Print nothing but messages."""


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Pager).serve_forever()
