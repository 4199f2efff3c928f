# The commands a contributor needs. Each sets up what it needs first.
# Tests run in three processes on any machine, since they mostly wait for processes and links; those
# that are slow run alone, since they take both cores or compare times. If a case fails in `make test`,
# it runs once more with the machine to itself: what fails again is no matter of load.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/pytest -n 3 --no-loadscope-reorder

TRAINERS := .venv-trainers
WITH_TRAINERS := $(TRAINERS)/.installed

.PHONY: setup demo test test-all test-trainers lint browser bench-against clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(WITH_TRAINERS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,trainers]'
	touch $(WITH_TRAINERS)

demo: setup
	$(BIN)/thalweg demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	scripts/check-prose

browser: setup
	scripts/browser

test: lint browser
	$(PYTEST) -m "not slow" || { [ $$? -eq 1 ] && $(BIN)/pytest -m "not slow" --last-failed; }

test-all: lint browser
	$(PYTEST) -m "not slow" --hypothesis-profile thorough
	$(BIN)/pytest -m slow --hypothesis-profile thorough
	$(MAKE) test-trainers

test-trainers: $(WITH_TRAINERS)
	$(TRAINERS)/bin/pytest tests/trainers

bench-against: setup
	scripts/bench-against $(REV)

clean:
	rm -rf $(VENV) $(TRAINERS) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
