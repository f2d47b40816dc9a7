# `make test` sets up everything on a fresh machine and runs all tests. The other targets are for daily work.

PYTHON ?= python3
VENV ?= .venv

.PHONY: setup test unit lint format test-state-index test-model-runner browser pictures dashboard-picture matrix soak soak-mooncake nightly docs dist clean

# The operators' tests run in a process of their own, without our conftest; before all others, whose closing line is the last.
# Without torch they are all skipped, which pytest calls 5.
PYTEST := $(VENV)/bin/python -m pytest
FLA_TESTS := $(PYTEST) --noconftest tests/fla || [ $$? = 5 ]

setup:
	VENV=$(VENV) PYTHON=$(PYTHON) .ci/setup

test: setup
	$(FLA_TESTS)
	$(PYTEST) --ignore=tests/fla --cov --cov-report=term

unit: setup
	$(FLA_TESTS)
	$(PYTEST) --ignore=tests/fla -m unit

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format:
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Rows of padded states, and the operators that use them.
test-state-index: setup
	$(FLA_TESTS)
	$(PYTEST) tests/memory/test_state_rows.py tests/memory/test_state_rows_device.py tests/memory/test_states.py

# What a model runner gets: the views of its KV cache, and vLLM's own beside them.
test-model-runner: setup
	$(PYTEST) $(wildcard tests/memory/test_model_runner*.py tests/memory/test_cache_views.py tests/vllm)

# Our pages in a headless browser, the pictures of docs/report.md, and the timeline file.
browser: setup
	$(PYTEST) tests/browser

pictures: setup
	$(VENV)/bin/python -m tests.browser.looking docs/images

# The dashboard as Grafana's own components draw it, in docs/operating.md: needs npm; takes three minutes.
dashboard-picture: setup
	$(VENV)/bin/pip install -q pillow
	$(VENV)/bin/python -m tests.browser.dashboard docs/images/dashboard-light.png

# Tests on every Python that we support, with the lowest and the newest versions of what we need: see .ci/matrix.
matrix:
	.ci/matrix

# The long runs: see docs/simulation.md.
soak: setup
	for start in 0 10000 20000 30000 40000 50000 60000 70000 80000 90000; do \
		$(VENV)/bin/kvactors simulate --seeds $$start:$$((start + 10000)) --jobs 2 || exit 1; \
	done

# A replay on a real Mooncake whose master is killed and started again, a hundred times over; prints what it met.
soak-mooncake: setup
	KVACTORS_KILLS=100 $(PYTEST) tests/mooncake/test_kills.py

nightly: setup
	start=$$(( $$(date +%s) / 86400 * 20000 )); $(VENV)/bin/kvactors simulate --seeds $$start:$$((start + 20000)) --jobs 2
	$(PYTEST) -m sim

# The documentation as a site, in site/; a link or an anchor that leads nowhere is an error.
docs:
	[ -x $(VENV)/bin/mkdocs ] || { $(PYTHON) -m venv $(VENV) && $(VENV)/bin/pip install -q -e '.[docs]'; }
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# Wheel and sdist, in dist/: the same bytes from the same sources (tests/release).
dist: setup
	$(VENV)/bin/hatchling build

clean:
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
