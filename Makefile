# sp24: `make help` lists the targets. `make demo` and `make test` need only python3 and pip.

VENV := .venv
# The interpreter of every target. `make test-gpu PY=python3` takes one that has the dependencies
# already (a GPU machine without a network) and builds no venv.
PY := $(VENV)/bin/python
BOOTSTRAP := python3

ifeq ($(PY),$(VENV)/bin/python)
ENV := $(VENV)/.stamp
endif
SP24 := $(PY) -m sp24cli.cli

# Tests side by side: a BLAS of all cores in each would only wait for the others' (a solve of 20 ms
# took two minutes).
ALONGSIDE = $(if $(JOBS),OMP_NUM_THREADS=1)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint docs test-gpu sanitize golden bench kernels check-kernels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(ENV) ## build .venv: sp24 (editable) and the development tools

# pip before 25.1 cannot read dependency groups, so pip itself comes first.
$(VENV)/.stamp: pyproject.toml
	$(BOOTSTRAP) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet --editable . --group dev
	touch $@

demo: $(ENV) ## download a small real model; prune, quantize and verify all of its linear weights
	PY="$(PY)" SP24="$(SP24)" bash samples/demo.sh demo

test: JOBS ?= auto
test: $(ENV) ## the tests that need no GPU, JOBS=4 at a time, or one a core
	$(ALONGSIDE) $(PY) -m pytest tests/cpu -q --numprocesses=$(JOBS)

lint: $(ENV) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(ENV) ## write docs/cli.md from the commands' help
	$(PY) docs/make_cli.py

test-gpu: $(ENV) ## the tests on a Hopper GPU, JOBS=8 at a time; fails, never skips, where there is none
	SP24_REQUIRE_GPU=1 $(ALONGSIDE) $(PY) -m pytest tests/gpu -q $(if $(JOBS),--numprocesses=$(JOBS) -p no:benchmark)

sanitize: $(ENV) ## every kernel under compute-sanitizer, memcheck and racecheck (GPU, nvcc), JOBS=8 at a time
	$(ALONGSIDE) tests/gpu/sanitize.sh "$(PY)"

golden: $(ENV) ## record what a Hopper GPU makes of seeded matrices, for the tests without one
	$(PY) tests/golden/record.py

bench: $(ENV) ## verify and time the kernels on a Hopper GPU
	$(SP24) bench --suite llm

kernels: $(ENV) ## rebuild the fatbins and their manifest (needs nvcc of CUDA 13)
	$(PY) cuda/build.py

check-kernels: $(ENV) ## check the fatbins against manifest and sources, and their machine code
	$(PY) cuda/check.py

clean: ## remove what was built, and the venv
	rm -rf build dist demo $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
