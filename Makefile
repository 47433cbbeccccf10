# Everything from a bare clone: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests run in so many processes beside this one, each file of them in one; 2 take two thirds of the time, and a quiet machine.
TEST_PROCESSES ?= 0

.PHONY: setup demo test check soak format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "penstock needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,test,dev]'
	@# What pip does for a package that is not editable: without it, and where Python is told to keep no bytecode, every start
	@# compiles everything anew: 50 ms of 190 until a loader's first batch.
	$(BIN)/python -m compileall -q src
	@touch $(READY)

demo: $(READY)
	$(BIN)/penstock demo

test: $(READY)
	$(BIN)/pytest -m 'not soak and not alone' --numprocesses=$(TEST_PROCESSES) --dist=loadfile
	$(BIN)/pytest -m 'alone and not soak'

check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports

# Long random crash schedules; minutes to hours, by PENSTOCK_SOAK_S (seconds, default 300).
soak: $(READY)
	$(BIN)/pytest -m soak --timeout=0

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache penstock-demo build dist
