# Every target runs in $(VENV), which the first target creates. Without --no-compile, pip would compile every module, which takes
# longer than the rest of the installation.
PYTHON ?= python3
VENV ?= .venv
# Processes of gpu-test: each takes 12 GB of GPU memory, tests of offsets beyond 2**31 elements 60 GB.
WORKERS ?= 4
BIN := $(VENV)/bin
# Tests write bytecode: without it every process compiles its imports again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 20
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint gpu-test dist clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[cpu,serve,dev]'
	@touch $@

demo: $(INSTALLED)  ## the whole pipeline on the embedded model, a few minutes on two CPU cores
	$(BIN)/msattn demo

test: lint  ## lint, and every test that a change usually breaks
	$(PYTEST) -m 'not slow'

test-all: lint  ## the slow tests too: compile targets, full products, process kills, toy experiments
	$(PYTEST)

lint: $(INSTALLED)  ## ruff and pyrefly
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

gpu-test: $(INSTALLED)  ## the tests that need a GPU
	$(BIN)/pytest -m gpu -n $(WORKERS)

dist: $(INSTALLED)  ## wheel and source distribution in dist/
	$(BIN)/python -m build --no-isolation

clean:  ## remove the environment and caches; outputs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist msattn.egg-info
