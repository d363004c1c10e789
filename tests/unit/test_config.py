"""The configuration: what a text means, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fr_exporter.config import (
    AnalysisOptions,
    Config,
    DumpSetOptions,
    IncidentOptions,
    Limits,
    Log,
    Publish,
    Target,
    Topology,
    Watch,
    Web,
    effective_text,
    load,
)
from fr_exporter.errors import ConfigError

HOME = "/home/me"
REPOSITORY = Path(__file__).parents[2]
BAD = sorted((Path(__file__).parent / "config" / "bad").glob("*.yaml"))

DEFAULTS = Config(
    targets=(
        Target(
            training_job="default",
            path=None,
            pattern=None,
            prefixes=(
                "/tmp/nccl_trace_rank_",
                "/home/me/.cache/torch/nccl_trace_rank_",
                "/home/me/.cache/torch/comm_lib_trace_rank_",
            ),
            url=None,
            scope="job",
            world_size=None,
            discover=False,
            discover_ttl_s=86_400.0,
            retention_s=None,
        ),
    ),
    watch=Watch(backend="auto", poll_interval_s=2.0, rescan_interval_s=30.0),
    dump_set=DumpSetOptions(settle_s=1.0, window_s=120.0, grace_s=60.0),
    analysis=AnalysisOptions(min_open_age_s=15.0),
    incidents=IncidentOptions(ttl_s=3_600.0, history=50),
    topology=Topology(ranks_per_node=None, hosts_file=None, node=None),
    publish=Publish(
        url=None,
        training_job=None,
        attempt=0,
        recent_calls=200,
        spool_dir="/tmp/fr-exporter-spool",
        spool_max_bytes=67_108_864,
    ),
    limits=Limits(
        max_dump_bytes=268_435_456,
        max_memory_bytes=1_073_741_824,
        max_ranks=131_072,
        max_rank_series=20_000,
        max_suspects=64,
    ),
    web=Web(host="0.0.0.0", port=19140, config_file=None, enable_reload=False, shutdown_linger_s=0.0),
    log=Log(level="info", format="text"),
)


def loaded(text: str, **env: str) -> Config:
    """Load a text with a fixed home and only the given environment."""
    return load(text, env=env, home=HOME)


@pytest.mark.parametrize("text", ["", "# nothing\n", "watch:\nlimits:\n", "dump_set: {grace: null}\nlog: {level: ~}\n"])
def test_what_is_left_out_keeps_its_default(text: str) -> None:
    """No text, an empty section and a null value all mean the documented defaults."""
    assert loaded(text) == DEFAULTS


def test_the_documented_configuration_is_the_default() -> None:
    """config.yaml at the top of the repository shows every key there is, at its default."""
    text = (REPOSITORY / "config.yaml").read_text(encoding="utf-8")
    assert loaded(text) == DEFAULTS
    shown = yaml.safe_load(effective_text(DEFAULTS))
    written = yaml.safe_load(text)
    assert {name: set(keys) for name, keys in written.items() if name != "targets"} == {
        name: set(keys) for name, keys in shown.items() if name != "targets"
    }


def test_every_key_reaches_its_field() -> None:
    """Each key set to something else than its default is found in the field of its meaning, in seconds and bytes."""
    text = """
    targets:
      - {training_job: 4711, path: /a, pattern: rank_*, scope: node, world_size: 16}
      - {url: "s3://bucket/a", discover: true, discover_ttl: 1h, retention: 720h}
    watch: {backend: polling, poll_interval: 500ms, rescan_interval: 5m}
    dump_set: {settle: 0s, window: 30s, grace: 90s}
    analysis: {min_open_age: 3s}
    incidents: {ttl: 10m, history: 7}
    topology: {ranks_per_node: 8, hosts_file: /etc/hosts.mpi, node: n1}
    publish: {attempt: 3, recent_calls: 2000, spool_dir: /spool, spool_max_bytes: 1GiB}
    limits: {max_dump_bytes: 1000, max_memory: 2GiB, max_ranks: 5, max_rank_series: 6, max_suspects: 0}
    web: {listen: "[::1]:9000", config_file: null, enable_reload: true, shutdown_linger: 20s}
    log: {level: debug, format: json}
    """
    assert loaded(text) == Config(
        targets=(
            Target("4711", "/a", "rank_*", (), None, "node", 16, False, 86_400.0, None),
            Target(None, None, None, (), "s3://bucket/a", "job", None, True, 3_600.0, 2_592_000.0),
        ),
        watch=Watch("polling", 0.5, 300.0),
        dump_set=DumpSetOptions(0.0, 30.0, 90.0),
        analysis=AnalysisOptions(3.0),
        incidents=IncidentOptions(600.0, 7),
        topology=Topology(8, "/etc/hosts.mpi", "n1"),
        publish=Publish(None, None, 3, 2000, "/spool", 1024**3),
        limits=Limits(1000, 2 * 1024**3, 5, 6, 0),
        web=Web("::1", 9000, None, enable_reload=True, shutdown_linger_s=20.0),
        log=Log("debug", "json"),
    )


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        (":19140", "0.0.0.0", 19140),
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("[::]:0", "::", 0),
        ("pod-7:80", "pod-7", 80),
    ],
)
def test_listen_takes_a_port_a_name_and_both_kinds_of_address(listen: str, host: str, port: int) -> None:
    """An address without a host means every one; brackets belong to the text of an IPv6 address, not to the host."""
    web = loaded(f"web: {{listen: '{listen}'}}").web
    assert (web.host, web.port) == (host, port)


@pytest.mark.parametrize(
    ("written", "env", "node"),
    [
        ("${HOST}-a", {"HOST": "n1"}, "n1-a"),
        ("${HOST:-n2}", {}, "n2"),
        ("${HOST:-n2}", {"HOST": ""}, "n2"),
        ("'${HOST}'", {"HOST": ""}, None),
        ("${HOST:-}${HOST2:-x}", {}, "x"),
        ("a$$b$${HOST}", {}, "a$b${HOST}"),
        ("${HOST}", {"HOST": "$HOME ${USER}: [*x"}, "$HOME ${USER}: [*x"),
    ],
)
def test_variables_expand_in_values(written: str, env: dict[str, str], node: str | None) -> None:
    """A default stands for an unset and an empty variable, `$$` is a dollar, and a variable's text is never YAML."""
    assert loaded(f"topology:\n  node: {written}\n", **env).topology.node == node


def test_variables_give_numbers_and_choices_too() -> None:
    """The key decides what a text means, not the way it is quoted, so that a variable can hold any value."""
    text = "targets: [{world_size: '${WORLD_SIZE}', training_job: '${SLURM_JOB_ID}', scope: '${SCOPE}'}]"
    target = loaded(text, WORLD_SIZE="16", SLURM_JOB_ID="007", SCOPE="node").targets[0]
    assert (target.world_size, target.training_job, target.scope) == (16, "007", "node")


def test_the_environment_names_the_job_and_the_node_by_default() -> None:
    """FR_TRAINING_JOB and NODE_NAME are what a pod sets; no file is needed for them."""
    config = loaded("", FR_TRAINING_JOB="llm", NODE_NAME="n1")
    assert (config.targets[0].training_job, config.topology.node) == ("llm", "n1")


def test_a_name_that_is_not_text_is_refused() -> None:
    """A variable may hold any bytes; those that are not UTF-8 could name no node in a record and on no page."""
    with pytest.raises(ConfigError, match=r"topology\.node: 'n\\+udcff' is not UTF-8 text"):
        loaded("", NODE_NAME="n\udcff")


def test_the_environment_tells_the_attempt_and_where_the_spool_is() -> None:
    """A launcher that counts restarts sets FR_ATTEMPT; the spool goes where temporary files go on the node."""
    publish = loaded("", FR_ATTEMPT="7", TMPDIR="/scratch").publish
    assert (publish.attempt, publish.spool_dir) == (7, "/scratch/fr-exporter-spool")


def test_a_node_publishes_to_a_url_and_under_a_name_of_its_own() -> None:
    """`publish.training_job` renames the only job there is, and NODE_NAME is enough to name the node."""
    text = "targets: [{path: /dumps}]\npublish: {url: file:///shared/$$a, training_job: llm-7}"
    config = loaded(text, NODE_NAME="n1")
    assert (config.publish.url, config.publish.training_job) == ("file:///shared/$a", "llm-7")
    assert loaded(effective_text(config)) == config


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("sftp://me:s3cr3t@host/a", "sftp://***@host/a"),
        ("simplecache::ftp://me:s3c@r3t@host/a", "simplecache::ftp://***@host/a"),
    ],
)
def test_the_effective_configuration_hides_what_stands_before_a_host(written: str, shown: str) -> None:
    """Who may see /config does not learn the password of the store."""
    config = loaded(f"publish: {{url: '{written}'}}", NODE_NAME="n1", FR_TRAINING_JOB="llm")
    assert config.publish.url == written
    assert yaml.safe_load(effective_text(config))["publish"]["url"] == shown


@pytest.mark.parametrize(
    ("env", "prefixes"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b_"}, ("/a_",)),
        ({"TORCH_FR_DUMP_TEMP_FILE": "", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b_"}, ("/b_",)),
        (
            {"XDG_CACHE_HOME": "/cache"},
            (
                "/tmp/nccl_trace_rank_",
                "/home/me/.cache/torch/nccl_trace_rank_",
                "/cache/torch/comm_lib_trace_rank_",
            ),
        ),
    ],
)
def test_without_a_prefix_the_dumps_are_where_pytorch_writes_them(
    env: dict[str, str], prefixes: tuple[str, ...]
) -> None:
    """The variables PyTorch reads win, the newer name first; else the defaults of every version are watched."""
    assert loaded("targets: [{prefix: null}]", **env).targets[0].prefixes == prefixes


def test_a_prefix_or_path_of_the_file_wins_over_the_environment() -> None:
    """What the file says is watched, and nothing else."""
    env = {"TORCH_FR_DUMP_TEMP_FILE": "/env_"}
    by_prefix, by_path = loaded("targets: [{prefix: /file_}, {path: /file, training_job: b}]", **env).targets
    assert (by_prefix.prefixes, by_prefix.path, by_prefix.pattern) == (("/file_",), None, None)
    assert (by_path.prefixes, by_path.path, by_path.pattern) == ((), "/file", "_dump_*")


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_wrong_configuration_is_told_the_key_and_its_line(file: Path) -> None:
    """Each file under config/bad is refused with exactly the message in its first line."""
    text = file.read_text(encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        loaded(text)
    assert f"# {refusal.value}" == text.splitlines()[0]


def test_the_effective_configuration_loads_to_the_same_values() -> None:
    """What /config shows can be used as a file: dollars, brackets, words and units come back as they were."""
    text = """
    targets:
      - {training_job: "12", prefix: "/a$$b/rank_"}
      - {path: /jobs, discover: true, discover_ttl: 36h}
      - {training_job: b, url: "s3://bucket/$$a", retention: 90m}
    watch: {poll_interval: 1500ms}
    limits: {max_dump_bytes: 1500, max_memory: 3072MiB}
    topology: {node: "null"}
    publish: {spool_dir: /$$a, spool_max_bytes: 1000}
    web: {listen: "[::1]:9000"}
    """
    config = loaded(text)
    assert loaded(effective_text(config)) == config
    shown = yaml.safe_load(effective_text(config))
    assert shown["watch"]["poll_interval"] == "1500ms"
    assert shown["limits"] == {
        "max_dump_bytes": "1500",
        "max_memory": "3GiB",
        "max_ranks": 131_072,
        "max_rank_series": 20_000,
        "max_suspects": 64,
    }


def test_the_effective_configuration_names_every_prefix_that_is_watched() -> None:
    """Who did not configure a prefix sees which ones the exporter chose."""
    assert yaml.safe_load(effective_text(DEFAULTS))["targets"][0]["prefix"] == list(DEFAULTS.targets[0].prefixes)


YAML_ISH = st.text(st.sampled_from("targets:watch[]{}-\n #&*!|>'\"$~,?%\t\x00aé012"), max_size=60)


@given(YAML_ISH | st.text(max_size=60))
def test_any_text_is_a_configuration_or_one_line(text: str) -> None:
    """Whatever stands in the file, the answer is a configuration or a single line that says what is wrong."""
    try:
        loaded(text)
        answer = "config line 0: fine"
    except ConfigError as error:
        answer = str(error)
    assert answer.startswith("config line ")
    assert len(answer.splitlines()) == 1
