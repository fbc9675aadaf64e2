# make serve      virtual environment, native build, server on 127.0.0.1:8080 with Owlet, our small model
# make test       all tests
# 
# BACKEND=cpu|cuda|hip|vulkan|metal   what the native part is built for
# GPU_TARGETS=...                     GPU architectures (hip: gfx1151 unless given; cuda: the GPUs found)
# CMAKE_FLAGS=...                     more definitions for llama.cpp, for example -DGGML_NATIVE=OFF
# MODEL=path.gguf HOST= PORT= ARGS=   what `make serve` serves (or smollm2), where, and more flags of `gufo serve`
# PYTHON=python3.12                   the Python that makes .venv
# GUFO_CACHE_DIR=...                  where downloads and native builds are kept

BACKEND     ?= cpu
GPU_TARGETS ?=
CMAKE_FLAGS ?=
MODEL       ?=
HOST        ?= 127.0.0.1
PORT        ?= 8080
ARGS        ?=
TESTS       ?=
PYTHON      ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; done; echo $$p)

PY      := .venv/bin/python
BUILD   := native/build.py
KIND    := --kind '$(BACKEND)' --gpu-targets '$(GPU_TARGETS)' --cmake-flags='$(CMAKE_FLAGS)'
PYTEST  := $(PY) -m pytest

.PHONY: serve native venv venv-dev test test-fast test-long qualify tools bench-quick check-hip lint format clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile
	@echo 'Targets: serve test test-fast test-long qualify native tools venv-dev bench-quick check-hip lint format clean'

serve: native
	@exec .venv/bin/gufo serve $(if $(MODEL),'$(MODEL)') --host '$(HOST)' --port '$(PORT)' $(ARGS)

venv:
	@$(PYTHON) $(BUILD) venv $(KIND)

venv-dev:
	@$(PYTHON) $(BUILD) venv $(KIND) --extras dev

native: venv
	@$(PY) $(BUILD) native $(KIND)

# No model, no native library: layers, keys, the cache against its slow models, crash images.
test-fast: venv-dev
	$(PYTEST) -m 'not native and not slow and not long' $(TESTS)

# The fast part first; then everything that needs the library, where a missing one is a failure.
test: test-fast
	@$(PY) $(BUILD) native $(KIND)
	GUFO_REQUIRE_NATIVE=1 $(PYTEST) -m '(native or slow) and not long' $(TESTS)

# Searches that take minutes to hours: exhaustive power cuts, kills at every call, long state machines.
test-long: venv-dev
	$(PYTEST) -m long --timeout 0 $(TESTS)

# The full matrix of architectures and paths, compared as bytes; takes long.
qualify: venv-dev
	@$(PY) $(BUILD) native $(KIND)
	$(PY) -m tests.qualification $(ARGS)

# Upstream's own server and benchmark, of the same build: what ours is compared with.
tools: native
	@$(PY) $(BUILD) tools $(KIND) llama-server llama-bench

# Does the device code of the HIP backend compile for gfx1151?  Without ROCm the compiler and the headers come
# from Debian and are unpacked into the cache folder.  ARGS=--every: all sources instead of one per family.
check-hip: venv
	@$(PY) native/check_hip.py --gpu-targets '$(GPU_TARGETS)' $(ARGS)

# An agent's day against llama-server in its short form; the README's tables are filled from what was measured.
bench-quick: tools
	@$(PYTHON) $(BUILD) venv $(KIND) --extras dev bench
	$(PY) -m benchmarks.agent --quick
	$(PY) -m benchmarks.agent.ablations --scale 0.5
	$(PY) -m benchmarks.agent.restart --tokens 4000 --rounds 1
	$(PY) -m benchmarks.serve --quick --model qwen4exp
	$(PY) -m benchmarks.table

lint: venv-dev
	$(PY) -m ruff check .
	$(PY) -m mypy

format: venv-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# What make put into the checkout.  The cache folder is shared by all checkouts: docs/building.md.
clean:
	rm -rf .venv .build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gufo_gguf tests native benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
