"""The example of a fleet: what it plays on one machine, and what of it is to be copied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fr_exporter.config import Config, load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fleet"
STORES = {"s3": "s3://training-records/fr", "volume": "file:///fleet"}
MANIFESTS = sorted(EXAMPLE.glob("*/*.yaml"))
# The first in which sidecars need no feature gate, and the newest that is known.
KUBERNETES = ("1.29", kubernetes_validate.latest_version())
# What the downward API gives for a pod that no JobSet made.
FROM_THE_POD = {"FR_ATTEMPT": "", "NODE_NAME": "node-0"}


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_the_fleet_names_the_rank_at_fault(number: signal.Signals, tmp_path: Path) -> None:
    """Each node waits for the other, the fleet exporter names rank 11; a signal ends all without a trace."""
    command = [sys.executable, str(EXAMPLE / "try_it.py")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as playing:
        assert playing.stdout is not None
        shown = ""
        while "Ctrl-C" not in shown and (line := playing.stdout.readline()):
            shown += line
        playing.send_signal(number)
        rest, errors = playing.communicate(timeout=20)
    truth, *said = shown.split("\n\n")
    assert "rank 11, on node-1" in truth
    assert said[0].startswith("node-0 alone\n  INCONCLUSIVE: 8 ranks are waiting on ranks outside this node (rank 11)")
    assert said[1].startswith("node-1 alone\n  INCONCLUSIVE: 8 ranks are waiting on ranks outside this node")
    assert said[2].startswith("the fleet\n  HANG: Rank 11 ")
    assert "\n  rank 11 on node-1: order_deadlock" in said[2]
    assert (playing.returncode, rest, errors) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kubernetes_takes_the_manifests(manifest: Path, version: str) -> None:
    """Every object in them is valid, and has no field that Kubernetes does not know."""
    for described in yaml.safe_load_all(manifest.read_text()):
        kubernetes_validate.validate(described, version, strict=True)


@pytest.mark.parametrize("store", STORES)
def test_the_manifests_run_the_configurations(store: str) -> None:
    """They set all variables; nodes and fleet share a URL, trainer and exporter the path of the dumps."""
    pod, deployment = read(store, "sidecar.yaml"), read(store, "fleet-exporter.yaml")["spec"]["template"]
    [sidecar], [trainer] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    [fleet_exporter] = deployment["spec"]["containers"]
    node, fleet = run("node.yaml", sidecar), run("fleet.yaml", fleet_exporter)

    assert node.publish.url == fleet.targets[0].url == STORES[store]
    assert node.publish.attempt == 0
    assert node.targets[0].prefixes == (variables(trainer)["TORCH_FR_DUMP_TEMP_FILE"],)
    written = [node.targets[0].prefixes[0], node.publish.spool_dir]
    if store == "volume":
        written.append("/fleet/")
        assert is_mounted("/fleet/", fleet_exporter)
    assert all(is_mounted(path, sidecar) for path in written)
    assert is_mounted(written[0], trainer)
    assert pod["spec"]["terminationGracePeriodSeconds"] > node.web.shutdown_linger_s + 10
    for container, config in ((sidecar, node), (fleet_exporter, fleet)):
        assert memory_bytes(container) > config.limits.max_memory_bytes


@pytest.mark.parametrize("name", ["sidecar.yaml", "fleet-exporter.yaml"])
def test_the_two_stores_differ_in_the_store_alone(name: str) -> None:
    """Without URL, credentials and volume of the store, the manifests for S3 and for a volume are the same."""
    s3, volume = ([without_store(each) for each in read_all(store, name)] for store in STORES)
    assert s3 == volume


def read(store: str, name: str) -> dict[str, Any]:
    """Return the first object of a manifest."""
    return read_all(store, name)[0]


def read_all(store: str, name: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest."""
    return list(yaml.safe_load_all((EXAMPLE / store / name).read_text()))


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that a manifest gives to a container."""
    return {each["name"]: each["value"] if "value" in each else FROM_THE_POD[each["name"]] for each in container["env"]}


def run(config: str, container: Mapping[str, Any]) -> Config:
    """Return the configuration that a container runs with."""
    return load((EXAMPLE / config).read_text(), env=variables(container), home="/")


def is_mounted(path: str, container: Mapping[str, Any]) -> bool:
    """Tell whether a path of a container lies on a volume."""
    return any(f"{path}/".startswith(f"{mount['mountPath']}/") for mount in container["volumeMounts"])


def memory_bytes(container: Mapping[str, Any]) -> int:
    """Return how much memory a container may take."""
    limit: str = container["resources"]["limits"]["memory"]
    return int(limit.removesuffix("Mi")) * 2**20


def without_store(described: Any) -> Any:
    """Return an object of a manifest without what tells of its store."""
    if isinstance(described, dict):
        return {key: without_store(value) for key, value in described.items() if key != "envFrom"}
    if isinstance(described, list):
        return [
            without_store(each)
            for each in described
            if not isinstance(each, dict) or each.get("name") not in ("fleet", "FR_FLEET_URL")
        ]
    return described
