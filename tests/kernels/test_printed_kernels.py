"""Printed kernels, compiled by Numba: every scalar op beside NumPy, and the file that checks itself."""

import re
import subprocess
import sys
from functools import partial

import jax
import numba
import numpy as np
import pytest

pytest.importorskip("numba")

from support.scalar_kernels import check_every_op, run
from typer.testing import CliRunner

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.numba_front.compile import KernelRefused, compile_kernel
from aotc.kernels.numba_front.source import numba_source
from aotc.kernels.numba_front.trial import NoTrial, output_difference, random_arguments
from aotc.targets import host_target
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import DTYPES
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

QUICK = ("i1", "i4", "u8", "i32", "bf16", "f8E5M2", "f32", "c64")
ROW = """def row(x: "f32[n, 8]", exp: "i8[n]", /, o: "f32[n]", q: "i8[n]", *, n: "dim", grid: "n"):
    for i in parallel(0, n):
        sum = private("f32[]")
        sum[()] = f32(0.0)
        for j in range(0, 8):
            sum[()] += exp_(x[i, j])
        o[i] = sum[()]
        q[i] = exp[i] * i8(100)
""".replace("exp_(", "exp(")
PRINTED = """def row(x: "f32[n, 8]", exp_: "i8[n]", o: "f32[n]", q: "i8[n]", n: "dim", scratch, begin, end):
    for i in range(begin, end):
        sum_ = private((1,), f32)
        sum_[0] = f32(0.0)
        for j in range(0, 8):
            sum_[0] = sum_[0] + f32(exp(x[i, j]))
        o[i] = sum_[0]
        q[i] = i8(exp_[i] * i8(100))
"""
GATHER = """def gather(x: "f32[4]", at: "i32[3]", /, o: "f32[3]", *, grid: "1"):
    for i in range(0, 3):
        k = at[i]
        o[i] = x[k]
"""


@pytest.mark.own_process
@pytest.mark.parametrize(
    "dtype", [d if d in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in DTYPES]
)
def test_every_scalar_op(dtype):
    check_every_op(dtype, partial(run, by=compile_kernel), plain=True)


@pytest.mark.own_process
def test_the_text_casts_integers_and_renames_what_hides_a_function():
    source = numba_source(parse_kernel(ROW))
    assert source.text == PRINTED
    assert source.names == ("exp", "f32", "i8", "private")
    x, steps = np.zeros((3, 8), "f4"), np.array([1, 2, 3], "i1")
    sums, wrapped = np.zeros(3, "f4"), np.zeros(3, "i1")
    run(parse_kernel(ROW), [x, steps, sums, wrapped], 3, (3,), by=compile_kernel)
    np.testing.assert_array_equal(sums, [8, 8, 8])
    np.testing.assert_array_equal(wrapped, [100, -56, 44])


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def other(x): pass", "does not define gather; found other"),
        ("def gather(x:", "SyntaxError"),
        ("def gather(x, at, o, scratch, begin, end):\n    o[0] = x[0].lower()\n", "lower"),
    ],
)
def test_a_function_that_is_refused(text, reason):
    with pytest.raises(KernelRefused, match=f"(?s){reason}"):
        compile_kernel(parse_kernel(GATHER), host_target(), text, "gather")


def test_random_arguments_stay_in_bounds():
    arguments = random_arguments(parse_kernel(GATHER))
    assert arguments.arrays[1].min() >= 0
    assert arguments.arrays[1].max() < 4
    outside = GATHER.replace("x[k]", "x[k + 4]").replace('"f32[4]"', '"f32[4]"')
    with pytest.raises(NoTrial, match="out of bounds"):
        random_arguments(parse_kernel(outside))


def test_moved_elements_must_have_equal_bits():
    kernel = parse_kernel(GATHER)
    one = random_arguments(kernel)
    other = one.copied()
    assert not output_difference(kernel, one, other)
    other.arrays[2][1] = np.nextafter(np.float32(0), np.float32(1))
    assert "1 of 3 elements differ, the first at [1]" in output_difference(kernel, one, other)


@pytest.fixture(scope="module")
def kernels_file(tmp_path_factory):
    """The printed kernels of a matmul with a softmax."""
    folder = tmp_path_factory.mktemp("printed")

    def model(x, w):
        from jax.nn import softmax

        return softmax(x @ w), (x[:, ::-1] > 0).sum(0)

    aotc.compile(model, np.zeros((5, 7), "f4"), np.zeros((7, 9), "f4")).save(folder / "m.vmfb")
    done = CliRunner().invoke(app, ["dump", str(folder / "m.vmfb"), "--kernels", "-o", str(folder / "k.py")])
    assert done.exit_code == 0, done.output
    return folder / "k.py"


def _checked(path):
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)


def test_the_file_checks_each_kernel(kernels_file):
    done = _checked(kernels_file)
    names = re.findall(r"^def (\w+)", kernels_file.read_text(), re.MULTILINE)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{name}: agrees" for name in names]), done.stderr
    assert len(names) >= 2


def test_the_file_reports_a_kernel_that_differs(kernels_file):
    text = kernels_file.read_text()
    assert "f32(exp(" in text
    edited = kernels_file.with_name("edited.py")
    edited.write_text(text.replace("f32(exp(", "f32(exp(0.5 * "))
    done = _checked(edited)
    assert done.returncode == 1
    assert "elements differ, the first at" in done.stdout


def test_a_replaced_kernel_runs_in_the_bundle():
    model, x = jax.jit(lambda x: jax.nn.softmax(x)), np.linspace(-3, 3, 45, dtype="f4").reshape(5, 9)
    usual = aotc.compile(model, x)
    opened = open_bundle(usual)
    ((key, row),) = opened.manifest["debug"]["kernels"].items()
    module = numba_source(parse_kernel(row["text"])).module
    own = aotc.compile(model, x, replace={key.rpartition("/")[2]: module})
    np.testing.assert_allclose(aotc.load(own)(x), aotc.load(usual)(x), rtol=1e-6)
    library = opened.manifest["variants"][0]["library"]
    assert bytes(open_bundle(own).segment(library)) != bytes(opened.segment(library))


def test_a_replaced_kernel_of_one_kind_of_target():
    """Kernels for CPUs and for GPUs may have one name."""
    model, x = jax.jit(lambda x: jax.nn.softmax(x)), np.linspace(-3, 3, 45, dtype="f4").reshape(5, 9)
    ((key, row),) = open_bundle(aotc.compile(model, x)).manifest["debug"]["kernels"].items()
    name, module = key.rpartition("/")[2], numba_source(parse_kernel(row["text"])).module
    targets = {"target": "cpu,cuda:sm_90"}
    own = aotc.compile(model, x, replace={f"cpu/{name}": module}, **targets)
    np.testing.assert_allclose(aotc.load(own, devices="cpu")(x), jax.nn.softmax(x), rtol=1e-6)
    with pytest.raises(aotc.CompileError, match=f"cpu/{name} or cuda/{name}"):
        aotc.compile(model, x, replace={name: module}, **targets)
    with pytest.raises(aotc.CompileError, match="no kernel 'cuda/other' to replace"):
        aotc.compile(model, x, replace={"cuda/other": module}, **targets)


def doubled(a, o, scratch, begin, end):
    for item in range(begin, end):
        for i in range(10 * item, 10 * item + 10):
            o[i] = 2 * a[i] + BIAS


BIAS = np.float32(0)


def test_a_function_in_place_of_a_kernel():
    """A function of this module, with what it reads from it; and one that is printed, with the runtime's functions."""
    model, x = jax.jit(lambda x: x * 2), np.arange(10, dtype="f4")
    opened = open_bundle(aotc.compile(model, x))
    ((key, row),) = opened.manifest["debug"]["kernels"].items()
    name = key.rpartition("/")[2]
    scope = {}
    exec(numba_source(parse_kernel(row["text"])).module, scope)
    for function in (doubled, scope[name], numba.njit(scope[name])):
        own = aotc.compile(model, x, replace={name: function})
        np.testing.assert_array_equal(aotc.load(own)(x), 2 * x)


def _raises(*arrays):
    raise ValueError


@pytest.mark.parametrize("function", [_raises, len, lambda *a: None])
def test_a_function_that_cannot_be_sent(function):
    with pytest.raises(aotc.CompileError, match="cannot compile the function that replaces kernel k0: "):
        aotc.compile(jax.jit(lambda x: x * 2), np.ones(3, "f4"), replace={"k0": function})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("k9", "def k9(): pass\n", "the bundle has no kernel 'k9' to replace.*one of: k0_"),
        ("k0_mul", "def other(): pass\n", "does not define k0_mul; found other"),
        ("k0_mul", "def k0_mul(x, o, scratch, begin, end):\n    o[0] = 1.0\n", "9 of 10 elements differ|10 of 10"),
        ("k0_mul", "missing.py", "cannot read the module"),
    ],
)
def test_a_replacement_that_is_refused(name, text, reason):
    model, x = jax.jit(lambda x: x * 2), np.ones(10, "f4")
    names = [row["name"] for row in open_bundle(aotc.compile(model, x)).manifest["variants"][0]["kernels"]]
    name, text, reason = (s.replace("k0_mul", names[0]) for s in (name, text, reason))
    with pytest.raises(aotc.CompileError, match=f"(?s){reason}"):
        aotc.compile(model, x, replace={name: text})
