# Two commands need nothing beforehand but python3 with venv, make and g++:
#   make demo   installs into .venv and runs the whole pipeline on an embedded corpus
#   make test   installs into .venv and runs the tests
# Both take ARGS, for instance: make demo ARGS="--seed 2".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-slow lint format clean

install: $(STAMP)

# The constraints name the CPU build of torch where pip finds one; on a CUDA machine install torch first.
$(STAMP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fastrlhf demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
