# The only command vocabulary: a person, CI and a container use the same words. `make` lists them.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?=
MLFLOW_PORT ?= 5000

BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
export PATH := $(BIN):$(PATH)

# uv does not read pip's settings; pass on where the user's packages come from.
pip_setting = $(shell $(PYTHON) -m pip config get global.$(1) 2>/dev/null)
export UV_FIND_LINKS ?= $(or $(PIP_FIND_LINKS),$(call pip_setting,find-links))
export UV_DEFAULT_INDEX ?= $(or $(PIP_INDEX_URL),$(call pip_setting,index-url))

UV = env $(if $(UV_FIND_LINKS),,-u UV_FIND_LINKS) $(if $(UV_DEFAULT_INDEX),,-u UV_DEFAULT_INDEX) $(BIN)/uv

.DEFAULT_GOAL := help
# Local wheels stay out of the lock: they may be builds for one machine (torch without CUDA, say).
COMPILE = env -u UV_FIND_LINKS uv pip compile -q --universal --python-version 3.11 --no-header --no-annotate
.PHONY: help setup install-base rebuild test test-slow check fix ui deploy lock bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## virtual environment with the locked dependencies (PYTHON=python3.12 chooses another Python)

$(STAMP): pyproject.toml requirements.lock requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements-dev.lock uv
	$(UV) pip install --python $(BIN)/python -c requirements.lock -c requirements-dev.lock -e '.[train,pretrained,dev]'
	@touch $@

install-base: setup ## what serving needs, and no more, into the virtual environment BASE=folder
	$(UV) pip install --python $(BASE)/bin/python -c requirements.lock .

rebuild: setup ## the main job: data -> training -> evaluation -> model.onnx in release/ (RECIPE=transformer: that recipe)
	$(if $(RECIPE),reprise recipes use $(RECIPE))
	dvc repro

test: setup ## all tests but the slow ones
	python -m pytest -m "not slow"

test-slow: setup ## the tests that take minutes
	python -m pytest -m slow

check: setup ## format, lint, types, import contracts, dead settings: seconds
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	python -m pytest -q tests/test_config.py tests/test_structure.py

fix: setup ## let ruff mend what it can
	ruff check --fix .
	ruff format .

ui: setup ## the MLflow page, to compare runs
	@echo "MLflow: http://127.0.0.1:$(MLFLOW_PORT)  (Ctrl-C stops it)"
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --workers 1 --host 127.0.0.1 --port $(MLFLOW_PORT) \
	  --backend-store-uri "sqlite:///$(CURDIR)/mlflow.db" --artifacts-destination "$(CURDIR)/mlartifacts"

deploy: setup ## register the Prefect deployments (needs a running `prefect server start`)
	prefect --no-prompt work-pool create reprise --type process --overwrite
	prefect --no-prompt deploy --all

lock: setup ## resolve the dependencies anew
	$(COMPILE) --extra train --extra pretrained -o requirements.lock pyproject.toml
	$(COMPILE) --extra dev -c requirements.lock -o requirements-dev.lock pyproject.toml

bench: setup ## score and time of the recipes over five seeds, on the validation split
	for recipe in recipes/*.yaml; do \
	  for step in fetch split encode; do reprise -q $$step --params $$recipe --workdir runs/bench/$$(basename $$recipe .yaml) || exit; done; \
	  python -m bench.seeds $$recipe --workdir runs/bench/$$(basename $$recipe .yaml) || exit; \
	done

clean: ## remove what was made, keep the environment and your own files in data/source
	rm -rf data/raw data/encoder data/split data/encoded data/quarantine.jsonl runs release mlflow.db mlartifacts
