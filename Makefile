# Each command sets up what it needs: a virtual environment in .venv with the tested versions.

PYTHON ?= python3
# The PyTorch to install: a requirement or the path of a wheel.
TORCH ?=
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo check dist docs test test-fast test-full test-clang torch-versions lint format clean help FORCE

help:
	@echo "make demo         train a small model made of everything here"
	@echo "make check        run every operator on this machine"
	@echo "make test         all tests that this machine can run, with a sample of each kind of kernel"
	@echo "make test OP=quant.per_token_cast   the tests of one operator"
	@echo "make test-fast    what to run after every edit: no emulation, no compiler, one process"
	@echo "make test-full    every sample emulated, every kernel compiled for every architecture (hours)"
	@echo "make test-clang   the emulator with clang as its compiler, which is downloaded (a minute)"
	@echo "make torch-versions   a fast subset with each PyTorch that has a small wheel (minutes)"
	@echo "make docs         the documentation as a site in build/site, to open from disk or serve"
	@echo "make dist         sdist and wheel in dist/, tested in a fresh environment"
	@echo "make lint         ruff and mypy"
	@echo "PYTHON=... is the interpreter, TORCH=... a requirement or wheel of PyTorch to install"

# PyTorch comes first: one that $(PYTHON) or .venv has is reused; TORCH=... installs that one instead.
.venv/ready: pyproject.toml constraints.txt tools/setup_env.py $(if $(TORCH),FORCE)
	$(PYTHON) tools/setup_env.py $(if $(TORCH),--torch '$(TORCH)')
	touch $@

FORCE:

demo: .venv/ready
	$(BIN)/python -m examples.tiny_v4.train

check: .venv/ready
	$(BIN)/tile-kernels check

dist: .venv/ready
	$(BIN)/python tools/dist.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "The documentation is in build/site. Open $(CURDIR)/build/site/index.html in a browser,"
	@echo "or serve it while you edit: $(BIN)/mkdocs serve, then http://localhost:8000"

PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
OP ?=

test: .venv/ready
	$(PYTEST) $(if $(OP),--op $(OP))

test-fast: .venv/ready
	$(PYTEST) -m "not emulated and not compiled and not multiprocess and not slow"

test-full: .venv/ready
	$(PYTEST) --full

# The package ziglang has a clang, which by default compiles for this machine's processor and adds a sanitizer.
build/clang/clang++: Makefile
	$(BIN)/pip install --quiet --upgrade --target $(@D) ziglang==0.17.0
	printf '#!/bin/sh\nexec %s c++ "$$@" -mcpu=baseline -fno-sanitize=undefined\n' $(CURDIR)/$(@D)/ziglang/zig > $@
	chmod +x $@

test-clang: .venv/ready build/clang/clang++
	PATH="$(CURDIR)/build/clang:$$PATH" $(BIN)/python -m pytest -q tests/emulator/test_clang.py

# The range of PyTorch: fresh environments, then the table of docs/release.md. Wheels for CUDA exceed the limit.
TORCH_MB ?= 300

torch-versions: .venv/ready
	$(BIN)/python tools/torch_versions.py --max-mb $(TORCH_MB)
	$(BIN)/python docs/tables.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
