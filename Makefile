# The commands of the project; `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2
RUN    ?= arch=speedrun threshold=learned

# One thread per test process: xdist already uses every core, and results depend on the thread count.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow check format lint types studies studies-smoke notebooks bench build lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install what requirements.lock pins

train: $(STAMP) ## train the speedrun network with a learned threshold (RUN="..." for other overrides)
	$(BIN)/python train.py $(RUN)

test: $(STAMP) ## install, then run the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(STAMP) ## run only the slow tests
	$(PYTEST) -m slow

check: format lint types test test-slow ## format, lint, types and all tests

format: $(STAMP) ## is everything formatted? (make format FIX=1 formats)
	$(BIN)/ruff format $(if $(FIX),,--check) .

lint: $(STAMP) ## ruff (make lint FIX=1 repairs what it can)
	$(BIN)/ruff check $(if $(FIX),--fix) .

types: $(STAMP) ## pyright
	$(BIN)/pyright

# Every study with a network of nothing for two steps: do all arms start, train and end?
SMOKE := model.d_model=32 model.n_heads=2 model.seq_len=32 train.steps=2 train.batch_size=2 train.eval_batches=2 \
         probe.scan_tokens=1024 seed=0 data.seed=0 logger=none hydra.launcher.parallel=$(JOBS)
STUDIES := $(basename $(notdir $(wildcard configs/experiment/*.yaml)))

studies: $(STAMP) ## run every study to its end (hours; goes on where it stopped), and draw its results
	set -e; for study in $(STUDIES); do \
	  $(BIN)/python train.py experiment=$$study; $(BIN)/python experiments/$$study/figures.py; done

studies-smoke: $(STAMP) ## every arm of every study, tiny
	set -e; for study in $(STUDIES); do rm -rf outputs/smoke-$$study; \
	  $(BIN)/python train.py experiment=$$study study=smoke-$$study $(SMOKE); rm -rf outputs/smoke-$$study; done

notebooks: $(STAMP) ## notebooks/*.ipynb out of their sources
	$(BIN)/jupytext --to ipynb notebooks/*.py

bench: $(STAMP) ## step time, tokens/s and the fraction of the machine's matrix-product rate
	$(BIN)/ffnlab bench train

build: $(STAMP) ## the wheel, in dist/
	$(BIN)/hatchling build -t wheel

# torch stays outside the lock: its file, and so its hash, differs between a CPU build, a CUDA build and a local
# one. Its version is pinned by pyproject.toml; of what it needs, the lock pins all but the CUDA libraries, whose
# versions torch itself names.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

lock: $(STAMP) ## write requirements.lock anew from pyproject.toml (UPGRADE=1 for newer versions)
	$(BIN)/python -m pip install -q pip-tools==7.6.2
	$(BIN)/pip-compile -q $(if $(UPGRADE),--upgrade) --generate-hashes --strip-extras --all-extras \
	  --unsafe-package torch --unsafe-package pip --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	  -o requirements.lock pyproject.toml

clean: ## remove .venv, caches and build products (outputs/ stays)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "'$(PYTHON)' is not there: install Python 3.11, 3.12 or 3.13, or say make PYTHON=/path/to/python3 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "ffnlab needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Say make PYTHON=/path/to/python3.12 ..." % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
