# Two commands on a fresh machine: make reproduce, make test. Both make .venv on first use.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS ?= test
ARGS   ?=

.PHONY: install reproduce claims paper tune bench profile depth thousand study test fault cases lint figures clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
	  uv pip install --quiet --python $(BIN)/python -e '.[$(EXTRAS)]'; \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/pip install --quiet -e '.[$(EXTRAS)]'; \
	fi
	@touch $@

reproduce: install
	$(BIN)/python experiments/reproduce.py $(ARGS)

tune: install
	$(BIN)/python experiments/tune_lr.py $(ARGS)

bench: install
	$(BIN)/python experiments/benchmark.py $(ARGS)

profile: install
	$(BIN)/python experiments/profile_step.py $(ARGS)

depth: install
	$(BIN)/python experiments/depth_check.py $(ARGS)

thousand: install
	$(BIN)/python experiments/thousand_layers.py $(ARGS)

# max stable learning rates of every placement, then the phase diagrams over them: hours of CPU. A run
# that is finished is skipped, one that was stopped goes on
study: install
	$(BIN)/python experiments/max_lr.py $(ARGS)
	$(BIN)/python experiments/phase_diagram.py --max-lr runs/max_lr/max_lr.csv $(ARGS)

# every claim measured: 3 hours on two cores for five seeds; what is finished is skipped
claims: install
	$(BIN)/python experiments/claims.py --seeds 5 --tables paper/data $(ARGS)

# those of the paper from its committed tables; of a run or study with ARGS=FOLDER
figures: install
	$(BIN)/normstudy figures $(or $(ARGS),paper/data --out paper/build/figures)

# paper/build/main.pdf from the committed tables; needs latexmk (says which Debian packages)
paper: install
	$(BIN)/normstudy paper $(ARGS)

# 13 minutes on two cores, one test at a time, for the tests start processes of their own; not part of
# .ci/run. In an environment of its own: where libtpu is, every process looks for a TPU first
fault:
	$(MAKE) install VENV=.venv-fault EXTRAS=test,aot
	.venv-fault/bin/python -m pytest -m fault $(ARGS)

# public bug reports made small, each diagnosed with trials: one at a time, for they have a time budget
cases: install
	$(BIN)/python -m pytest -m cases $(ARGS)

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/shellcheck -P SCRIPTDIR tpu_scripts/*.sh tpu_scripts/slurm.sbatch \
	  tests/fake_bin/uv tests/fake_bin/sudo .ci/run

clean:
	rm -rf $(VENV) build *.egg-info
