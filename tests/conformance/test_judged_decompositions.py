"""How the conformance suite judges eigenvectors and singular vectors: all right ones pass, and no others."""

import jax
import numpy as np
import pytest

from conformance.agreement import compare

pytestmark = pytest.mark.ir

RANDOM = np.random.default_rng(0)


def batch(*shape, dtype):
    x = RANDOM.normal(size=shape)
    return (x + 1j * RANDOM.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def svd(dtype):
    a = batch(2, 9, 5, dtype=dtype)
    u, s, vh = np.linalg.svd(a)
    return a, [s, u, vh]


def eigh(dtype):
    a = batch(2, 7, 7, dtype=dtype)
    a = a + a.swapaxes(1, 2).conj()
    w, v = np.linalg.eigh(a)
    return a, [v, w]


def values_first(dtype):
    a, (v, w) = eigh(dtype)
    return a, [w, v]


def values_between(dtype):
    a, (s, u, vh) = svd(dtype)
    return a, [u, s, vh]


def eig(dtype):
    a = batch(2, 6, 6, dtype=dtype)
    wide = a.astype("c16")
    w, v = np.linalg.eig(wide)
    left = np.linalg.inv(v).conj().swapaxes(1, 2)
    left /= np.linalg.norm(left, axis=1, keepdims=True)
    narrow = np.result_type(a, "c8")
    return a, [x.astype(narrow) for x in (w, left, v)]


MAKERS = {
    "svd": svd, "eigh": eigh, "eig": eig,
    "jax.numpy.linalg.eigh": values_first, "jax.numpy.linalg.svd": values_between,
}  # fmt: skip
VECTORS = {
    "svd": (1, 2), "eigh": (0,), "eig": (1, 2), "jax.numpy.linalg.eigh": (1,), "jax.numpy.linalg.svd": (0, 2),
}  # fmt: skip


def verdict(group, a, got, want):
    with jax.enable_x64(True):
        return compare(group, [jax.numpy.asarray(a) if "." in group else a], got, want, lambda: None).problem


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("group", MAKERS)
class TestJudgedDecompositions:
    def test_signs_and_phases_are_free(self, group, dtype):
        a, want = MAKERS[group](dtype)
        assert verdict(group, a, want, want) == ""
        iteration = np.exp(0.7j) if np.dtype(dtype).kind == "c" or group == "eig" else -1.0
        got = [x.copy() for x in want]
        for n in VECTORS[group]:
            if group.endswith("svd") and n == 2:
                got[n][:, 1] *= np.conj(iteration)
            else:
                got[n][..., 1] *= iteration
        assert verdict(group, a, got, want) == ""

    def test_what_is_wrong_is_seen(self, group, dtype):
        a, want = MAKERS[group](dtype)
        eps = np.finfo(dtype).eps
        for n in VECTORS[group]:
            spoiled = {
                "two change places": lambda x: x[..., [1, 0, *range(2, x.shape[-1])]],
                "too long": lambda x: x * (1 + 400 * eps),
                "noise": lambda x: x * (1 + 3000 * eps * RANDOM.choice([-1, 1], x.shape)),
                "one is there twice": lambda x: np.concatenate([x[..., :1], x[..., :1], x[..., 2:]], -1),
                "no number": lambda x: np.where(np.arange(x.shape[-1]) == 1, np.nan, x),
                "another matrix's": lambda x: x[::-1],
            }
            for what, change in spoiled.items():
                got = list(want)
                got[n] = change(want[n]).astype(want[n].dtype)
                assert "vectors: " in verdict(group, a, got, want), (n, what)

    def test_values_are_unique(self, group, dtype):
        a, want = MAKERS[group](dtype)
        values = {"eigh": 1, "jax.numpy.linalg.svd": 1}.get(group, 0)
        got = list(want)
        got[values] = want[values] * (1 + 3 * np.finfo(dtype).eps)
        assert verdict(group, a, got, want) == ""
        got[values] = want[values] * (1 + 600 * np.finfo(dtype).eps)
        assert verdict(group, a, got, want)
        got[values] = want[values][..., ::-1]
        assert verdict(group, a, got, want)


@pytest.mark.parametrize("side", [1, 2])
def test_left_vectors_are_no_right_ones(side):
    """A case that asks for those of one side does not get the other's."""
    a, want = eig("f8")
    assert verdict("eig", a, [want[0], want[side]], [want[0], want[side]]) == ""
    assert "vectors: " in verdict("eig", a, [want[0], want[3 - side]], [want[0], want[side]])
