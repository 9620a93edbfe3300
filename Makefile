# make tune   one command from a clone to a tuned Llama: creates .venv, installs, runs the main job, ends with what it gained
# make check  creates .venv, installs, runs ruff, mypy and the tests that take no longer than 0.3 s: for every commit
# make test   the same with every test, and with coverage; leaves their times in build/tests.xml
# make docs   builds the site from docs/ into build/docs: no network, and no warning is let pass
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Without an NVIDIA GPU, PyTorch's build for CPUs is taken where its index can be reached: it saves gigabytes.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
EXTRAS := models
ifneq ($(GPU),)
EXTRAS := gpu,models
endif
# Processes that run the tests: each holds PyTorch, starts others, and waits for them. On two cores three keep busy.
JOBS ?= 3
BIN := $(VENV)/bin
# Python compiles what it imports; to compile all that is installed takes as long again as some downloads.
PIP := $(BIN)/python -m pip install --quiet --no-compile
# A file stays with one process, which makes its fixtures once; tests/conftest.py has long files begin.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: tune check test docs lint types wheel clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(if $(GPU),,$(PIP) --retries 0 --timeout 15 --index-url $(CPU_INDEX) $(TORCH) 2>/dev/null ||) \
	  $(PIP) $(TORCH)
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev,docs]"
	touch $@

tune: $(VENV)/.installed
	$(BIN)/plan tune --model llama

check: $(VENV)/.installed-dev lint types
	$(PYTEST) -m "not slow" --ignore tests/gpu --durations=10 --durations-min=1

test: $(VENV)/.installed-dev lint types
	$(PYTEST) --junitxml=build/tests.xml --cov --cov-report=term --cov-fail-under=85

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
