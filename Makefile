# Every target does its own set-up: the first call makes .venv and installs the pinned
# packages into it, later calls only run.

OLDEST_JAX := 0.11.2
OLDEST_TESTS := tests/test_transform.py tests/test_rewrite.py tests/test_hints.py tests/test_graphs.py \
  tests/test_collectives.py tests/test_composites.py tests/test_laws.py tests/test_program_size.py \
  tests/test_marks.py tests/test_keys.py tests/test_partial_manual.py tests/test_measure.py \
  tests/test_compressed_gradients.py tests/test_gradients_buckets.py tests/test_gradients_windows.py \
  tests/test_make_mesh.py tests/test_value_and_grad.py

PY := .venv/bin/python
OLDEST_PY := .venv-oldest/bin/python
RUN := JAX_PLATFORMS=cpu $(PY)

# A candidate counts only if it runs: version managers put names on the path that do not.
CANDIDATES := python3.13 python3.12 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python3 python3
RUNS := -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help demo demo-int8 test test-oldest lint format types bench convergence clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: .venv/installed ## train a small language model plain and optimised on 8 virtual CPU devices
	$(RUN) examples/train_lm.py --virtual-devices 8 --mesh host=2,device=4 \
	  --topology '2*cpu:4@200Mbit' --out runs/demo

demo-int8: .venv/installed ## the same with int8 between hosts, beside the exact run
	$(RUN) examples/train_lm.py --virtual-devices 8 --mesh host=2,device=4 --steps 30 \
	  --topology '2*cpu:4@200Mbit' --codec int8@host --max-ratio 0.27 --out runs/demo-int8

test: .venv/installed-aot ## all tests, with the TPU and GPU compilers
	$(PY) -m pytest -n 2 $(PYTEST_ARGS)

test-oldest: .venv-oldest/installed ## the pass, primitives and collectives on the oldest jax, a third of the cases
	$(OLDEST_PY) -m pytest -n 2 --every 3 $(PYTEST_ARGS) $(wildcard $(OLDEST_TESTS))

lint: .venv/installed-dev ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: .venv/installed-dev ## let ruff rewrite the files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: .venv/installed-dev ## mypy
	$(PY) -m mypy

bench: .venv/installed-aot .venv/installed-bench ## overhead, planning, schedules against bounds, audits, kernels, errors of codecs, regret, slow links, training over one
	$(RUN) bench/overhead.py --rounds 3
	$(RUN) bench/planner.py --rounds 3
	$(RUN) bench/schedules.py
	$(RUN) bench/audit.py
	$(RUN) bench/kernels.py --mib 16
	$(RUN) bench/errors.py
	$(RUN) -m bench.regret --quick || [ $$? = 125 ]
	$(RUN) -m bench.wire --quick || [ $$? = 125 ]
	$(RUN) -m bench.cluster --hosts 2 --devices 4 --rate 200mbit -- python examples/train_lm.py \
	  --distributed --quick --mesh host=2,device=4 --topology '2*cpu:4@200Mbit' --out runs/hosts-2 \
	  || [ $$? = 125 ]
	$(RUN) -m bench.cluster --hosts 4 --devices 2 --rate 200mbit -- python examples/train_lm.py \
	  --distributed --quick --mesh host=4,device=2 --topology '4*cpu:2@200Mbit' --out runs/hosts-4 \
	  || [ $$? = 125 ]

convergence: .venv/installed-bench ## train through each codec and compressor: about 10 minutes
	$(RUN) bench/convergence.py

clean: ## remove the virtual environments and everything that was built
	rm -rf .venv .venv-oldest build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps: what is installed follows pyproject.toml and constraints.txt. A .venv whose
# python has gone, or is too old, is made anew.
ifneq ($(shell $(PY) $(RUNS) && echo yes),yes)
.PHONY: .venv/pyvenv.cfg
endif
ifneq ($(shell $(OLDEST_PY) $(RUNS) && echo yes),yes)
.PHONY: .venv-oldest/pyvenv.cfg
endif

.venv/pyvenv.cfg .venv-oldest/pyvenv.cfg:
	@for python in $(CANDIDATES); do \
	  if "$$python" $(RUNS); then \
	    echo "$$python -m venv --clear $(@D)"; exec "$$python" -m venv --clear $(@D); \
	  fi; \
	done; \
	echo "xcoll needs Python 3.12 or newer, with venv, and found none (tried python3.13," >&2; \
	echo "python3.12, ~/.pyenv/versions, python3). Install one, for example with" >&2; \
	echo "'apt-get install python3.12 python3.12-venv', 'brew install python@3.13' or" >&2; \
	echo "'pyenv install 3.13', and call make again." >&2; \
	exit 1

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint

.venv/installed: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(PY) $(PIP_INSTALL) constraints.txt hatchling
	$(PY) $(PIP_INSTALL) constraints.txt --no-build-isolation --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PY) $(PIP_INSTALL) constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

.venv/installed-bench: .venv/installed
	$(PY) $(PIP_INSTALL) constraints.txt --no-build-isolation --editable '.[bench]'
	@touch $@

.venv/installed-aot: .venv/installed-dev
	$(PY) $(PIP_INSTALL) constraints.txt --no-build-isolation --editable '.[aot]'
	@touch $@

.venv-oldest/installed: .venv-oldest/pyvenv.cfg pyproject.toml constraints.txt
	sed -E 's/^(jax|jaxlib)==.*/\1==$(OLDEST_JAX)/' constraints.txt >.venv-oldest/constraints.txt
	$(OLDEST_PY) $(PIP_INSTALL) .venv-oldest/constraints.txt hatchling
	$(OLDEST_PY) $(PIP_INSTALL) .venv-oldest/constraints.txt --no-build-isolation \
	  --editable '.[dev]'
	@touch $@
