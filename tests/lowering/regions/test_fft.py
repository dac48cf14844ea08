"""Fourier transforms of every kind and length, beside numpy in double precision."""

import numpy as np
import pytest
from support.differential import LEVELS

import aotc
from aotc.ir.loop.forms.butterflies import Butterfly
from aotc.ir.loop.ir import Apply, Const
from aotc.lowering.analysis.fft_tables import nearest_factors, radices, smooth_size, twiddles

pytestmark = pytest.mark.cpu

EPSILON = {"f32": 2.0**-23, "f64": 2.0**-52}
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 30, 64, 97, 105, 128, 210, 1000, 1024]
SLOW_LENGTHS = [
    6,
    9,
    10,
    14,
    15,
    18,
    31,
    32,
    49,
    60,
    121,
    169,
    243,
    256,
    343,
    512,
    625,
    1009,
    4096,
    8192,
    10007,
    16384,
    65536,
]


def run(kind, x, length, level=2, threads=2):
    real = {"f4": "f32", "f8": "f64", "c8": "complex<f32>", "c16": "complex<f64>"}
    shape = list(x.shape)
    out = {"RFFT": "c8" if x.dtype == "f4" else "c16", "IRFFT": "f4" if x.dtype == "c8" else "f8"}.get(
        kind, x.dtype.str[1:]
    )
    shape[-1] = {"RFFT": length[-1] // 2 + 1, "IRFFT": length[-1]}.get(kind, shape[-1])
    types = ["x".join([*map(str, s), real[t]]) for s, t in ((x.shape, x.dtype.str[1:]), (shape, out))]
    text = (
        f"func.func @main(%x: tensor<{types[0]}>) -> tensor<{types[1]}> {{\n"
        f"%y = stablehlo.fft %x, type = {kind}, length = {list(length)} : (tensor<{types[0]}>) -> tensor<{types[1]}>\n"
        f"return %y : tensor<{types[1]}>\n}}"
    )
    return aotc.load(aotc.compile(text.encode(), opt_level=level, verify_each=True), threads=threads).invoke("main", x)[
        0
    ]


NUMPY = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}


def signal(kind, shape, wide=False, seed=0):
    """Return a signal, or for IRFFT a spectrum of any values: those at the ends count by their real parts."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) + 1j * random.normal(size=shape)
    if kind == "RFFT":
        return x.real.astype("f8" if wide else "f4")
    return x.astype("c16" if wide else "c8")


def agree(kind, x, length, **options):
    found = run(kind, x, length, **options)
    want = NUMPY[kind](x.astype("f8" if kind == "RFFT" else "c16"), s=length, axes=range(-len(length), 0))
    eps = EPSILON["f64" if x.dtype.str[1:] in ("f8", "c16") else "f32"]
    bound = 2 * eps * max(np.log2(max(np.prod(length), 2)), 1)
    assert found.shape == want.shape
    assert np.abs(found - want).max() <= bound * np.abs(want).max()


def input_shape(kind, lead, length):
    return (*lead, *length[:-1], length[-1] // 2 + 1 if kind == "IRFFT" else length[-1])


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("n", [*LENGTHS, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_LENGTHS)])
def test_ffts_of_every_length_match_numpy(kind, n):
    agree(kind, signal(kind, input_shape(kind, (3,), (n,))), (n,))


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("length", [(6, 5), (4, 3, 8), (17, 16)])
@pytest.mark.parametrize("level", LEVELS)
def test_multidimensional_f64_ffts_match_numpy(kind, length, level):
    agree(kind, signal(kind, input_shape(kind, (2,), length), wide=True), length, level=level)


@pytest.mark.parametrize("kind", NUMPY)
def test_ffts_of_split_lengths_match_numpy(kind):
    agree(kind, signal(kind, input_shape(kind, (), (30000,))), (30000,))


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("lead", [(), (0,), (1, 1, 2)])
def test_batched_and_empty_ffts_match_numpy(kind, lead):
    x = signal(kind, input_shape(kind, lead, (4, 6)))
    if 0 in lead:
        assert run(kind, x, (4, 6)).size == 0
    else:
        agree(kind, x, (4, 6))


def test_ffts_have_the_same_bits_with_one_and_two_threads():
    x = signal("FFT", (5, 40, 24))
    assert run("FFT", x, (40, 24), threads=1).tobytes() == run("FFT", x, (40, 24), threads=2).tobytes()


def test_ffts_of_a_symbolic_batch_match_numpy():
    import jax
    import jax.numpy as jnp

    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda x: (jnp.fft.rfft2(x), jnp.fft.irfft(jnp.fft.rfft(x))))
    module = aotc.load(aotc.compile(f, jax.ShapeDtypeStruct((n, 6, 10), "float32")))
    for size in (1, 2, 7):
        x = signal("RFFT", (size, 6, 10), seed=size)
        forward, back = module.invoke("main", x)
        np.testing.assert_allclose(forward, np.fft.rfft2(x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-6)


@pytest.mark.ir
def test_radices_multiply_to_the_length():
    for n in range(1, 3000):
        rough = any(n % p == 0 for p in range(17, n + 1) if all(p % q for q in range(2, int(p**0.5) + 1)))
        assert radices(n) == () if rough else np.prod(radices(n), dtype=int) == n
    assert radices(34) == ()
    assert nearest_factors(30000) == (150, 200)


@pytest.mark.ir
@pytest.mark.parametrize("n", [33, 1009, 20013])
def test_sizes_for_chirps_have_radices(n):
    assert smooth_size(n) >= n
    assert radices(smooth_size(n))


@pytest.mark.ir
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 11, 13])
@pytest.mark.parametrize("sign", [-1, 1])
def test_butterflies_match_numpy(n, sign):
    """The written-out transforms, evaluated as numbers."""

    def evaluate(node):
        if isinstance(node, Const):
            return node.value
        a = [evaluate(x) for x in node.args]
        return {
            "add": lambda: a[0] + a[1],
            "sub": lambda: a[0] - a[1],
            "mul": lambda: a[0] * a[1],
            "neg": lambda: -a[0],
        }[node.fn]()

    random = np.random.default_rng(n)
    x = random.normal(size=n) + 1j * random.normal(size=n)
    bind = lambda s: Const(evaluate(s), "f64") if isinstance(s, Apply) else s
    pairs = [(Const(v.real, "f64"), Const(v.imag, "f64")) for v in x]
    found = [a.value + 1j * b.value for a, b in Butterfly(bind, "f64", sign).transform(pairs)]
    np.testing.assert_allclose(found, np.fft.fft(x) if sign < 0 else np.fft.ifft(x) * n, rtol=1e-12, atol=1e-12)


@pytest.mark.ir
def test_twiddles_are_exact_to_the_last_place():
    table = twiddles((8, 8), False)
    assert table.shape == (2, 7 * 8)
    want = np.exp(-2j * np.pi * np.outer(np.arange(1, 8), np.arange(8)) / 64).reshape(-1)
    np.testing.assert_allclose(table[0] + 1j * table[1], want, rtol=1e-15, atol=1e-15)
