# The commands of the project. `make demo` and `make test` work on a fresh machine with Python 3.11 or newer
# (with its headers), a C++20 compiler and make; another Python is named by `make PYTHON=python3.12 demo`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: help demo test check check-native check-gpu format clean

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

demo: $(VENV)/.host ## install, and ask the demo model a question through two workers
	@$(BIN)/duckllm chat --prompt "What is a duck?" --workers 2

test: $(VENV)/.dev ## the whole suite, the kernels under every instruction set
	@scripts/test

check: $(VENV)/.dev ## style and types: ruff, mypy, clang-format
	@scripts/check

check-native: $(VENV)/.dev ## the native tests under sanitizers
	@scripts/check-native

check-gpu: $(VENV)/.dev ## the tests that need an NVIDIA GPU
	@scripts/check-gpu

format: $(VENV)/.dev ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix && $(BIN)/ruff format
	@find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

clean: ## remove what was built and installed here
	rm -rf $(VENV) build dist src/*.egg-info

$(VENV)/.made:
	@scripts/make-venv "$(PYTHON)" $(VENV)
	@touch $@

$(VENV)/.host: $(VENV)/.made $(BUILD_INPUTS)
	@echo "Installing dependencies into $(VENV), then compiling the kernels (minutes the first time) ..."
	@$(PIP) -e '.[host]'
	@touch $@

# The package is compiled once: this only adds the tools to what .host installed.
$(VENV)/.dev: $(VENV)/.host
	@echo "Installing the developers' tools into $(VENV)"
	@$(PIP) 'duckllm[dev]'
	@touch $@
