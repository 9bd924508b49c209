# Two commands: `make demo` and `make test`. Each does all its own set-up in .venv.
#
#   make demo     train a small GPT with four workers on the CPU
#   make test     lint, then the whole test suite
#   make soak     the same properties with large counts, and the long runs
#   make mutants  do the tests notice faults? tries some hundred, in copies of the tree
#   make gpu      what needs a GPU: its tests, and its figures into gpu-results.json
#   make lint     style, types, C++ format, shell scripts, one-way imports
#   make native   build the C++ (and, where nvcc is found, CUDA) library into the package
#   make clean    remove what was built; `make distclean` also removes .venv and runs
#
# PYTHON=python3.12 chooses an interpreter (3.10 to 3.13), VENV=path another place for the
# environment, PYTEST_ARGS="-k name" a part of the tests, JOBS=2 how many processes test at the same
# time, CPU=avx2 or CPU=baseline the instruction sets that kernels and libraries may use (default:
# all that the processor has), MUTANTS_ARGS="--only planner" a part of the faults (--help says what
# else).

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LIBRARY := megatron_flex/libmegatron_flex.so
KERNELS := $(shell find kernels/src kernels/cuda kernels/twin -type f) kernels/CMakeLists.txt kernels/build.py
CPP := find kernels \( -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' \)

# What an older processor would run, as far as this one can show it.
CPU ?=
ifneq ($(CPU),)
ifeq ($(filter $(CPU),avx2 baseline),)
$(error CPU=$(CPU): use CPU=avx2 or CPU=baseline)
endif
export MEGATRON_FLEX_CPU := $(CPU)
export ATEN_CPU_CAPABILITY := $(if $(filter avx2,$(CPU)),avx2,default)
export MKL_CBWR := $(if $(filter avx2,$(CPU)),AVX2,COMPATIBLE)
export MKL_ENABLE_INSTRUCTIONS := $(if $(filter avx2,$(CPU)),AVX2,SSE4_2)
export ONEDNN_MAX_CPU_ISA := $(if $(filter avx2,$(CPU)),AVX2,SSE41)
endif

# Tests start some hundred processes: without compiled modules each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

export OMP_NUM_THREADS := 1
export PYTHONPATH := $(CURDIR)

.PHONY: demo test soak mutants gpu lint native clean distclean
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime $(LIBRARY)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

# JOBS processes share the files, the long ones first (tests/order.py): as many as there are cores,
# since what tests start computes, too.
test: lint
ifeq ($(PYTEST_ARGS),)
	$(BIN)/python -m pytest -q --durations=40 -n $(JOBS) --dist loadfile --no-loadscope-reorder
else
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)
endif

soak: $(VENV)/.dev $(LIBRARY)
	$(BIN)/python -m pytest -q --durations=20 --soak \
	  $(or $(PYTEST_ARGS),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants.run $(MUTANTS_ARGS)

# With the Python that has PyTorch for CUDA, as it is: see tools/gpu.py.
gpu:
	$(or $(PYTHON),python3) tools/gpu.py

lint: $(VENV)/.dev $(LIBRARY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x $$(find examples -name '*.sh')
	$(BIN)/clang-format --dry-run -Werror $$($(CPP))
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

native: $(LIBRARY)

# The Python that makes the environment: PYTHON, or the first suitable one on PATH.
$(VENV)/.made:
	@set -e; found=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
	      2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python from 3.10 to 3.13 found; install one, or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	if ! "$$found" -m venv --clear $(VENV) >/dev/null 2>&1; then \
	  "$$found" -m venv --clear --without-pip $(VENV) && \
	  "$$found" -m pip --python $(VENV)/bin/python install --quiet pip || { \
	    echo "This Python cannot make virtual environments; on Debian: apt install python3-venv" >&2; \
	    exit 1; \
	  }; \
	fi
	@touch $@

# What running needs. The library is built by its own rule below, so that an edited kernel does
# not install anything again.
$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints.txt setup.py
	@echo "Installing (PyTorch is the large part), and building the native library"
	@$(PIP) install -c constraints.txt setuptools
	@command -v cmake >/dev/null || $(PIP) install -c constraints.txt cmake
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the tools for tests and lint"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(LIBRARY): $(KERNELS) | $(VENV)/.runtime
	$(BIN)/python kernels/build.py

clean:
	rm -rf build dist *.egg-info $(LIBRARY) megatron_flex/twin_manager .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) runs
