# make demo     train a small language model, breadth-first over 4 processes, and draw its timeline
# make test     check and test everything
# make test-all  the same with more draws of some checks
# make docs     the site with all pages, in site/: open site/index.html (the first time it installs the generator)
# make dist     the wheel and the source archive, in dist/, both tested in empty environments
# make docs-commands   every command of README, docs and examples executed, with few steps (about 6 minutes)
# make predict  predicted beside measured step time on this machine, for six layouts
# make experts-step  measured step time beside simulated, with experts over 2 and 4 processes (3 minutes)
# make reproduce  the facts and figures of the breadth-first paper, and BPipe's, simulated: docs/reproduction/
# make schedules  the table and the pictures of all families of schedules: docs/schedules/
# make plan-demo  the planner's ranking of a small model's layouts beside all of them really run (7 minutes)
# make plan-speed  how fast the planner answers, from the shell and on one core (some minutes; 405B takes most of them)
# make recipes  published trainings beside plans for them: docs/recipes.md (1 minute)
# make seeds  the twelve systems that pipeloom joins: the claim of each beside a figure made here (about a minute)
# make random-plans  300 random questions to the planner: budgets, memory, written runs, better clusters (15 minutes)
# make bench-network   beside PyTorch's pipelining over slow networks between hosts (as root; 12 minutes)
# make bench-overhead  beside PyTorch's pipelining with next to no compute (2 minutes)
# make bench-start  seconds from the command to the end of the first step (1 minute)
# make bench-peers  beside a plain loop, transformers, DDP, FSDP2, PyTorch's pipelining with real compute (some minutes)
# make bench-averages  averages of replicas over slow networks, waited for and in the background (4 minutes; takes root)
# make bench-balance  what moving activations saves and costs, with emulated compute (1 minute)
# make bench-checkpoints  steps beside a checkpoint to a disk of 20 MB/s, and without (1 minute)
# make bench-tokenize  memory and speed of tokenizing 5 GB of text (ARGS="--gb 1" for less; some minutes for each GB)
# make bench-loading  seconds that steps wait for their data, with a mixture of packed texts (2 minutes)
# make playground-pictures  the pictures of docs/playground.md; needs Chromium (as the next one)
# make playground-speed     milliseconds from a slider's move to the painted timeline, 8 x 4 x 64 (20 seconds)
# make tune     a model imported, tuned on a text, evaluated, exported and loaded by transformers (2 minutes)
# make adapted  gradients of models of transformers, by model type, as pieces and whole (1 minute)
# make signals  a run that gets SIGTERM or SIGUSR1 at 20 random moments and goes on (5 minutes)
# make hangs    runs that hang in one rank, of eight kinds, and whether `pipeloom inspect` names it (10 minutes)
# make chaos    a run with 50 faults of nine kinds that goes on, beside one without (8 minutes)
# make resume-pairs  20 layouts, each resumed from the checkpoint of each other one: 380 pairs (15 minutes)
# make steady   memory, descriptors and step times of 2,000 steps (5 minutes)
# make gpu      every CUDA path on one device, and a llama of 1 B beside a plain loop; status 2 without CUDA (10 minutes)
# make launch-schemas  files of `pipeloom launch` for Kubernetes and SkyPilot against the schemas of these (2 minutes)
# make launch-parsers  200 planned exports through the parsers of Megatron-LM and torchtitan (10 minutes;
#               MEGATRON=folder of a checkout of Megatron-LM, core 0.16.1, in place of a clone from GitHub)
# make first-choice  the first row of plans among measured layouts: TABLES="measured.csv modern.csv" (1 minute)
# make speed    actions a second that schedules are made, verified, lowered and simulated at
#
# The first use makes .venv; nothing is needed but Python >= 3.11 and make. Knobs:
#   PYTHON=python3.12        another interpreter
#   TORCH_INDEX=             PyTorch as pip is configured, on PyPI with 3 GB of CUDA libraries; without a GPU the default is
#                            PyTorch's index of CPU builds, 0.2 GB
#   PIP_ARGS="..."           for pip, such as a mirror
#   CONSTRAINTS=/dev/null    the newest torch, or one that is installed already (see SYSTEM_SITE)
#   SYSTEM_SITE=1            use the packages that the interpreter has, its torch among them
#   ARGS="..."               for pipeloom or pytest
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS    ?=
SYSTEM_SITE ?=
TORCH_INDEX ?= $(if $(SYSTEM_SITE)$(wildcard /dev/nvidia* /dev/dxg /Library),,https://download.pytorch.org/whl/cpu)
ARGS        ?=
TABLES      ?=
TRAINING    := pipeloom.training.trainer, pipeloom.training.conversions.export, torch._dynamo, torch.distributed.checkpoint
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile $(PIP_ARGS) -c $(CONSTRAINTS)
STAMP       := $(VENV)/.installed
LOADED      := numba llvmlite numpy pydantic pydantic_core rich

.PHONY: demo test test-all docs dist docs-commands plan-demo recipes seeds random-plans predict experts-step reproduce schedules plan-speed bench-network bench-overhead \
        bench-peers bench-start bench-averages bench-balance bench-checkpoints bench-tokenize bench-loading bench-generate playground-pictures playground-speed tune adapted signals \
        gpu hangs chaos resume-pairs steady launch-schemas launch-parsers first-choice speed check format clean

demo: $(STAMP)
	$(BIN)/pipeloom train $(ARGS)

# The tests start hundreds of processes: without bytecode each would compile transformers and others again.
test: check
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: check
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --all $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q -d $(VENV)/doctrees docs site
	@echo "written: site/index.html"

$(VENV)/.docs: $(STAMP)
	$(PIP) -e '.[docs]'
	@touch $@

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist > $(VENV)/built.txt 2>&1 || { cat $(VENV)/built.txt; exit 1; }
	$(BIN)/python tests/support/distribution.py dist $(ARGS)

docs-commands: $(STAMP)
	$(BIN)/python tests/support/documented.py $(ARGS)

plan-demo: $(STAMP)
	$(BIN)/python benchmarks/plan_demo.py $(ARGS)

predict: $(STAMP)
	$(BIN)/python benchmarks/predict.py

experts-step: $(STAMP)
	$(BIN)/python benchmarks/experts_step.py $(ARGS)

reproduce: $(STAMP)
	$(BIN)/python benchmarks/reproduce.py

schedules: $(STAMP)
	$(BIN)/python benchmarks/schedules.py

tune: $(STAMP)
	$(BIN)/python benchmarks/tune.py

bench-generate: $(STAMP)
	$(BIN)/python benchmarks/generating.py

adapted: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/adapted.py

signals: $(STAMP)
	$(BIN)/python benchmarks/signals.py

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

chaos: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/chaos.py $(ARGS)

resume-pairs: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/resume_pairs.py $(ARGS)

steady: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/steady.py $(ARGS)

hangs: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/hangs.py $(ARGS)

launch-schemas: $(VENV)/schemas/.installed $(STAMP)
	$(BIN)/pipeloom launch examples/run.toml --out $(VENV)/schemas/cpus --to kubeflow skypilot \
	  --image registry.example.org/pipeloom:1 > $(VENV)/schemas/written.txt
	$(BIN)/pipeloom launch examples/run.toml --out $(VENV)/schemas/gpus --to kubeflow skypilot \
	  --image registry.example.org/pipeloom:1 --name gpus --volume lustre:/data \
	  --machine.cluster dgx-h100 --layout.dp 4 > $(VENV)/schemas/written.txt
	$(VENV)/schemas/bin/python tests/support/launch_schemas.py $(VENV)/schemas/cpus $(VENV)/schemas/gpus

$(VENV)/schemas/.installed: $(STAMP)
	$(PYTHON) -m venv $(VENV)/schemas
	$(VENV)/schemas/bin/python -m pip install -q $(PIP_ARGS) kubeflow-trainer-api==2.3.0 skypilot==0.14.1
	@touch $@

# Megatron-LM's packages have its core alone, without the parser of its flags; the last three are imported by that.
launch-parsers: $(VENV)/parsers/.installed $(STAMP)
	$(BIN)/python -m pytest -m parsers -n 2 tests/export/test_parsers.py $(ARGS)

$(VENV)/parsers/.installed: $(STAMP)
	rm -rf $(VENV)/parsers
	$(PYTHON) -m venv $(VENV)/parsers
	$(VENV)/parsers/bin/python -m pip install -q $(PIP_ARGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c $(CONSTRAINTS) torch torchtitan==0.3.0 six regex triton
	$(if $(MEGATRON),ln -s $(abspath $(MEGATRON)),git clone -q --depth 1 --branch core_v0.16.1 \
	  https://github.com/NVIDIA/Megatron-LM) $(VENV)/parsers/Megatron-LM
	@touch $@

first-choice: $(STAMP)
	$(BIN)/python benchmarks/first_choice.py $(TABLES)

plan-speed: $(STAMP)
	$(BIN)/python benchmarks/plan.py

recipes: $(STAMP)
	$(BIN)/python benchmarks/recipes.py

seeds: $(STAMP)
	$(BIN)/python benchmarks/seeds.py

random-plans: $(STAMP)
	PYTHONPATH=tests/support $(BIN)/python benchmarks/random_plans.py $(ARGS)

bench-network: $(STAMP)
	$(BIN)/python benchmarks/network.py $(ARGS)

bench-overhead: $(STAMP)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

bench-start: $(STAMP)
	$(BIN)/python benchmarks/start.py $(ARGS)

bench-peers: $(STAMP)
	$(BIN)/python benchmarks/beside_peers.py $(ARGS)

bench-averages: $(STAMP)
	$(BIN)/python benchmarks/averages.py $(ARGS)

bench-balance: $(STAMP)
	$(BIN)/python benchmarks/balance.py $(ARGS)

bench-checkpoints: $(STAMP)
	$(BIN)/python benchmarks/checkpoints.py $(ARGS)

bench-tokenize: $(STAMP)
	$(BIN)/python benchmarks/tokenizing.py $(ARGS)

bench-loading: $(STAMP)
	$(BIN)/python benchmarks/loading.py $(ARGS)

playground-pictures: $(STAMP)
	$(BIN)/python benchmarks/playground.py pictures

playground-speed: $(STAMP)
	$(BIN)/python benchmarks/playground.py speed

speed: $(STAMP)
	$(BIN)/python -m pytest benchmarks/speed.py -q -p no:xdist --benchmark-disable-gc --benchmark-quiet $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist outputs site src/pipeloom.egg-info .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Making $(VENV) ..."
	$(PYTHON) -m venv $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
	@echo "Installing what pipeloom needs into it (once; about a minute, PyTorch is large) ..."
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  $(PIP) --no-deps --no-index torch 2> /dev/null || \
	  $(PIP) --no-deps --retries 0 --timeout 20 --index-url $(TORCH_INDEX) torch 2> /dev/null || \
	  echo "$(TORCH_INDEX) has no PyTorch for this machine or cannot be reached: taking what pip finds (3 GB from PyPI)"; fi
	$(PIP) -e '.[dev]'
	@echo "Compiling what commands load first, and loops (once; about 15 seconds) ..."
	@for folder in $(LOADED:%=$(VENV)/lib/python*/site-packages/%); do \
	  if [ -d $$folder ]; then $(BIN)/python -m compileall -q $$folder; fi; \
	done
	$(BIN)/python -m compileall -q src/pipeloom
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import $(TRAINING)"
	$(BIN)/pipeloom simulate examples/gpt-1t-3072-a100.toml --machine.software pipeloom > $(VENV)/simulated.txt
	@touch $@
