# Everything sets itself up: a virtual environment in .venv, packages from PyPI by pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# OpenCV 5 reads no Caffe networks: an older one, a peer in tests, has a folder of its own.
OPENCV_4 := opencv-python-headless<5
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
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)-opencv '$(OPENCV_4)' \
		|| echo "pip finds no $(OPENCV_4): tests of Caffe networks against it are skipped"
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-opencv build dist demo-output .pytest_cache .mypy_cache .ruff_cache
