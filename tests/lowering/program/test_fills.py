"""Constants that one value fills take no bytes of the bundle: kernels write them where they are needed."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support.differential import close
from support.gpu_program import check_gpu

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.program.ir import Copy, Launch, Loop, walk
from aotc.lowering.lower import lower
from aotc.lowering.program.fills import filling_value
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.devices.cuda import driver

pytestmark = pytest.mark.cpu

CODE = 100_000  # bytes of a bundle of a few kernels, at most
RNG = np.random.default_rng(0)
X = RNG.standard_normal(128).astype("float32")
PLACES = np.array([3, 5, 3, 30], "int32")
TABLE = RNG.standard_normal((256, 128)).astype("float32")


def fori(count, body, state):
    return lax.fori_loop(0, count, body, state)


def square(x, value=0.0):
    return jnp.full((len(x), len(x)), value)


def row(c, i, x):
    return lax.dynamic_update_slice(c, x[None], (i, 0))


# A function of a row and some places; it makes square arrays that one value fills.
PROGRAMS = {
    "a result": lambda x, i: (square(x), x + 1),
    "one array as two results": lambda x, i: ((z := square(x, 2.0)), z, z[:, :1] + x),
    "scatter": lambda x, i: square(x).at[i].add(x),
    "scatter of minima": lambda x, i: square(x, jnp.inf).at[i].min(x),
    "update": lambda x, i: row(square(x, -1.0), 3, x),
    "two updates of one array": lambda x, i: (row((z := square(x)), 3, x), row(z, 5, x)),
    "a loop's state": lambda x, i: fori(9, lambda k, c: jnp.tanh(c + x) + c.T, square(x)),
    "the state of a loop in one kernel": lambda x, i: fori(
        len(x), lambda k, c: c.at[k].set(x * c[k - 1, 0] + k), square(x, 1.0)
    ),
    "a loop that begins anew": lambda x, i: fori(
        3, lambda k, s: s + fori(9, lambda j, c: row(c, k + j, x * j), square(x)), square(x)
    ),
    "a state that becomes zeros": lambda x, i: fori(
        4, lambda k, c: (square(x), c[0] @ c[0].T + c[1]), (x + square(x, 1.0), square(x) + x)
    ),
    "a branch": lambda x, i: lax.cond(i[0] > 5, lambda: x + square(x, 1.0), lambda: square(x)),
    "a branch in a loop": lambda x, i: fori(
        4, lambda k, c: lax.cond(k % 2 > 0, lambda: jnp.sin(c @ c), lambda: square(x, 1.0)), square(x)
    ),
    "read where it is": lambda x, i: lax.sort(square(x, 3.0)) + x,
    "read where it is by a loop": lambda x, i: fori(
        3, lambda k, c: jnp.sort(c + k) + lax.sort(square(x, 3.0)), x + square(x)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bundles_contain_no_filled_arrays(name):
    data = aotc.compile(PROGRAMS[name], X, PLACES, verify_each=True)
    close(aotc.load(data)(X, PLACES), jax.jit(PROGRAMS[name])(X, PLACES))
    assert len(data) < CODE


def one_of(*ways):
    return lambda x, i: lax.switch(i[0] % len(ways), [lambda way=way: way(x) for way in ways])


BRANCHES = {
    "zeros": one_of(lambda x: square(x) + x, square),
    "several fills": one_of(square, lambda x: square(x, 1.0), lambda x: square(x, jnp.nan), lambda x: square(x) + x),
    "zeros of each of two results": one_of(lambda x: (square(x), square(x) + x), lambda x: (square(x) - x, square(x))),
    "a gradient": lambda x, i: jax.grad(
        lambda y: lax.cond(i[0] > 9, lambda: jnp.sin(y).sum(), lambda: 0.0)
    )(square(x, 1.0) + x),
    "in a loop": lambda x, i: fori(3, lambda k, c: one_of(lambda x: c * 2 + x, square)(x, i + k), square(x) + x),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_fills_a_constant_result(name):
    data = aotc.compile(BRANCHES[name], X, PLACES)
    for places in (PLACES, PLACES + 1, PLACES + 2, PLACES + 3):
        close(aotc.load(data)(X, places), jax.jit(BRANCHES[name])(X, places))
    steps = list(walk(steps_of(name)))
    assert len(data) < CODE
    assert not any(isinstance(s, Copy) and s.size >= 4 * len(X) ** 2 for s in steps)
    assert fills_in(steps)


def test_the_gradient_of_an_embedding_stores_no_zeros():
    def gradient(table, places):
        return jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[places])))(table)

    data = aotc.compile(gradient, TABLE, PLACES)
    close(aotc.load(data)(TABLE, PLACES), jax.jit(gradient)(TABLE, PLACES))
    assert len(data) < CODE


@pytest.mark.parametrize(
    "name",
    ["one array as two results", "scatter", "a loop's state", "a branch in a loop", "read where it is by a loop"],
)
def test_gpu_kernels_fill_constant_arrays(name):
    variant = check_gpu(PROGRAMS[name], (X[:33], PLACES))
    assert variant.constants.size < 1000


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("name", PROGRAMS)
def test_filled_arrays_on_a_gpu_match_jax(name):
    data = aotc.compile(PROGRAMS[name], X, PLACES, target="cuda")
    close(aotc.load(data)(X, PLACES), jax.jit(PROGRAMS[name])(X, PLACES))


def test_functions_share_fill_kernels():
    models = {"f": lambda x: square(x).at[PLACES].add(x), "g": lambda x: (square(x), x * 2)}
    data = aotc.compile(models, args={"f": (X,), "g": (X,)}, verify_each=True)
    module = aotc.load(data)
    close(module.f(X), models["f"](X))
    close(module.g(X), models["g"](X))
    assert len(data) < CODE


def steps_of(name):
    """Return the steps of a program on a CPU."""
    chosen = Options(target="cpu:x86-64-v4")
    raw = fetch(jax.jit({**PROGRAMS, **BRANCHES}[name]), (X, PLACES), {})
    module = run_passes(import_raw(raw, options=chosen, platform="cpu"), chosen)
    (program,) = lower(module, resolve_targets(chosen.target)[0], chosen).steps.values()
    return program.steps


def fills_in(steps):
    return [s.kernel.name for s in steps if isinstance(s, Launch) and s.kernel.name.startswith("fill")]


def test_an_array_read_in_a_loop_is_filled_once():
    """A kernel that cannot compute its operand reads a filled array; the loop does not fill it in each iteration."""
    steps = steps_of("read where it is by a loop")
    (loop,) = (step for step in steps if isinstance(step, Loop))
    assert fills_in(steps)
    assert not fills_in(walk(loop.body))


def test_a_filled_array_is_not_copied():
    steps = steps_of("two updates of one array")
    assert len(fills_in(steps)) == 2
    assert not any(isinstance(s, Copy) for s in walk(steps))


@pytest.mark.parametrize("value", [0, 1, -2.5, -0.0, np.nan])
def test_every_dtype_is_filled_bit_for_bit(value):
    types = ["float64", "float16", ml_dtypes.bfloat16, "int8", "uint16", "bool", "complex64", "complex128"]
    fit = [t for t in types if np.isfinite(value) or np.dtype(t).kind not in "iub"]
    arrays = [np.full((200, 300), np.array(value).astype(t)) for t in fit]
    with jax.enable_x64(True):
        data = aotc.compile(lambda: tuple(jnp.asarray(a) for a in arrays))
    for got, want in zip(aotc.load(data)(), arrays, strict=True):
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
    assert len(data) < CODE


def test_filling_value_is_found_only_for_uniform_bits():
    ones, pair = np.ones((3, 4)), np.zeros((2, 500))
    pair[1, 499] = -0.0
    assert filling_value(ones) == 1
    assert filling_value(np.broadcast_to(np.float32(2), (5, 5))) == 2
    assert filling_value(ones.T[::2]) == 1
    assert filling_value(pair) is None
    assert np.isnan(filling_value(np.full(9, np.nan)))
    assert filling_value(np.arange(5)) is None
