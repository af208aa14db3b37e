# Everything runs in $(VENV), which the first target that needs it makes; later calls go straight on. Python compiles what it
# imports: pip would compile everything, which takes longer than the rest of the installation.
PYTHON ?= python3
VENV ?= .venv
# Of gpu-test: some 12 GB of GPU memory each, and 60 GB for tests of offsets beyond 2**31 elements.
WORKERS ?= 4
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint gpu-test clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]'
	@touch $@

demo: $(INSTALLED)  ## the whole line on the embedded model, a few minutes on two CPU cores
	$(BIN)/msattn demo

test: lint  ## everything that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-fast: $(INSTALLED)  ## without the slow tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

lint: $(INSTALLED)  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

gpu-test: $(INSTALLED)  ## what needs a GPU
	$(BIN)/pytest -m gpu -n $(WORKERS)

clean:  ## remove the environment and caches; outputs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist msattn.egg-info
