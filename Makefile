# make demo | check | test | test-avx2 | coverage | golden | lint | docs | bench | reproduce | fuzz      needs Python 3.11-3.14 (PYTHON=...) and nothing else
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGE = pyproject.toml constraints.txt
# PROCESSES with whole files each, in the order that tests/health.py gives them: those with slow tests first. One more than
# a machine of two cores has: some tests wait for links, schedulers and servers. Hundreds of Python processes begin
# meanwhile: compiled once, whatever the environment says of bytecode.
PROCESSES ?= 3
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
DEMO := demo-out

.PHONY: help demo check test test-changed test-avx2 coverage golden lint docs bench reproduce fuzz clean
help:
	@grep -E '^# make' Makefile | cut -c 3-

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	  || { echo "foretrace needs Python 3.11 to 3.14; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of dependencies, so that a second run installs nothing.
$(VENV)/run.stamp: $(PACKAGE) | $(BIN)/python
	$(INSTALL) --editable '.[torch]'
	@touch $@

$(VENV)/dev.stamp: $(PACKAGE) | $(BIN)/python
	$(INSTALL) --editable '.[torch,dev]'
	@touch $@ $(VENV)/run.stamp

# The peer that reading is measured against wants its own environment (notebooks, plots); without it, bench says so.
$(VENV)/peers.stamp: $(VENV)/dev.stamp
	$(PYTHON) -m venv $(VENV)/peers
	$(VENV)/peers/bin/python -m pip install --quiet --disable-pip-version-check HolisticTraceAnalysis==0.5.0 \
	  || echo "HolisticTraceAnalysis cannot be installed here; its row will be missing" >&2
	@touch $@

# Record a real training step, replay it, ask what if; then make one of the changes for real and keep both figures.
demo: $(VENV)/run.stamp
	@rm -rf $(DEMO) && mkdir $(DEMO)
	$(BIN)/foretrace record --out $(DEMO)/run -- $(BIN)/python examples/train_cnn.py --threads 1
	$(BIN)/foretrace show $(DEMO)/run
	$(BIN)/foretrace simulate $(DEMO)/run
	$(BIN)/foretrace whatif $(DEMO)/run --do prefetch-data --do fused-optimizer --do "scale name=*conv* by=0.5" \
	  --html $(DEMO)/report.html --perfetto $(DEMO)/timeline.json.gz
	$(BIN)/foretrace verify prefetch-data --model examples/train_cnn.py --seconds 6 --ledger $(DEMO)/ledger.sqlite
	$(BIN)/foretrace ledger --ledger $(DEMO)/ledger.sqlite

# Before a commit: lint and types beside the quick tests of what changed and one way through the whole house.
check: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint test-changed

test-changed: $(VENV)/dev.stamp
	FORETRACE_EXAMPLES=quick $(PYTEST) -m "not slow" $(ARGS) $$($(BIN)/python .ci/changed.py)

# Properties draw 25 examples here, 100 in the matrix of .github/workflows, 2000 with FORETRACE_EXAMPLES=thorough.
test: export FORETRACE_EXAMPLES ?= quick
test: $(VENV)/dev.stamp
	$(PYTEST) $(ARGS)

# What depends on the processor, once more as if it had AVX2 and no more. All tests: ONEDNN_MAX_CPU_ISA=AVX2 make test
test-avx2: $(VENV)/dev.stamp
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) -m processor $(ARGS) $$(grep -rl --include='test_*.py' mark.processor tests reproductions)

# Branches that the tests of four rooms take. Compiled loops and processes of their own are not seen.
coverage: $(VENV)/dev.stamp
	$(INSTALL) coverage
	FORETRACE_EXAMPLES=quick $(BIN)/python -m coverage run --branch --source=src/foretrace \
	  -m pytest -q tests/graph tests/simulate tests/trace tests/techniques $(ARGS)
	$(BIN)/python -m coverage report --skip-covered --include="*/graph/*,*/simulate/*,*/trace/*,*/techniques/*"

# What the commands answer, against the answers that are kept; ARGS="--write NAME" where one is meant to change.
golden: $(VENV)/dev.stamp
	$(BIN)/python -m tests.golden.golden $(ARGS)

# Types that another clone of this machine has checked are not checked again: mypy goes by what files hold. .ci/run keeps
# them.
lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@[ -d .mypy_cache ] || cp -r "$${XDG_CACHE_HOME:-$$HOME/.cache}/foretrace/mypy" .mypy_cache 2>/dev/null || true
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/docs.stamp: $(PACKAGE) | $(BIN)/python
	$(INSTALL) --editable '.[docs]'
	@touch $@

# The pages as a web site, site/docs/index.html. A link or anchor that leads nowhere, or a page that nothing lists, ends it.
docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d site/.doctrees . site
	@echo "wrote site/docs/index.html"

# How fast it is and how close predictions come: docs/performance.md and docs/accuracy/. Leave the machine alone meanwhile.
# Techniques whose row in benchmarks/data/ledger.jsonl is conclusive are not measured again (verify_zoo.py --again does);
# without any it takes about an hour. What cannot be verified here (no compiler, no memory) is named and stops nothing.
bench: $(VENV)/peers.stamp
	$(BIN)/python benchmarks/run.py --hta-python $(VENV)/peers/bin/python
	-$(BIN)/python benchmarks/verify_zoo.py
	$(BIN)/python benchmarks/accuracy.py

# What a paper claimed, held against what we get: make reproduce NAME=dally ARGS="--quick". See reproductions/README.md.
reproduce: $(VENV)/dev.stamp
	@$(BIN)/python -m reproductions $(NAME) $(ARGS)

# Damaged files for every reader, for a minute; see benchmarks/fuzz.py --help (ARGS="--inputs 100000 --seed 7").
fuzz: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py $(if $(ARGS),$(ARGS),--seconds 60)

clean:
	rm -rf $(VENV) $(DEMO) site
