# Needs only Python 3.11+ (3.11 or 3.12 tested) and make. Everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Three tests at a time keep two cores busy, since tests wait too; who is done first takes over what others have left.
TOGETHER := -n 3 --dist worksteal
# Tests start hundreds of processes: each would compile anew what none may write.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-fast test-all lint compiled docs clean

help:
	@echo "make demo      set up, then train on 8 processes on real handwritten digits"
	@echo "make test      set up, then lint, type-check and test (minutes)"
	@echo "make test-fast what starts no processes: under two minutes, for while you edit"
	@echo "make test-all  the same with the long tests"
	@echo "make lint      ruff and mypy alone"
	@echo "make docs      the pages for a browser, in site/"

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt scripts/setup
	@PYTHON=$(PYTHON) scripts/setup

demo: setup
	@scripts/demo

test: setup
	@$(MAKE) --no-print-directory -j 2 lint compiled
	@$(BIN)/python -m pytest $(TOGETHER) -m "not slow"

test-fast: setup
	@$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not processes and not networks"

test-all: setup
	@$(MAKE) --no-print-directory -j 2 lint compiled
	@$(BIN)/python -m pytest $(TOGETHER)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# What all workers import, once. Errors are not told here, since the tests tell them.
compiled: setup
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@cd tests/support && PYTHONPATH=files ../../$(BIN)/python -c "import ranks, sys; [*map(__import__, ranks.PRELOAD)]" || true

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf .venv log_output demo_output site
