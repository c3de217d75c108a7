# Each target sets up what it needs: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
# Without bytecode, every process compiles the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs test test-slow test-long records records-pause records-resume lint format clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,attacks,export,dev]'
	touch $@

demo: .venv/.installed ## train, certify and attack on digits, and write a page that shows it
	$(BIN)/orthoconv demo

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: .venv/.docs ## the documentation, into site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: .venv/.installed ## the quick suite, about two minutes on two idle cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: .venv/.docs ## the longer tests, and a build of the documentation
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

test-long: .venv/.installed ## three hours of faults, fuzzing, compilation and attacks: the figures of docs/reliability.md
	$(BIN)/python -m pytest -s -m long

records: .venv/.installed ## run what is missing in the tables, at the lowest priority; stop and start it at any time
	@# Linux shares its cores out by session (autogroup), so nice alone does not yield to other terminals.
	@(echo 19 > /proc/self/autogroup) 2>/dev/null || true
	@# Huge pages save a tenth of a training step of KWLarge, and glibc asks for them only if told at the start.
	OMP_WAIT_POLICY=passive GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/orthoconv records run --workers $(WORKERS)

records-pause: .venv/.installed ## stop the queue of records for the time of a benchmark
	$(BIN)/orthoconv records pause

records-resume: .venv/.installed ## let it continue
	$(BIN)/orthoconv records resume

lint: .venv/.installed ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed ## write the code as ruff formats it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that was made here
	rm -rf .venv runs dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
