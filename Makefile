# Two commands are all a newcomer needs: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Where PyPI's torch brings CUDA and you want the small CPU build (or the other way round), name the build:
# make TORCH='torch==2.13.0+cpu' quickstart, with the index that has it in PIP_EXTRA_INDEX_URL.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin

.PHONY: quickstart test test-all check bench clean

quickstart: $(VENV)/.installed
	$(BIN)/miles launch quickstart

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m "not slow and not docker and not harness and not sglang and not hub"

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -q

check: $(VENV)/.installed
	$(BIN)/ruff check miles tests benchmarks scripts examples
	$(BIN)/ruff format --check miles tests benchmarks scripts examples
	$(BIN)/mypy
	$(BIN)/mypy --strict benchmarks scripts examples
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/session_server.py
	$(BIN)/python benchmarks/async_vs_sync.py
	$(BIN)/python -m benchmarks.tree_packing
	$(BIN)/python -m benchmarks.delta_sync
	$(BIN)/python -m benchmarks.loss_memory
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.http_clients
	$(BIN)/python -m benchmarks.harnesses
	$(BIN)/python -m benchmarks.env_workers --add gymnasium:Taxi-v4

# torch first: whatever depends on it then takes the build that is there.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Miles needs Python 3.11 or newer: make PYTHON=python3.12 quickstart"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
