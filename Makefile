# Setpoint's commands. Each does its own set-up, the first time only.
#
#   make serve    install what is needed and serve the default model on 127.0.0.1:30000
#                 (PORT=8000, ARGS="--model-path … --mem-fraction-static 0.5")
#   make test     the test suite: CPU only, about ten minutes on two cores
#   make full     the long tests too, half an hour on two cores, and real clients, each in an environment of its own (.venv-clients,
#                 6 GB of downloads the first time); then the goldens with the newest transformers (.venv-newest), unless
#                 there is no network; then the quick ones on every other Python from 3.11 to 3.13 that is
#                 installed (on the PATH or in pyenv), some ten minutes each, in environments of their own (.venv-3.12, …)
#   make quick    of these, the tests that your change can break (BASE=main)
#   make gpu      the tests that need an NVIDIA GPU, on one: kernels, goldens, graphs, servers
#   make durations  the test suite, and from it the order in which the next runs start the files
#   make check    format, lint, types, architecture
#
# torch comes from pip's default index, where a plain Linux install brings the CUDA build. TORCH_SOURCE_ARGS goes to pip for
# torch alone, for another source: make serve TORCH_SOURCE_ARGS="--index-url URL-of-CPU-wheels".

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=
TORCH_SOURCE_ARGS ?=
BASE ?=
export PYTHON TORCH_SOURCE_ARGS
# Some environments forbid Python to keep what it compiles. A server, its engine and each of the hundreds of processes that
# the tests start would then compile the same sources again, which is a third of what a start costs.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
SERVE := $(VENV)/.serve-installed
DEV := $(VENV)/.dev-installed

.PHONY: help serve test quick gpu durations full check types lint clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

serve: $(SERVE)
	@exec $(BIN)/setpoint serve --port $(PORT) $(ARGS)

# Three test files at a time: most tests keep one core busy, or wait. The longest files start first (tests/durations.json, which
# `make durations` makes anew). A test that takes longer than the limit ends its worker, because code under test may catch an
# exception that is raised within it.
QUICK := -n 3 --dist loadfile --no-loadscope-reorder --timeout-method thread -m "not full and not gpu"

test: $(DEV)
	$(BIN)/pytest $(QUICK)

# The tests that can break by what differs from BASE, the branch main if it is not given.
quick: $(DEV)
	$(BIN)/pytest $(QUICK) $$($(BIN)/python scripts/tests_of_diff.py $(BASE))

# Elsewhere Triton is interpreted (tests/conftest.py).
gpu: $(DEV)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU: nothing was tested")'
	TRITON_INTERPRET=0 $(BIN)/pytest -rs --timeout-method thread -m "gpu and not full" tests/gpu

durations: $(DEV)
	$(BIN)/pytest $(QUICK) --junitxml $(VENV)/report.xml
	$(BIN)/python scripts/durations.py $(VENV)/report.xml

full: test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout-method thread -m "full and not gpu"
	@scripts/test-newest-transformers $(VENV)
	@scripts/test-other-pythons $(VENV)

check: lint types
	$(BIN)/pytest tests/arch

types: $(DEV)
	$(BIN)/mypy

# The fast half of check: what the pre-commit hooks run.
lint: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run -Werror src/setpoint/engine/kernels/cpu/*/*.cpp src/setpoint/engine/kernels/cpu/*/*.h

clean:
	rm -rf $(VENV) $(VENV)-3.* $(VENV)-newest .venv-clients

$(SERVE): pyproject.toml constraints.txt
	@scripts/setup $(VENV) serve

$(DEV): pyproject.toml constraints.txt
	@scripts/setup $(VENV) dev
