# make run      set up .venv and train ds_configs/offload.json; further flags in ARGS, as in ARGS="--model bert-120m"
# make test     set up .venv and run the tests that need no GPU; ARGS goes to pytest
# make check    style, types and layers
# make test-gpu the tests that need an NVIDIA GPU
# make clean    remove .venv and caches; runs/ stays
#
# PYTHON   the Python to start from. Where it can import torch, .venv is laid on top of its packages.
# FRESH=1  an isolated .venv all the same; it stays isolated until `make clean`.
# TORCH    another torch than the tested one, isolated too. On a machine without a GPU, PyPI's torch for Linux is the
#          CUDA build, which works but takes several GB more than the CPU build, to be had with
#          make run TORCH=torch==2.13.0+cpu PIP_ARGS="--extra-index-url ADDRESS", with the address from pytorch.org
# PIP_ARGS further arguments for pip install, as in PIP_ARGS="--no-index --find-links wheels"
PYTHON ?= python3
FRESH ?=
TORCH ?=
PIP_ARGS ?=
ARGS ?=

# .venv/bin comes first on PATH for ninja, which torch starts by name, and for the commands that tests start. torch
# compiles with c++ unless CXX says otherwise, and some machines have only g++ or clang++.
IN_VENV = export PATH="$(CURDIR)/.venv/bin:$$PATH"; \
	command -v c++ >/dev/null || export CXX="$${CXX:-$$(command -v g++ || command -v clang++)}";

.PHONY: run test check test-gpu clean env-run env-dev

run: env-run
	@$(IN_VENV) set -x; accelerate launch run_zero.py --ds ds_configs/offload.json $(ARGS)

test: env-dev
	@$(IN_VENV) set -x; python -m pytest $(ARGS)

test-gpu: env-dev
	@$(IN_VENV) set -x; python -m pytest -m gpu $(ARGS)

check: env-dev
	@$(IN_VENV) set -ex; ruff check .; ruff format --check .; mypy; lint-imports

# Run every time: tools/setup_env.py compares contents, not dates (git changes dates), and ends at once when nothing
# has changed. The version is looked at here, since an older Python could not even read that file.
env-run env-dev: env-%:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "setup: Python 3.10 or newer is needed, '$(PYTHON)' is: $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) tools/setup_env.py $* --fresh="$(FRESH)" --torch="$(TORCH)" --pip-args="$(PIP_ARGS)"

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
