# What a stranger types: `make demo`, then `make test`. Both make .venv when it is missing.
# Needs Python >= 3.11, git and make. Choose the Python with: make test PYTHON=python3.12
# Another release of torch or of Lightning, in an environment of its own: make test TORCH=2.11.0, LIGHTNING=2.7.0

PYTHON ?=
TORCH ?=
LIGHTNING ?=
# it becomes the name of a folder
ifneq ($(strip $(TORCH)),$(notdir $(firstword $(TORCH))))
$(error TORCH="$(TORCH)" is no release of torch. Give all three numbers, for instance: make test TORCH=2.13.0)
endif
ifneq ($(strip $(LIGHTNING)),$(notdir $(firstword $(LIGHTNING))))
$(error LIGHTNING="$(LIGHTNING)" is no release of Lightning. Give its number, for instance: make test LIGHTNING=2.7.0)
endif
VENV := .venv$(if $(TORCH),-torch-$(strip $(TORCH)))$(if $(LIGHTNING),-lightning-$(strip $(LIGHTNING)))
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# any Python with torch and lightning will do for the benchmark: make bench-gpu PYTHON_BENCH=python3
PYTHON_BENCH ?= $(RUN)
# tests of one file stay in one process, in the order of tests/conftest.py; WORKERS= runs all of them in this one
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# for `make demo` and `make bench-gpu`: make demo ARGS="--precision 16-mixed"
ARGS ?=

# Images for containers often set it. The tests start Python a hundred times, and compile all that they import each time.
unexport PYTHONDONTWRITEBYTECODE

# a later step reads what an earlier one wrote, and two of them would fight for the cores
.NOTPARALLEL:
.PHONY: help install demo test test-full soak mutants lint format notebooks docs drawings bench bench-gpu evidence results-check clean

help:
	@echo "make demo        train the demo; options in ARGS, for instance ARGS='--precision 16-mixed'"
	@echo "make test        lint, types, tests, doctests (at most 6 minutes on 2 cores)"
	@echo "make test-full   the same, and the slow tests and the notebooks"
	@echo "make soak        20,000 steps of interrupted runs, 100 kills, 200 fits in one process (hours)"
	@echo "make mutants     three random one-line changes per package: which of them do its tests not see? (an hour)"
	@echo "make lint        ruff and mypy only;  make format rewrites the files"
	@echo "make notebooks   run the notebooks, keeping nothing"
	@echo "make docs        the documentation, into build/docs; make drawings draws its figures anew"
	@echo "make bench       what it costs beside stock Lightning and a plain loop, into docs/results (5 minutes)"
	@echo "make bench-gpu   the GPU benchmark, into docs/results; PYTHON_BENCH=python3 needs no .venv"
	@echo "make evidence    paired runs in every precision, into docs/results (an hour); ARGS=--quick: minutes"
	@echo "make results-check  a small cell of each page of docs/results again, beside its stated range (minutes)"
	@echo "make clean       remove .venv, caches and builds"
	@echo "TORCH=2.11.0     with any of these: that release of torch, in .venv-torch-2.11.0 (8 GB)"
	@echo "LIGHTNING=2.7.0  with any of these: that release of Lightning, in .venv-lightning-2.7.0"

install: $(INSTALLED)

# written last, so an install that was cut short is done again
$(INSTALLED): pyproject.toml constraints.txt scripts/make_venv.sh
	@sh scripts/make_venv.sh $(VENV) "$(PYTHON)" "$(strip $(TORCH))" "$(strip $(LIGHTNING))"
	@touch $(INSTALLED)

demo: $(INSTALLED)
	$(RUN) -m lightning_mp demo $(ARGS)

# each release of torch has other annotations, so that some of `# type: ignore` are needed with the pinned one only
lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy $(if $(TORCH),--no-warn-unused-ignores)

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: lint
	$(RUN) -m pytest $(WORKERS) -m "not full"

test-full: lint
	$(RUN) -m pytest $(WORKERS)
	$(MAKE) notebooks

soak: $(INSTALLED)
	$(RUN) -m pytest tests/soak tests/resume/test_exact_resume_on_ranks.py --soak-steps 20000 --soak-fits 200

# not in CI: which random one-line changes of the product no test of their package sees
mutants: $(INSTALLED)
	$(RUN) scripts/mutants.py $(ARGS)

notebooks: $(INSTALLED)
	$(RUN) -m pytest $(WORKERS) --nbmake --nbmake-timeout=90 notebooks

# DOCS_INVENTORIES=required fails where links to the documentation of torch and Lightning cannot be made
docs: $(INSTALLED)
	rm -rf docs/api
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -b html docs build/docs
	$(RUN) scripts/check_search.py build/docs
	@echo "open build/docs/index.html"

drawings: $(INSTALLED)
	$(RUN) scripts/draw.py

bench: $(INSTALLED)
	$(RUN) tests/benchmarks/bench_cost.py --out docs/results/cost_cpu.md $(ARGS)

bench-gpu: $(if $(filter $(RUN),$(PYTHON_BENCH)),$(INSTALLED))
	PYTHONPATH="$(CURDIR)" $(PYTHON_BENCH) tests/benchmarks/bench_gpu.py --out docs/results $(ARGS)

# the pictures of one part are scikit-learn's; without a network the others run nevertheless
evidence: $(INSTALLED)
	@$(RUN) -c "import sklearn" 2>/dev/null || $(RUN) -m pip install --quiet --constraint constraints.txt scikit-learn || true
	$(RUN) scripts/evidence.py $(ARGS)

# provenance and figures of docs/results, and a small cell of each page run again
results-check: $(INSTALLED)
	PYTHONPATH=tests/support:tests/benchmarks $(RUN) tests/benchmarks/results_check.py $(ARGS)

clean:
	rm -rf .venv .venv-torch-* .venv-lightning-* $(VENV) build dist docs/api ./*.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
