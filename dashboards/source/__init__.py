"""Where the rules and dashboards are written: `python -m dashboards.source` makes the files beside this folder."""
