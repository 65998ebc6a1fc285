PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
STAMP := .venv/.installed

.PHONY: venv demo lint quick test test-all exhaustive versions

venv: $(STAMP)

# torch goes first and pinned, so that no other package decides which torch is installed. On Linux PyPI serves its
# CUDA build; for the smaller CPU build set PIP_EXTRA_INDEX_URL to PyTorch's CPU index before the first make.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("autoplan needs Python 3.11 to 3.13: make PYTHON=python3.11" \
		if not (3, 11) <= sys.version_info < (3, 14) else 0)'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -c constraints.txt torch
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(PY) -m experiments.demo.run

lint: venv
	$(PY) -m ruff check
	$(PY) -m mypy
	$(BIN)/lint-imports

# One path through every room of the house: under 2 minutes on 2 cores.
quick: lint
	$(PY) -m pytest tests/quick tests/ir tests/house/test_limits.py

# Two files at a time.
IN_TWO = $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# The files that have tests marked alone: reading all others takes longer than some of these tests.
ALONE = $(PY) -m pytest $$(grep -rl "mark\.alone" tests --include="test_*.py")

# All but the tests marked slow, two files at a time, then what waits for timeouts or measures, one after the other.
test: lint
	$(IN_TWO) -m "not alone and not slow and not exhaustive and not gpu"
	$(ALONE) -m "alone and not slow and not exhaustive and not gpu"

# Every test but the exhaustive ones and those of a GPU: make test's, then the slow ones. CI runs this (.ci/run).
test-all: lint
	$(IN_TWO) -m "not alone and not slow and not exhaustive and not gpu"
	$(ALONE) -m "alone and not exhaustive and not gpu"
	$(IN_TWO) -m "slow and not alone and not exhaustive and not gpu"

# Every pair of features, and every combination of degrees and options in one process: hours.
exhaustive: venv
	$(IN_TWO) -m exhaustive

# The tests that compare with one process on another version: make versions TORCH=2.15.0 PYTHON=python3.13
versions:
	$(PYTHON) -m experiments.compatibility.versions --torch $(TORCH) --python $(PYTHON)
