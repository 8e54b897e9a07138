# Everything works from a clean clone on a machine with Python >= 3.11, pip and make: each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

# A stalled mirror must not hang a build. --foreground keeps Ctrl-C working; macOS has no timeout(1): unbounded there.
BOUND := $(shell command -v timeout >/dev/null 2>&1 && echo timeout --foreground -k 10 900)
PIP    = $(BOUND) $(BIN)/python -m pip --disable-pip-version-check --no-input -q

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup docs site dist demo browser programs test test-matrix lint check bench soak conformance lock picture size mutate clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv with the pinned dependencies and shotclock itself

# `pip check` catches a pyproject.toml that asks for more than the lock gives: run `make lock` then.
$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("shotclock needs Python >= 3.11, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(CREATE_VENV); }
	@echo "setting up $(VENV), which takes a minute or so"
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(PIP) check
	@$(BIN)/python -m compileall -q src
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true # compiles the tests, once for all of their processes
	@touch $@

# Debian splits ensurepip off into python3-venv. The pip that is already there can fill an empty venv without root;
# apt is the last resort. A clean start each time: a half-made venv would be taken for a good one.
CREATE_VENV = \
	{ rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) >/dev/null 2>&1; } || \
	{ rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(BOUND) $(PYTHON) -m pip --python $(BIN)/python install -q pip; } || \
	{ rm -rf $(VENV) && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(BOUND) apt-get install -y python3-venv || { $(BOUND) apt-get update && $(BOUND) apt-get install -y python3-venv; }; } && \
	  $(PYTHON) -m venv $(VENV); } || \
	{ echo "cannot create $(VENV): install python3-venv, or pip >= 22.3 for $(PYTHON)" >&2; rm -rf $(VENV); exit 1; }

demo: $(STAMP) ## five hangs, each run without and with shotclock
	@PATH="$(abspath $(BIN)):$$PATH" shotclock demo

# Some tests look at pages in a real browser and are skipped where there is none. Debian's root gets one; that it
# cannot be had (no network, no root) is no reason to leave the other tests out.
# The headless shell starts with half the work of the whole browser.
BROWSER = { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1
INSTALL = $(BOUND) apt-get install -y -qq --no-install-recommends
browser:
	@command -v chromium-headless-shell >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(INSTALL) chromium-headless-shell >/dev/null 2>&1 || \
	    { $(BOUND) apt-get update -qq && { $(INSTALL) chromium-headless-shell || $(INSTALL) chromium; } >/dev/null 2>&1; }; }; } || \
	  $(BROWSER) || \
	  echo "no Chromium, and none can be installed here: tests of pages are skipped" >&2

# And programs that some tests use: the client of adb (the phone itself is scripted), and shells that complete words.
PROGRAMS := adb fish zsh
programs:
	@missing=; for program in $(PROGRAMS); do command -v $$program >/dev/null 2>&1 || missing="$$missing $$program"; done; \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(INSTALL) $$missing >/dev/null 2>&1 || { $(BOUND) apt-get update -qq && $(INSTALL) $$missing >/dev/null; }; }; } || \
	  echo "not here, and not to be installed:$$missing; their tests are skipped" >&2

# Several at once, because most tests wait for processes. What fails beside the others runs once more by itself: code
# that is late is late then too. Last come those that fill the machine by themselves.
# Files in memory where there is room: thousands of stores wait for no disk.
SCRATCH := $(shell [ -w /dev/shm ] && [ "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 4000000 ] && echo TMPDIR=/dev/shm)
PYTEST = $(SCRATCH) $(BIN)/python -m pytest -q
TESTED = $(PYTEST) $(1) -m $(2) || { [ $$? -eq 1 ] && $(PYTEST) --last-failed --last-failed-no-failures none -m $(2); }
# Coverage of the test processes, where sys.monitoring makes it cheap; on Python 3.11 it takes 40 % more time.
COVER = $(shell $(BIN)/python -c 'import sys; print("--cov=shotclock --cov-report=" if sys.version_info >= (3, 12) else "")')
test: export COVERAGE_CORE = sysmon
test: $(STAMP) browser programs ## the whole suite, with coverage on Python 3.12 and later
	$(call TESTED,$(COVER) -n 7 --dist worksteal --durations=25,"not soak and not alone")
	@[ -z "$(COVER)" ] || $(BIN)/coverage report --skip-covered --sort=cover
	$(PYTEST) -m "alone and not soak" $$(grep -rl --include='*.py' 'mark\.alone' tests)

# Each version in a venv of its own, .venv-3.12 and so on. A pyenv shim of a version that is not activated does not run.
PYTHONS := 3.11 3.12 3.13 3.14 3.15
test-matrix: ## the whole suite on Python 3.11 to 3.15, as far as they are found on PATH or under pyenv
	@failed=; found=; \
	for version in $(PYTHONS); do \
	  python=; \
	  for each in "$$(command -v python$$version)" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
	    [ -n "$$each" ] && "$$each" -c 'import venv' >/dev/null 2>&1 && { python=$$each; break; }; \
	  done; \
	  [ -n "$$python" ] || { echo "Python $$version: not found, left out" >&2; continue; }; \
	  found="$$found $$version"; echo "Python $$version: $$python"; \
	  $(MAKE) test PYTHON="$$python" VENV=".venv-$$version" || failed="$$failed $$version"; \
	done; \
	[ -n "$$found" ] || { echo "none of $(PYTHONS) is found" >&2; exit 1; }; \
	[ -z "$$failed" ] || { echo "failed on:$$failed" >&2; exit 1; }; \
	echo "passed on:$$found"

lint: $(STAMP) ## lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(STAMP) ## write the generated parts of the reference pages
	$(BIN)/python -m tools.reference

site: $(STAMP) docs ## the documentation as a site, in build/site
	$(BIN)/python -m tools.site

# In a new environment, as a user installs it. The list of parts (CycloneDX) is of the base install.
dist: $(STAMP) ## the wheel and the sdist in dist/, checked, with their hashes and a list of what they depend on
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && rm -rf dist && \
	$(PYTHON) -m venv "$$scratch/tools" && $(PYTHON) -m venv "$$scratch/user" && tools="$$scratch/tools/bin" && \
	$(BOUND) "$$tools/pip" --disable-pip-version-check install -q -r requirements-dist.lock && \
	$(BOUND) "$$tools/python" -m build -q && \
	"$$tools/check-wheel-contents" dist/*.whl && "$$tools/pyroma" --min=8 dist/*.tar.gz && \
	"$$tools/validate-pyproject" pyproject.toml && "$$tools/sp-repo-review" . >/dev/null && \
	"$$tools/zizmor" --offline -q .github/workflows action.yml && \
	$(BOUND) "$$scratch/user/bin/pip" --disable-pip-version-check install -q dist/*.whl && \
	"$$scratch/user/bin/shotclock" --version && \
	"$$tools/cyclonedx-py" environment "$$scratch/user/bin/python" --output-reproducible -o dist/shotclock.cdx.json && \
	cd dist && sha256sum *.whl *.tar.gz *.json >SHA256SUMS && cat SHA256SUMS

check: $(STAMP) ## the same and the fast tests, in under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; $(BIN)/lint-imports --no-cache & imports=$$!; \
	$(call TESTED,-n 5 --dist worksteal,"not slow and not soak and not alone"); tests=$$?; \
	wait $$imports && wait $$types && exit $$tests

bench: $(BENCH_STAMP) ## benchmark tables, side by side with the peers
	$(BIN)/python -m benchmarks

$(BENCH_STAMP): $(STAMP) requirements-bench.lock
	$(PIP) install -r requirements-bench.lock
	@touch $@

soak: $(STAMP) ## minutes of load
	$(BIN)/python -m pytest -q -m soak

# Real agents, servers and clients by exact version, in a folder of their own; a model on loopback follows a script.
# Agents have short limits of their own, so they run one after the other.
CONFORMANCE := .conformance
BESIDE_OTHERS := $(addprefix tests/conformance/test_,published_servers.py conformance_suite.py kill_matrix.py own_server.py port.py)
conformance: $(STAMP) browser ## published agents and MCP servers and the MCP conformance suite, with and without shotclock, and axe on our pages (needs npm)
	@command -v npm >/dev/null 2>&1 || { echo "no npm here: the conformance suite is skipped; install Node.js >= 20" >&2; exit 0; }; \
	mkdir -p $(CONFORMANCE) && rm -f $(CONFORMANCE)/observations $(CONFORMANCE)/results && \
	$(BOUND) npm install --no-audit --no-fund --loglevel=error --prefix $(CONFORMANCE) \
	  $$($(BIN)/python -m tests.conformance.coding_agents) $$($(BIN)/python -m tests.conformance.published_servers npm) && \
	$(BOUND) $(BIN)/python -m tests.conformance.published_servers $(CONFORMANCE) && \
	export SHOTCLOCK_CONFORMANCE=$(CONFORMANCE) && \
	$(BIN)/python -m pytest -q -n 3 --dist worksteal $(BESIDE_OTHERS) tests/testing/test_wheel.py && \
	$(BIN)/python -m tests.conformance.results $(CONFORMANCE) && \
	$(BIN)/python -m pytest -q tests/conformance $(BESIDE_OTHERS:%=--ignore %)

# One resolution for Python 3.11 and up, with environment markers. uv lives in a throw-away venv; no index,
# host or path of this machine ends up in the files.
# Keeps the pins that still fit; `make lock LOCK_FLAGS=--upgrade` moves them all.
LOCK = $(BOUND) "$$uv/bin/uv" pip compile -q --no-config --universal --python-version 3.11 \
	--no-emit-index-url --no-annotate --generate-hashes --custom-compile-command "make lock" $(LOCK_FLAGS)
lock: ## resolve the three lock files anew
	@uv=$$(mktemp -d) && trap 'rm -rf "$$uv"' EXIT && $(PYTHON) -m venv "$$uv" && \
	$(BOUND) "$$uv/bin/python" -m pip --disable-pip-version-check install -q uv && \
	$(LOCK) --extra dev -o requirements.lock pyproject.toml && \
	$(LOCK) --extra bench -c requirements.lock -o requirements-bench.lock pyproject.toml && \
	$(LOCK) --extra dist -o requirements-dist.lock pyproject.toml

picture: $(STAMP) browser ## run the demo, a workflow and the operators' page, and make docs/pictures anew
	@$(BIN)/python tools/picture.py

size: ## how large and how plain the code is, beside its limits
	@$(PYTHON) tools/size.py

ROOM := core
mutate: $(STAMP) ## change the source of ROOM (core, store …) at random places: does its own folder of tests notice?
	$(SCRATCH) $(BIN)/python tools/mutate.py --room $(ROOM) $(MUTATE)

clean: ## remove everything the other targets made
	rm -rf $(VENV) .venv-3.* $(CONFORMANCE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
