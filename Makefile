# Every target makes .venv by itself. Overrides: make PYTHON=python3.12, make setup PIP_FLAGS="--extra-index-url ..."
PYTHON ?= python3
PIP_FLAGS ?=
# Two workers for the tests, one thread each for torch: together they fill two cores without fighting over them.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check format bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vtoken needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): torch is large, the first time takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(READY) ## Install everything into .venv

demo: $(READY) ## Get a real model, answer prompts, show what the memory did
	@$(BIN)/python examples/demo.py

test: $(READY) ## Run the tests, the slow ones aside
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

test-slow: $(READY) ## Run the slow tests only (they may download the demo model)
	@$(BIN)/python -m pytest -q -m slow

check: $(READY) ## Lint, formatting, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(READY) ## Fix formatting and what the linter can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## Run the recorded benchmarks
	@for script in benchmarks/bench_*.py; do echo "== $$script"; PYTHONPATH=. $(BIN)/python "$$script" || exit 1; done

clean: ## Remove .venv and caches
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
