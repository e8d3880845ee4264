.DEFAULT_GOAL := help
.PHONY: help setup demo test clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

setup:  ## Create .venv with all that is needed (PYTHON=, MAX_JOBS=)
	@bash tools/setup_env.sh

demo: setup  ## Train, evaluate and try three small models
	.venv/bin/python tools/quickstart.py

test: setup  ## Run the tests, two files at a time
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests -n 2 --dist loadfile

clean:  ## Remove .venv and all build products
	rm -rf .venv build dist *.egg-info mmlaplace/.mim mmlaplace/_C*.so
	rm -rf .pytest_cache .ruff_cache
	find mmlaplace configs tools tests -name __pycache__ -prune -exec rm -rf {} +
