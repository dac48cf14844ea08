"""No kernel reads memory of a GPU that nothing has written, in any order that the edges of a graph allow."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.watched.unwritten import Unwritten
from support.differential import close, integers, normal
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

lax = jax.lax


def factors(a, b):
    lower = jnp.linalg.cholesky(a)
    return lower, lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)


def until(x):
    return lax.while_loop(lambda s: s.sum() < 100, lambda s: jnp.sin(s) * 0.5 + s + s.max(), x)


def segments(x, i):
    return jax.ops.segment_sum(x, i, 9), jax.ops.segment_max(x, i % 3, 3), x.at[i].set(1.0), x[i]


X, I = normal(100), integers(100, low=-2, high=12)  # noqa: E741
CASES = {
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x[:60].reshape(2, 30), 1)), [X[:70]], 800),
    "top_k": (lambda x: (*lax.top_k(x, 20), *lax.top_k(x.reshape(2, -1), 5)), [X], 800),
    "top_k in no memory": (lambda x: lax.top_k(x.reshape(4, -1), 5), [X], 1),
    "scan": (lambda x: (jnp.cumsum(x), lax.cummax(x, reverse=True), jnp.cumsum(x.reshape(10, 10), 0)), [X], 300),
    "segments": (segments, [X, I], 0),
    "softmax": (lambda x: (jax.nn.softmax(x.reshape(2, 50)), x.reshape(10, 10).sum(0), jnp.argmax(x)), [X], 0),
    "transpose": (lambda x: x.reshape(4, 25).T + 1, [X], 0),
    "fft": (lambda x: jnp.fft.fft(x[:64]), [X.astype("complex64")], 0),
    "factors": (factors, [np.eye(12, dtype="f4") * 3 + 0.01, normal(12, 5)], 0),
    "random": (lambda k: jax.random.normal(k, (50,)), [np.array([1, 2], "u4")], 0),
    "loop": (until, [normal(4, 40, scale=0.3)], 0),
    "product": (lambda x: x.reshape(10, 10) @ x.reshape(10, 10), [X], 0),
}


def read_unwritten(name, monkeypatch, right=True):
    """What kernels of a case read before it was written; the results are ``right`` or nobody looks."""
    function, arrays, limit = CASES[name]
    with jax.default_matmul_precision("highest"):
        data = aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90", shared_memory_limit=limit)
        want = jax.tree.leaves(jax.jit(function)(*arrays))
    install(monkeypatch, data, order=random.Random(3))
    watched = Unwritten(monkeypatch)
    module = aotc.load(data)
    for _ in range(2):
        got = [np.asarray(x) for x in module.invoke("main", *arrays)]
        if right:
            close(got, want, factor=40)
    return watched.found


@pytest.mark.parametrize("name", CASES)
def test_nothing_unwritten_is_read(name, monkeypatch):
    assert not read_unwritten(name, monkeypatch)


@pytest.mark.parametrize("what", ["upload", "kernel"])
def test_missing_uploads_and_writes_are_detected(what, monkeypatch):
    """An argument that does not come; kernels that write nothing."""
    if what == "upload":
        monkeypatch.setattr(SimulatedGpu, "upload", lambda *_: None)
    else:
        run = Unwritten.run
        monkeypatch.setattr(Unwritten, "run", lambda *given: None if "k0_" in given[1][:9] else run(*given))
    assert read_unwritten("transpose" if what == "upload" else "segments", monkeypatch, right=False)
