# make demo    run the three-tier demo           make test    run the tests
# make check   linters, types, import layers     make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@sed -n '1,2s/^# //p' Makefile

demo: $(VENV)/.runtime
	@$(BIN)/hicache demo

test: $(VENV)/.dev
	@$(BIN)/pytest -n 2 --dist worksteal

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

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hicache and its development tools into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.runtime $@

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
