"""Reductions go along what lies side by side in memory, whatever the order of the axes that they name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, close, integers, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop_access import leaves, operands
from aotc.ir.loop_ir import For, Load, Store, walk
from aotc.kernels.emit.index import flat_index, step_of
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
    "rows that are read again": (lambda x: jax.nn.softmax(x.T, axis=1), (96, 160)),
    "all": (lambda x: x.T.sum(), (96, 160)),
    "one axis": (lambda x: x.sum(), (160,)),
}


def arrays_of(shapes):
    return [normal(*s, seed=n) * 0.5 for n, s in enumerate(shapes)]


def steps_of(function, arrays):
    """Yield how far the innermost loops of the reductions step in what they read."""
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arrays)
    options = Options(target=TARGET.name)
    for kernel in lower(run_passes(import_model(exported), options), TARGET, options).kernels:
        for loop in walk(kernel.body):
            if isinstance(loop, For) and not any(isinstance(s, For) for s in loop.body):
                loads = [x for s in loop.body for x in leaves(operands(s)) if isinstance(x, Load)]
                adds = any(isinstance(s, Store) and s.reduce for s in loop.body)
                read = [flat_index(x.buffer, x.index) for x in loads if adds and x.buffer in kernel.inputs]
                yield from (step_of(flat, loop.var) for flat in read)


@pytest.mark.parametrize("name", ALONG)
def test_a_turned_operand_is_read_along_its_memory(name):
    function, *shapes = ALONG[name]
    arrays = arrays_of(shapes)
    steps = {*steps_of(function, arrays)}
    assert steps <= {0, 1}, steps
    check(function, arrays, 2)


@pytest.mark.parametrize("name", ELSE)
def test_other_reductions(name):
    function, *shapes = ELSE[name]
    check(function, arrays_of(shapes), 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "int8", "uint8", "complex64"])
def test_dtypes(dtype):
    x = integers(40, 72, low=-9, high=9).astype(jnp.dtype(dtype))
    check(lambda x: (x.T.sum(1), x.T.sum(0)), [x], 2)


def test_rows_that_only_a_call_counts():
    def reductions(x):
        return x.T.max(1), x.T.sum(0)

    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(reductions))(jax.ShapeDtypeStruct((n, 40), np.float32))
    module = aotc.load(aotc.compile(exported))
    for rows in (1, 7, 100):
        x = normal(rows, 40)
        close(module.invoke("main", x), reductions(x))
