# `make test` sets up everything on a fresh machine and runs all tests. The other targets are for daily work.

PYTHON ?= python3
VENV ?= .venv

.PHONY: setup test unit lint format clean

setup:
	VENV=$(VENV) PYTHON=$(PYTHON) .ci/setup

test: setup
	$(VENV)/bin/python -m pytest

unit: setup
	$(VENV)/bin/python -m pytest -m "not mooncake and not vllm and not sim"

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format:
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
