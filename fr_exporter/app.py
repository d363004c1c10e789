"""The daemon: wiring, signals, reload, shutdown."""

from __future__ import annotations

import logging
import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import waitress
from prometheus_client import CollectorRegistry, ProcessCollector

from fr_exporter import logs
from fr_exporter._version import __version__
from fr_exporter.config import Config, Topology, Web, effective_text
from fr_exporter.errors import ConfigError, UsageError
from fr_exporter.metrics.collector import DomainCollector
from fr_exporter.metrics.telemetry import Telemetry
from fr_exporter.store import Store
from fr_exporter.topology import parse_hosts
from fr_exporter.web.app import make_app
from fr_exporter.worker import Worker

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from fr_exporter.fleet.outlet import Outlet

# Stacks count towards RLIMIT_DATA, and every watched directory has a thread. The worker keeps the usual 8 MiB: it
# decodes what others wrote.
_THREAD_STACK_BYTES = 2**19
# What reading a dump, answering a request and new threads need on top of what is in use at the start.
_WORKING_BYTES = 64 * 2**20

# How long a request or a dump being read may hold up the end.
_STOP_S = 0.5
# How long the last dumps may hold it up where they are published.
_PUBLISH_S = 5.0
_SCRAPES_BEFORE_STOP = 2
_EXIT_INTERNAL = 4

Event = Literal["scraped", "caught up", "worker failed"]

log = logging.getLogger(__name__)


def run(load_config: Callable[[], Config], env: Mapping[str, str]) -> int:
    """Serve until a signal says stop; return the exit code.

    `load_config` reads the configuration, at the start and at each reload. Raises ConfigError or UsageError, each in
    one line, where the daemon cannot start.
    """
    config = load_config()
    logs.configure(config.log, env)
    _limit_memory(config.limits.max_memory_bytes)
    return _Daemon(config, load_config, env).serve()


class _Daemon:
    """The threads of the daemon and what they share. `_inbox` holds what its main thread waits for: signals, events."""

    def __init__(self, config: Config, load_config: Callable[[], Config], env: Mapping[str, str]) -> None:
        self._config = config
        self._load_config = load_config
        self._env = env
        self._reloading = threading.Lock()
        self._inbox: queue.SimpleQueue[int | Event] = queue.SimpleQueue()
        self._store = Store(config.incidents.history)
        self._registry = CollectorRegistry()
        self._telemetry = Telemetry(self._registry)
        self._collector = DomainCollector(self._store.snapshot, config.limits)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        _check_stores(config)
        self._outlet = _open_outlet(config, self._telemetry)
        self._worker = Worker(
            config,
            _read_hosts(config.topology),
            self._store,
            self._telemetry,
            publish=None if self._outlet is None else self._outlet.publish,
        )

    def serve(self) -> int:
        """Start everything, wait for the end, stop everything; return the exit code."""
        listener = _listen(self._config.web)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._inbox.put(number))
        self._telemetry.reloaded(success=True, time_s=time.time())
        worker = threading.Thread(target=self._work, name="worker", daemon=True)
        worker.start()
        if self._outlet is not None:
            self._outlet.start()
        threading.stack_size(_THREAD_STACK_BYTES)
        server = waitress.create_server(self._app(), sockets=[listener], ident=None, channel_timeout=30)
        threading.Thread(target=server.run, name="web", daemon=True).start()
        host, port = listener.getsockname()[:2]
        log.info("fr_exporter %s serves http://%s:%d/", __version__, f"[{host}]" if ":" in host else host, port)
        code = self._wait()
        if self._outlet is not None and code == 0:
            self._publish_the_rest(self._outlet)
        log.info("stopping")
        server.task_dispatcher.shutdown(timeout=_STOP_S)
        self._worker.stop()
        worker.join(_STOP_S)
        return code

    def reload(self) -> str | None:
        """Load the configuration anew; return why the old one stays in force, in one line, or None."""
        with self._reloading:
            try:
                config = self._load_config()
                hosts = _read_hosts(config.topology)
                _check_stores(config)
            except (ConfigError, UsageError) as error:
                log.error("the old configuration stays in force: %s", error)
                self._telemetry.reloaded(success=False, time_s=time.time())
                return str(error)
            for key, changed in _needs_restart(self._config, config).items():
                if changed:
                    log.warning("%s has changed: restart fr_exporter for it to take effect", key)
            logs.configure(config.log, self._env)
            self._worker.reload(config, hosts)
            self._registry.unregister(self._collector)
            self._collector = DomainCollector(self._store.snapshot, config.limits)
            self._registry.register(self._collector)
            self._config = config
            self._telemetry.reloaded(success=True, time_s=time.time())
            log.info("configuration reloaded")
            return None

    def _app(self) -> WSGIApplication:
        return make_app(
            snapshot=self._store.snapshot,
            registry=self._registry,
            config_text=lambda: effective_text(self._config),
            ready=self._worker.ready.is_set,
            reload=self.reload if self._config.web.enable_reload else None,
            scraped=lambda: self._inbox.put("scraped"),
            now_ns=time.time_ns,
            version=__version__,
        )

    def _work(self) -> None:
        try:
            self._worker.run()
        except Exception:
            log.exception("internal error, please report it")
            self._inbox.put("worker failed")

    def _wait(self) -> int:
        while True:
            event = self._inbox.get()
            if event == "worker failed":
                return _EXIT_INTERNAL
            if event == signal.SIGHUP:
                self.reload()
            elif event in (signal.SIGTERM, signal.SIGINT):
                if self._config.web.shutdown_linger_s > 0:
                    self._linger()
                return 0

    def _publish_the_rest(self, outlet: Outlet) -> None:
        """Publish what has landed, as far as the store takes it in a few seconds; the rest is in the spool."""
        read = threading.Event()
        self._worker.catch_up(read.set)
        read.wait(_PUBLISH_S)
        outlet.stop(_PUBLISH_S)

    def _linger(self) -> None:
        """Where there is a hang, or a set still partial, serve until two scrapes have seen the final verdict.

        The signal comes when the training process ends, and that may be just after its dumps: look once more first.
        """
        until = time.monotonic() + self._config.web.shutdown_linger_s
        self._worker.catch_up(lambda: self._inbox.put("caught up"))
        caught_up = False
        scrapes = 0
        while scrapes < _SCRAPES_BEFORE_STOP and (left := until - time.monotonic()) > 0:
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            states = self._store.snapshot().targets
            partial = any(state.diagnosis is not None and state.diagnosis.partial for state in states)
            if event == "caught up":
                if not partial and not any(state.hang for state in states):
                    return
                caught_up = True
                log.info("serving the verdict to two more scrapes, for at most %.0f s; a second signal stops now", left)
            elif event == "scraped":
                scrapes += caught_up and not partial
            elif event != signal.SIGHUP:
                return


def _check_stores(config: Config) -> None:
    """Raise UsageError where the stores of a configuration cannot be used, whether or not anything answers there."""
    if config.uses_stores:
        # The drivers of stores would take a third of the start.
        from fr_exporter.fleet.check import check_stores  # noqa: PLC0415

        check_stores(config)


def _open_outlet(config: Config, telemetry: Telemetry) -> Outlet | None:
    """Return what publishes the dumps, None where that is off."""
    if config.publish.url is None:
        return None
    from fr_exporter.fleet.outlet import Outlet  # noqa: PLC0415  as in _check_stores

    return Outlet(config.publish, config.topology, telemetry)


def _needs_restart(old: Config, new: Config) -> dict[str, bool]:
    return {
        "web.listen": old.web.listen != new.web.listen,
        "web.enable_reload": old.web.enable_reload != new.web.enable_reload,
        "publish": old.publish != new.publish,
        "limits.max_memory": old.limits.max_memory_bytes != new.limits.max_memory_bytes,
        "incidents.history": old.incidents.history != new.incidents.history,
    }


def _read_hosts(topology: Topology) -> tuple[str, ...] | None:
    if topology.hosts_file is None:
        return None
    try:
        with open(topology.hosts_file, encoding="utf-8") as file:
            return parse_hosts(file.read(), topology.ranks_per_node)
    except OSError as error:
        raise ConfigError(f"topology.hosts_file: {topology.hosts_file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"topology.hosts_file: {topology.hosts_file} is not UTF-8 text") from error


def _listen(web: Web) -> socket.socket:
    family = socket.AF_INET6 if ":" in web.host else socket.AF_INET
    try:
        return socket.create_server((web.host, web.port), family=family)
    except OSError as error:
        # The library repeats the address after the reason.
        reason = str(error.strerror or error).partition(" (while attempting")[0]
        raise UsageError(f"cannot listen on {web.listen}: {reason}; change web.listen") from error


def _limit_memory(limit: int) -> None:
    """Make the kernel refuse more than `limit` bytes: a memory bomb is then a MemoryError, and one rejected file."""
    in_use = _data_bytes()
    if limit < in_use + _WORKING_BYTES:
        needed = -(-(in_use + _WORKING_BYTES) // 2**20)
        raise ConfigError(f"limits.max_memory is {limit // 2**20}MiB; fr_exporter needs {needed}MiB or more")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _data_bytes() -> int:
    """Return what counts towards RLIMIT_DATA now; 0 where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return 0
