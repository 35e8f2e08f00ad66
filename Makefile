# make demo    train a small GPT-2 on real text with every head watched, plant a fault, see the alert
# make test    run the tests, but for the slow ones; all of them: make test PYTEST_ARGS="-n auto"
# make lint    ruff and mypy
# Each installs pinned versions into .venv the first time, and again only when the pins change.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto -m "not slow"

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/attnmon demo

# One thread a worker: the tests' tensors are small, and the workers already fill the cores.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "attnmon needs Python 3.10 or newer, and '$(PYTHON)' is not ($$($(PYTHON) -V 2>&1 | tail -1))." \
			"Name another one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (torch is large: this takes some minutes)"
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

# The dev extra contains the demo extra: after it the demo has nothing left to install.
$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (torch is large: this takes some minutes)"
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.demo $@
