# Every target makes its own environment. SGLANG chooses the release: make test SGLANG=0.5.23
PYTHON ?= python3
SGLANG ?= 0.5.17
VENV ?= .venv-$(SGLANG)
BIN = $(VENV)/bin

.PHONY: demo test lint bench

demo: $(VENV)/installed
	$(BIN)/python -m sglang_pat.demo

test: $(VENV)/installed
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python benchmarks/cpu_decode.py

# uv resolves and unpacks SGLang's 8.5 GB in about a minute.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python "sglang==$(SGLANG)" -e ".[dev]"
	touch $@
