"""Kernels that differ in sizes alone become one that is given the sizes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.diagnostics import InternalError
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering import lower as lowering
from aotc.lowering.program.merge_by_sizes import MergedBySizes, merge_by_sizes
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.verify.kernel_interface import Interface, Invalid

pytestmark = pytest.mark.cpu

ROW = """def {name}(a: "f32[{n}]", /, out: "f32[{n}]", *, grid: "1", flops: "{n}"):
    for i in range(0, {n}):
        out[i] = a[i] + f32(1.0)
"""
PAD = """def {name}(a: "f32[{h}, {c}]", /, out: "f32[{k}, {c}]", *, grid: "{k}"):
    for p in parallel(0, {k}):
        for i in range(0, {c}):
            out[p, i] = select(index(p) < index({h}), a[min({last}, p), i], f32(0.0))
"""
WINDOW = """def {name}(a: "f32[{h}, {c}]", /, out: "f32[{k}, {c}]", *, grid: "{k}"):
    for p in parallel(0, {k}):
        for i in range(0, {c}):
            out[p, i] = a[p, i] + a[p + 1, i]
"""
SPLIT = """def {name}(a: "f32[{n}]", /, out: "f32[{k}, {c}]", *, grid: "1"):
    for i in range(0, {n}):
        out[i // {c}, i % {c}] = a[i]
"""
REPEAT = """def {name}(a: "f32[{k}]", /, out: "f32[{n}]", *, grid: "1"):
    for i in range(0, {n}):
        out[i] = a[i // {c}]
"""
TILE = """def {name}(a: "f32[{rows}, {k}]", b: "f32[{k}, 16]", /, out: "f32[{rows}, 16]", *, grid: "1"):
    tile(out, a, b, rows={rows}, cols=16, out_base=0, out_row=16, {at}, a_row={k}, levels=[({k}, 1, 16)])
""".replace("{at}", "a_base=0, b_base=0")
SUM = """def {name}(a: "f32[{n}]", /, out: "f32[]", *, grid: "1"):
    out[()] = f32(0.0)
    for i in range(0, {n}):
        out[()] += a[i]
"""


def several(text, rows):
    """Kernels of a text, one for each of some numbers, under names in order."""
    return [parse_kernel(text.format(name=f"k{n}", **row)) for n, row in enumerate(rows)]


def padded(h, c, more=2):
    return {"h": h, "k": h + more, "c": c, "last": h - 1}


def results(kernel, sizes, shapes, arrays):
    """What a kernel writes, by the meaning of its text, whatever its arrays' axes."""
    outputs = [np.full(shape, np.nan, np.float32) for shape in shapes]
    given = dict(zip(kernel.dims, sizes, strict=True))
    own = [[evaluate(d, given) for d in b.shape] for b in (*kernel.inputs, *kernel.outputs)]
    run_kernel(kernel, [x.reshape(shape) for x, shape in zip([*arrays, *outputs], own, strict=True)], given)
    return outputs


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (ROW, [{"n": 16}, {"n": 48}, {"n": 128}]),
        (PAD, [padded(5, 32), padded(9, 64), padded(2, 96)]),
        (PAD, [padded(5, 20), padded(9, 20)]),
        (WINDOW, [{"h": 5, "k": 4, "c": 64}, {"h": 9, "k": 8, "c": 64}]),
        (SPLIT, [{"n": 96, "k": 3, "c": 32}, {"n": 192, "k": 3, "c": 64}]),
        (SPLIT, [{"n": 96, "k": 3, "c": 32}, {"n": 96, "k": 6, "c": 16}]),
        (REPEAT, [{"n": 96, "k": 3, "c": 32}, {"n": 160, "k": 5, "c": 32}]),
        (TILE, [{"rows": 8, "k": 12}, {"rows": 8, "k": 7}]),
    ],
    ids=["rows", "padding", "odd rows", "windows", "a number that is divided", "without axes", "a divisor", "terms"],
)
def test_kernels_that_differ_only_in_sizes_become_one(text, rows):
    kernels = several(text, rows)
    found = merge_by_sizes(kernels)
    assert {sized.kernel for sized in found.values()} == {found["k0"].kernel}
    general = found["k0"].kernel
    assert general.name == "k0"
    assert verify_kernel(general) == []
    assert parse_kernel(print_kernel(general)) == general
    for kernel in kernels:
        arrays = [normal(*b.shape, seed=n) for n, b in enumerate(kernel.inputs)]
        shapes = [b.shape for b in kernel.outputs]
        own, shared = results(kernel, (), shapes, arrays), results(general, found[kernel.name].sizes, shapes, arrays)
        for a, b in zip(own, shared, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (ROW, [{"n": 20}, {"n": 40}]),
        (PAD, [padded(5, 16), padded(9, 32)]),
        (WINDOW, [{"h": 5, "k": 4, "c": 32}, {"h": 9, "k": 8, "c": 64}]),
        (REPEAT, [{"n": 96, "k": 3, "c": 32}, {"n": 192, "k": 3, "c": 64}]),
        (TILE, [{"rows": 4, "k": 12}, {"rows": 4, "k": 7}]),
        (TILE, [{"rows": 8, "k": 12}, {"rows": 9, "k": 12}]),
        (SUM, [{"n": 32}, {"n": 64}]),
        (ROW, [{"n": 32}]),
    ],
    ids=["no whole vectors", "a vector", "rows of windows", "divisors", "few rows", "heights", "sums", "one"],
)
def test_kernels_specialized_to_their_sizes_are_not_merged(text, rows):
    assert merge_by_sizes(several(text, rows)) == {}


def test_vector_loops_of_merged_kernels_have_symbolic_lengths():
    found = merge_by_sizes(several(ROW, [{"n": 32}, {"n": 64}]))
    text = print_kernel(found["k0"].kernel)
    assert "for i_vector in range(0, 2*size0):" in text
    assert "for i in range(0, 16):" in text
    assert [found[name].sizes for name in ("k0", "k1")] == [(1,), (2,)]


def test_dependent_sizes_become_expressions_of_few_dims():
    """Rows with padding are rows and two; the channels are whole vectors, and the grid is as long as an axis."""
    found = merge_by_sizes(several(PAD, [padded(5, 32), padded(9, 64), padded(2, 96)]))
    assert found["k0"].kernel.dims == ("size0", "size1")
    (out,) = found["k0"].kernel.outputs
    assert list(map(str, out.shape)) == ["size1 + 3", "32*size0"]
    assert found["k0"].kernel.grid == out.shape[0]


def test_kernels_with_different_constants_or_aliases_are_not_merged():
    one, other = several(ROW, [{"n": 32}, {"n": 64}])
    doubled = parse_kernel(print_kernel(other).replace("f32(1.0)", "f32(2.0)"))
    assert merge_by_sizes([one, doubled]) == {}
    assert merge_by_sizes([one, replace(other, aliases=((0, 0),))]) == {}


def layers(*images):
    """Each image padded, and scaled by what is known of its channels."""
    return [
        jnp.pad(x, ((1, 1), (1, 1), (0, 0))) * 2.0 if n % 2 else jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
        for n, x in enumerate(images)
    ]


IMAGES = [normal(6, 6, 32), normal(4, 4, 64), normal(8, 8, 64), normal(12, 12, 96), normal(3, 3, 128)]


@pytest.mark.parametrize("threads", [1, 3])
def test_layers_of_a_model_share_one_kernel(threads, monkeypatch):
    bundle = aotc.compile(layers, *IMAGES, verify_each=True)
    (variant,) = open_bundle(bundle).manifest["variants"]
    monkeypatch.setattr(lowering, "merge_by_sizes", lambda *_: {})
    (apart,) = open_bundle(aotc.compile(layers, *IMAGES, cache=False)).manifest["variants"]
    assert len(variant["kernels"]) < len(apart["kernels"])
    assert any(kernel["dims"] for kernel in variant["kernels"])
    for got, want in zip(aotc.load(bundle, threads=threads)(*IMAGES), jax.jit(layers)(*IMAGES), strict=True):
        np.testing.assert_array_equal(got, want)


def test_compiling_merged_layers_twice_gives_the_same_bytes():
    assert aotc.compile(layers, *IMAGES, cache=False) == aotc.compile(layers, *IMAGES, cache=False)


def test_depthwise_convolutions_share_kernels():
    """Of other images, channels and weights: one kernel of a vector of channels along a row of pixels."""

    def convolve(*pairs):
        names = ("NHWC", "HWIO", "NHWC")
        return [
            jax.lax.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=names, feature_group_count=x.shape[-1]
            )
            for x, w in pairs
        ]

    pairs = [(normal(1, n, n, c), normal(3, 3, 1, c, seed=c)) for n, c in ((7, 32), (9, 64), (5, 128))]
    bundle = aotc.compile(convolve, *pairs, verify_each=True)
    (variant,) = open_bundle(bundle).manifest["variants"]
    assert len(variant["kernels"]) == 1
    for got, want in zip(aotc.load(bundle)(*pairs), jax.jit(convolve)(*pairs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def wrong_sizes(monkeypatch):
    """Commands give kernels one more than each of their sizes."""
    encode = lowering.CommandBufferEncoder.encode

    def planted(scheduler, steps):
        scheduler.sizes = {name: tuple(n + 1 for n in sizes) for name, sizes in scheduler.sizes.items()}
        return encode(scheduler, steps)

    monkeypatch.setattr(lowering.CommandBufferEncoder, "encode", planted)


def test_the_verifier_finds_wrong_sizes(wrong_sizes):
    with pytest.raises(InternalError, match="its grid or dims are not"):
        aotc.compile(layers, *IMAGES, verify_each=True)


def test_calls_refuse_sizes_that_a_merged_kernel_does_not_support(wrong_sizes):
    """An index may count in them, so that no kernel may be given others: it would leave its arrays."""
    module = aotc.load(aotc.compile(layers, *IMAGES, cache=False))
    with pytest.raises(aotc.BundleError, match="is not made for the sizes"):
        module(*IMAGES)


def test_an_interface_evaluates_only_its_sizes():
    row = {"name": "k", "inputs": 1, "dims": 1, "grid": 4, "extents": [64, 64], "aliases": [], "sizes": [[1], [3]]}
    assert Interface(row).evaluate_sizes((3,)) == (4, [64, 64])
    with pytest.raises(Invalid, match="kernel 'k' is not made for the sizes 2"):
        Interface(row).evaluate_sizes((2,))


def test_merged_kernels_use_the_measured_times_of_their_sizes():
    """A record of a shared kernel has its dims; who asks what a layer's own kernel costs gets the row of its sizes."""
    from aotc.lowering.cost_model.model import Costs
    from aotc.targets import TARGETS
    from aotc.vmfb.profile.cost_record import kernel_text_digest

    kernels = several(ROW, [{"n": 32}, {"n": 64}])
    found = merge_by_sizes(kernels)
    assert isinstance(found["k1"], MergedBySizes)
    digest = kernel_text_digest(print_kernel(found["k0"].kernel))
    row = {"digest": digest, "loc": "", "name": "k0", "ops": 1, "bytes": 8}
    record = {"kernels": [{**row, "sizes": {"size0": n}, "ns": {"cpu": 100.0 * n}} for n in (1, 2)]}
    costs = Costs(TARGETS["cpu:x86-64-v4"], record, None, found)
    assert [costs.of(kernel).measured for kernel in kernels] == [100.0, 200.0]
