# Everything runs from .venv, which the first target that needs it makes. Requirements: python3 (3.11-3.13) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo fleet-demo serve test lint format stubs bench bench-peers soak lock compose-test wheels transcript docs first-light first-light-wheels gpu-check compat clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.venv/.server: pyproject.toml constraints.txt $(wildcard ferrum_rpc_*/pyproject.toml ferrum_rpc_kernels/setup.py ferrum_rpc_kernels/src/*)
	@echo "installing the executor (torch and friends) into .venv: minutes where they must be fetched ..."
	@$(PYTHON) tools/environment.py server,uvloop
	@touch $@

.venv/.dev: .venv/.server
	@echo "installing the development tools into .venv ..."
	@$(PYTHON) tools/environment.py server,dev
	@touch $@

setup: .venv/.dev  ## Make .venv with everything in it

demo: .venv/.server  ## Serve the demo model and let the reference scheduler complete 8 prompts at once
	@$(BIN)/python tools/demo.py

fleet-demo: .venv/.server  ## Three executors, one scheduler over them, one executor killed in the middle
	@$(BIN)/python -m tools.fleet_demo

serve: .venv/.server  ## Serve the demo model on port 50051
	@$(BIN)/ferrum-rpc serve demo

# Four workers for two cores: a third of a worker's time is waiting for processes and timers. Bytecode is written, for
# a hundred processes compile the package without it. What fails (status 1) is tried once more by itself: a shared machine
# stalls for seconds now and then. Both results are printed, and what fails beside others only is a race to mend. A worker
# that crashes ends the run: behind one that was restarted pytest-xdist waited for ever.
test: .venv/.dev  ## Run the whole suite
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder || \
	{ [ $$? = 1 ] && $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none; }

lint: .venv/.dev  ## Style, types, protos, stubs, links of the docs, containers, and whether everything can be installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/buf lint
	@$(BIN)/buf breaking protos --against protos/landed.binpb --exclude-imports
	@$(BIN)/python tools/generate_stubs.py --check
	@$(BIN)/python tools/generate_sync.py --check
	@$(BIN)/python -m tools.monitoring --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/hadolint Dockerfile
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml docker-compose.gpu.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml
	@$(BIN)/python -m tools.lock --check

format: .venv/.dev  ## Format the code
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

stubs: .venv/.dev  ## Generate what is generated: stubs from protos/, clients without asyncio, deploy/monitoring
	@$(BIN)/python tools/generate_stubs.py
	@$(BIN)/python tools/generate_sync.py
	@$(BIN)/python -m tools.monitoring

bench: .venv/.dev  ## How fast, beside limits and a peer, and what gRPC costs; writes docs/benchmarks.md
	@$(BIN)/python -m benchmarks suite
	@$(BIN)/python -m benchmarks protocol
	@$(BIN)/python -m benchmarks trips
	@$(BIN)/python -m benchmarks streams
	@$(BIN)/python -m benchmarks streams --model qwen3-0.6b --prompt 16 --tokens 32
	@$(BIN)/python -m benchmarks grammars
	@$(BIN)/python -m benchmarks grammars --model qwen3-0.6b --tokens 8 --rounds 5
	@$(BIN)/python -m benchmarks quantized
	@$(BIN)/python -m benchmarks memory
	@$(BIN)/python -m benchmarks transfer
	@$(BIN)/python -m benchmarks ranks
	@$(BIN)/python -m benchmarks prefix
	@$(BIN)/python -m benchmarks report

bench-peers: .venv/.dev  ## Ours beside vLLM, OpenVINO, llama.cpp and transformers, an environment each (the first time: minutes)
	@$(BIN)/python -m benchmarks peers
	@$(BIN)/python -m benchmarks report

soak: .venv/.dev  ## Try every promise at full size (hours); writes benchmarks/results/soak.json and docs/soak.md
	@$(BIN)/python -m tests.faults.soak

lock: .venv/.dev  ## Write locked/, what the images install with hashes, from constraints.txt
	@$(BIN)/python -m tools.lock

compose-test:  ## Build the images and run the stack (needs a Docker engine; skips visibly without)
	@$(PYTHON) -m tools.compose_test

wheels:  ## Collect the images' packages in build/wheels, for an engine without a network
	@$(PYTHON) -m tools.wheels

compat: .venv/.dev  ## Load the stubs with the oldest and newest grpcio and protobuf that we promise
	@$(BIN)/python tools/compat_check.py

transcript: .venv/.dev  ## Write docs/transcript.md from real calls
	@$(BIN)/python tools/transcript.py

docs: .venv/.dev  ## Build the documentation site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "python3 -m http.server --bind 127.0.0.1 --directory build/site 8000 shows it, with the search"

first-light:  ## On a CUDA machine with torch, triton and transformers: run all that waits for one, step by step
	@$(PYTHON) -m benchmarks.gpu first-light

first-light-wheels: .venv/.dev  ## Collect in wheels/ what first light needs besides, for a machine without an index
	@$(BIN)/python -m tools.wheels first-light

gpu-check:  ## On a CUDA machine: measure against its limits, write benchmarks/results/gpu-check.json
	@$(PYTHON) -m benchmarks.gpu

clean:  ## Remove .venv and what the tools left
	@rm -rf .venv .venv-peers build dist *.egg-info ferrum_rpc_*/build ferrum_rpc_*/*.egg-info ferrum_rpc_kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
