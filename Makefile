# Environments are built on first use and again when their requirements change.
#   make demo PYTHON=python3.12      another interpreter
#   make test PYTEST_ARGS="-k recipe -x"

PYTHON ?= python3
ENGINE ?= transformers
PYTEST_ARGS ?=
ENV := .venv
VLLM_ENV := .venv-vllm
DEMO := outputs/demo

ifeq ($(ENGINE),vllm)
DEMO_ENV := $(VLLM_ENV)
else
DEMO_ENV := $(ENV)
endif

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help env env-vllm test test-fast test-vllm demo demo-e2e demo-discrete lint docs bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV)/.ready ## Build the environment of the tests and the recipe (.venv)

env-vllm: $(VLLM_ENV)/.ready ## The same with a real vLLM CPU engine (.venv-vllm)

$(ENV)/.ready: setup.cfg requirements/torch-cpu.txt requirements/test.txt
	$(PYTHON) -m venv --clear $(ENV)
	$(ENV)/bin/pip install -r requirements/torch-cpu.txt
	$(ENV)/bin/pip install -c requirements/torch-cpu.txt -r requirements/test.txt -e '.[train,view,tensorboard,dev]'
	touch $@

$(VLLM_ENV)/.ready: setup.cfg $(wildcard requirements/*.txt)
	$(PYTHON) -m venv --clear $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install -r requirements/torch-cpu.txt
	$(VLLM_ENV)/bin/pip install -c requirements/torch-cpu.txt -r requirements/vllm.txt -r requirements/test.txt -e '.[train,test]'
	$(VLLM_ENV)/bin/pip install --no-deps -r requirements/vllm-no-deps.txt
	touch $@

test: test-fast test-vllm ## Run every test: the default suite, then those that need vLLM

test-fast: $(ENV)/.ready ## Run the default suite (real Ray, torch.profiler and FSDP; no vLLM)
	$(ENV)/bin/python -m pytest -m "not vllm and not sglang" $(PYTEST_ARGS)

test-vllm: $(VLLM_ENV)/.ready ## Run the tests that drive a real vLLM engine
	$(VLLM_ENV)/bin/python -m pytest -m vllm $(PYTEST_ARGS)

demo: demo-e2e demo-discrete ## Profile the recipe in both modes, merge, report, check [ENGINE=vllm]
	@echo
	@echo "Open in https://ui.perfetto.dev (the page reads the file; it does not send it anywhere):"
	@ls $(DEMO)/*/profiling/step_*/timeline.*
	@echo "What is in those folders: docs/quickstart.md"

demo-e2e demo-discrete: demo-%: $(DEMO_ENV)/.ready
	$(DEMO_ENV)/bin/python -m recipes.grpo_tiny.train profiling=$* profiling.schedule.steps=[2,3] \
	  rollout.engine=$(ENGINE) output_dir=$(DEMO)/$*
	$(DEMO_ENV)/bin/verl-profiling merge $(DEMO)/$*/profiling
	$(DEMO_ENV)/bin/verl-profiling report $(DEMO)/$*/profiling
	$(DEMO_ENV)/bin/verl-profiling check $(DEMO)/$*/profiling

lint: $(ENV)/.ready ## Check style and types
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/mypy

docs: $(ENV)/.ready ## Build the documentation (docs/_build/html)
	$(ENV)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html

bench: $(ENV)/.ready ## Print the benchmarks
	$(ENV)/bin/python -m benchmarks

clean: ## Remove environments, outputs and caches
	rm -rf $(ENV) $(VLLM_ENV) outputs build dist docs/_build .mypy_cache .ruff_cache .pytest_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
