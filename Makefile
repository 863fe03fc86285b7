# Each target sets up its own virtual environment first, so one command is enough on a fresh machine.
#
#   make train      a policy learns from MuJoCo physics, and shows it; `make help` lists the rest
#
# How torch is installed can be overridden. The version is pinned; the build is yours to choose:
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
TORCH ?= torch==2.13.0
TRAIN ?= profile=demo
TEST ?=
JOBS ?= 2
BENCH ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install train test test-exhaustive test-exhaustive-ray check lint types contracts docs format bench clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP)  ## Set up .venv with the tested versions

# torch comes first and without its dependencies, from wherever TORCH says. The second step then finds it in place,
# held there by the constraints, and adds what is missing; so no other build of torch is ever fetched.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11, or say make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "millpond needs Python 3.11 or newer, and $(PYTHON) is not: say make PYTHON=/path/to/python"; exit 1; }
	$(PIP) --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps $(TORCH)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $(VENV)/constraints.txt
	$(PIP) install --quiet -c $(VENV)/constraints.txt -e '.[train,ray,dev,docs]'
	@touch $@

train: $(STAMP)  ## Train a policy on MuJoCo physics for about three minutes and show what it learned
	$(BIN)/millpond train $(TRAIN)

# A process that was connected to Ray is not fit for anything else, so what needs Ray has one of its own; it waits most of
# the time, and goes first when it does not. Status 5: there was no such test.
test: $(STAMP)  ## Run the tests, JOBS of them at a time beside those that need Ray (TEST="-k name" for some of them)
	@$(BIN)/python -m pytest --ray only $(TEST) > $(VENV)/ray-tests.log 2>&1 & beside=$$!; \
	trap 'kill -INT $$beside 2> /dev/null' INT TERM; \
	nice -n 5 $(BIN)/python -m pytest --ray without --numprocesses $(JOBS) --dist loadgroup $(TEST); others=$$?; \
	wait $$beside; ray=$$?; cat $(VENV)/ray-tests.log; \
	echo "exit status: $$others, and $$ray of what needs Ray"; \
	test $$others -eq 0 -o $$others -eq 5 && test $$ray -eq 0 -o $$ray -eq 5

test-exhaustive: $(STAMP)  ## Run the many alike cases that `make test` leaves out
	$(BIN)/python -m pytest --exhaustive only --ray without --numprocesses $(JOBS) --dist loadgroup $(TEST)

test-exhaustive-ray: $(STAMP)  ## The same for what needs Ray
	$(BIN)/python -m pytest --exhaustive only --ray only $(TEST)

check: lint types contracts docs  ## All of the next four; with make -k also after one has failed

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

contracts: $(STAMP)  ## Which package may import which
	$(BIN)/lint-imports --no-logo

docs: $(STAMP)  ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --site-dir site

format: $(STAMP)  ## Let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Run the benchmarks (BENCH="replay" for one of them) into benchmarks/results
	$(BIN)/python -m benchmarks $(BENCH)

clean:  ## Remove everything that can be made again, .venv included
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
