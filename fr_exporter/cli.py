"""The command line: `fr-exporter serve | analyze | check-config | simulate`, and `fr-attribution`: `analyze` alone.

Standard output carries the report and nothing else; notes and errors go to standard error, one line each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from fr_exporter._version import __version__
from fr_exporter.attribution import analyze_dumps
from fr_exporter.config import DEFAULT_PATTERN, Config, Target, load
from fr_exporter.diagnosis import Verdict
from fr_exporter.errors import ConfigError, DumpError, FRExporterError, UsageError
from fr_exporter.parsing import DumpReader
from fr_exporter.pipeline import find_dumps, open_dump
from fr_exporter.report import render_json, render_text
from fr_exporter.text import printable, shown_url

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EXIT_CODES: dict[Verdict, int] = {"healthy": 0, "hang": 1, "inconclusive": 3}
EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130

BUILT_IN = "built-in configuration"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fr-exporter` and return its exit code."""
    parser = _Parser(
        prog="fr-exporter",
        description="Say which ranks made a hung PyTorch job wait, from its flight-recorder dumps.",
        allow_abbrev=False,
    )
    _add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="watch for dumps and serve the verdict", allow_abbrev=False)
    serve.add_argument("--config", metavar="FILE", help="configuration (default: the built-in one)")
    serve.set_defaults(handler=_serve)
    analyze = commands.add_parser(
        "analyze", help="analyse dumps and print the report", description=_ANALYZE, allow_abbrev=False
    )
    _add_analyze_arguments(analyze)
    check = commands.add_parser("check-config", help="check a configuration", allow_abbrev=False)
    check.add_argument("file", metavar="FILE", nargs="?", help="configuration (default: the built-in one)")
    check.set_defaults(handler=_check_config)
    simulate = commands.add_parser("simulate", help="write the dumps of a simulated hang: a drill", allow_abbrev=False)
    simulate.set_defaults(handler=_simulate)
    if "simulate" in (sys.argv if argv is None else argv):
        _add_simulate_arguments(simulate)
    return _run(parser, argv)


def attribution_main(argv: Sequence[str] | None = None) -> int:
    """Run `fr-attribution` and return its exit code."""
    parser = _Parser(prog="fr-attribution", description=_ANALYZE, allow_abbrev=False)
    _add_version(parser)
    _add_analyze_arguments(parser)
    return _run(parser, argv)


_ANALYZE = (
    "Analyse the dumps of a job and print what hung and which ranks made the others wait. "
    "Exit code: 0 no hang, 1 hang, 2 wrong usage or nothing readable, 3 inconclusive, 4 internal error."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Give the caller one line instead of the whole usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:  # noqa: ARG002
        """Print the help or the version as we print all else: `--help | head -1` is no error."""
        _write(message)


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"fr-exporter {__version__}")


def _add_analyze_arguments(parser: argparse.ArgumentParser) -> None:
    paths = parser.add_mutually_exclusive_group(required=True)
    paths.add_argument(
        "--fr-path", metavar="PATH", help="the dumps: a directory, one file, a path prefix, or a job's URL of records"
    )
    paths.add_argument("path", metavar="PATH", nargs="?", help="the same, for short")
    parser.add_argument(
        "-p",
        "--pattern",
        default=DEFAULT_PATTERN,
        help="which files of a directory are dumps (default: %(default)s, else the names that PyTorch gives)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="add per-rank tables")
    parser.add_argument("-c", "--health-check", action="store_true", help="add the health checks found in the dumps")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="(default: %(default)s)")
    parser.add_argument(
        "--scope",
        choices=("job", "node"),
        default="job",
        help="node: only this node's ranks dump here (default: %(default)s)",
    )
    parser.add_argument("--world-size", metavar="N", type=int, help="ranks of the job (default: from the dumps)")
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="processes to read in (default: the cores there are, 1 for small sets)"
    )
    parser.add_argument("--debug", action="store_true", help="also write each dump as JSON, into --debug-dir")
    parser.add_argument(
        "--debug-dir", metavar="DIR", help="where to (default: a new temporary directory); implies --debug"
    )
    parser.set_defaults(handler=_analyze)


def _add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    from fr_exporter.simulate import command  # noqa: PLC0415  would slow every analyze down

    parser.description = command.DESCRIPTION
    command.add_arguments(parser)


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Do what the arguments say, and turn whatever goes wrong into one line and an exit code."""
    debug = os.environ.get("FR_DEBUG") == "1"
    # What goes wrong with a file stands in the report; the log repeats it, with a traceback where the fault is ours.
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL)
    try:
        return _dispatch(parser, argv)
    except (UsageError, ConfigError) as error:
        _note(f"{parser.prog}: error: {error}")
        return EXIT_USAGE
    except FRExporterError as error:
        _note(f"{parser.prog}: error: {error}")
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:  # of the output: what cannot be read ends in one of the errors above
        _note(f"{parser.prog}: error: {error}")
        return EXIT_INTERNAL
    except Exception as error:  # noqa: BLE001  whatever a bug raises must not look like a verdict
        if debug:
            traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        _note(f"{parser.prog}: error: internal error, please report it: {what} (FR_DEBUG=1 shows where)")
        return EXIT_INTERNAL


def _dispatch(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    try:
        arguments = parser.parse_args(argv)
    except SystemExit:  # --help and --version have been printed
        return EXIT_OK
    code: int = arguments.handler(arguments)
    return code


def _analyze(arguments: argparse.Namespace) -> int:
    path = arguments.path if arguments.fr_path is None else arguments.fr_path
    if arguments.debug or arguments.debug_dir is not None:
        _write_debug(path, arguments.pattern, arguments.debug_dir)
    diagnosis = analyze_dumps(
        path,
        pattern=arguments.pattern,
        scope=arguments.scope,
        world_size=arguments.world_size,
        jobs=arguments.jobs,
    )
    if arguments.format == "json":
        report = render_json(diagnosis)
    else:
        report = render_text(diagnosis, verbose=arguments.verbose, health_check=arguments.health_check)
    _write(f"{report}\n")
    return EXIT_CODES[diagnosis.verdict]


def _serve(arguments: argparse.Namespace) -> int:
    from fr_exporter import app  # noqa: PLC0415  the daemon's libraries would slow every analyze down

    return app.run(lambda: _load_config(arguments.config), os.environ)


def _simulate(arguments: argparse.Namespace) -> int:
    from fr_exporter.simulate import command  # noqa: PLC0415  as in _add_simulate_arguments

    command.run(arguments, write=_write, clock=time.time_ns, sleep=time.sleep)
    return EXIT_OK


def _check_config(arguments: argparse.Namespace) -> int:
    config = _load_config(arguments.file)
    if config.uses_stores:
        from fr_exporter.fleet.check import check_stores  # noqa: PLC0415  as in _serve

        check_stores(config)
    lines = [f"{arguments.file or BUILT_IN}: ok", *map(_target_text, config.targets)]
    if config.publish.url is not None:
        place = f"{config.publish.training_job or '<training job>'}/{config.publish.attempt}/{config.topology.node}"
        lines.append(f"  published to {shown_url(config.publish.url).rstrip('/')}/{place}")
    _write("".join(f"{printable(line)}\n" for line in lines))
    return EXIT_OK


def _load_config(file: str | None) -> Config:
    """Read a configuration file, or take the defaults."""
    text = "" if file is None else _read_text(file)
    try:
        return load(text, env=os.environ, home=os.path.expanduser("~"))
    except ConfigError as error:
        raise ConfigError(f"{file or BUILT_IN}: {error}") from error


def _read_text(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _target_text(target: Target) -> str:
    """Return which files or objects a target watches, on one line."""
    if target.url is not None:
        from fr_exporter.fleet.layout import quoted  # noqa: PLC0415  as in _serve

        job = "<training job>" if target.training_job is None else quoted(target.training_job)
        files = "/".join((shown_url(target.url).rstrip("/"), job, "<attempt>", "<node>"))
    elif target.path is None:
        files = ", ".join(f"{prefix}<rank>" for prefix in target.prefixes)
    elif target.discover:
        files = os.path.join(target.path, "<training job>", target.pattern or "")
    else:
        files = os.path.join(target.path, target.pattern or "")
    return f"  {target.training_job or 'each sub-directory'} (scope {target.scope}): {files}"


def _write_debug(path: str, pattern: str, directory: str | None) -> None:
    """Write each dump as JSON into a directory, a fresh one where None is given; never into that of the dumps."""
    files, _ = find_dumps(path, pattern)
    target = _debug_directory(directory, beside=os.path.dirname(files[0].path))
    reader = DumpReader(sys.maxsize)
    written = 0
    for file in files:
        name = os.path.basename(file.path)
        try:
            with open_dump(file.path) as stream:
                # A key that JSON has no form for is none of the flight recorder's.
                text = json.dumps(reader.decode(stream, size=file.size), indent=1, skipkeys=True)
        except (DumpError, OSError, ValueError, RecursionError) as error:
            _note(f"{name}: not written as JSON: {error}")
            continue
        _write_file(os.path.join(target, f"{name}.json"), text)
        written += 1
    _note(f"wrote {written} dumps as JSON to {target}")


def _debug_directory(directory: str | None, *, beside: str) -> str:
    if directory is None:
        import tempfile  # noqa: PLC0415  costs a tenth of the start, for a rare flag

        return tempfile.mkdtemp(prefix="fr-debug-")
    if os.path.realpath(directory) == os.path.realpath(beside):
        raise UsageError(f"--debug-dir {directory}: is where the dumps are; choose another directory")
    try:
        os.makedirs(directory, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--debug-dir {directory}: is not a directory") from error
    except OSError as error:
        raise UsageError(f"--debug-dir {directory}: {error.strerror or error}") from error
    return directory


def _write_file(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as output:
            output.write(text)
    except OSError as error:
        raise UsageError(f"--debug-dir: cannot write {path}: {error.strerror or error}") from error


def _write(text: str) -> None:
    """Write to standard output, whatever its encoding; a reader that has gone (`| head`) is no error."""
    if sys.stdout is None:  # closed by the caller, who wants the exit code alone
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Python would flush once more at exit, fail again and say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _note(text: str) -> None:
    """Write a line to standard error; where that cannot be, the exit code must still be ours, never that of a hang."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{printable(text)}\n")
