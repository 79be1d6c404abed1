# Every target makes its own environment. SGLANG chooses the release: make test SGLANG=0.5.17
PYTHON ?= python3
SGLANG ?= 0.5.23
VENV ?= .venv-$(SGLANG)
BIN = $(VENV)/bin

.PHONY: demo test test-all test-releases lint bench docs sanitize sanitize-memory sanitize-threads

demo: $(VENV)/installed
	$(BIN)/python -m sglang_pat.demo

# Two processes; the servers of a file are all in one of them. Files in the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15

test: $(VENV)/installed
	$(PYTEST) -m "not slow and not release" $(TESTS)

test-all: $(VENV)/installed
	$(PYTEST) $(TESTS)

test-releases: $(VENV)/installed
	$(BIN)/python tests/releases.py $(RELEASES)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find sglang_pat/csrc tests benchmarks/csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python benchmarks/cpu_decode.py

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# uv resolves and unpacks SGLang's 8.5 GB in about a minute.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python "sglang==$(SGLANG)" -e ".[dev]"
	touch $@

# The native scheduler's tests, once with each sanitizer; they need neither torch nor SGLang. Traces are what strangers send. The CPU kernels, which need
# torch, with one only: torch's threads are OpenMP's, of which ThreadSanitizer knows nothing. Three of their 96
# extends are enough here: with the 101 other tests they take 28 s of a CPU.
sanitize: sanitize-memory sanitize-threads

sanitize-memory: $(VENV)/installed
	SGLANG_PAT_SANITIZE=address,undefined LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest --noconftest --capture=no tests/test_native.py tests/test_extend_plans.py tests/test_trace.py tests/test_cpu_kernel.py -k 'not without_sglang and (not test_extends or True-7-1-30)'

sanitize-threads: $(VENV)/installed
	SGLANG_PAT_SANITIZE=thread LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1 \
		$(BIN)/python -m pytest --noconftest --capture=no tests/test_native.py tests/test_extend_plans.py
