PYTHON ?= .venv/bin/python

.PHONY: setup check test docs curves faults

setup:
	python3 -m venv .venv
	.venv/bin/pip install -e '.[quickstart,dev]'

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q -n 0 tests/unit/test_layering.py

test:
	$(PYTHON) -m pytest

MODULES = $(addprefix accel_ft., $(patsubst accel_ft/%.py,%,$(wildcard accel_ft/[a-z]*.py)) \
	checkpoint data diagnosis engine model reporting runtime)

# The reference of everything public, from its docstrings, into site/.
docs:
	$(PYTHON) -m pdoc --docformat google --output-directory site accel_ft $(MODULES)

# One curve under every strategy, as a table; ROWS=file.csv for rows of your own.
curves:
	$(PYTHON) examples/benchmarks/curves.py $(if $(ROWS),--train_file $(ROWS))

# Everything that can happen to a run, done to it; about half an hour on two cores. Root, for the small disks.
faults:
	$(PYTHON) tests/faults/campaign.py --full
