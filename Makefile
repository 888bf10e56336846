# `make demo` and `make test` work on a fresh machine: both create .venv first, once. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUTPUT := demo_output
# Parallel test processes.
JOBS ?= 2
# More arguments for pytest, for instance `make test PYTEST_ARGS="-k masks"`.
PYTEST_ARGS ?=
# Without this, jax asks the installed libtpu for a TPU first, and libtpu complains at length that there is none.
ON_CPU := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu}

.DEFAULT_GOAL := help
.PHONY: help install demo test check verify bench format clean distclean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):[^#]*## /\1\t/' | \
		while IFS='	' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

install: $(STAMP) ## create .venv and install everything for development

$(STAMP): pyproject.toml constraints.txt .ci/find_python .ci/install
	@.ci/install $(VENV) constraints.txt
	@touch $@

demo: $(STAMP) ## train a small language model and plot its loss (about 3 minutes)
	$(BIN)/python -m codegen
	$(ON_CPU) $(BIN)/python -m eqx_attn.demo --output $(DEMO_OUTPUT)

test: $(STAMP) ## run the CPU test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, and generated files against their templates
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m codegen --check

verify: $(STAMP) ## compile every kernel with every real compiler, without a device
	$(ON_CPU) $(BIN)/python -m codegen --verify --platform tpu --record
	$(ON_CPU) $(BIN)/python -m codegen --verify --platform cuda --record

bench: $(STAMP) ## time the kernels on this machine's GPU
	$(BIN)/python -m eqx_attn.bench

format: $(STAMP) ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## delete build output and caches
	rm -rf build dist *.egg-info $(DEMO_OUTPUT) .pytest_cache .ruff_cache .hypothesis
	find codegen eqx_attn generated tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## delete the environments as well
	rm -rf $(VENV) .venv-other
