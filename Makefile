# make test: a fresh environment, linters and the tests; make demo: a model from Keras to a bundle.
# make test-all: the slow tests too; make test-gpu: those that need an NVIDIA GPU; make check: seconds, no Numba;
# make test-sanitizer: kernels of every template and algorithm under compute-sanitizer, on an NVIDIA GPU;
# make test-browser: the server's page, and those of aotc report, in headless Chromium (apt install chromium);
# make test-torch: the tutorial for PyTorch models with PyTorch itself, in an environment of its own (4 GB);
# make test-ray: the server on a cluster of Ray's, in an environment of its own;
# make test-aarch64: bundles for aarch64 and for old x86 processors under qemu (apt install qemu-user libc6-arm64-cross);
# make aarch64-python: a Python for aarch64 that runs there too, for tests of the whole runtime (Debian's packages);
# make zoo: models of flax, equinox, keras and transformers beside jax.jit;
# make fuzz: changed bundles, models, weights and calls; goes on where the last run ended;
# make site: the documentation as a site in build/site;
# make site-version: the same as the site of this version, in a commit on the branch gh-pages, beside earlier versions;
# make package: wheel and source archive in build/package, checked, and installed once;
# make executor: the executor's LLVM IR again, after a change of its Python.
# Needs Python >= 3.11 and pip; everything else is installed into .venv*.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && { echo $$p; break; }; done)
DEMO ?= resnet50v2
OUT = build/demo-$(DEMO)
PIP = bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: package test test-all test-gpu test-sanitizer test-browser test-ray test-torch torch-models test-aarch64 aarch64-python zoo demo check clean fuzz executor site site-version

# Tests of a file run one after the other in one process, with what its fixtures and caches compile (worksteal; loadfile
# repeats a test that crashes). Processes that tests start read the bytecode of the first that imports a module, whatever the
# environment says: without it each takes 0.6 s more. A test that hangs fails after 10 minutes, and in native code its
# process ends after 11, with the stacks of all threads; the others go on.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: .venv-test/ready
	.venv-test/bin/ruff check aotc cli tests examples benchmarks docs
	.venv-test/bin/mypy
	.venv-test/bin/python -m pytest -n 2 --dist worksteal --durations=40 --timeout=600 \
	  -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true -m "not slow and not cuda and not peer and not emulated and not sanitizer and not browser and not ray"

test-all: .venv-test/ready
	AOTC_ACCURACY_SEED=$$(date +%Y%m%d) .venv-test/bin/python -m pytest -n auto -m "not cuda and not peer and not sanitizer and not browser and not ray"

test-gpu: .venv-test/ready
	.venv-test/bin/python -m pytest -n auto -m cuda

test-sanitizer: .venv-test/ready
	.venv-test/bin/python -m pytest -m sanitizer -rs

test-browser: .venv-test/ready
	.venv-test/bin/python -m pytest -m browser -rs

test-ray: .venv-ray/ready .venv-ray/bundles/ready
	.venv-ray/bin/python -m pytest tests/serve/test_ray.py tests/serve/test_ray_gang.py tests/serve/test_ray_gang_replicas.py -p no:cacheprovider -W ignore -rs

.venv-ray/bundles/ready: .venv-ray/ready .venv-test/ready tests/serve/ray_bundles.py
	PYTHONPATH=tests .venv-test/bin/python -m serve.ray_bundles .venv-ray/bundles
	touch $@

.venv-ray/ready: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/$(PIP) --editable '.[ray]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

# torchax 0.0.13 does not work with torch 2.13.
test-torch: .venv-torch/ready
	.venv-torch/bin/python -m pytest tests/frontend/test_torch_models.py "tests/tools/test_pages.py" -k "torch" -p no:cacheprovider -W ignore -rs

torch-models: .venv-torch/ready
	.venv-torch/bin/python tests/inputs/torch/make.py

.venv-torch/ready: pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/$(PIP) --editable '.[compile]' torch==2.12.1 torchax==0.0.13 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist'
	touch $@

# Every model of docs/zoo.md in full beside jax.jit, some minutes and 4 GB: make zoo ZOO="resnet50|gpt2" takes these.
zoo: .venv-test/ready
	.venv-test/bin/python -m benchmarks models zoo $(if $(ZOO),--only "$(ZOO)")

test-aarch64: .venv-test/ready
	.venv-test/bin/python -m pytest -m "emulated and not slow" -rs

aarch64-python: build/aarch64/ready

build/aarch64/ready: tests/support/aarch64/python.sh .venv-test/ready
	rm -rf build/aarch64
	PYTHON=$(CURDIR)/.venv-test/bin/python bash tests/support/aarch64/python.sh build/aarch64

# Changed bundles, models, files of weights and command lines: make fuzz BUNDLES=1000 MODULES=0 runs so many of each. It goes
# on where the last run ended (build/fuzz); make fuzz FROM=0 begins again. Inputs that fail are in build/fuzz/failures.
BUNDLES ?= 100000
MODULES ?= 100000
BYTECODE ?= 10000
BLOBS ?= 10000
TENSORS ?= 10000
COMPILED ?= 3500
CALLS ?= 100000
FROM ?=

fuzz: .venv-test/ready
	.venv-test/bin/python tests/fuzz/run.py --resume=build/fuzz $(if $(FROM),--first=$(FROM)) \
	  --bundles=$(BUNDLES) --modules=$(MODULES) --bytecode=$(BYTECODE) --blobs=$(BLOBS) --tensors=$(TENSORS) \
	  --compiled=$(COMPILED) --calls=$(CALLS)

executor: .venv-test/ready
	.venv-test/bin/python -m aotc.kernels.cpu.executor.prebuilt_ir

.venv-test/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "aotc needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	rm -rf .venv-test
	$(PYTHON) -m venv .venv-test
	.venv-test/$(PIP) --editable '.[dev]'
	.venv-test/$(PIP) --no-deps 'keras-hub>=0.20'
	touch $@

check: .venv-test/ready
	.venv-test/bin/python -m pytest -m "ir"

demo: .venv/ready-$(DEMO) .venv-run/ready
	@mkdir -p $(OUT)
	.venv/bin/python examples/export_$(DEMO).py $(OUT)
	.venv/bin/aotc compile $(OUT)/model.jaxexp -o $(OUT)/model.vmfb
	.venv-run/bin/aotc run $(OUT)/model.vmfb --input=@$(OUT)/x.npy --output=@$(OUT)/y_aotc.npy
	.venv-run/bin/python examples/compare.py $(OUT) .venv/bin/python

.venv/ready-small: pyproject.toml
	@echo "installing JAX and Numba, about 1 GB"
	$(PYTHON) -m venv .venv
	.venv/$(PIP) '.[compile,linker]'
	touch $@

.venv/ready-resnet50v2: .venv/ready-small
	.venv/$(PIP) 'keras>=3.8'
	touch $@

.venv-run/ready: pyproject.toml
	$(PYTHON) -m venv .venv-run
	.venv-run/$(PIP) .
	touch $@

site: .venv-test/ready
	NO_MKDOCS_2_WARNING=1 .venv-test/bin/mkdocs build --strict

# 0.1 of version 0.1.0: patches have no site of their own.
VERSION = $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)

site-version: .venv-site/ready
	PATH="$(CURDIR)/.venv-site/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest
	PATH="$(CURDIR)/.venv-site/bin:$$PATH" mike set-default latest

.venv-site/ready:
	$(PYTHON) -m venv .venv-site
	.venv-site/$(PIP) 'mkdocs-material>=9.5' 'mike>=2.1'
	touch $@

package: .venv-package/ready
	rm -rf build/package build/lib
	.venv-package/bin/python -m build --outdir build/package
	.venv-package/bin/python -m twine check --strict build/package/*
	.venv-package/$(PIP) --force-reinstall build/package/*.whl
	cd build/package && ../../.venv-package/bin/aotc --version

.venv-package/ready:
	$(PYTHON) -m venv .venv-package
	.venv-package/$(PIP) build twine
	touch $@

clean:
	rm -rf .venv .venv-run .venv-test .venv-ray .venv-torch .venv-package .venv-site build
