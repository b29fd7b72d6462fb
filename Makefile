# make demo  environment + the main job (runs/demo)
# make test  environment + lint + every test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env demo test lint format constraints clean

env: $(STAMP)

# Plain pip and a constraints file: torch==2.13.0 is the newest with a CPU wheel where this is built.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/oblrpo train demo --output runs/demo

test: lint
	$(BIN)/pytest -n auto

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

clean:
	rm -rf $(VENV) runs
