"""The version of fr_exporter, in one place."""

__version__ = "0.1.0"
