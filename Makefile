# Needs python3 (3.10 or newer), make and a package index; everything else goes into .venv on the first call.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
# pip would compile what it installs on one core, for two minutes. COMPILE uses all cores, and fails for files that
# packages have for other versions of Python, as pip does without saying so.
INSTALL := -m pip --disable-pip-version-check -qq install --no-compile
COMPILE := -m compileall -qq -j 0
READY := .venv/.ready
KERAS_ENV := .venv-keras
KERAS_READY := $(KERAS_ENV)/.ready
OLDEST_ENV := .venv-oldest
OLDEST_READY := $(OLDEST_ENV)/.ready

DEMO_ARGS ?= --workers $(WORKERS)
TEST_ARGS ?=
# More than the two cores that CI has: tests wait for processes a part of their time.
TEST_WORKERS ?= 3
# Of the deep tests only this part, such as 1/2.
DEEP_PART ?=
BENCH_ARGS ?=
SEEDS ?= 1:2000
ROUNDS ?= 4

PYTEST := $(BIN)/python -m pytest --durations=10
PROOFS := build/requirements-tests.json
ADAPTERS := accelerate fabric keras lightning transformers
OF_ADAPTERS = tests/test_compatibility.py tests/contracts/test_adapter_contract.py \
	$(foreach name,$(ADAPTERS),$(wildcard tests/integrations/test_$(name)*.py tests/elastic/test_$(name)*.py)) \
	$(addprefix tests/integrations/,test_drill.py test_export.py test_extra_state.py test_forged_adapters.py test_sharded_refused.py)
KUBERNETES := tests/kubernetes tests/contracts/test_scaler_contract.py
RAY := tests/integrations/test_ray_*.py tests/contracts/test_job_backends.py tests/contracts/test_scaler_contract.py tests/test_examples.py
STATIC := tests/test_architecture.py tests/test_requirements.py
USUAL := not deep and not ray and not kubernetes
# A file to one worker, whose module fixtures it shares; tests/conftest.py puts files with slow tests first.
SPREAD = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The tests start some thousands of processes. Without .pyc files each compiles the package again: 3 s, not 0.6 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-ps demo-scaling test test-deep test-ray test-oldest requirements simulate simulate-masters simulate-roles simulate-cluster chaos kubernetes test-kubernetes check structure format docs clean

help:  ## show this list
	@echo "dlrover-hooks - make targets"
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## build .venv (every other target does it when needed)

demo: $(READY)  ## train twice, once shot three times, and compare (WORKERS=3 works too)
	$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

demo-ps: $(READY) $(KERAS_READY)  ## train on TensorFlow's parameter servers, scale and kill them, and draw the loss
	$(BIN)/python examples/tensorflow/demo.py --python $(CURDIR)/$(KERAS_ENV)/bin/python

demo-scaling: $(READY)  ## train on as many workers as pay, and draw workers, speed and plans
	$(BIN)/python examples/scaling/demo.py

test: $(READY)  ## run the tests of every change, in 12 minutes on 2 cores (TEST_ARGS="-k keeper" for some, deep ones too)
ifeq ($(TEST_ARGS),)
	$(PYTEST) $(SPREAD) -m "$(USUAL)" tests $(STATIC:%=--ignore=%)
else
	$(PYTEST) $(TEST_ARGS)
endif

test-deep: $(READY) $(KERAS_READY)  ## run the tests that make test has no time for (DEEP_PART=1/2 for a half)
	$(PYTEST) $(SPREAD) -m "deep and not ray and not kubernetes" $(DEEP_PART:%=--deep-part %) tests

# A node of Ray gives up after 30 s if others keep it from starting.
test-ray: TEST_WORKERS = 2
test-ray: $(READY)  ## run the tests on clusters of Ray
	$(PYTEST) $(SPREAD) -m ray $(RAY)

test-oldest: $(OLDEST_READY)  ## run the tests of the adapters with the oldest versions of the frameworks that pyproject.toml allows
	$(OLDEST_ENV)/bin/python -m pytest --durations=10 $(SPREAD) -m "not ray and not kubernetes" -k "not jax and not tensorflow" $(OF_ADAPTERS)

requirements: $(READY)  ## run all tests, then list the requirements that they prove (build/requirements.json)
	@rm -f $(PROOFS)
	@status=0; $(MAKE) -k test test-deep test-ray test-kubernetes PYTEST='$(PYTEST) --requirements $(PROOFS)' || status=$$?; \
		$(BIN)/python -m tests.requirements_report $(PROOFS) && exit $$status

kubernetes: $(READY)  ## build the control plane of Kubernetes into the user's cache, once (about 7 minutes)
	$(BIN)/python -m tests.kubernetes.build

test-kubernetes: kubernetes $(KERAS_READY)  ## run the tests on a real control plane
	$(PYTEST) $(SPREAD) -m kubernetes $(KUBERNETES)

simulate-masters: $(READY)  ## several masters on a journal in etcd in virtual time, with faults (SEEDS=FIRST:LAST)
	$(BIN)/python -m tests.simulation $(SEEDS) masters

simulate-roles: $(READY)  ## jobs of several roles in virtual time, with faults (SEEDS=FIRST:LAST)
	$(BIN)/python -m tests.simulation $(SEEDS) roles

simulate-cluster: $(READY)  ## the operator and 2,000 jobs on 5,000 simulated nodes for a day, with faults (SEED=N for others)
	$(BIN)/python -m tests.simulation.cluster $(if $(SEED),--seed $(SEED))

simulate: $(READY)  ## the master and whole jobs in virtual time, with faults (SEEDS=FIRST:LAST)
	$(BIN)/python -m tests.simulation $(SEEDS)

chaos: $(READY)  ## real processes, each kind of fault ROUNDS times (SEED=N repeats a run)
	$(BIN)/python -m pytest tests/chaos/test_run.py -s --chaos-run-rounds $(ROUNDS) $(if $(SEED),--chaos-seed $(SEED))

check: $(READY)  ## ruff, format, pyright, import contracts, the rules of tests/test_architecture.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q $(STATIC)

structure: $(READY)  ## figures of the packages: duplicate names, import circles, sizes (build/structure.json)
	$(BIN)/python -m tests.structure

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the manual into docs/_build/html, warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench-%: $(READY)  ## run tests/benchmarks/bench_NAME.py
	@test -f tests/benchmarks/bench_$*.py || { echo "there is no tests/benchmarks/bench_$*.py" >&2; exit 2; }
	$(BIN)/python -m tests.benchmarks.bench_$* $(BENCH_ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache lightning_logs
	find dlrover_hooks integrations master_server tests examples docs -type d -name __pycache__ -prune -exec rm -rf {} +

# The versions are those of tests/compat.toml. trl and the other tools of the tests are those of constraints.txt.
$(OLDEST_READY): pyproject.toml constraints.txt tests/compat.toml | $(READY)
	@echo "setting up $(OLDEST_ENV) (once)"
	@mkdir -p build && $(BIN)/python -m tests.compatibility $(OLDEST_ENV) > build/oldest.txt
	test -x $(OLDEST_ENV)/bin/pip || $(PYTHON) -m venv $(OLDEST_ENV)
	$(OLDEST_ENV)/bin/python $(INSTALL) -c build/oldest.txt torch==2.13.0 setuptools
	$(OLDEST_ENV)/bin/python $(INSTALL) -c build/oldest.txt --no-build-isolation -e '.[transformers,lightning,keras,test]'
	@$(OLDEST_ENV)/bin/python $(COMPILE) $(OLDEST_ENV)/lib || true
	@touch $@

# torch goes in by itself and pinned, so that no resolver ever weighs another build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("dlrover-hooks needs Python 3.10 or newer; set PYTHON=...")'
	@echo "setting up .venv (once; some minutes on a slow line)"
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt torch==2.13.0 setuptools
	$(BIN)/python $(INSTALL) -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/python $(COMPILE) .venv/lib || true
	@touch $@
	@echo "ready: . .venv/bin/activate"

# Keras' other backends, without torch: what the tests there import must be theirs.
$(KERAS_READY): pyproject.toml constraints.txt
	@echo "setting up $(KERAS_ENV) (once)"
	test -x $(KERAS_ENV)/bin/pip || $(PYTHON) -m venv $(KERAS_ENV)
	$(KERAS_ENV)/bin/python $(INSTALL) -c constraints.txt setuptools
	$(KERAS_ENV)/bin/python $(INSTALL) -c constraints.txt --no-build-isolation -e '.[keras]' jax tensorflow-cpu
	$(KERAS_ENV)/bin/python $(INSTALL) -c constraints.txt --no-deps tf-keras  # with its dependencies a second TensorFlow would come
	@$(KERAS_ENV)/bin/python $(COMPILE) $(KERAS_ENV)/lib || true
	@touch $@
