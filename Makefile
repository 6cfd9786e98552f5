# Each command sets up what it needs: a virtual environment in .venv with the tested versions.

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo check docs test lint format test-arches clean help

help:
	@echo "make demo         train a small model made of everything here"
	@echo "make check        run every operator on this machine"
	@echo "make test         all tests that this machine can run"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make lint         ruff and mypy"
	@echo "make test-arches  compile every kernel with nvcc for all architectures (slow)"

# PyTorch comes first and exactly as pinned, so that nothing after it asks for another build.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/python -m examples.tiny_v4.train

check: .venv/ready
	$(BIN)/tile-kernels check

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test: .venv/ready
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-arches: .venv/ready
	TILE_KERNELS_TEST_ARCHES=1 $(BIN)/python -m pytest -q -n $(JOBS) tests/test_compile.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
