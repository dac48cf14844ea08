"""Padding in front of windows is their own where it is what they begin with, and they are no scan."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import check, normal

from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.inline import inline
from aotc.options import Options


def windows(config, fill, how, start, strides=(1, 1), padding="VALID"):
    return lambda x: lax.reduce_window(lax.pad(x, np.float32(fill), config), start, how, (2, 3), strides, padding)


JOINED = {
    "apart": windows([(1, 1, 1), (0, 2, 0)], 0, lax.add, 0.0),
    "strided": windows([(0, 1, 0), (2, 0, 2)], 0, lax.add, 0.0, (2, 2)),
    "padded-twice": windows([(1, 0, 0), (0, 1, 0)], 0, lax.add, 0.0, padding=[(1, 1), (0, 2)]),
    "largest": windows([(1, 1, 0), (1, 1, 0)], -np.inf, lax.max, -jnp.inf),
}
APART = {
    "another-number": windows([(1, 1, 0), (1, 1, 0)], 1, lax.add, 0.0),
    "begin-with-more": windows([(1, 1, 0), (1, 1, 0)], 1, lax.add, 1.0),
    "cut-off": windows([(-1, 1, 0), (1, 1, 0)], 0, lax.add, 0.0),
    "a-scan": lambda x: lax.cumsum(lax.pad(x, np.float32(0), [(0, 0, 0), (20, 0, 0)]), axis=1),
}


@pytest.mark.ir
@pytest.mark.parametrize("name", [*JOINED, *APART])
def test_padding_is_merged_into_windows_with_its_value(name):
    module = inline(import_model({**JOINED, **APART}[name], normal(6, 7)), Options())
    for _ in range(2):
        module = canonicalize(module, Options())
    ops = [op for f in module.functions.values() for op in walk(f.body) if op.name == "reduce_window"]
    read = [v for op in ops for v in op.operands]
    assert any(v in f.body.params for f in module.functions.values() for v in read) == (name in JOINED)


@pytest.mark.cpu
# Another start may count more than once.
@pytest.mark.parametrize("name", [*JOINED, "another-number", "cut-off", "a-scan"])
@pytest.mark.parametrize("level", [0, 2])
def test_padded_windows_match_xla(name, level):
    check({**JOINED, **APART}[name], [normal(6, 7)], level)
