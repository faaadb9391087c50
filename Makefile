# `make demo` and `make test` need Python 3.10+ with pip and a C++ compiler (torch.compile uses it on CPU). Both make .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3 || command -v python)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# A wheel build of the tree: the package as users get it, where the two root folders lie inside the package.
WHEEL_DIR := $(abspath $(VENV))/wheel_tree

.PHONY: help demo test lint typecheck pytest clean

help:
	@echo "make demo   set up .venv and run three real models with and without fa_inductor"
	@echo "make test   set up .venv and run the linters, the type checker, the import rules and the tests"
	@echo "make clean  remove .venv and all build products"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.10 or newer is needed, $(PYTHON) is {sys.version.split()[0]}" if sys.version_info < (3, 10) else 0)'
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
	  rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV); \
	  $(PYTHON) -m pip --python $(BIN)/python install -q pip; }

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch, transformers and fa_inductor into $(VENV) (first time only, some minutes)"
	@$(PIP) torch -e . transformers tabulate psutil
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch, triton and the test tools into $(VENV) (first time only, some minutes)"
	@$(PIP) torch triton -e '.[test]' transformers psutil
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/python -m fa_inductor demo

test: lint typecheck pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .

# mypy and import-linter look at the installed layout, where fa_inductor.patterns and fa_inductor.templates are sub-packages.
typecheck: $(VENV)/.test
	@rm -rf $(WHEEL_DIR)
	@$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation --target $(WHEEL_DIR) .
	@cp pyproject.toml $(WHEEL_DIR)
	cd $(WHEEL_DIR) && MYPYPATH=. $(abspath $(BIN))/mypy -p fa_inductor
	cd $(WHEEL_DIR) && PYTHONPATH=. $(abspath $(BIN))/lint-imports

pytest: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
