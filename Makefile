# Everything one does with Tierbed, in one word each. `make` prints the list.
#
# A fresh machine needs Rust (cargo), Python 3.10 to 3.14 and a C compiler. All else is
# fetched into this folder: .tools/ (uv), .venv/ (Python packages), target/ (Rust builds).
# Nothing is installed globally and no step needs root.

UV_VERSION := 0.13.9
PYTHON ?= python3

ABOUT_VERSION := 0.9.0
FUZZ_VERSION := 0.13.2
FUZZ_SECONDS ?= 20
FUZZ_LONG_SECONDS ?= 600
CAMPAIGN_MINUTES ?= 5
SIM_ROUNDS ?= 4
KIND ?= all
# Features of a wheel or a server that is built: otel sends traces by OTLP.
FEATURES ?=
# That of the Rust tests, which then have all code. Python's tests ask a build without it.
TESTED := tierbed-server/otel
# Wheels are for systems with glibc 2.28 or newer: zig links against that version's symbols.
MANYLINUX := manylinux_2_28
ARCH ?= $(shell uname -m)
ARCHS ?= $(ARCH)
TARGET = $(ARCH)-unknown-linux-gnu
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DATE ?= $(shell date -u +%F)
comma := ,

STEP := scripts/step
UV := .tools/uv/bin/uv
PY := .venv/bin/python
TIERBED := .venv/bin/tierbed

# Stamps live in the folders they speak of, so removing a folder removes its stamp.
UV_STAMP := .tools/uv/.version-$(UV_VERSION)
ENV_STAMP := .venv/.stamp-packages
FUZZ_STAMP := .tools/cargo-fuzz/.version-$(FUZZ_VERSION)
NATIVE_STAMP := .venv/.stamp-native
BENCH_STAMP := .venv/.stamp-bench
RELEASE_STAMP := .venv/.stamp-release
ABOUT_STAMP := .tools/cargo-about/.version-$(ABOUT_VERSION)
LICENCES := THIRD-PARTY-LICENSES.txt
NATIVE_SOURCES := Cargo.toml Cargo.lock \
    $(shell find crates tools -path '*/tests' -prune -o -path tools/fuzz -prune -o \( -name '*.rs' -o -name Cargo.toml -o -name '*.proto' \) -print)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_PYTHON_DOWNLOADS := never
# An environment that happens to be active must not be mistaken for ours.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME
# Tests start hundreds of processes: without bytecode on disk each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# CI=true: no colours, no progress bars.
ifeq ($(CI),true)
export NO_COLOR := 1
export CARGO_TERM_COLOR := never
export CARGO_TERM_PROGRESS_WHEN := never
export UV_NO_PROGRESS := 1
PYTEST_PLAIN := --color=no
endif

.DEFAULT_GOAL := help
# The targets share one virtual environment and one cargo folder: `make -j` runs them in order.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help: ## Print this list
	@echo 'make <word>:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

# ---------------------------------------------------------------- set-up

.PHONY: setup
setup: $(NATIVE_STAMP) $(BENCH_STAMP) ## Make the environment in .venv and build the native module into it
	@:

$(UV_STAMP):
	@PYTHON='$(PYTHON)' scripts/check-machine
	@rm -rf .tools/uv
	@$(STEP) 'uv $(UV_VERSION) into .tools/uv' $(PYTHON) -m venv .tools/uv
	@.tools/uv/bin/python -m pip install --quiet uv==$(UV_VERSION)
	@touch $@

$(ENV_STAMP): $(UV_STAMP) pyproject.toml uv.lock
	@$(STEP) 'Python packages into .venv' \
	    $(UV) sync --quiet --locked --no-install-project --python '$(PYTHON)'
	@touch $@

$(NATIVE_STAMP): $(ENV_STAMP) $(NATIVE_SOURCES)
	@PATH="$(CURDIR)/.tools/uv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" \
	    $(STEP) 'native module (release build)' \
	    .venv/bin/maturin develop --uv --release --locked --features lab,pyo3/abi3-py310
	@touch $@

# What measures and compares: a package of its own (tools/python).
$(BENCH_STAMP): $(ENV_STAMP) tools/python/pyproject.toml
	@$(STEP) 'tierbed-bench into .venv' $(UV) pip install --quiet --python .venv \
	    --no-deps --no-build-isolation --editable tools/python
	@touch $@

# ---------------------------------------------------------------- wheels and releases

$(RELEASE_STAMP): $(ENV_STAMP)
	@$(STEP) 'dependency group release' $(UV) sync --quiet --locked --inexact \
	    --no-install-project --python '$(PYTHON)' --group release
	@touch $@

$(ABOUT_STAMP):
	@$(STEP) 'cargo-about $(ABOUT_VERSION) into .tools/cargo-about' cargo install --quiet --locked \
	    --version $(ABOUT_VERSION) --features cli --root .tools/cargo-about cargo-about
	@touch $@

$(LICENCES): $(ABOUT_STAMP) Cargo.lock scripts/release/about.toml scripts/release/about.hbs
	@$(STEP) 'licences of linked crates' .tools/cargo-about/bin/cargo-about generate --fail --locked \
	    --manifest-path crates/tierbed-py/Cargo.toml --no-default-features --features otel \
	    --config scripts/release/about.toml --output-file $@ scripts/release/about.hbs

.PHONY: wheel
wheel: $(RELEASE_STAMP) $(LICENCES) ## Build a manylinux wheel into build/wheel and check it; ARCH=aarch64 FEATURES=otel
	@scripts/check-machine target '$(TARGET)'
	@rm -rf build/wheel
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(STEP) 'wheel for $(ARCH) (release build)' \
	    .venv/bin/maturin build --quiet --release --locked --zig --compatibility $(MANYLINUX) \
	    --target $(TARGET) --out build/wheel \
	    $(if $(FEATURES),--features $(FEATURES)$(comma)pyo3/abi3-py310)
	@$(STEP) 'check wheel' scripts/check-wheel build/wheel/*.whl

.PHONY: try-wheel
try-wheel: ## Install the wheel of build/wheel as a user does; run documents, notebooks and examples there
	@PYTHON='$(PYTHON)' $(STEP) 'try wheel' scripts/try-wheel build/wheel/*_$(shell uname -m).whl

.PHONY: release
release: $(RELEASE_STAMP) ## Build, check and try what is released, into build/release; ARCHS="x86_64 aarch64"
	@rm -rf build/release && mkdir -p build/release
	@$(STEP) 'notes' sh -c '$(PY) scripts/release/changelog.py notes $(VERSION) > build/release/NOTES.md'
	@for arch in $(ARCHS); do \
	    $(MAKE) --no-print-directory wheel ARCH=$$arch && mv build/wheel/*.whl build/release || exit 1; \
	done
	@$(STEP) 'source distribution' .venv/bin/maturin sdist --quiet --out build/release
	@$(STEP) 'metadata' .venv/bin/twine check --strict build/release/*.whl build/release/*.tar.gz
	@for wheel in build/release/*.whl; do \
	    case $$wheel in \
	    *_$(shell uname -m).whl) PYTHON='$(PYTHON)' $(STEP) "try $$wheel" scripts/try-wheel $$wheel ;; \
	    *_aarch64.whl) $(STEP) "try $$wheel, emulated" scripts/try-wheel-emulated $$wheel ;; \
	    esac || exit 1; \
	done
	@cd build/release && sha256sum *.whl *.tar.gz > SHA256SUMS && ls -l

.PHONY: changelog
changelog: ## Move the notes of changes/ into the changelog's section of this version, dated DATE=2026-12-31
	@$(PYTHON) scripts/release/changelog.py join $(VERSION) '$(DATE)'

# ---------------------------------------------------------------- the server without Python

.PHONY: server
server: ## Build tierbed-server into build/server and check what it needs; FEATURES=otel
	@$(STEP) 'tierbed-server (release build)' cargo build --quiet --release --locked -p tierbed-server \
	    $(if $(FEATURES),--features $(FEATURES))
	@mkdir -p build/server
	@strip --strip-debug -o build/server/tierbed-server target/release/tierbed-server
	@$(STEP) 'check server' scripts/check-server build/server/tierbed-server

# ---------------------------------------------------------------- the backend for Triton

BACKEND := build/backends/tierbed/libtriton_tierbed.so

.PHONY: triton-backend
triton-backend: ## Build the backend for Triton into build/backends and check what it needs
	@$(STEP) 'libtriton_tierbed.so (release build)' cargo build --quiet --release --locked -p tierbed-triton
	@mkdir -p build/backends/tierbed
	@strip --strip-debug -o $(BACKEND) target/release/libtriton_tierbed.so
	@$(STEP) 'check backend' scripts/check-backend $(BACKEND)

# ---------------------------------------------------------------- the main job

.PHONY: demo
demo: setup ## Train, checkpoint, resume, publish and serve a model; DATA=file for a Criteo file
	@$(TIERBED) demo --out demo-out $(if $(DATA),--data '$(DATA)')

.PHONY: bench
bench: setup ## Run the quick benchmarks into bench-out/ (table, PNG, JSON)
	@$(STEP) 'bench lookup' $(TIERBED) bench lookup --quick --out bench-out
	@$(STEP) 'bench training' $(TIERBED) bench training --quick --out bench-out

.PHONY: bench-deps
bench-deps: $(ENV_STAMP) ## Bring what only comparisons need: FBGEMM, rocksdict, lmdb, Lance, RocksDB (as root), Redis, memcached
	@$(STEP) 'dependency group bench' $(UV) sync --quiet --locked --inexact \
	    --no-install-project --python '$(PYTHON)' --group bench
	@scripts/bench-deps '$(PYTHON)'

.PHONY: client-deps
client-deps: ## Bring clients that others made into .tools/clients, for the tests that ask with them
	@scripts/client-deps '$(PYTHON)'

.PHONY: framework-deps
framework-deps: $(ENV_STAMP) ## Bring the libraries that rows are used with (TorchRec, Lightning, Polars, ...), for their tests
	@$(STEP) 'dependency group frameworks' $(UV) sync --quiet --locked --inexact \
	    --no-install-project --python '$(PYTHON)' --group frameworks

.PHONY: browser-deps
browser-deps: $(ENV_STAMP) ## Bring a browser (as root) and what drives it into .tools/browser, for the tests of the live page
	@scripts/browser-deps '$(PYTHON)'

.PHONY: s3-server
s3-server: ## Bring a store that speaks S3 into .tools/s3, for the tests of versions in buckets
	@scripts/s3-server '$(PYTHON)'

# ---------------------------------------------------------------- checks

.PHONY: test
test: setup lint test-quick ## Run every check and every quick test, as CI does

# Python's tests wait for servers and processes most of the time, Rust's compile.
.PHONY: test-quick
test-quick: setup
	@PYTHON='$(PYTHON)' scripts/side-by-side test-python test-rust

.PHONY: lint
lint: setup ## Check formatting, lints, house rules and types
	@$(STEP) 'cargo fmt' cargo fmt --all --check
	@$(STEP) 'tidy' cargo x tidy
	@PYO3_PYTHON="$(CURDIR)/$(PY)" $(STEP) 'clippy' \
	    cargo clippy --quiet --locked --workspace --all-targets --features $(TESTED) -- -D warnings
	@PYO3_PYTHON="$(CURDIR)/$(PY)" $(STEP) 'clippy of the wheel: no laboratory, no traces' \
	    cargo clippy --quiet --locked -p tierbed-py --no-default-features -- -D warnings
	@$(STEP) 'ruff check' $(PY) -m ruff check
	@$(STEP) 'ruff format' $(PY) -m ruff format --check
	@$(STEP) 'mypy' $(PY) -m mypy --strict python/tierbed tools/python/tierbed_bench
	@$(STEP) 'stubtest' $(PY) -m mypy.stubtest tierbed._native

.PHONY: test-rust
test-rust: ## Run the Rust tests
	@$(STEP) 'cargo test' cargo test --locked --no-fail-fast --features $(TESTED)

.PHONY: test-python
test-python: setup ## Run the quick Python tests
	@$(STEP) 'pytest' $(PY) -m pytest $(PYTEST_PLAIN) -m 'not slow and not gpu'

.PHONY: test-long
test-long: setup ## Run the slow tests and SIM_ROUNDS=4 simulation seeds
	@$(STEP) 'simulations' cargo x sim --rounds $(SIM_ROUNDS)
	@$(STEP) 'models' cargo test --locked --quiet -p tierbed-models -- --ignored
	@$(STEP) 'kills' cargo test --locked --quiet -p tierbed-train --test '*_kills' -- --ignored
	@$(STEP) 'kills of publishers' cargo test --locked --quiet -p tierbed-remote --test kills -- --ignored --nocapture
	@$(STEP) 'slow pytest' $(PY) -m pytest $(PYTEST_PLAIN) -m 'slow and not gpu'
	@$(MAKE) --no-print-directory test-versions

.PHONY: test-versions
test-versions: setup ## Run the quick Python tests with the lowest and the newest dependencies
	@PYTHON='$(PYTHON)' $(STEP) 'other versions' scripts/test-versions

.PHONY: campaign
campaign: setup ## Kill, cut the power, damage, ask: CAMPAIGN_MINUTES=5 KIND=all SEED= CASE= OTHER= OUT=
	@PYTHONPATH=python/tests $(PY) -m campaign --minutes $(CAMPAIGN_MINUTES) --kind $(KIND) \
	    $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE)) \
	    $(if $(OTHER),--other '$(OTHER)') $(if $(OUT),--out '$(OUT)')

.PHONY: fuzz
fuzz: $(FUZZ_STAMP) ## Fuzz every decoder of bytes on disk; FUZZ_SECONDS=20 for each
	@$(STEP) 'fuzz' scripts/fuzz $(FUZZ_SECONDS)

.PHONY: fuzz-long
fuzz-long: $(FUZZ_STAMP) ## Fuzz for ten minutes each, two at a time; FUZZ_LONG_SECONDS=600
	@$(STEP) 'fuzz-long' scripts/fuzz-long $(FUZZ_LONG_SECONDS)

$(FUZZ_STAMP):
	@$(STEP) 'cargo-fuzz $(FUZZ_VERSION) into .tools/cargo-fuzz' \
	    cargo install --quiet --locked --version $(FUZZ_VERSION) --root .tools/cargo-fuzz cargo-fuzz
	@touch $@

.PHONY: format
format: setup ## Format all Rust and Python sources
	@cargo fmt --all
	@$(PY) -m ruff check --quiet --fix-only
	@$(PY) -m ruff format --quiet

# ---------------------------------------------------------------- documents

.PHONY: docs
docs: setup ## Build the site into build/site, the Rust reference into target/doc, check links
	@$(STEP) 'Rust reference and links' cargo x docs
	@$(STEP) 'dependency group docs' $(UV) sync --quiet --locked --inexact \
	    --no-install-project --python '$(PYTHON)' --group docs
	@NO_MKDOCS_2_WARNING=1 $(STEP) 'site' $(PY) -m mkdocs build --quiet

.PHONY: clean
clean: ## Remove everything that was built (.tools, .venv, target, outputs)
	@rm -rf .tools .venv target build demo-out bench-out \
	    tools/fuzz/target tools/fuzz/corpus tools/fuzz/artifacts
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -rf tools/python/*.egg-info
	@find python tools/python -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -f python/tierbed/_native*.so
