PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
STAMP := .venv/.installed

.PHONY: venv demo lint test test-all

venv: $(STAMP)

# torch goes first and pinned, so that no other package decides which torch is installed. On Linux PyPI serves its
# CUDA build; for the smaller CPU build set PIP_EXTRA_INDEX_URL to PyTorch's CPU index before the first make.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("autoplan needs Python 3.11 or newer: make PYTHON=python3.11" \
		if sys.version_info < (3, 11) else 0)'
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

# What needs no processes captures and plans, on one core: two files at a time. The processes of the others share what
# is there, and some of them wait for timeouts: one after the other.
test: lint
	$(PY) -m pytest -n 2 --dist loadfile -m "not processes and not exhaustive and not gpu"
	$(PY) -m pytest -m "processes and not exhaustive and not gpu"

# Also the tests marked exhaustive, which the default selection in pyproject.toml leaves out.
test-all: lint
	$(PY) -m pytest -n 2 --dist loadfile -m "not processes and not gpu"
	$(PY) -m pytest -m "processes and not gpu"
