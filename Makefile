# Everything sets itself up: a virtual environment in .venv, installed again when pyproject.toml or
# constraints.txt change. `make help` lists what there is.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip install --disable-pip-version-check --quiet
ARGS   ?=

# make train SHORT=1: the same in about a minute, on a small model.
EXPERIMENT := $(if $(SHORT),quickstart_test,quickstart)
# A whole run of the tests may take this long (seconds); one test has its own limit in pyproject.toml.
TEST_LIMIT_S ?= 1500
# Tests that run at the same time: many start several processes themselves, so not one for each core.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format faults clean
.DELETE_ON_ERROR:

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'
	@echo "  Options go in ARGS, as in: make test ARGS='tests/planner -x'"

setup: $(STAMP) ## Install everything into .venv (the others do so by themselves)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is too old: Python 3.11 or newer is needed (make PYTHON=...)" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (minutes the first time)"
	@$(PIP) --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --constraint constraints.txt --editable '.[data,plots,models,dev]'
	@$(PIP) --no-deps "$$(grep '^timm==' constraints.txt)"  # torchvision's wheel does not fit a CPU build of torch
	@touch $@

train: $(STAMP) ## Train three tasks on one process and on four, and compare (SHORT=1: a small model)
	$(PY) train.py experiment=$(EXPERIMENT) $(ARGS)

test: $(STAMP) ## Run the tests
	$(PY) -m pytest -ra -n $(WORKERS) --dist=worksteal --durations=10 --session-timeout=$(TEST_LIMIT_S) $(ARGS)

lint: $(STAMP) ## Check style, layers and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

format: $(STAMP) ## Format the code and sort its imports
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

faults: $(STAMP) ## Put each deliberate fault in and demand that its tests turn red
	$(PY) -m tests.faults $(ARGS)

clean: ## Remove the environment, caches and what runs left
	rm -rf $(VENV) build dist *.egg-info outputs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache \
		multirun checkpoints lightning_logs .hypothesis timeline.json timeline.png
