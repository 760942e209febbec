# Every target is one line of `make help`. Needs python >= 3.11, make and git.
PYTHON ?= python3
TOOLS := build/tools
BESIDE := build/beside
IN_TOOLS = PATH="$(abspath $(TOOLS))/bin:$$PATH"
# test.txt locks uv, too: pip installs uv, and uv the others, in less time.
UV_INSTALL = $(IN_TOOLS) python "{{cookiecutter.project}}/requirements/with_uv.py" install --quiet --require-hashes \
	--index-strategy unsafe-best-match
# Tests wait for processes and servers now and then: three workers keep two cores busy, and four end no sooner.
WORKERS = $(shell echo $$(($$(nproc) * 3 / 2)))
PYTEST = $(IN_TOOLS) PYTHONPATH="$(abspath $(BESIDE))" build/venv/bin/python -m pytest \
	--numprocesses $(WORKERS) --maxprocesses 4 --dist loadscope --no-loadscope-reorder
# Projects made below build/ lie inside this repository and are repositories of their own all the same.
export GIT_CEILING_DIRECTORIES := $(abspath build)
# Without bytecode a process takes three times as long to load torch, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo environment test test-hosts test-all lint lock released golden chaos step-cost order loader sharding networks proof hashing portability stock measure bench-check times scaling allocation picture page architecture gpu-bundle gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(TOOLS)/.locked  ## generate a project, train it twice in different ways, compare the bits
	@$(IN_TOOLS) python tools/demo.py

test: environment  ## test generation, a generated project and its library (TESTS=FILES); minutes
	@echo "pytest"
	@$(PYTEST) $(or $(TESTS),-m "not long")

test-hosts: environment  ## test containers, Slurm, PostgreSQL, networks, other CPUs; as root, it installs packages
	@$(IN_TOOLS) python tests/hosts/packages.py
	@echo "pytest"
	@$(PYTEST) $(or $(TESTS),tests/hosts)

# Without --keep-duplicates pytest drops tests/hosts, which lies in tests, and then leaves it out as norecursedirs says.
test-all: environment  ## run the tests of both, side by side, as CI does; as root
	@$(IN_TOOLS) python tests/hosts/packages.py
	@echo "pytest"
	@$(PYTEST) --keep-duplicates tests/hosts tests

lint: $(TOOLS)/.locked  ## ruff over the template's own code, import-linter over the library
	@echo "ruff, import-linter"
	@$(IN_TOOLS) ruff check --quiet .
	@$(IN_TOOLS) ruff format --check --quiet .
	@$(IN_TOOLS) lint-imports --no-cache --no-logo

lock: $(TOOLS)/.locked  ## write requirements/test.txt anew (python 3.11)
	@echo "compiling requirements/test.txt"
	@$(IN_TOOLS) CUSTOM_COMPILE_COMMAND="make lock" pip-compile --quiet --generate-hashes --allow-unsafe \
		--strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements/test.txt requirements/test.in

released: $(TOOLS)/.locked  ## make the released runs again (STARTERS=series) and write their digests into the starters
	@$(IN_TOOLS) python tools/released.py $(STARTERS)

golden: $(TOOLS)/.locked  ## train the golden set on all worlds and write tests/golden.json; half an hour
	@$(IN_TOOLS) python tools/golden.py

chaos: $(TOOLS)/.locked  ## kill a training at 100 instants and at each system call, compare the bits (KILLS=100 SEED=0); half an hour
	@$(IN_TOOLS) python tools/chaos.py --kills $(or $(KILLS),100) --seed $(or $(SEED),0)

step-cost: $(TOOLS)/.locked  ## measure what agreement, the trace and the look at attributes cost per step, on CPU; five minutes
	@$(IN_TOOLS) python tools/step_cost.py

order: $(TOOLS)/.locked  ## measure time and memory to enter an epoch of up to 10^10 samples; five minutes
	@$(IN_TOOLS) python tools/order.py

loader: $(TOOLS)/.locked  ## measure samples per second of a run's loader beside a plain DataLoader's; five minutes
	@$(IN_TOOLS) python tools/loader.py

sharding: $(TOOLS)/.locked  ## measure what sharded models send and hold, on CPU, and between hosts, as root; fifteen minutes
	@$(IN_TOOLS) python tools/sharding.py

networks: $(TOOLS)/.locked  ## run `samebits verify` on ten networks of other people (NAMES=swin), on CPU; half an hour
	@$(IN_TOOLS) python tools/networks.py $(addprefix --only ,$(NAMES))

proof: $(TOOLS)/.locked  ## let 200 runs prove themselves, count false alarms, and measure what a proof takes (RUNS=200); two hours
	@$(IN_TOOLS) python tools/proof.py --runs $(or $(RUNS),200)

hashing: $(TOOLS)/.locked  ## measure what checking 10^5 files, or 10 GB, costs at the start of a run; ten minutes
	@$(IN_TOOLS) python tools/hashing.py

portability: $(TOOLS)/.locked  ## measure which operations of torch give one result on all CPUs; twenty minutes
	@$(IN_TOOLS) python tools/portability.py

stock: $(TOOLS)/.locked  ## measure the bits of plain PyTorch, Fabric and Accelerate beside this project's, on CPU; five minutes
	@$(IN_TOOLS) python measure/bits.py

measure: $(TOOLS)/.locked  ## measure steps of a project beside plain PyTorch, Fabric and Accelerate, on CPU; 15 minutes
	@$(IN_TOOLS) python measure/document.py

times: $(TOOLS)/.locked  ## measure how long commands let a user wait; a quarter of an hour
	@$(IN_TOOLS) python measure/times.py

bench-check: $(TOOLS)/.locked  ## say whether a project has become slower beside plain PyTorch than docs/peers.md says
	@$(IN_TOOLS) python measure/check.py

scaling: $(TOOLS)/.locked  ## measure steps on 1, 2 and 4 processes, and the bytes that they send, on CPU; three minutes
	@$(IN_TOOLS) python measure/scaling.py

allocation: $(TOOLS)/.locked  ## measure what a step gains where memory of gradients is kept, on CPU; eight minutes
	@$(IN_TOOLS) python measure/allocation.py

picture: $(TOOLS)/.locked  ## draw the README's picture from what commands print; two minutes
	@$(IN_TOOLS) python tools/picture.py

page: $(TOOLS)/.locked  ## take the README's picture of a report; needs chromium; a minute
	@$(IN_TOOLS) python tools/page.py

architecture: $(TOOLS)/.locked  ## draw the rooms of the library and their imports, docs/architecture.md
	@$(IN_TOOLS) python tools/architecture.py

gpu-bundle: $(TOOLS)/.locked  ## pack the GPU checks into build/gpu-bundle, for a machine with Python, torch and no network
	@$(IN_TOOLS) python benchmarks/bundle.py

gpu: $(if $(RESULTS),$(TOOLS)/.locked,gpu-bundle)  ## run the GPU checks here (TRAIN_PYTHON=…), or take RESULTS=DIR, and write benchmarks/gpu.md
	@$(if $(RESULTS),,PYTHON="$(or $(TRAIN_PYTHON),python3)" build/gpu-bundle/run.sh all || [ $$? = 1 ])
	@$(IN_TOOLS) python benchmarks/table.py $(or $(RESULTS),build/gpu-bundle/results) benchmarks/gpu.md

clean:  ## remove everything that was built
	rm -rf build .pytest_cache .ruff_cache .mypy_cache

$(TOOLS)/.locked: requirements/test.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON): $$($(PYTHON) --version 2>&1) seen, Python 3.11 or newer wanted; name one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "installing the template's tools into $(TOOLS)"
	@$(PYTHON) -m venv --clear $(TOOLS)
	@sed -n '/^uv==/,/# via/p' $< >$(TOOLS)/uv.txt
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(TOOLS)/uv.txt
	@$(UV_INSTALL) -r $<
	@touch $@

$(BESIDE)/.locked: requirements/beside.txt $(TOOLS)/.locked
	@$(UV_INSTALL) --no-deps --target $(BESIDE) -r $<
	@touch $@

environment: $(BESIDE)/.locked
	@$(IN_TOOLS) python tools/bake.py
