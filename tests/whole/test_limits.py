"""Programs at the edge of what one kernel can take, and angles at the edge of what a reduction can."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.abi import MAX_PLACES

pytestmark = [pytest.mark.cpu]


def leaves(fn, *args, **flags):
    """Return what aotc and what XLA make of ``fn``."""
    jitted = jax.jit(fn)
    module = aotc.load(aotc.compile(jitted, *args, **flags))
    return jax.tree.leaves(module(*args)), jax.tree.leaves(jitted(*args))


def test_a_kernel_may_have_many_inputs_and_outputs():
    """The fourth derivative of sinc has 16 results, and 65 arrays around one of its kernels."""

    def derivative(fn, order):
        return fn if order == 0 else lambda *xs: jax.jvp(derivative(fn, order - 1), xs[: len(xs) // 2], xs[len(xs) // 2 :])  # noqa: E501

    xs = [np.float32(n) / 7 for n in range(1, 17)]
    for a, b in zip(*leaves(derivative(jnp.sinc, 4), *xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("fn", [lambda *a: jnp.concatenate(a), lambda *a: jnp.stack(a, 1) * 2, lambda *a: sum(a)])
def test_ops_with_hundreds_of_operands_match_jax(fn, level):
    xs = [np.full((2, 3), n, np.float32) for n in range(300)]
    for a, b in zip(*leaves(fn, *xs, opt_level=level), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_op_of_too_many_operands_is_refused():
    xs = [np.arange(5, dtype=np.float32)] * (MAX_PLACES // 2 + 1)
    with pytest.raises(CompileError, match=f"expected at most {MAX_PLACES}"):
        aotc.compile(jax.jit(lambda *a: jax.lax.sort(a, num_keys=1)), *xs)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_sines_of_large_angles_are_accurate(kind, name):
    """Every size of angle, and the f64 that is nearest to a multiple of pi/2 (J.-M. Muller, 5.3e-19 away)."""
    random = np.random.default_rng(1)
    highest = np.log10(np.finfo(kind).max)
    x = (10 ** random.uniform(0, highest, 500) * random.choice([-1, 1], 500)).astype(kind)
    x[:8] = [np.finfo(kind).max, 2.0**44, -(2.0**44), 2.0**52, 3e15, 1e22, 1e17, 5e8]
    if kind == "float64":
        x[8] = float.fromhex("0x1.6ac5b262ca1ffp+849")
    with jax.enable_x64(True):
        found = aotc.load(aotc.compile(jax.jit(getattr(jnp, name)), x))(x)
    with mpmath.workprec(1400):
        want = np.array([float(getattr(mpmath, name)(mpmath.mpf(float(v)))) for v in x])
    assert found.dtype == kind
    assert np.max(np.abs(found - want) / np.spacing(np.abs(want).astype(kind))) <= 4
