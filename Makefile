# `make demo` shows the exporter on a bundled incident, `make test` checks everything; both set up what they need.

PYTHON ?= python3
BIN := .venv/bin

# CI also tests with torch itself, which is large, and the benchmarks; elsewhere `pip install '.[torch,benchmarks]'`.
comma := ,
EXTRAS := dev$(if $(filter true,$(CI)),$(comma)torch$(comma)benchmarks)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint format check-generated generated system-tools clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

# pytest comes last, so that its closing line is the last one.
test: lint check-generated system-tools
	$(BIN)/pytest

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check-generated: .venv/installed-dev
	$(BIN)/python -m fr_exporter.metrics.docs --check docs/metrics.md
	$(BIN)/python -m dashboards.source --check

generated: .venv/installed-dev
	$(BIN)/python -m fr_exporter.metrics.docs docs/metrics.md
	$(BIN)/python -m dashboards.source

system-tools:
	tools/install-system-tools.sh

clean:
	rm -rf .venv .tools build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@
