"""A matrix that products of other numbers of rows read too is packed once, for the most rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((256, 384)).astype("f4")
BACK = RNG.standard_normal((384, 256)).astype("f4")
MANY, ONE = (RNG.standard_normal((rows, 256)).astype("f4") for rows in (64, 1))


def layers(x):
    return jnp.tanh(x @ WEIGHTS / 16) @ BACK


def size(data):
    """Return how many times the bytes of the two matrices a bundle has."""
    return len(data) / (WEIGHTS.nbytes + BACK.nbytes)


def close(found, x):
    want = np.tanh(x.astype("f8") @ WEIGHTS / 16) @ BACK
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


def two(function, **options):
    models = {"prefill": function, "decode": function}
    return aotc.compile(models, args={"prefill": (MANY,), "decode": (ONE,)}, source=False, **options)


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:aarch64"])
def test_two_functions_share_one_packed_matrix(target):
    assert size(two(layers, target=target)) < 1.2


def test_results_equal_those_of_separate_bundles():
    module = aotc.load(two(layers))
    close(module.invoke("prefill", MANY)[0], MANY)
    close(module.invoke("decode", ONE)[0], ONE)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_specialized_copies_share_one_packed_matrix(level):
    x = jax.ShapeDtypeStruct((jax.export.symbolic_shape("b")[0], 256), np.float32)
    data = aotc.compile(layers, x, specialize={"b": (1, 8, 64)}, source=False, opt_level=level)
    assert size(data) < 1.2
    for rows in (1, 5, 8, 64):
        close(aotc.load(data).main(MANY[:rows]), MANY[:rows])


def test_matmuls_of_few_and_many_rows_share_one_packed_matrix():
    def model(x):
        return layers(x), layers(x[:1]), layers(x[:3])

    data = aotc.compile(model, MANY, source=False)
    assert size(data) < 1.2
    for found, rows in zip(aotc.load(data).main(MANY), (64, 1, 3)):
        close(found, MANY[:rows])


def test_matmuls_of_a_transposed_matrix_share_one_packed_matrix():
    weights = WEIGHTS.T.copy()
    data = two(lambda x: x @ weights.T)
    assert len(data) / weights.nbytes < 1.3
    np.testing.assert_allclose(aotc.load(data).invoke("decode", ONE)[0], ONE @ WEIGHTS, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.35), ("int4:64", 0.25)])
def test_quantized_weights_are_shared(kind, most):
    data = two(layers, quantize_weights=kind)
    assert size(data) < most
    one = aotc.load(data).invoke("decode", ONE)[0]
    alone = aotc.load(aotc.compile(layers, ONE, quantize_weights=kind)).main(ONE)
    np.testing.assert_allclose(one, alone, rtol=1e-3, atol=1e-3)


def test_convolutions_of_different_image_sizes_share_weights():
    kernel = RNG.standard_normal((3, 3, 64, 96)).astype("f4")

    def model(x):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    small, large = (RNG.standard_normal((1, n, n, 64)).astype("f4") for n in (3, 28))
    data = aotc.compile({"s": model, "l": model}, args={"s": (small,), "l": (large,)}, source=False)
    assert len(data) / kernel.nbytes < 1.6
    for name, x in (("s", small), ("l", large)):
        np.testing.assert_allclose(aotc.load(data).invoke(name, x)[0], jax.jit(model)(x), rtol=1e-3, atol=1e-3)


def test_different_matrices_of_one_shape_are_packed_separately():
    others = RNG.standard_normal((256, 384)).astype("f4")
    args = {"prefill": (MANY,), "decode": (ONE,)}
    data = aotc.compile({"prefill": lambda x: x @ WEIGHTS, "decode": lambda x: x @ others}, args=args, source=False)
    assert len(data) > 2 * WEIGHTS.nbytes
    np.testing.assert_allclose(aotc.load(data).invoke("decode", ONE)[0], ONE @ others, rtol=1e-4, atol=1e-4)


def prepared(data):
    """Return the types of what is prepared in a bundle, by their numbers."""
    (variant,) = open_bundle(data).manifest["variants"]
    rows = [row for entry in variant["prepared"].values() for row in entry["prepare"]["results"]]
    return {row["value"]: tuple(row["dims"]) for row in rows}


def test_bound_matrices_are_packed_once():
    models = {name: lambda p, x: jnp.tanh(x @ p["w"] / 16) @ p["u"] for name in ("prefill", "decode")}
    p = {"w": WEIGHTS, "u": BACK}
    data = aotc.compile(models, args={"prefill": (p, MANY), "decode": (p, ONE)}, bind=["p"])
    assert len(prepared(data)) == 2
    for name, x in (("prefill", MANY), ("decode", ONE)):
        close(aotc.load(data).bind({"p": p}, name).invoke(x)[0], x)
