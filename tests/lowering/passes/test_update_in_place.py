"""Sums of loops with updates of zeros are written in place: gradients of lookups, slices and updates."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import close
from support.gpu_program import check_gpu

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.dims.algebra import product
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import Module, walk
from aotc.lowering.analysis.constant_values import constants_in, splat_of
from aotc.lowering.passes.canonicalize import array_passes, inner_sums
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.vmfb.devices.cuda import driver

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((50, 8)).astype("float32")
PLACES = RNG.integers(-3, 60, (6, 4)).astype("int32")  # some out of bounds, some twice
PLACES[2] = 7


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Let no table be too small for a branch, or to add the sum of an inner loop by its places."""
    rows = (inner_sums, "INNER_SUM", 1), (array_passes, "BRANCHED_BYTES", 0), (array_passes, "BRANCHED_BYTES_CUDA", 0)
    for module, name, value in rows:
        monkeypatch.setattr(module, name, replace(getattr(module, name), default=value))


def scanned(step):
    """Return the gradient of a scan of ``step(state, table, places)`` with respect to the table."""

    def loss(table, places):
        state, _ = lax.scan(lambda c, i: (jnp.tanh(step(c, table, i)), None), jnp.ones(8), places)
        return jnp.sum(state * jnp.arange(8.0))

    return jax.grad(loss)


def carried(step):
    """Return the gradient of a scan of ``step(table, places)`` with respect to the table, which is its state."""

    def loss(table, places):
        state, _ = lax.scan(lambda c, i: (step(c, i), None), table, places)
        return jnp.sum(jnp.sin(state) * jnp.arange(8.0))

    return jax.grad(loss)


def nested(step):
    """Return the gradient of a scan in a scan of ``step(state, table, place)`` with respect to the table."""
    return scanned(lambda c, t, i: lax.scan(lambda d, k: (step(d, t, k), None), c, i)[0])


GRADIENTS = {
    "lookup": scanned(lambda c, t, i: c + t[i].sum(0)),
    "lookup that drops": scanned(lambda c, t, i: c + t.at[i].get(mode="fill", fill_value=0.5).sum(0)),
    "row": scanned(lambda c, t, i: c * t[i[0]]),
    "slice": scanned(lambda c, t, i: c + lax.dynamic_slice(t, (i[0], 0), (2, 8)).sum(0)),
    "constant place": scanned(lambda c, t, i: c * t[7] + t[3:5].sum(0) * i[1]),
    "two lookups": scanned(lambda c, t, i: c * t[i[0]] + t[i[1]]),
    "lookup in a branch": scanned(lambda c, t, i: lax.cond(i[0] > 9, lambda: c + t[i[1]], lambda: c * 2)),
    "nested loops": nested(lambda d, t, k: jnp.sin(d + t[k])),
    "nested loops that skip": nested(lambda d, t, k: jnp.sin(d + t[k] * t[3]) + t[k % 5, 0]),
    "nested slices that overlap": nested(lambda d, t, k: d + lax.dynamic_slice(t, (k % 7, 0), (3, 8)).sum(0)),
    "nested lookups of several rows": nested(lambda d, t, k: jnp.sin(d + t[jnp.stack([k, k % 7, k + 1])].sum(0))),
    "three loops": nested(lambda d, t, k: lax.scan(lambda e, m: (e + t[k + m], None), d, jnp.arange(2))[0]),
}
UPDATES = {
    "update by mul": carried(lambda c, i: c.at[i[0]].mul(jnp.cos(c[i[1]]))),
    "update by add": carried(lambda c, i: c.at[i[0]].add(jnp.cos(c[i[1]]))),
    "update by set": carried(lambda c, i: c.at[i[0]].set(jnp.cos(c[i[1]]))),
    "update by max": carried(lambda c, i: c.at[i[0]].max(jnp.cos(c[i[1]]))),
}


@pytest.mark.parametrize("name", [*GRADIENTS, *UPDATES])
def test_gradients_of_loops_match_eager_jax(name):
    function = {**GRADIENTS, **UPDATES}[name]
    with jax.disable_jit():
        want = function(TABLE, PLACES)
    close(aotc.load(aotc.compile(function, TABLE, PLACES, verify_each=True))(TABLE, PLACES), want, factor=4)


@pytest.mark.parametrize("name", ["lookup", "slice", "constant place", "update by mul", "nested loops"])
def test_gradients_of_loops_on_a_simulated_gpu_match_jax(name):
    check_gpu({**GRADIENTS, **UPDATES}[name], (TABLE[:20], PLACES[:3]), factor=4)


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("name", [*GRADIENTS, *UPDATES])
def test_gradients_of_loops_on_a_gpu_match_jax(name):
    function = {**GRADIENTS, **UPDATES}[name]
    data = aotc.compile(function, TABLE, PLACES, target="cuda")
    close(aotc.load(data)(TABLE, PLACES), jax.jit(function)(TABLE, PLACES), factor=4)


def whole_sums(module: Module) -> list[str]:
    """Return the ops inside of loops that make as many elements as the table has, but update no array in place."""
    (function,) = (f for f in module.functions.values() if f.public)
    known = constants_in(function.body)
    inner = [o for op in walk(function.body) if op.name == "while" for r in op.regions for o in walk(r)]
    made = [o for o in inner if any(product(v.type.shape) == TABLE.size for v in o.results)]
    in_place = {"scatter", "dynamic_update_slice"}
    return [
        o.name
        for o in made
        if o.name not in ("while", "case", "constant", "reshape")
        and (o.name not in in_place or splat_of(o.operands[0], known) is not None)
    ]


@pytest.mark.parametrize("name", sorted(GRADIENTS.keys() - {"three loops"}))
def test_loops_have_no_whole_array_sums(name):
    """The outermost of three loops adds the sum of the second one."""
    options = Options(target="cpu:x86-64-v4", stop_after="dce")
    raw = fetch(jax.jit(GRADIENTS[name]), (TABLE, PLACES), {})
    assert whole_sums(run_passes(import_raw(raw, options=options, platform="cpu"), options)) == []


@pytest.mark.parametrize("name", [name for name in GRADIENTS if "nested" in name or "three" in name])
def test_sums_of_inner_loops_have_unchanged_bits(name, monkeypatch):
    """The same program with whole sums, interpreted: each element has the same terms in the same order."""

    def result():
        options = Options(target="cpu:x86-64-v4", stop_after="update-in-place", verify_each=True)
        raw = fetch(jax.jit(GRADIENTS[name]), (TABLE, PLACES), {})
        module = run_passes(import_raw(raw, options=options, platform="cpu"), options)
        loops = sum(op.name == "while" for f in module.functions.values() for op in walk(f.body))
        return loops, interpret(module, TABLE, PLACES)[0].tobytes()

    more, got = result()
    monkeypatch.setattr(inner_sums, "INNER_SUM", replace(inner_sums.INNER_SUM, default=1 << 40))
    loops, want = result()
    assert more > loops
    assert got == want


def test_signs_of_zeros_and_nan_are_preserved():
    """A -0.0 of an argument becomes 0.0 where zeros are added; NaN and infinity stay."""
    x = np.array([-0.0, 0.0, np.nan, np.inf, -1.0, -0.0], "float32")
    g, i = np.array([-0.0, 2.0], "float32"), np.array([1, 5], "int32")

    def added(x, g, i):
        return x + jnp.zeros(6).at[i].add(g), x + lax.dynamic_update_slice(jnp.zeros(6), g, (i[1] - 4,))

    def summed(x, g, i):
        """From zeros, then with the array itself, whose -0.0 is read by nobody else."""
        return lax.fori_loop(0, 2, lambda k, c: c + jnp.zeros(6).at[i].add(g * k) + x, jnp.zeros(6))

    for function in (added, summed):
        got = aotc.load(aotc.compile(function, x, g, i))(x, g, i)
        with jax.disable_jit():
            want = function(x, g, i)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_bf16_updates_are_summed_before_they_are_added():
    """One by one, 64 updates of 1 would leave 256 of a bf16 as it is."""

    def function(g, i):
        return lax.fori_loop(0, 2, lambda k, c: c + jnp.zeros(4, "bfloat16").at[i].add(g), jnp.zeros(4, "bfloat16"))

    g, i = np.ones(64, "float32"), np.zeros(64, "int32")
    module = aotc.load(aotc.compile(lambda g, i: function(g.astype("bfloat16") * 4, i).astype("float32"), g, i))
    assert module(g, i)[0] == 512
