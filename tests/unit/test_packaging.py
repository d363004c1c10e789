"""What an installation brings along."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fr_exporter._version import __version__

PACKAGE = Path(__file__).parents[2] / "fr_exporter"


def imported_roots() -> Iterator[str]:
    """Yield the first word of each module that the package imports anywhere, also inside functions."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                yield node.module.partition(".")[0]


def test_the_code_imports_exactly_its_declared_dependencies() -> None:
    """Nothing undeclared is imported, torch for one, and no dependency is installed for nothing."""
    # Type checkers bring _typeshed along; nothing imports it at run time.
    third_party = set(imported_roots()) - set(sys.stdlib_module_names) - {"fr_exporter", "_typeshed"}
    providers = metadata.packages_distributions()
    used = {name.lower().replace("_", "-") for root in third_party for name in providers.get(root, [root])}
    required = [line for line in metadata.requires("fr-exporter") or [] if "extra ==" not in line]
    declared = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-") for line in required}
    assert used == declared


def test_the_console_scripts_exist() -> None:
    """Both commands that the package installs lead to a function that is there."""
    scripts = {script.name: script for script in metadata.distribution("fr-exporter").entry_points}
    assert set(scripts) == {"fr-exporter", "fr-attribution"}
    assert all(callable(script.load()) for script in scripts.values())


def test_the_version_stands_in_one_place() -> None:
    """The installed package carries the version that the code names, and its types."""
    assert metadata.version("fr-exporter") == __version__
    assert (PACKAGE / "py.typed").is_file()
