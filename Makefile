# Every target does its own set-up from nothing but python3 (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
STAMPS := $(VENV)/.stamps
VERIFIERS := .venv-verifiers
VERIFIERS_PIP := $(VERIFIERS)/bin/python -m pip install --disable-pip-version-check --quiet -c $(VERIFIERS)/constraints.txt

AGAINST ?= HEAD~1

.PHONY: help setup demo faults frozen docs-site wheel package test test-slow test-vllm test-cluster test-envs test-plain check format bench results results-quick mutate mutate-wiring mutants-listed kernels docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rolecall needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e '.[dev,lora,tasks,agents,marl,plot,track,view]'
	@ls /usr/lib/*/libtcmalloc* >/dev/null 2>&1 || echo "optional: apt-get install libtcmalloc-minimal4 makes updates on a CPU faster; rolecall env says how to use it"
	@touch $@

$(STAMPS)/mutate: $(STAMPS)/dev
	$(PIP) -e '.[mutate]'
	@touch $@

$(STAMPS)/ray: $(STAMPS)/dev
	$(PIP) -e '.[ray,store]' 'moto[server]'
	@touch $@

$(STAMPS)/lessons: $(STAMPS)/dev
	$(PIP) -e '.[lessons]'
	@touch $@

$(STAMPS)/envs: $(STAMPS)/dev
	$(PIP) -e '.[openenv,verifiers,textworld]' langgraph langchain-openai
	@touch $@

# The newest verifiers that has `load_environment` installs beside everything but mcp 2: in an environment of its own.
$(STAMPS)/verifiers: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERIFIERS)
	@grep -vE '^(mcp|verifiers)==' constraints.txt > $(VERIFIERS)/constraints.txt
	$(VERIFIERS_PIP) torch
	$(VERIFIERS_PIP) -e '.[verifiers]' 'verifiers>=0.3' beartype hypothesis pytest pytest-timeout
	@touch $@

$(STAMPS)/site: $(STAMPS)/dev
	$(PIP) -e '.[site]'
	@touch $@

# Pages are tested in a real browser. Where it is missing and may not be installed, those tests are skipped, and say so.
$(STAMPS)/browser: $(STAMPS)/venv
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium and chromedriver for the tests of pages"; \
	  { apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core; }; } >/dev/null 2>&1 \
	    || echo "chromium could not be installed: the tests of pages will fail"; \
	else echo "no chromium and chromedriver: the tests of pages will be skipped; install Debian's chromium and chromium-driver"; fi
	@command -v chromedriver >/dev/null && touch $@ || true

setup: $(STAMPS)/dev  ## the environment in .venv

test: $(STAMPS)/dev $(STAMPS)/browser  ## the default test suite
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMPS)/lessons  ## tests that take minutes or a downloaded model
	$(BIN)/pytest -m slow --timeout=3000

test-vllm: $(STAMPS)/dev  ## rollouts through a real vLLM server, in an environment of its own that is made at first use
	$(BIN)/pytest -m vllm --timeout=1800 tests/real_vllm

test-cluster: $(STAMPS)/ray  ## Ray actors on a cluster of three machines that Ray fakes here, and rollouts in a bucket of a local S3 server
	$(BIN)/pytest -m slow --timeout=1200 tests/cluster

test-envs: $(STAMPS)/envs $(STAMPS)/verifiers  ## environments of other packages, for real: OpenEnv, verifiers (the oldest and the newest), TextWorld, LangGraph
	$(BIN)/pytest -m slow --timeout=600 tests/agents
	$(VERIFIERS)/bin/python -m pytest -m "slow or not slow" --timeout=600 tests/agents/test_verifiers.py

test-plain: $(STAMPS)/dev  ## the tests of models, engines and updates with every fast path turned off
	ROLECALL_FLAT=0 ROLECALL_KERNELS=0 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/policy tests/rollout tests/agents tests/train tests/recipes

kernels: $(STAMPS)/dev  ## every C file compiled and tested for x86-64-v2, v3, v4 and this machine; for aarch64 emulated
	@command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null 2>&1; } || true
	$(BIN)/python .ci/kernels

faults: $(STAMPS)/dev $(STAMPS)/browser  ## the tests of every fault that a run must survive: how many hold; writes their table in docs/reliability.md
	$(BIN)/python .ci/faults

check: $(STAMPS)/dev  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMPS)/dev  ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMPS)/dev  ## SFT, a reward model, PPO and GRPO on the built-in model
	$(BIN)/rolecall demo

bench: $(STAMPS)/dev  ## rebuild docs/performance.md, against TRL, transformers and vLLM; then the smaller benchmarks
	$(BIN)/python benchmarks/performance.py
	$(BIN)/python benchmarks/front_door.py
	$(BIN)/python benchmarks/gae.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/marl.py
	$(BIN)/python benchmarks/store.py

results-quick: $(STAMPS)/dev  ## rebuild docs/results.md from one seed
	$(BIN)/python benchmarks/results.py --quick

results: $(STAMPS)/dev  ## rebuild docs/results.md from three seeds; continues where it stopped
	$(BIN)/python benchmarks/results.py

docs: $(STAMPS)/dev  ## rebuild the page of options from their docstrings
	$(BIN)/python -m rolecall.config.docs

docs-site: $(STAMPS)/site  ## the documentation as a site in site/, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@! grep -rlE '<(script|link|img)[^>]+(src|href)="https?://' site --include='*.html' || { echo "these pages load something from the network"; exit 1; }

wheel: $(STAMPS)/dev  ## the wheel in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

package: $(STAMPS)/dev  ## the wheel in dist/, installed into an empty environment and tried there without a compiler
	rm -rf dist && $(MAKE) --no-print-directory wheel
	$(BIN)/python benchmarks/package.py

mutate: $(STAMPS)/mutate  ## mutation tests of the maths: survivors and score
	rm -rf mutants
	$(BIN)/mutmut run --max-children 1
	@$(BIN)/mutmut results
	@$(BIN)/mutmut export-cicd-stats > /dev/null
	@$(BIN)/python -c 'import json; s = json.load(open("mutants/mutmut-cicd-stats.json")); print("killed", s["killed"] + s["timeout"], "of", s["total"])'

mutate-wiring: $(STAMPS)/dev  ## mutation tests of everything but the maths, on a sample: score and survivors; goes on where it stopped
	$(BIN)/python benchmarks/mutate_wiring.py

frozen: $(STAMPS)/dev  ## whether every command does what it did: AGAINST=COMMIT, by default the last one
	$(BIN)/python benchmarks/frozen.py --against $(AGAINST)

mutants-listed: $(STAMPS)/dev  ## known mistakes of the wiring: each must make a test fail; writes their table in docs/numerics.md
	$(BIN)/python benchmarks/mutants_listed.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis mutants .mutate
