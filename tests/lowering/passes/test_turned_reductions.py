"""Reductions go along what lies side by side in memory, whatever the order of the axes that they name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, close, integers, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Alloc, For, Load, Store, walk
from aotc.kernels.emit.index import flat_index, stride_of_offset
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

TARGET = TARGETS["cpu:x86-64-v4"]
ALONG = {
    "rows of a turned matrix": (lambda x: x.T.sum(1), (96, 160)),
    "columns of a turned matrix": (lambda x: x.T.sum(0), (96, 160)),
    "products with a vector": (lambda x, v: (x.T * v).sum(1), (96, 160), (96,)),
    "the last axis first": (lambda x: x.transpose(2, 0, 1).max(-1), (8, 24, 64)),
    "the last axis first, it": (lambda x: x.transpose(2, 0, 1).min(0), (8, 24, 64)),
    "the last axis first, the middle": (lambda x: x.transpose(2, 0, 1).sum(1), (8, 24, 64)),
    "the first axis last": (lambda x: x.transpose(1, 2, 0).mean(-1), (24, 8, 64)),
    "two axes of three": (lambda x: x.transpose(2, 0, 1).sum((1, 2)), (8, 24, 64)),
    "two axes of three, the nearest": (lambda x: x.transpose(2, 0, 1).sum((0, 2)), (8, 24, 64)),
    "two sums": (lambda x: (x.T.sum(1), (x.T * x.T).sum(1)), (96, 160)),
    "few columns": (lambda x: x.T.sum(1), (400, 3)),
    "odd columns": (lambda x: x.T.prod(1), (37, 83)),
}
ELSE = {
    "as it lies": (lambda x: x.sum(1), (96, 160)),
    "columns": (lambda x: x.sum(0), (96, 160)),
    "neither": (lambda x: (x + x.T).sum(0), (96, 96)),
    "places": (lambda x: x.T.argmax(0), (96, 160)),
    "all": (lambda x: x.T.sum(), (96, 160)),
    "one axis": (lambda x: x.sum(), (160,)),
    "nothing": (lambda x: x.T.sum(1), (0, 40)),
    "any": (lambda x: (x.T > 0.9).any(0), (96, 160)),
}
TURNED = {
    "sums": (lambda x, y: (x.T * y).sum(1), (64, 96), (96, 64)),
    "the largest": (lambda x, y: jnp.maximum(x.T, y).max(1), (64, 96), (96, 64)),
    "places": (lambda x, y: (x.T + y).argmax(1), (64, 96), (96, 64)),
    "halves of lines": (lambda x, y: (x.T * y).sum(1), (64, 40), (40, 64)),
    "odd rows": (lambda x, y: (x.T * y).sum(1), (333, 32), (32, 333)),
    "a batch": (lambda x, y: (x.swapaxes(1, 2) * y).sum(2), (3, 64, 32), (3, 32, 64)),
    "softmax": (lambda x: jax.nn.softmax(x.T, axis=1), (160, 96)),
    "variance": (lambda x: (x.T.var(1), x.T - x.T.mean(1, keepdims=True)), (160, 96)),
    "channels": (lambda x: (x.transpose(0, 3, 1, 2).mean((2, 3)), x.transpose(0, 3, 1, 2).var((2, 3))), (2, 8, 8, 48)),
    "symmetric": (lambda x: (x + x.T).max(1), (128, 128)),
    "two turned": (lambda x, y, z: (x.T * y.T * z).sum(1), (64, 96), (64, 96), (96, 64)),
    "all of both": (lambda x, y: ((x.T - y) ** 2).sum(), (512, 128), (128, 512)),
    "the same, rows of halves": (lambda x: ((x - x.T) ** 2).sum(), (512, 512)),
}
NOT_TURNED = {
    "short rows": (lambda x, y: (x.T * y).sum(1), (31, 96), (96, 31)),
    "no parts": (lambda x, y: (x.T * y).sum(1), (64, 97), (97, 64)),
    "more than a worker's memory": (lambda x, y: (x.T * y).sum(1), (8192, 32), (32, 8192)),
    "five operands": (
        lambda *xs: (sum(x.T for x in xs[:5]) * xs[5]).sum(1), *[(64, 96)] * 5, (96, 64),
    ),
}  # fmt: skip


def arrays_of(shapes):
    return [normal(*s, seed=n) * 0.5 for n, s in enumerate(shapes)]


def kernels_of(function, arrays):
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arrays)
    options = Options(target=TARGET.name)
    return lower(run_passes(import_model(exported), options), TARGET, options).kernels


def is_transposed(kernel):
    return any(isinstance(s, Alloc) and s.buffer.name.startswith("turned") for s in walk(kernel.body))


def steps_of(function, arrays):
    """Yield how far the innermost loops of the reductions step in what they read."""
    for kernel in kernels_of(function, arrays):
        for loop in walk(kernel.body):
            if isinstance(loop, For) and not any(isinstance(s, For) for s in loop.body):
                loads = [x for s in loop.body for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]
                adds = any(isinstance(s, Store) and s.reduce for s in loop.body)
                read = [flat_index(x.buffer, x.index) for x in loads if adds and x.buffer in kernel.inputs]
                yield from (stride_of_offset(flat, loop.var) for flat in read)


@pytest.mark.parametrize("name", ALONG)
def test_transposed_operands_are_read_contiguously(name):
    function, *shapes = ALONG[name]
    arrays = arrays_of(shapes)
    steps = {*steps_of(function, arrays)}
    assert steps <= {0, 1}, steps
    check(function, arrays, 2)


@pytest.mark.parametrize("name", ELSE)
def test_other_reductions_match_xla(name):
    function, *shapes = ELSE[name]
    check(function, arrays_of(shapes), 2)


@pytest.mark.parametrize("name", TURNED)
def test_rows_across_memory_are_transposed(name):
    function, *shapes = TURNED[name]
    arrays = arrays_of(shapes)
    assert any(map(is_transposed, kernels_of(function, arrays)))
    check(function, arrays, 2)


@pytest.mark.parametrize("name", NOT_TURNED)
def test_other_rows_are_not_transposed(name):
    function, *shapes = NOT_TURNED[name]
    arrays = arrays_of(shapes)
    assert not any(map(is_transposed, kernels_of(function, arrays)))
    check(function, arrays, 2, factor=2)


def test_sums_of_transposed_rows_are_close_to_f64():
    x, y = arrays_of([(1024, 256), (256, 1024)])
    got = aotc.load(aotc.compile(jax.jit(TURNED["sums"][0]), x, y)).invoke("main", x, y)[0]
    np.testing.assert_allclose(got, (x.T.astype("f8") * y).sum(1), atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "int8", "complex64"])
def test_transposed_rows_of_each_dtype_match_xla(dtype):
    x, y = (integers(*s, low=-9, high=9, seed=9).astype(jnp.dtype(dtype)) for s in ((72, 128), (128, 72)))
    assert any(map(is_transposed, kernels_of(TURNED["sums"][0], [x, y])))
    check(TURNED["sums"][0], [x, y], 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "int8", "uint8", "complex64"])
def test_reductions_of_transposes_in_each_dtype_match_xla(dtype):
    x = integers(40, 72, low=-9, high=9).astype(jnp.dtype(dtype))
    check(lambda x: (x.T.sum(1), x.T.sum(0)), [x], 2)


def test_transposed_rows_of_symbolic_count_match_jax():
    def reductions(x):
        return x.T.max(1), x.T.sum(0)

    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(reductions))(jax.ShapeDtypeStruct((n, 40), np.float32))
    module = aotc.load(aotc.compile(exported))
    for rows in (1, 7, 100):
        x = normal(rows, 40)
        close(module.invoke("main", x), reductions(x))
