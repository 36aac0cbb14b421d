# make check    the main job: the reference against the oracle on the tiny model
# make test     lint, types and tests (Hypothesis profile ci)
# make explore  the same tests, long and random, with those marked slow
#
# Each creates .venv and installs into it what is missing. No GPU and no model hub is needed.

PYTHON ?= python3
BIN := .venv/bin
# Stands for "the environment holds what pyproject.toml and constraints.txt ask for".
INSTALLED := .venv/.installed

export HF_HUB_OFFLINE = 1

.PHONY: check test explore install

check: $(INSTALLED)
	$(BIN)/note-parity check

test: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -q --hypothesis-profile ci

explore: $(INSTALLED)
	$(BIN)/pytest -n 2 -q --hypothesis-profile explore --timeout 3600

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,oracle,media]'
	touch $@
