"""Users' functions for GPUs: per element, per row and as kernels; without a GPU their numbers are the simulator's."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba_cuda")
from numba import cuda

import aotc
from aotc.ir.loop.ir import For, calls_device_function, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.numba_front.compile import function_from_text
from aotc.kernels.numba_front.gpu_trial import call_simulated
from aotc.kernels.numba_front.trial import TrialArguments, memory_form
from aotc.kernels.numba_front.users_function import users_module
from aotc.targets import TARGETS
from aotc.vmfb import custom_calls
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver

pytestmark = pytest.mark.cudasim

ROOT = Path(__file__).resolve().parents[2]
X = np.linspace(-1, 1, 300, dtype=np.float32).reshape(3, 100)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """An empty registry for each test."""
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})


@cuda.jit(device=True)
def one_more(x):
    return x + 1


@cuda.jit(device=True)
def scaled_exp(x, b, *, scale=1.0):
    return math.exp(one_more(x)) * scale * b


def sum_and_difference(x, y):
    return x + y, x - y


def running_sum(x, out):
    total = 0.0
    for k in range(x.shape[0]):
        total += x[k]
        out[k] = total


@cuda.jit
def reversed_elements(x, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        out[i] = x[x.shape[0] - 1 - i]


@cuda.jit
def sums_of_blocks(x, out):
    """Each block of 64 threads sums a row of 64 elements in shared memory."""
    part = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    part[t] = x[cuda.blockIdx.x, t]
    cuda.syncthreads()
    if t == 0:
        total = np.float32(0)
        for k in range(64):
            total += part[k]
        out[cuda.blockIdx.x] = total


def call(name, result, *operands, **attributes):
    shapes = jax.tree.map(lambda r: jax.ShapeDtypeStruct(*r), result, is_leaf=lambda r: isinstance(r, tuple))
    return jax.ffi.ffi_call(name, shapes)(*operands, **attributes)


def kernels_of(data):
    rows = open_bundle(data).manifest["debug"]["kernels"].values()
    return [parse_kernel(row["text"]) for row in rows]


def simulated(function, arrays, results, name="f", target="cuda:sm_80", **attributes):
    """Compile a call of the registered function, and run its kernel in the simulator."""
    shapes = [(r.shape, r.dtype) for r in results]
    data = aotc.compile(
        jax.jit(lambda *xs: call(name, shapes if len(shapes) > 1 else shapes[0], *xs, **attributes)), *arrays,
        target=target, verify_each=True,
    )  # fmt: skip
    (variant,) = open_bundle(data).manifest["variants"]
    assert "parts" not in variant  # no step of the host
    (kernel,) = [k for k in kernels_of(data) if calls_device_function(k)]
    plain = {key: value.item() for key, value in attributes.items()}
    source = users_module(kernel, function, plain, TARGETS[target])
    buffers = (*kernel.inputs, *kernel.outputs)
    given = [memory_form(a.copy(), b.dtype) for a, b in zip((*arrays, *results), buffers, strict=True)]
    arguments = TrialArguments(tuple(given), (), kernel.grid)
    call_simulated(function_from_text(source, kernel.name), kernel, TARGETS[target], arguments)
    return [a.view(r.dtype).reshape(r.shape) for a, r in zip(given[len(arrays) :], results, strict=True)]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:compute_80"])
def test_a_function_per_element(target):
    aotc.register_custom_call("f", gpu=scaled_exp)
    arrays = [X, np.float32(3)]
    (found,) = simulated(scaled_exp, arrays, [np.zeros_like(X)], target=target, scale=np.float32(0.5))
    np.testing.assert_allclose(found, np.exp(X + 1) * 1.5, rtol=1e-6)


def test_several_results_per_element():
    aotc.register_custom_call("f", gpu=sum_and_difference)
    found = simulated(sum_and_difference, [X, X * 2], [np.zeros_like(X), np.zeros_like(X)])
    np.testing.assert_array_equal(found, [X + X * 2, X - X * 2])


@pytest.mark.parametrize("shape", [(3, 100), (2, 3, 5), (7,)])
def test_a_function_per_row(shape):
    aotc.register_custom_call("f", gpu=running_sum, per="row")
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    (found,) = simulated(running_sum, [x], [np.zeros_like(x)])
    np.testing.assert_array_equal(found, np.cumsum(x, -1))


def test_rows_with_a_vector_that_all_share():
    def scaled(x, w, out):
        for k in range(x.shape[0]):
            out[k] = x[k] * w[k]

    aotc.register_custom_call("f", gpu=scaled, per="row")
    w = np.arange(100, dtype=np.float32)
    (found,) = simulated(scaled, [X, w], [np.zeros_like(X)])
    np.testing.assert_array_equal(found, X * w)


def test_a_kernel_with_its_launch():
    blocks = lambda x, out: (out[0] + 127) // 128
    aotc.register_custom_call("f", gpu=reversed_elements, per="launch", blocks=blocks)
    x = X.reshape(-1)
    (found,) = simulated(reversed_elements, [x], [np.zeros_like(x)])
    np.testing.assert_array_equal(found, x[::-1])


def test_a_kernel_with_shared_memory():
    aotc.register_custom_call("f", gpu=sums_of_blocks, per="launch", threads=64, blocks=5)
    x = np.arange(320, dtype=np.float32).reshape(5, 64)
    (found,) = simulated(sums_of_blocks, [x], [np.zeros(5, np.float32)])
    np.testing.assert_array_equal(found, x.sum(1))


def test_small_floats_are_their_bits():
    def negated(x):
        return x ^ 0x8000

    aotc.register_custom_call("f", gpu=negated)
    x = X.astype(jnp.bfloat16)
    (found,) = simulated(negated, [x], [np.zeros_like(x)])
    np.testing.assert_array_equal(found, -x)


def test_a_result_that_starts_as_an_operand():
    def added(x, y, out):
        out[0] += x[1]

    def model(x, y):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("f", shape, input_output_aliases={1: 0})(x, y)

    aotc.register_custom_call("f", gpu=added, per="row")
    data = aotc.compile(jax.jit(model), X, X, target="cuda:sm_80")
    (kernel,) = [k for k in kernels_of(data) if calls_device_function(k)]
    out = np.zeros_like(X)
    source = users_module(kernel, added, {}, TARGETS["cuda:sm_80"])
    arguments = TrialArguments((X, 2 * X, out), (), kernel.grid)
    call_simulated(function_from_text(source, kernel.name), kernel, TARGETS["cuda:sm_80"], arguments)
    expected = 2 * X
    expected[:, 0] += X[:, 1]
    np.testing.assert_array_equal(out, expected)


def test_symbolic_sizes_and_a_loop():
    """The number of blocks follows from the sizes; a loop does not become one kernel around the call."""
    blocks = lambda x, out: (out[0] + 127) // 128
    aotc.register_custom_call("f", gpu=reversed_elements, per="launch", blocks=blocks)
    aotc.register_custom_call("g", gpu=one_more)

    def model(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: call("g", (c.shape, c.dtype), c), call("f", (x.shape, x.dtype), x))

    (n,) = jax.export.symbolic_shape("n")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("f", "g")]
    exported = jax.export.export(jax.jit(model), disabled_checks=checks)(jax.ShapeDtypeStruct((n,), np.float32))
    data = aotc.compile(exported, target="cuda:sm_80")
    users = [k for k in kernels_of(data) if calls_device_function(k)]
    assert {str(k.grid) for k in users} == {"n", "((n + 127) // 128)"}
    small = aotc.compile(jax.jit(model), np.zeros(4, "f4"), target="cuda:sm_80")
    for kernel in kernels_of(small):
        loops = [s for s in walk(kernel.body) if isinstance(s, For)]
        assert not calls_device_function(kernel) or len(loops) <= 2


def test_without_a_function_for_gpus_the_host_calls_it():
    def doubled(x, out):
        for i in range(x.size):
            out.flat[i] = x.flat[i] + x.flat[i]

    aotc.register_custom_call("f", doubled)
    data = aotc.compile(jax.jit(lambda x: call("f", (x.shape, x.dtype), x)), X, target="cuda:sm_80")
    assert "parts" in open_bundle(data).manifest["variants"][0]


@cuda.jit(device=True)
def with_a_list(x):
    return [x].pop(x, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": scaled_exp}, "it does not fit: the call has 1 operands and results, and attributes none: missing"),
        ({"gpu": with_a_list}, "cannot be compiled into the bundle"),
        ({"gpu": running_sum, "per": "launch", "blocks": lambda x: 1}, "the function of its blocks failed: TypeError"),
        ({"gpu": running_sum, "per": "launch", "blocks": lambda x, o: 0}, "blocks returned 0, expected a positive"),
    ],
)
def test_a_function_that_is_refused(options, message):
    aotc.register_custom_call("f", **options)
    with pytest.raises(aotc.CompileError, match=message):
        aotc.compile(jax.jit(lambda x: call("f", (x.shape, x.dtype), x)), X, target="cuda:sm_80")


def subtract(x, y, out):
    out[...] = x - y


def test_shapes_that_are_refused():
    aotc.register_custom_call("f", gpu=sum_and_difference)
    with pytest.raises(aotc.CompileError, match=r"per element, but has arrays of shapes \(3, 100\) and \(100,\)"):
        aotc.compile(jax.jit(lambda x: call("f", (x.shape, x.dtype), x, x[0])), X, target="cuda:sm_80")
    aotc.register_custom_call("f", native=False, gpu=sum_and_difference)  # for the CPU it fits
    made = aotc.compile(jax.jit(lambda x: call("f", (x.shape, x.dtype), x, x[0])), X, target="cpu")
    np.testing.assert_array_equal(aotc.load(made, custom_calls={"f": subtract})(X), X - X[0])
    aotc.register_custom_call("f", gpu=running_sum, per="row")
    with pytest.raises(aotc.CompileError, match=r"per row, but has arrays of shapes \(2, 100\) and \(3, 100\)"):
        aotc.compile(jax.jit(lambda x: call("f", ((2, 100), x.dtype), x)), X, target="cuda:sm_80")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": 3}, "3 is not a function"),
        ({"gpu": running_sum, "per": "column"}, "per is 'column', expected 'element', 'row' or 'launch'"),
        ({"gpu": running_sum, "per": "launch"}, "a launch needs blocks"),
        ({"gpu": running_sum, "threads": 2048}, "threads of a block are 1 to 1024, found 2048"),
        ({"function": running_sum, "per": "row"}, "per and blocks are about the function for GPUs"),
    ],
)
def test_a_registration_that_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        aotc.register_custom_call("f", **options)


def test_the_documented_example():
    scope = {"jax": jax, "np": np, "aotc": aotc}
    page = (ROOT / "docs/custom_calls.md").read_text()
    (example,) = [e for e in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "gpu=" in e]
    exec(compile(example, "custom_calls.md", "exec"), scope)
    assert "parts" not in open_bundle(scope["data"]).manifest["variants"][0]


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
def test_users_functions_on_a_gpu():
    aotc.register_custom_call("scaled", gpu=scaled_exp)
    aotc.register_custom_call("both", gpu=sum_and_difference)
    aotc.register_custom_call("sums", gpu=running_sum, per="row")
    blocks = lambda x, out: (out[0] + 127) // 128
    aotc.register_custom_call("reversed", gpu=reversed_elements, per="launch", blocks=blocks)
    aotc.register_custom_call("blocks", gpu=sums_of_blocks, per="launch", threads=64, blocks=5)

    def model(x, y):
        a = call("scaled", (x.shape, x.dtype), x * 2, jnp.float32(3), scale=np.float32(0.5))
        b, c = call("both", [(x.shape, x.dtype)] * 2, a, x)
        d = call("sums", (x.shape, x.dtype), b - c)
        return call("reversed", ((300,), x.dtype), d.reshape(-1)), call("blocks", ((5,), y.dtype), y)

    y = np.arange(320, dtype=np.float32).reshape(5, 64)
    module = aotc.load(aotc.compile(jax.jit(model), X, y, target="cuda:compute_80"))
    for _ in range(2):
        found, sums = module.invoke("main", X, y)
        np.testing.assert_allclose(found, np.cumsum(2 * X, -1).reshape(-1)[::-1], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(sums, y.sum(1))
