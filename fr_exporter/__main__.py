"""`python -m fr_exporter` is `fr-exporter`."""

from __future__ import annotations

import sys

from fr_exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
