"""Bundles for other CPUs: those for older x86 processors run here, and under qemu, as those for aarch64 do.

A fixed part of the conformance cases and of the random programs, and the small models, on each target; every op that
StableHLO and CHLO have links for each of them. ``make test-aarch64`` runs what needs qemu, which refuses instructions
that a target must not use.
"""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("absl")

from conformance import functions, harnesses
from conformance.case import NotRun, run
from hypothesis import HealthCheck, given, settings
from support import emulated
from support.checklists.checklist import module
from support.checklists.checklist_all import CASES
from support.differential import compare
from support.programs import programs
from support.small_models import MODELS, close

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.kernels.cpu import link
from aotc.targets import TARGETS
from aotc.vmfb import device
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

SHARE = 150  # one in so many of the conformance cases
RANDOM = 12  # programs
OLDER = ("cpu:x86-64-v2", "cpu:x86-64-v3")
EMULATED = [pytest.param(f"qemu {name}", marks=pytest.mark.emulated) for name in emulated.MACHINES]
CPUS = [t.name for t in TARGETS.values() if t.kind == "cpu"]
LINKED = [(OLDER[0], 7), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CPUS)]
CLOSE_TO_XLA_ONLY = {"jax.random.truncated_normal"}  # beside 0 it magnifies the last bits of erf, and so does XLA


@pytest.fixture(scope="module", params=[*OLDER, *EMULATED])
def target(request):
    """A target that can run here, with an executor of its own: a process keeps the first that it loads."""
    how, _, name = request.param.rpartition(" ")
    patch = pytest.MonkeyPatch()
    if how:
        if emulated.missing(name):
            pytest.skip(f"needs qemu: {emulated.missing(name)}")
        patch.setitem(device.DEVICES, "cpu", "support.emulated")
    elif not cpu_features().issuperset(TARGETS[name].features):
        pytest.skip("this machine lacks its features")
    patch.setattr(native, "_PROCESS", native._Process())
    yield name
    patch.undo()


def part():
    """Return conformance cases chosen by a checksum of the name: the same everywhere, spread over all groups."""
    cases = [*harnesses.cases(), *functions.cases()]
    chosen = [c for c in cases if zlib.crc32(c.name.encode()) % SHARE == 1 and c.name not in CLOSE_TO_XLA_ONLY]
    return [pytest.param(c, id=c.name) for c in chosen]


@pytest.mark.parametrize("case", part())
def test_conformance_cases_match_xla_on_each_target(case, target):
    if case.skip:
        pytest.skip(f"jax: {case.skip}")
    try:
        verdict = run(case, target)
    except NotRun as reason:
        pytest.skip(str(reason))
    except BundleError as error:
        if "other libraries" not in str(error):
            raise
        pytest.skip("LAPACK is not there under qemu")
    assert not verdict.problem, verdict.problem


# Compositions whose errors a product and sum with two roundings magnifies: beyond the bound beside XLA with FMA, within
# it beside XLA without. Of `stats.gamma.logsf` the error is 27 units, where XLA's is 26 without FMA, and 17 with it.
MAGNIFIED = """
    special.log_ndtr(f) special.spence(u) special.gamma(p) special.beta(pp) special.poch(pp) stats.norm.logcdf(f)
    stats.gamma.pdf(pp) stats.gamma.cdf(pp) stats.gamma.sf(pp) stats.chi2.pdf(pp) stats.poisson.cdf(jp)
    stats.gennorm.pdf(fp) stats.gennorm.cdf(fp)
"""


@pytest.mark.slow
def test_code_that_lacks_fma_is_as_accurate_as_xla_without_it():
    """In a process of its own, as XLA reads its flags once."""
    names = [f"tests/whole/test_conformance.py::test_function[jax.scipy.{name}]" for name in MAGNIFIED.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--target=cpu:x86-64-v2", *names]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "." * len(names)), done.stdout


@pytest.mark.parametrize("name", MODELS)
def test_small_models_match_jax_on_each_target(name, target):
    function, weights, x, tolerance = MODELS[name]
    loaded = aotc.load(aotc.compile(jax.jit(function), weights, x, target=target, verify_each=True))
    close(loaded.invoke("main", *weights, x), jax.jit(function)(weights, x), tolerance)


def test_argument_and_computed_sizes_work_on_each_target(target):
    batch = jax.export.symbolic_shape("b, 12")
    exported = jax.export.export(jax.jit(lambda x: jax.nn.softmax(x @ x.T)))(jax.ShapeDtypeStruct(batch, "float32"))
    loaded = aotc.load(aotc.compile(exported, target=target))
    for size in (1, 3, 33):
        x = np.random.default_rng(size).standard_normal((size, 12)).astype("float32")
        np.testing.assert_allclose(loaded.invoke("main", x)[0], jax.nn.softmax(x @ x.T), rtol=2e-5, atol=1e-6)


@settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, max_examples=RANDOM)
@given(program=programs(most=6))
def test_random_programs_match_xla_on_each_target(program, target):
    arrays = program.arrays({})
    with jax.enable_x64(True):
        text = jax.jit(program.function(), keep_unused=True).lower(*arrays).as_text()
    want = run_xla(fetch(text), arrays)
    compare(program, target, aotc.load(aotc.compile(text, target=target)).invoke("main", *arrays), want)


@pytest.mark.parametrize(("name", "step"), LINKED)
def test_every_op_links_without_further_symbols(name, step):
    """Libraries of each case of each op need nothing that a bundle does not have."""
    texts = [module(*case) for cases in CASES.values() for case in cases]
    for text in texts[::step]:
        bundle = open_bundle(aotc.compile(text.encode(), target=name))
        (variant,) = bundle.manifest["variants"]
        numbers = [variant[key] for key in ("library", "executor") if variant[key] is not None]
        libraries = [bytes(bundle.verified_segment(number)) for number in numbers]
        assert set().union(*map(link.undefined_symbols, libraries)) <= link.ALLOWED_SYMBOLS | link.THREAD_SYMBOLS
