# Two commands set everything up on a machine that has only Python (>= 3.11) and make:
#   make demo    measure this machine, plan, predict and train a small GPT, compare
#   make test    the test suite

PYTHON ?= python3
VENV := .venv
PURE := .venv-pure
BIN := $(VENV)/bin
# Where there is no NVIDIA driver, constraints.txt pins the CPU build of torch.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints.txt)

# The documentation tool prints a note on its own future into every build.
export NO_MKDOCS_2_WARNING := 1

# Tests and examples start hundreds of processes. Without bytecode, each one compiles all of weft anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-pure quick tables compiled examples mutants late check bench docs pictures clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23.1"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[torch,data,loggers,opentelemetry,dev,docs]"
	touch $@

demo: install
	PYTHON=$(BIN)/python examples/demo/demo.sh

# The pure half is tested where there is no torch, the rest where there is. Four runners for two cores: some
# tests wait for processes, and the others fill their time.
test: test-pure install
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not pure and not examples and not compiler and not tables"

test-pure: $(PURE)/.installed
	$(PURE)/bin/python -m pytest -n 2 --dist loadgroup -p no:cacheprovider

$(PURE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PURE)
	$(PURE)/bin/python -m pip install --quiet --upgrade "pip>=23.1"
	$(PURE)/bin/python -m pip install --quiet $(CONSTRAINTS) -e ".[test]"
	touch $@

# What to run after each change: the tests that it touches, nearest first, for at most a minute.
quick: install
	$(BIN)/python tests/touched.py $(SINCE)

# The rows of the equality table that tests/equality_cover.py leaves out of `make test`, and the longest runs.
tables: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m tables tests/run tests/training tests/methods

compiled: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m compiler

examples: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m examples

mutants: install
	PYTHONPATH=tests $(BIN)/python tests/mutants/run_all.py $(ROOMS)

# All rows of the equality table on late accelerators, with three seeds of their times each.
late: install
	WEFT_LATE_SEEDS=3 $(BIN)/python -m pytest -n 2 --dist loadgroup -m processes tests/run/test_equality_table.py -k late

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/check_prose.py
	$(BIN)/python -m pytest --quiet --no-header tests/mutants/test_mutations.py tests/test_class_names.py
	# With --quiet no warning reaches --strict.
	$(BIN)/mkdocs build --strict --site-dir site

# Continues where it was stopped; `python benchmarks/tables.py` then makes the tables of docs/benchmarks.md.
bench: install
	$(BIN)/python benchmarks/run_all.py

docs: install
	$(BIN)/mkdocs build --strict --site-dir site

pictures: install
	PYTHONPATH=tests $(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/walkthrough.py docs/coming-from/*.md
	$(BIN)/python docs/notebook_pages.py

clean:
	rm -rf $(VENV) $(PURE) site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
