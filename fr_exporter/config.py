"""The configuration: text in, a frozen `Config` out.

A scalar stays text until the table at the end of this module says what its key holds: `${VAR}` works for numbers as it
does for words, and a job may be named 4711. A new key is one line of that table and one field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fr_exporter.errors import ConfigError
from fr_exporter.model import Scope
from fr_exporter.text import printable, shown_url

if TYPE_CHECKING:
    from fr_exporter.yaml_text import Section, Value

DEFAULT_PATTERN = "_dump_*"
UNNAMED_JOB = "default"


@dataclass(frozen=True, slots=True)
class Target:
    """What to watch: the directory `path` with the files that match `pattern`, every file behind `prefixes`, or `url`.

    Exactly one of `path`, `prefixes` and `url` is set. `url` is the store that node exporters publish to; what is older
    than `retention_s` is removed from it. With `discover` each directory in `path` or `url` is a training job named
    after it, and `training_job` is None.
    """

    training_job: str | None
    path: str | None
    pattern: str | None
    prefixes: tuple[str, ...]
    url: str | None
    scope: Scope
    world_size: int | None
    discover: bool
    discover_ttl_s: float
    retention_s: float | None


@dataclass(frozen=True, slots=True)
class Watch:
    """How changes of files are noticed."""

    backend: Literal["auto", "inotify", "polling"]
    poll_interval_s: float
    rescan_interval_s: float


@dataclass(frozen=True, slots=True)
class DumpSetOptions:
    """How long to wait after a change, between two sets, and for ranks that have not dumped."""

    settle_s: float
    window_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class AnalysisOptions:
    """How old an open call must be to count as stuck."""

    min_open_age_s: float


@dataclass(frozen=True, slots=True)
class IncidentOptions:
    """How long an incident stays open without new files, and how many closed ones are kept."""

    ttl_s: float
    history: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node a rank runs on, where its file name does not say."""

    ranks_per_node: int | None
    hosts_file: str | None
    node: str | None


@dataclass(frozen=True, slots=True)
class Publish:
    """Where this node's records go for a fleet exporter to read; nowhere while `url` is None.

    `training_job` None publishes each job under the name its target gives it. `attempt` counts the job's restarts.
    """

    url: str | None
    training_job: str | None
    attempt: int
    recent_calls: int
    spool_dir: str
    spool_max_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the exporter refuses to exceed."""

    max_dump_bytes: int
    max_memory_bytes: int
    max_ranks: int
    max_rank_series: int
    max_suspects: int


@dataclass(frozen=True, slots=True)
class Web:
    """The HTTP server. `host` is a bare address: `::1`, never `[::1]`."""

    host: str
    port: int
    config_file: None
    enable_reload: bool
    shutdown_linger_s: float

    @property
    def listen(self) -> str:
        """The address as the configuration writes it: `127.0.0.1:9000`, `[::1]:9000`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Log:
    """What is logged, and how a line looks."""

    level: Literal["debug", "info", "warning", "error"]
    format: Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration; a reload replaces it."""

    targets: tuple[Target, ...]
    watch: Watch
    dump_set: DumpSetOptions
    analysis: AnalysisOptions
    incidents: IncidentOptions
    topology: Topology
    publish: Publish
    limits: Limits
    web: Web
    log: Log

    @property
    def uses_stores(self) -> bool:
        """Whether anything is read from a store, or published to one."""
        return self.publish.url is not None or any(target.url is not None for target in self.targets)


def load(text: str, *, env: Mapping[str, str], home: str) -> Config:
    """Return the configuration that YAML `text` describes; empty text gives the defaults.

    `env` fills `${VAR}` and names the prefix of PyTorch's dumps, `home` is the home directory. Raises ConfigError with
    the key and its line.
    """
    targets, written = _read(text)
    sections = {
        name: section.build(**_fields(written.get(name), name, section.keys, env)[0])
        for name, section in _SECTIONS.items()
    }
    config = Config(targets=_targets(targets, env, home), **sections)
    _check_retention(config, targets)
    _check_publish(config, written.get("publish"))
    return config


def effective_text(config: Config) -> str:
    """Return the configuration in force as YAML text, with defaults and variables filled in and secrets hidden."""
    from fr_exporter import yaml_text  # noqa: PLC0415  as in _read

    document: dict[str, object] = {"targets": [_shown(target, _TARGET) for target in config.targets]}
    for name, section in _SECTIONS.items():
        document[name] = _shown(getattr(config, name), section.keys)
    return yaml_text.write(document)


def _read(text: str) -> tuple[list[Section], dict[str, Section]]:
    if not text:
        return [], {}
    # `analyze` has no configuration to read, and this import would be a tenth of its start.
    from fr_exporter import yaml_text  # noqa: PLC0415

    return yaml_text.read(text, _TARGET, {name: section.keys for name, section in _SECTIONS.items()})


def _shown(values: object, keys: Mapping[str, _Key]) -> dict[str, object]:
    fields = {word: getattr(values, key.field) for word, key in keys.items()}
    return {word: None if value is None else keys[word].type.show(value) for word, value in fields.items()}


def _targets(sections: Sequence[Section], env: Mapping[str, str], home: str) -> tuple[Target, ...]:
    if not sections:
        return (_target(None, "targets[0]", env, home),)
    targets: list[Target] = []
    index_of: dict[str, int] = {}
    for index, section in enumerate(sections):
        target = _target(section, f"targets[{index}]", env, home)
        if target.training_job is not None:
            first = index_of.setdefault(target.training_job, index)
            if first != index:
                message = f"training_job {target.training_job!r} belongs to targets[{first}]; give each its own"
                raise _error(section, f"targets[{index}]: {message}")
        targets.append(target)
    return tuple(targets)


def _target(section: Section | None, name: str, env: Mapping[str, str], home: str) -> Target:
    fields, given = _fields(section, name, _TARGET, env)
    places = [word for word in ("path", "prefix", "url") if word in given]
    if len(places) > 1:
        raise _error(given[places[1]], f"{name}: {places[0]} and {places[1]} are both set; keep one of them")
    if "path" not in given and "pattern" in given:
        raise _error(given["pattern"], f"{name}: pattern needs a path, the directory of the dumps")
    if places not in (["path"], ["url"]) and fields["discover"]:
        raise _error(given["discover"], f"{name}: discover needs a path or url, below which each job has a directory")
    if "url" not in given and "retention" in given:
        raise _error(given["retention"], f"{name}: retention needs a url, the store whose old records it removes")
    if fields["discover"] and "training_job" in given:
        raise _error(given["training_job"], f"{name}: remove training_job: discover names jobs after directories")
    if fields["discover"]:
        fields["training_job"] = None
    if "path" in given:
        fields["pattern"] = fields["pattern"] or DEFAULT_PATTERN
    if "path" in given or "url" in given:
        fields["prefixes"] = ()
    else:
        fields["prefixes"] = fields["prefixes"] or _default_prefixes(env, home)
    return Target(**fields)


def _check_retention(config: Config, sections: Sequence[Section]) -> None:
    """Raise ConfigError where records would be removed while the incident that they show is open."""
    ttl_s = config.incidents.ttl_s
    for index, (target, section) in enumerate(zip(config.targets, sections, strict=False)):
        if target.retention_s is not None and target.retention_s <= ttl_s:
            message = f"targets[{index}].retention must be longer than incidents.ttl, {_shown_duration(ttl_s)}"
            raise _error(section.values["retention"], message)


def _check_publish(config: Config, section: Section | None) -> None:
    """Raise ConfigError where what is to be published has no name, or is no node's own."""
    publish = config.publish
    if section is None:
        return
    if publish.url is not None and config.topology.node is None:
        message = "publish.url needs the name of this node; set NODE_NAME or topology.node"
        raise _error(section.values["url"], message)
    if publish.url is not None and any(target.url is not None for target in config.targets):
        message = "publish.url is for the exporters of nodes; remove it, or every target with a url"
        raise _error(section.values["url"], message)
    is_unnamed = any(target.training_job == UNNAMED_JOB for target in config.targets)
    if publish.url is not None and publish.training_job is None and is_unnamed:
        message = "publish.url needs the name of the training job; set FR_TRAINING_JOB or training_job"
        raise _error(section.values["url"], message)
    if publish.training_job is not None and (len(config.targets) > 1 or config.targets[0].discover):
        message = "publish.training_job is the name of one job; remove it, or keep one target without discover"
        raise _error(section.values["training_job"], message)


def _default_prefixes(env: Mapping[str, str], home: str) -> tuple[str, ...]:
    """Return where PyTorch writes when no prefix is configured; without a variable any version's default may be it."""
    prefix = env.get("TORCH_FR_DUMP_TEMP_FILE") or env.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if prefix:
        return (prefix,)
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return (
        "/tmp/nccl_trace_rank_",  # noqa: S108 - PyTorch's choice
        f"{home}/.cache/torch/nccl_trace_rank_",
        f"{cache}/torch/comm_lib_trace_rank_",
    )


def _fields(
    section: Section | None, name: str, keys: Mapping[str, _Key], env: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Value]]:
    """Return the value of each field, and what is written for the keys that are given one; null leaves the default."""
    values = {} if section is None else section.values
    fields: dict[str, Any] = {}
    given: dict[str, Value] = {}
    for word, key in keys.items():
        try:
            text = values[word].text(lambda written: _expand(written, env)) if word in values else None
            if text is not None:
                given[word] = values[word]
            elif key.default is not None:
                text = _expand(key.default, env) or None
            fields[key.field] = None if text is None else key.type.parse(text)
        except ValueError as error:
            raise _error(values.get(word), f"{name}.{word}: {error}") from None
    return fields, given


_DOLLAR = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `${VAR}`, `${VAR:-default}` (for unset and empty, as in a shell) and `$$`."""

    def replacement(match: re.Match[str]) -> str:
        dollar, name, default = match.groups()
        if dollar is not None:
            return "$"
        if name is None:
            raise ValueError(f"{text!r} has a lone $; write ${{VAR}}, ${{VAR:-default}}, or $$ for a dollar")
        if default is not None:
            return env.get(name) or default
        if name not in env:
            raise ValueError(f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}")
        return env[name]

    return _DOLLAR.sub(replacement, text)


def _error(at: Section | Value | None, message: str) -> ConfigError:
    where = "config" if at is None else f"config line {at.line}"
    return ConfigError(printable(f"{where}: {message}"))


@dataclass(frozen=True, slots=True)
class _Type:
    """How text becomes a value (a ValueError says what it should be), and a value what YAML shows."""

    parse: Callable[[str], Any]
    show: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True, slots=True)
class _Key:
    """One key: the field it fills, its type, and its default as the file would write it."""

    field: str
    type: _Type
    default: str | None = None


@dataclass(frozen=True, slots=True)
class _Section:
    build: Callable[..., Any]
    keys: Mapping[str, _Key]


# Ascending: a value is shown in the last unit that divides it. Durations count in milliseconds, sizes in bytes.
_DURATION_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_SIZE_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _with_unit(value: int, units: Mapping[str, int]) -> str:
    unit, scale = [(unit, scale) for unit, scale in units.items() if value % scale == 0][-1]
    return f"{value // scale}{unit}"


def _one_of(*words: str) -> _Type:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return _Type(parse)


def _integer(minimum: int, maximum: int | None = None) -> _Type:
    allowed = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        is_number = re.fullmatch(r"[0-9]{1,15}", text) is not None
        if not is_number or int(text) < minimum or (maximum is not None and int(text) > maximum):
            raise ValueError(f"{text!r} is not a whole number {allowed}")
        return int(text)

    return _Type(parse)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9})(ms|s|m|h)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms, 2s, 2m or 24h")
    return int(match[1]) * _DURATION_UNITS[match[2]] / 1000


def _interval(text: str) -> float:
    seconds = _duration(text)
    if seconds == 0:
        raise ValueError(f"{text!r} is too short; it must be longer than 0s")
    return seconds


def _shown_duration(seconds: float) -> str:
    return _with_unit(round(seconds * 1000), _DURATION_UNITS) if seconds else "0s"


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})(|KiB|MiB|GiB|TiB)", text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size such as 256MiB or 1GiB, or a number of bytes")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _path(text: str) -> str:
    if text.startswith("~"):
        raise ValueError(f"{text!r}: write ${{HOME}} for the home directory")
    return text


def _text(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{text!r} is not UTF-8 text")
    return text


def _url(text: str) -> str:
    if "://" not in text:
        raise ValueError(f"{text!r} is not a URL such as s3://bucket/path; for a directory write file:///path")
    return text


def _shown_url(url: str) -> str:
    return _shown_text(shown_url(url))


def _listen(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]*)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{text!r} is not an address such as :19140, 127.0.0.1:9000 or [::1]:9000")
    return match[1] or match[2] or "0.0.0.0", int(match[3])  # noqa: S104 - no address means every one


def _web(listen: tuple[str, int], **fields: Any) -> Web:
    host, port = listen
    return Web(host=host, port=port, **fields)


def _no_web_config(text: str) -> None:
    raise ValueError(f"{text!r} is not supported; TLS and authentication come with a reverse proxy for now")


def _shown_text(text: str) -> str:
    return text.replace("$", "$$")


def _shown_prefixes(prefixes: tuple[str, ...]) -> object:
    shown = [_shown_text(prefix) for prefix in prefixes]
    return shown if len(shown) > 1 else "".join(shown) or None


_BOOLEAN = _Type(_boolean)
_DURATION = _Type(_duration, _shown_duration)
_INTERVAL = _Type(_interval, _shown_duration)
_LISTEN = _Type(_listen)
_NO_WEB_CONFIG = _Type(_no_web_config)
_PATH = _Type(_path, _shown_text)
_PREFIX = _Type(lambda text: (_path(text),), _shown_prefixes)
_SIZE = _Type(_size, lambda value: _with_unit(value, _SIZE_UNITS))
_TEXT = _Type(_text, _shown_text)
_URL = _Type(_url, _shown_url)

_TARGET = {
    "training_job": _Key("training_job", _TEXT, f"${{FR_TRAINING_JOB:-{UNNAMED_JOB}}}"),
    "path": _Key("path", _PATH),
    "pattern": _Key("pattern", _TEXT),
    "prefix": _Key("prefixes", _PREFIX),
    "url": _Key("url", _URL),
    "scope": _Key("scope", _one_of("job", "node"), "job"),
    "world_size": _Key("world_size", _integer(1)),
    "discover": _Key("discover", _BOOLEAN, "false"),
    "discover_ttl": _Key("discover_ttl_s", _INTERVAL, "24h"),
    "retention": _Key("retention_s", _INTERVAL),
}

_SECTIONS = {
    "watch": _Section(
        Watch,
        {
            "backend": _Key("backend", _one_of("auto", "inotify", "polling"), "auto"),
            "poll_interval": _Key("poll_interval_s", _INTERVAL, "2s"),
            "rescan_interval": _Key("rescan_interval_s", _INTERVAL, "30s"),
        },
    ),
    "dump_set": _Section(
        DumpSetOptions,
        {
            "settle": _Key("settle_s", _DURATION, "1s"),
            "window": _Key("window_s", _INTERVAL, "2m"),
            "grace": _Key("grace_s", _DURATION, "60s"),
        },
    ),
    "analysis": _Section(AnalysisOptions, {"min_open_age": _Key("min_open_age_s", _DURATION, "15s")}),
    "incidents": _Section(
        IncidentOptions,
        {
            "ttl": _Key("ttl_s", _INTERVAL, "1h"),
            "history": _Key("history", _integer(0), "50"),
        },
    ),
    "topology": _Section(
        Topology,
        {
            "ranks_per_node": _Key("ranks_per_node", _integer(1)),
            "hosts_file": _Key("hosts_file", _PATH),
            "node": _Key("node", _TEXT, "${NODE_NAME:-}"),
        },
    ),
    "publish": _Section(
        Publish,
        {
            "url": _Key("url", _URL),
            "training_job": _Key("training_job", _TEXT),
            # As large as a record can hold.
            "attempt": _Key("attempt", _integer(0, 2**31 - 1), "${FR_ATTEMPT:-0}"),
            "recent_calls": _Key("recent_calls", _integer(1, 2000), "200"),
            "spool_dir": _Key("spool_dir", _PATH, "${TMPDIR:-/tmp}/fr-exporter-spool"),
            "spool_max_bytes": _Key("spool_max_bytes", _SIZE, "64MiB"),
        },
    ),
    "limits": _Section(
        Limits,
        {
            "max_dump_bytes": _Key("max_dump_bytes", _SIZE, "256MiB"),
            "max_memory": _Key("max_memory_bytes", _SIZE, "1GiB"),
            "max_ranks": _Key("max_ranks", _integer(1), "131072"),
            "max_rank_series": _Key("max_rank_series", _integer(0), "20000"),
            "max_suspects": _Key("max_suspects", _integer(0), "64"),
        },
    ),
    "web": _Section(
        _web,
        {
            "listen": _Key("listen", _LISTEN, ":19140"),
            "config_file": _Key("config_file", _NO_WEB_CONFIG),
            "enable_reload": _Key("enable_reload", _BOOLEAN, "false"),
            "shutdown_linger": _Key("shutdown_linger_s", _DURATION, "0s"),
        },
    ),
    "log": _Section(
        Log,
        {
            "level": _Key("level", _one_of("debug", "info", "warning", "error"), "info"),
            "format": _Key("format", _one_of("text", "json"), "text"),
        },
    ),
}
