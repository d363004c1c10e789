"""Whether a configuration can work with its stores, as far as that shows without asking them."""

from __future__ import annotations

from fr_exporter.config import Config
from fr_exporter.errors import UsageError
from fr_exporter.fleet.layout import Place, object_name
from fr_exporter.fleet.objectstore import ObjectStore


def check_stores(config: Config) -> None:
    """Raise UsageError where a URL cannot be used, or what is to be published has a name that no store can hold."""
    publish = config.publish
    for url in (*(target.url for target in config.targets), publish.url):
        if url is not None:
            ObjectStore(url)
    if publish.url is None:
        return
    for target in config.targets:
        job = publish.training_job or target.training_job or "discovered"
        try:
            object_name(Place(job, publish.attempt, config.topology.node or ""))
        except ValueError as error:
            raise UsageError(f"publish: {error}") from error
