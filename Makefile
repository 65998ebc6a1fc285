PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
STAMP := .venv/.installed

.PHONY: venv demo lint test test-all versions

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
	$(PY) experiments/demo.py

lint: venv
	$(PY) -m ruff check
	$(PY) -m mypy
	$(BIN)/lint-imports

# Two files at a time, then what waits for timeouts or measures, one after the other.
test: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not exhaustive and not gpu"
	$(PY) -m pytest -m "alone and not exhaustive and not gpu"

# Also the tests marked exhaustive, which the default selection in pyproject.toml leaves out.
test-all: lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not gpu"
	$(PY) -m pytest -m "alone and not gpu"

# The tests that compare with one process on another version: make versions TORCH=2.15.0 PYTHON=python3.13
versions:
	$(PYTHON) experiments/versions.py --torch $(TORCH) --python $(PYTHON)
