"""A choice between updates of an array, or an update and the array, is conditional updates with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = pytest.mark.ir

ROWS = np.random.default_rng(0).standard_normal((6, 9)).astype("f")


def slice_if(x, i, p):
    return jnp.where(p, lax.dynamic_update_slice(x, x[:1] * 2, (i, 0)), x)


def slice_unless(x, i, p):
    return jnp.where(p, x, lax.dynamic_update_slice(x, x[:2, :4] * 2, (i, 2)))


def slice_by_elements(x, i, p):
    return jnp.where(jnp.sin(x) > 0, x, lax.dynamic_update_slice(x, x[:2, :4] * 2, (i, 2)))


def two_scatters(x, i, p):
    return jnp.where(p, x.at[i].add(x[0]).at[i + 1, 2].set(3.0), x)


def mapped_branch(x, i, p):
    def changed(row):
        return row.at[i + (row[1] > 0)].set(7.0)

    return jax.vmap(lambda row: lax.cond(row[0] > 0, changed, lambda r: r, row))(x)


def mapped_loop(x, i, p):
    def count(row):
        return lax.while_loop(lambda s: s[0] < s[1][0] * 8, lambda s: (s[0] + 1, s[1].at[s[0] + 1].add(1.0)), (i, row))

    return jax.vmap(count)(x)[1]


def mapped_columns(x, i, p):
    return jax.vmap(lambda col: jnp.where(col[1] > 0, col.at[i].add(1.0), col), 1, 1)(x)


def mapped_column(x, i, p):
    return jax.vmap(lambda row: lax.cond(row[0] > 0, lambda r: r.at[i].set(7.0), lambda r: r, row))(x)


def either_scatter(x, i, p):
    return jnp.where(p, x.at[i].set(1.0), x.at[i + 1].set(2.0))


def either_sum(x, i, p):
    return jnp.where(p, x.at[i, 2].add(x[0, 0]), x.at[2, i].add(3.0))


def set_or_add(x, i, p):
    return jnp.where(p, x.at[i].set(1.0), x.at[i].add(2.0))


def one_or_two_scatters(x, i, p):
    return jnp.where(p, x.at[i].mul(x[1]), x.at[i].mul(2.0).at[i + 1, 2].set(x[i, 3]))


def either_slice(x, i, p):
    return jnp.where(p, lax.dynamic_update_slice(x, x[:2] * 2, (i, 0)), lax.dynamic_update_slice(x, x[2:4], (2, i)))


def slices_that_overlap(x, i, p):
    one, other = x[:3, :4] * 2, x[1:3, 1:] + 1
    return jnp.where(p, lax.dynamic_update_slice(x, one, (i, 1)), lax.dynamic_update_slice(x, other, (1, i)))


def slices_by_elements(x, i, p):
    one = lax.dynamic_update_slice(x, x[:3, :4] * 2, (i, 1))
    return jnp.where(jnp.sin(x) > 0, one, lax.dynamic_update_slice(x, x[1:3, 1:] + 1, (1, i)))


def slice_or_scatter(x, i, p):
    return jnp.where(p, lax.dynamic_update_slice(x, x[1:3], (i, 0)), x.at[i, 1:4].add(1.0))


def one_of_four(x, i, p):
    return lax.select_n(i & 3, x.at[i].set(1.0), x, x.at[0].add(1.0), x.at[i].set(x[0]).at[i, 1].mul(3.0))


def mapped_switch(x, i, p):
    branches = [lambda r: r.at[i].set(7.0), lambda r: r, lambda r: r.at[i + 1].add(1.0)]
    return jax.vmap(lambda row: lax.switch((row[0] * 4).astype(int), branches, row))(x)


EVERY = [
    slice_if, slice_unless, slice_by_elements, two_scatters, mapped_branch, mapped_loop, mapped_columns, mapped_column,
    either_scatter, either_sum, set_or_add, one_or_two_scatters, either_slice, slices_that_overlap, slices_by_elements,
    slice_or_scatter, one_of_four, mapped_switch,
]  # fmt: skip
MERGED = [either_scatter, either_sum, either_slice]


def passed(function, *arguments):
    options = Options(target="cpu:x86-64-v3", verify_each=True)
    return run_passes(import_raw(fetch(jax.jit(function, keep_unused=True), arguments, {}), options=options), options)


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_no_select_of_whole_arrays_remains_and_results_match_jax(function):
    module = passed(function, ROWS, np.int32(0), np.bool_(True))
    whole = [
        op for f in module.functions.values() for op in walk(f.body)
        if op.name == "select" and op.result.type.shape == ROWS.shape
    ]  # fmt: skip
    assert not whole
    for i in (-3, 0, 2, 5, 9):
        for p in (True, False):
            (got,) = interpret(module, ROWS, np.int32(i), np.bool_(p))
            with jax.disable_jit():
                np.testing.assert_array_equal(got, function(jnp.asarray(ROWS), jnp.int32(i), jnp.bool_(p)))


@pytest.mark.parametrize("function", MERGED, ids=lambda f: f.__name__)
def test_selects_between_two_updates_become_one_update(function):
    module = passed(function, ROWS, np.int32(0), np.bool_(True))
    ops = [op for f in module.functions.values() for op in walk(f.body)]
    assert sum(op.name in ("scatter", "dynamic_update_slice") for op in ops) == 1


def test_an_update_with_other_readers_stays_a_select():
    def function(x, i, p):
        updated = x.at[i].set(0.0)
        return jnp.where(p, updated, x), updated

    module = passed(function, ROWS, np.int32(0), np.bool_(True))
    for p in (True, False):
        got = interpret(module, ROWS, np.int32(1), np.bool_(p))
        for a, b in zip(got, function(jnp.asarray(ROWS), 1, p), strict=True):
            np.testing.assert_array_equal(a, b)
