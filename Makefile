# Every target works on a fresh Debian 12 with Python 3.11, make and a package index.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-vllm test-build test-ik test-dist dist docs check format record bench clean
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: .venv/ready ## create .venv and install tokenmill and all that its tests need

.venv/ready: pyproject.toml integrations/dagster-tokenmill/pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/venv.sh dev
	@touch .venv/installed $@

.venv/installed: pyproject.toml
	@PYTHON="$(PYTHON)" sh scripts/venv.sh
	@touch $@

demo: .venv/installed ## plan, load and run a batch of real jobs on a small model, twice
	@sh examples/demo.sh

test: check ## run every check and every test
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-vllm: venv ## run a real vLLM on the processors, in an environment of its own (1.5 GB), and test against it
	@PYTHON="$(PYTHON)" sh scripts/vllm.sh
	@$(BIN)/python -m pytest tests/vllm

test-build: venv ## build llama.cpp for this processor (10 minutes on 2 cores) and test the native engine with it
	@build="$$($(BIN)/tokenmill engines build --cpu)" && \
	TOKENMILL_TEST_BUILD="$$build" $(BIN)/python -m pytest tests/llama_build tests/integration/native \
		--ignore=tests/integration/native/test_native_sampling_parity.py  # which compares with the wheel's server

dist: venv ## build the wheel and the source distribution into dist/
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .

test-ik: venv ## build ik_llama.cpp of the checkout IK=FOLDER (10 minutes on 2 cores) and test the native engine with it
	@build="$$($(BIN)/tokenmill engines build --ik --source "$(IK)")" && \
	TOKENMILL_TEST_BUILD="$$build" $(BIN)/python -m pytest tests/integration/native \
		--ignore=tests/integration/native/test_native_sampling_parity.py \
		--ignore=tests/integration/native/test_native_constraints.py \
		--ignore=tests/integration/native/test_streams.py  # which compare with the wheel's, or need per_slot

test-dist: dist ## install the wheel into an empty environment and run a batch and a server with it
	@$(BIN)/python -m pytest tests/dist

docs: venv ## build the documentation site into build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check: venv ## lint, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: venv ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

record: venv ## write docs/commands and tests/data/contracts anew, after a change of what users see
	@$(BIN)/python scripts/docs.py
	@TOKENMILL_RECORD=1 $(BIN)/python -m pytest -q tests/contracts

bench: venv ## everything measured side by side, half an hour on an idle machine; into bench/results/
	@$(BIN)/python bench/bandwidth.py
	@$(BIN)/python bench/forecast.py
	@$(BIN)/python bench/million.py
	@$(BIN)/python bench/batch_width.py
	-@$(BIN)/python bench/batch.py
	-@$(BIN)/python bench/tune.py
	-@$(BIN)/python bench/gateway.py
	-@$(BIN)/python bench/interactive.py

clean: ## remove the environment and caches
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
