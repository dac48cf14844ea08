"""Donated arguments: results are made in their memory where that is right, and nowhere else."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from vmfb.simulated_gpu import install

import aotc
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
A, B, ROW = (RNG.standard_normal(shape).astype("float32") for shape in ((96, 64), (96, 64), (1, 64)))
SQUARE = A[:64].copy()
LARGE = RNG.standard_normal((1024, 64)).astype("float32")


def checked_update(c, r, i):
    from jax.experimental import checkify

    checkify.check(i >= 0, "negative row")
    return lax.dynamic_update_slice(c, r, (i, 0))


# A function, its arguments, and which of them give their memory to a result at the default level.
PROGRAMS = {
    "a row": (lambda c, r, i: lax.dynamic_update_slice(c, r, (i, 0)), (A, ROW, np.int32(5)), [True, False, False]),
    "a row that is read before": (
        lambda c, r, i: lax.dynamic_update_slice(c, r + c.sum(), (i, 0)), (A, ROW, np.int32(5)), [True, False, False]
    ),
    "the old value is a result too": (
        lambda c, r, i: (lax.dynamic_update_slice(c, r, (i, 0)), c), (A, ROW, np.int32(5)), [False, False, False]
    ),
    "the old value is read afterwards": (
        lambda c, r, i: (d := lax.dynamic_update_slice(c, r, (i, 0)), jnp.sort(d, 0) + c), (A, ROW, np.int32(5)), None
    ),
    "elementwise": (lambda a, b: a * 2 + b, (A, B), [True, False]),
    "two results": (lambda a, b: (a + 1, b * 2), (A, B), [True, True]),
    "both read both": (lambda a, b: (a + b, a - b), (A, B), None),
    "transposed": (lambda a: a.T + a, (SQUARE,), [False]),
    "a product": (lambda a, b: a @ b, (SQUARE, SQUARE.copy()), [False, False]),
    "returned as it is": (lambda a, b: (a, a + b), (A, B), [True, True]),
    "another type": (lambda a: a.sum(0), (A,), [False]),
    "a loop of updates": (
        lambda c, r: lax.fori_loop(0, 9, lambda i, c: lax.dynamic_update_slice(c, r * i, (i, 0)), c),
        (LARGE, ROW), [True, False],
    ),
    "a loop that reads it otherwise": (
        lambda c, r: lax.fori_loop(0, 9, lambda i, d: lax.dynamic_update_slice(d, r * c[i], (i, 0)), c),
        (LARGE, ROW), [False, False],
    ),
    "a loop of products": (lambda c: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ c), c), (SQUARE,), None),
    "a branch": (lambda c, i: lax.cond(i > 0, jnp.sin, jnp.cos, c), (A, np.int32(1)), [True, False]),
    "twice": (
        lambda c, r, i: lax.dynamic_update_slice(lax.dynamic_update_slice(c, r, (i, 0)), r, (i + 1, 0)),
        (A, ROW, np.int32(5)), None,
    ),
    "scatter": (lambda c, r: c.at[jnp.array([3, 7, 3])].add(r), (A, ROW), None),
    "without elements": (lambda a: a + 1, (np.zeros((0, 4), "float32"),), None),
}  # fmt: skip


SMALLER = {"a product": (20, 20), "a loop of products": (20, 20), "the old value is read afterwards": (40, 3)}

def smaller(name):
    """A program whose loops Python runs."""
    function, arguments, given = PROGRAMS[name]
    cut = tuple(map(slice, SMALLER.get(name, ())))
    return function, tuple(a[cut] if a.ndim else a for a in arguments), given


def donating(function, count):
    return jax.jit(function, donate_argnums=tuple(range(count)))


def bundle_of(function, arguments, **flags):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # JAX's, of buffers that XLA cannot use
        with jax.default_matmul_precision("highest"):  # else a GPU rounds what its tensor cores multiply
            return aotc.compile(donating(function, len(arguments)), *arguments, verify_each=True, **flags)


def compiled(function, arguments, **flags):
    return aotc.load(bundle_of(function, arguments, **flags))


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("name", PROGRAMS)
def test_donation_does_not_change_results(name, level):
    check_results(PROGRAMS[name], level, compiled(*PROGRAMS[name][:2], opt_level=level))


@pytest.mark.cudasim
@pytest.mark.parametrize("name", PROGRAMS)
def test_donation_on_a_simulated_gpu_does_not_change_results(name, monkeypatch):
    pytest.importorskip("numba_cuda")
    program = smaller(name)
    data = bundle_of(*program[:2], target="cuda:sm_90")
    install(monkeypatch, data)
    check_results(program, 2, aotc.load(data))


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda_driver.missing()), reason="no GPU")
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_donation_on_a_gpu_does_not_change_results(name, level):
    data = bundle_of(*PROGRAMS[name][:2], target="cuda:sm_90", opt_level=level)
    check_results(PROGRAMS[name], level, aotc.load(data, devices="cuda"))


def check_results(program, level, module):
    """Compare what a module of a program returns, in each way of giving memory, with JAX."""
    function, arguments, given = program
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    if given is not None and level == 2:
        assert [a["donated"] for a in module.main.signature.arguments] == given
    for how in ({}, {"donate": True}, {"out": [np.full(e.shape, 7, e.dtype) for e in expected]}):
        arrays = [np.array(a) for a in arguments]
        for x, y in zip(module.invoke("main", *arrays, **how), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        if how != {"donate": True}:
            assert all(map(np.array_equal, arrays, arguments))


def test_a_result_is_the_donated_array():
    module = compiled(*PROGRAMS["a row"][:2])
    cache = A.copy()
    (first,) = module.invoke("main", cache, ROW, np.int32(5), donate=True)
    assert first is cache
    (second,) = module.invoke("main", first, ROW, np.int32(6), donate=True)
    assert second is cache
    np.testing.assert_array_equal(cache[5:7], np.repeat(ROW, 2, 0))


def test_an_array_with_two_owners_is_copied():
    module = compiled(lambda a, b: a * 2 + b, (A, B))
    both = A.copy()
    np.testing.assert_allclose(module.invoke("main", both, both, donate=True)[0], 3 * A, rtol=1e-6)
    np.testing.assert_array_equal(both, A)


def test_donated_arrays_of_symbolic_size_are_updated_in_place():
    n = export.symbolic_shape("n")[0]
    shapes = (jax.ShapeDtypeStruct((n, 4), "float32"), jax.ShapeDtypeStruct((1, 4), "float32"))
    function = donating(lambda c, r: lax.dynamic_update_slice(c, r, (1, 0)), 1)
    module = aotc.load(aotc.compile(function, *shapes, verify_each=True, specialize={"n": (4,)}))
    assert module.main.signature.arguments[0]["donated"]
    for size in (1, 3, 4, 9):
        cache = np.zeros((size, 4), "float32")
        (result,) = module.invoke("main", cache, np.ones((1, 4), "float32"), donate=True)
        assert result is cache
        assert cache.sum() == 4


def test_a_failed_check_leaves_a_donated_argument_unchanged():
    from jax.experimental import checkify

    checked = checkify.checkify(checked_update)
    module = aotc.load(aotc.compile(donating(checked, 1), A, ROW, np.int32(0), verify_each=True))
    cache = A.copy()
    with pytest.raises(CallError, match="negative row"):
        module.invoke("main", cache, ROW, np.int32(-1), donate=True)
    np.testing.assert_array_equal(cache, A)
    module.invoke("main", cache, ROW, np.int32(1), donate=True)
    np.testing.assert_array_equal(cache[1], ROW[0])


def test_donating_calls_from_many_threads_are_right():
    from concurrent.futures import ThreadPoolExecutor

    module = compiled(*PROGRAMS["a row"][:2])

    def call(n):
        cache = A.copy()
        (result,) = module.invoke("main", cache, ROW, np.int32(n % 96), donate=True)
        return result is cache and (cache[n % 96] == ROW).all()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(400)))
