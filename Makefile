# make train    a first training run, from nothing: .venv, requirements, digits
# make check    lint, types and the tests that a change reaches, in a minute
# make test     the tests, from nothing; make test-long: those of whole runs; make test-faults: injected faults
# make fuzz     an hour of random files, settings and messages (MINUTES=5: less)
# make campaign every attack and every fault from fixed seeds, with a table of what was tried (docs/SECURITY.md)
# make ops      compiles the operators that make CPUs fast (ops/), where there is g++; install does so in the background,
#               and test waits for them
# make lint     ruff, spelling and types; make house: what can be counted of how the code reads
# make test-smoke    a short tour of every room; make test-paddle26: under Paddle 2.6; make clean: removes both environments
# make docs     the sites of both languages, in output/site; warnings are errors (tools/package/mkdocs.yml)
# make install  .venv with the pinned requirements; PADDLE=... chooses another Paddle (docs/start/install.md)
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt

# The Paddle that was chosen once stays chosen; another one installs anew.
CHOSEN := $(shell cat $(VENV)/paddle 2>/dev/null)
PADDLE ?= $(CHOSEN)
ifneq ($(PADDLE),$(CHOSEN))
.PHONY: $(VENV)/installed
endif
# Edits of constraints.txt for another Paddle: its own pin is removed, and lines marked "Paddle 2.6" become pins.
FOR_2.6 := $(findstring 2.6.,$(PADDLE))
VERSIONS := $(if $(PADDLE),-e '/^paddlepaddle==/d') $(if $(FOR_2.6),-e 's/^.*\# Paddle 2\.6: //')

.PHONY: install ops train check house test test-long test-smoke test-faults fuzz campaign install-paddle26 \
	test-paddle26 lint docs clean

# Nobody has to wait for the operators: without them, a training is only slower.
install: $(VENV)/installed
	@nohup nice $(RUN) -m ops.build > $(VENV)/ops.log 2>&1 < /dev/null &
	@echo "operators for CPUs: compiled in the background if g++ is there; make ops waits for them"

ops: $(VENV)/installed
	-$(RUN) -m ops.build

$(VENV)/installed: pyproject.toml requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	  f"error: found Python {v[0]}.{v[1]}, expected 3.10 to 3.13; make PYTHON=python3.11 ...")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	cat requirements.txt constraints.txt | sed -e '/^-c /d' $(VERSIONS) > $(VENV)/constraints.txt
	$(PIP) -e . $(or $(PADDLE),paddlepaddle) $(if $(FOR_2.6),setuptools)
	echo "$(PADDLE)" > $(VENV)/paddle
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e ".[test]"
	touch $@

train: install
	sh run_train_multi.sh

# The tests keep their compiled files, whatever the shell says: each of the four workers compiles them anew otherwise.
export PYTHONDONTWRITEBYTECODE =

# Four files at a time, the longest first (tests/conftest.py): a third of them wait for processes that they started. The
# fixtures of a file are shared within it. A crash ends the run: pytest-xdist would hang. What measures time has the
# machine to itself.
ALONE := tests/tools/test_benchmark.py tests/tools/test_measure.py
PYTEST := -m pytest -n 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(addprefix --ignore ,$(ALONE))

# Lint and types run beside the tests that follow; either fails the whole.
BESIDE_LINT = $(MAKE) --no-print-directory lint & lint=$$!; \
	$(RUN) $(1); tests=$$?; \
	wait $$lint || { echo "error: lint failed, see above"; exit 1; }; exit $$tests

# tests/support/reached.py says which these are, and which it doesn't see.
check: $(VENV)/installed-test ops
	$(RUN) tests/support/reached.py > $(VENV)/reached
	@$(call BESIDE_LINT,-m pytest -n 2 --max-worker-restart 0 --dist loadfile @$(VENV)/reached)

test: $(VENV)/installed-test ops
	@$(call BESIDE_LINT,$(PYTEST))
	$(RUN) -m pytest $(ALONE)

# What can be counted of how the code reads.
house: $(VENV)/installed
	$(RUN) tests/support/house.py

# What takes a core for five seconds and more: most of these are whole runs.
test-long: $(VENV)/installed-test ops
	$(RUN) $(PYTEST) -m long

# A short tour of every room, for other versions of Python and Paddle.
test-smoke: $(VENV)/installed-test ops
	$(RUN) $(PYTEST) -m smoke
	$(RUN) -m pytest $(ALONE) -m smoke

# Every fault that docs/evidence/faults.md reports, injected anew.
test-faults: $(VENV)/installed-test ops
	$(RUN) -m pytest -m slow -s

# Another seed each time; what is found prints how to repeat it, and becomes an @example of its test.
MINUTES ?= 60
fuzz: $(VENV)/installed-test ops
	end=$$(($$(date +%s) + 60 * $(MINUTES))); \
	while [ $$(date +%s) -lt $$end ]; do \
	  $(RUN) -m pytest tests/fuzz -m "" --hypothesis-profile=fuzz || exit 1; \
	done

campaign: $(VENV)/installed-test ops
	$(RUN) -m pytest tests/fuzz tests/faults -m "" --hypothesis-profile=campaign

lint: $(VENV)/installed-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m codespell_lib
	$(RUN) -m basedpyright --pythonpath $(RUN)

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) -e ".[docs]"
	touch $@

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict -f tools/package/mkdocs.yml
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict -f tools/package/mkdocs_zh.yml

# The newest GPU build that PyPI has; it runs on the CPU where there is no GPU.
install-paddle26:
	$(MAKE) VENV=.venv-paddle26 PADDLE=paddlepaddle-gpu==2.6.2 .venv-paddle26/installed-test ops

test-paddle26: install-paddle26
	$(MAKE) VENV=.venv-paddle26 PADDLE=paddlepaddle-gpu==2.6.2 test-smoke

clean:
	rm -rf .venv .venv-paddle26
