# Everything there is to do with this repository. Each target makes or updates .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs-installed
MINDSPORE_STAMP := .venv/.mindspore-installed
# Processes start twice as fast where what they import has been compiled: the first that imports it writes that down.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo tour test test-torch test-mindspore thorough newest check lint types format docs operators programs architectures bench fuzz kills clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:[^#]*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv .venv

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check
MADE_FROM := pyproject.toml constraints.txt hatch_build.py $(wildcard hyper_parallel/core/*/*.c)

$(STAMP): $(MADE_FROM) | $(BIN)/python
	$(INSTALL) -e '.[torch,dev,cli,demo,models]'
	@touch $@

# All at once: what is imported is compiled then, and most of it never is.
$(MINDSPORE_STAMP): $(MADE_FROM) | $(BIN)/python
	$(INSTALL) --no-compile -e '.[torch,mindspore,dev,cli,demo,models]'
	@touch $(STAMP) $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) -e '.[torch,docs]'
	@touch $@

demo: $(STAMP)  ## trains a model as one process and as four on a mesh, kills it and goes on, and compares: about three minutes
	$(BIN)/python examples/demo.py

tour: $(STAMP)  ## four processes show the platform at work
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 examples/platform_tour.py

test: $(MINDSPORE_STAMP) lint  ## formatting, lint, types and all tests, on PyTorch and on MindSpore
	$(MAKE) -j2 types test-torch
	$(MAKE) test-mindspore

test-torch: $(STAMP)
	$(PYTEST)

test-mindspore: $(MINDSPORE_STAMP)  ## the tests that run on MindSpore, and those of both frameworks together
	HYPER_PARALLEL_PLATFORM=mindspore GLOG_v=3 $(PYTEST)

thorough: export HYPER_PARALLEL_THOROUGH := 1
thorough: test  ## the same with more that is drawn at random, and every combination: half an hour and more

# On its own: on Linux the newest build brings several GB of CUDA packages along.
newest:  ## the tests with the newest torch that the registry has, in an environment of its own
	$(PYTHON) -m venv build/newest
	grep -vE '^(torch|sympy|filelock|fsspec|networkx)==' constraints.txt > build/newest/constraints.txt
	PIP_CONSTRAINT=build/newest/constraints.txt build/newest/bin/pip install --quiet --upgrade -e '.[torch,dev,cli,demo,models]'
	build/newest/bin/python -c 'import torch; print("torch", torch.__version__)'
	build/newest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: lint types  ## formatting, lint, types

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)  ## formats and fixes what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(DOCS_STAMP)  ## generates tables, pictures and the reference, and builds the pages into site/
	$(BIN)/python tools/platform_table.py
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/errors_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

operators: $(STAMP)  ## sweeps over all operators of torch and writes docs/operators.md: half an hour
	rm -rf build/operators
	$(BIN)/python -m tools.operators --page

programs: $(STAMP)  ## runs 10,000 random programs on distributed tensors and writes docs/programs.md: half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tools.programs --count 10000 --page

architectures: $(STAMP)  ## compares small models of all architectures with one process by `auto_plan` and writes docs/architectures.md: a quarter of an hour
	rm -f build/architectures.json
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tools.architectures --page

bench: $(STAMP)  ## tables of measurements; nothing else should run meanwhile
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/redistribution.py
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/tensor_parallel.py
	$(BIN)/python benchmarks/data_parallel_links.py
	$(BIN)/python benchmarks/fully_shard.py --growth
	$(BIN)/python benchmarks/pipelines.py
	$(BIN)/python benchmarks/pipeline_links.py
	$(BIN)/python benchmarks/context_parallel.py
	$(BIN)/python benchmarks/expert_parallel.py
	$(BIN)/python benchmarks/checkpoint_planning.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/order_check.py

fuzz: $(STAMP)  ## feeds a million damaged and forged files to what reads checkpoints: about ten minutes
	$(BIN)/python tools/fuzz_checkpoint.py --inputs 1000000

kills: $(STAMP)  ## kills ranks while they save and looks at what is left: about five minutes
	$(BIN)/python tools/kill_saves.py --kills 240

clean:  ## removes everything that was made
	rm -rf .venv site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
