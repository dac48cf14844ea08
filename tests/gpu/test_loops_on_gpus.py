"""Loops that are one kernel of all blocks, on the GPU of this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import array, close

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cuda
PRECISE = jax.lax.Precision.HIGHEST


def cell(xs, w, u):
    """A recurrent cell whose states are kept."""

    def step(state, x):
        h, c = state
        gates = jnp.matmul(x, w, precision=PRECISE) + jnp.matmul(h, u, precision=PRECISE)
        a, b, f, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(a) * jnp.tanh(b)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((xs.shape[1], u.shape[0]))
    return jax.lax.scan(step, (zero, zero), xs)


def rounded_cell(n, h, u):
    """Products as JAX's default rounds them, turns of an unknown number."""
    return jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ u + i), h)


def until(x, a):
    """A maximum decides, which one block finds."""

    def continue_while(state):
        return (jnp.abs(state[1]).max() > 1e-3) & (state[0] < 200)

    return jax.lax.while_loop(continue_while, lambda s: (s[0] + 1, jnp.matmul(a, s[1], precision=PRECISE)), (0, x))


def transposed(n, x):
    """Each element moves to another block."""
    return jax.lax.fori_loop(0, n, lambda i, x: jnp.roll(x, 7) * 0.99 + i, x)


def chosen(n, x):
    some = [lambda x: jnp.sin(x) @ x * 0.1, lambda x: x[::-1] * 0.5, jnp.cos]
    return jax.lax.fori_loop(0, n, lambda i, x: jax.lax.switch(i % 3, some, x), x)


CASES = {
    "cell": (cell, (array(30, 16, 256), array(256, 1024, seed=1, scale=0.06), array(256, 1024, seed=2, scale=0.06))),
    "odd cell": (cell, (array(9, 5, 100), array(100, 400, seed=1, scale=0.1), array(100, 400, seed=2, scale=0.1))),
    "many turns": (rounded_cell, (np.int32(5000), array(8, 256), array(256, 256, seed=1, scale=0.03))),
    "until": (until, (array(512), array(512, 512, seed=1, scale=0.03))),
    "turned": (transposed, (np.int32(100), array(40_001))),
    "chosen": (chosen, (np.int32(20), array(96, 96))),
}


def compiled(name):
    function, arrays = CASES[name]
    data = aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90")
    rows = [k for v in open_bundle(data).manifest["variants"] for k in v["kernels"]]
    assert any(k.get("launch", {}).get("cooperative") for k in rows)
    return data, arrays, [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arrays))]


@pytest.mark.parametrize("name", CASES)
def test_loops_of_all_blocks_on_a_gpu(name):
    """Again and again: who came first differs."""
    data, arrays, want = compiled(name)
    module = aotc.load(data)
    for _ in range(5):
        close(module.invoke("main", *arrays), want, 2e-3 if name == "many turns" else 1e-4)


def test_several_calls_in_flight():
    """Kernels that need all multiprocessors do not wait for each other's blocks."""
    data, arrays, want = compiled("cell")
    modules = [aotc.load(data) for _ in range(3)]
    calls = [module.submit("main", *arrays) for _ in range(8) for module in modules]
    for call in calls:
        close(call.result(60), want, 1e-4)


def test_a_call_of_an_endless_loop_ends():
    def endless(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 2, lambda c: jnp.sin(c @ w), x)

    x, w = array(16, 256), array(256, 256, seed=1)
    module = aotc.load(aotc.compile(jax.jit(endless), x, w, target="cuda:sm_90"))
    for _ in range(2):
        with pytest.raises(CallError, match="deadline"):
            module.submit("main", x, w, deadline=0.3).result(60)
