# Everything sets itself up: a virtual environment in .venv, packages from PyPI by pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# PyTorch is a peer in tests and benchmarks, not a dependency. Its CPU build is installed where pip
# offers one under this name; elsewhere the tests that compare with it are skipped.
TORCH ?= torch==2.13.0

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.demo
	$(BIN)/bedstone demo

test: $(VENV)/.test lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/bedstone bench conv --suite paper --peer torch --batch 16

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[dev,demo,docs,gpu]'
	$(BIN)/python tools/install_cpu_torch.py '$(TORCH)'
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache
