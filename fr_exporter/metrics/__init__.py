"""What Prometheus sees: the catalogue of metrics, and the collectors that fill it."""
