# Each target does its own set-up: `make train` and `make test` need nothing before them but Python, make and a network.

PYTHON  ?= python3
RANKS   ?= 2
CONFIG  ?= examples/llama/configs/zero3.json
MINUTES ?= 3
WORKERS ?= 2
RUN_DIR ?= runs/llama
EXTRAS  ?= data,hf,test,bench

comma := ,
BIN   := .venv/bin
STAMP := .venv/.stamp-$(subst $(comma),-,$(EXTRAS))
# Without an accelerator an exact version is asked for, so that a build for the CPU that lies at hand is taken.
PIN   := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)

.PHONY: help venv train test test-all lint clean

help:            ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /  \1\t/p' Makefile

venv: $(STAMP)   ## virtual environment with everything installed

$(STAMP): setup.py pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv; the first time this takes a minute or more ..."
	$(BIN)/python -m pip install --quiet $(PIN) -e ".[$(EXTRAS)]"
	touch $@

train: $(STAMP)  ## train the example on RANKS ranks with CONFIG for MINUTES; again: continue
	$(BIN)/launcher --num_gpus $(RANKS) examples/llama/train.py --config $(CONFIG) --minutes $(MINUTES) --run_dir $(RUN_DIR)

# The tests of one file stay together, so that they share what the file prepares.
test: $(STAMP)   ## the tests, without the exhaustive matrix, WORKERS files at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not full"

test-all: $(STAMP)  ## every test, the exhaustive matrix too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "full or not full"

lint: $(STAMP)   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .

clean:           ## remove the virtual environment, runs and caches
	rm -rf .venv .venv-peers runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: test-peers
test-peers:      ## compare with DeepSpeed itself, installed beside this package into .venv-peers
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet $(PIN) -e ".[deepspeed,test]"
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest tests/peers
