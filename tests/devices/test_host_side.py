"""Which ops run on the host beside a GPU: the cheapest division, and what it makes of models."""

import itertools
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aotc.ir.tensor.text import parse_module, print_module
from aotc.lowering.placement.min_cut import FIRST, SECOND, MinCut
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.tools.explain.affinity import explain_affinity
from aotc.tools.fetch_model import fetch_model

pytestmark = pytest.mark.ir


def cost(sides, preferences, groups):
    """What a division costs: ``sides`` of all things, the two fixed ones first."""
    own = sum(row[sides[n]] for n, row in enumerate(preferences, start=2))
    return own + sum(weight for things, weight in groups if len({sides[n] for n in things}) > 1)


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_cheaper(seed):
    chance = random.Random(seed)
    count = chance.randint(1, 7)
    preferences = [(chance.randint(0, 9), chance.randint(0, 9)) for _ in range(count)]
    groups = [
        (chance.sample(range(count + 2), chance.randint(2, min(4, count + 2))), chance.randint(0, 9))
        for _ in range(chance.randint(0, 8))
    ]
    cut = MinCut()
    things = [cut.add_node() for _ in preferences]
    for thing, row in zip(things, preferences, strict=True):
        cut.set_side_costs(thing, *row)
    for group, weight in groups:
        cut.add_separation_cost(group, weight)
    first = cut.first_side_of_min_cut()
    found = [0, 1, *(0 if thing in first else 1 for thing in things)]
    every = (cost((0, 1, *sides), preferences, groups) for sides in itertools.product((0, 1), repeat=count))
    assert cost(found, preferences, groups) == min(every)
    assert FIRST in first
    assert SECOND not in first


def placed(function, *shapes):
    """The devices of each op, without constants, and the transfers."""
    text = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).as_text()
    report = explain_affinity(text, target="cuda:sm_90a")
    rows = [(row.name, row.device) for row in report.rows if not row.source and not row.reason.startswith("free")]
    return rows, [(row.source, row.device) for row in report.transfers], report


def devices_of(rows, name):
    return {device for op, device in rows if op == name}


LARGE = (2048, 2048)


def test_large_ops_stay_on_the_gpu():
    rows, moved, report = placed(lambda x: jnp.tanh(x @ jnp.linalg.inv(jnp.sin(x @ x))), LARGE)
    assert devices_of(rows, "dot_general") == {"device"}
    assert devices_of(rows, "tanh") == devices_of(rows, "sin") == {"device"}
    assert devices_of(rows, "lapack") == {"host"}
    assert all(pair in (("device", "host"), ("host", "device")) for pair in moved)
    reasons = {row.reason for row in report.rows if row.name == "lapack"}
    assert reasons == {"LAPACK's getrf has no kernel for cuda:sm_90a"}


def test_what_reads_a_small_result_goes_with_it():
    """A sum of logarithms of singular values: one transfer there, and back what the function returns."""
    _, moved, _ = placed(lambda x: jnp.log(jnp.linalg.svd(x @ x, compute_uv=False)).sum(), LARGE)
    assert sorted(moved) == [("device", "host"), ("host", "device")]


def test_pivots_are_turned_into_a_permutation_where_they_are_made():
    rows, _, report = placed(lambda x: lax.linalg.lu(x @ x)[2], LARGE)
    inside = [row.device for row in report.rows if row.name in ("dynamic_slice", "dynamic_update_slice")]
    assert inside
    assert set(inside) == {"host"}
    assert devices_of(rows, "dot_general") == {"device"}


def test_a_loop_of_large_ops_is_divided():
    """The matrices of a turn are worth moving; what counts the turns is on the host, which goes through them."""

    def steps(x):
        return lax.fori_loop(0, 10, lambda _, y: jnp.linalg.qr(jnp.sin(y @ x) @ x)[0] @ x, x)

    rows, moved, _ = placed(steps, LARGE)
    assert devices_of(rows, "dot_general") == {"device"}
    assert devices_of(rows, "lt") == {"host"}
    assert ("device", "host") in moved
    assert ("host", "device") in moved


def test_loops_without_such_ops_are_not_touched():
    def steps(x):
        y = lax.fori_loop(0, 10, lambda _, y: jnp.sin(y @ x), x)
        return jnp.linalg.inv(y)

    rows, _, _ = placed(steps, LARGE)
    assert devices_of(rows, "dot_general") == devices_of(rows, "sin") == {"device"}


def test_a_model_without_such_ops_has_no_devices():
    assert placed(lambda x: x @ x, LARGE)[2].devices == ()


def test_the_text_with_devices_reads_back():
    text = jax.jit(jnp.linalg.inv).lower(jax.ShapeDtypeStruct(LARGE, "float32")).as_text()
    module, _, options = fetch_model(text, (), None, Options(target="cuda:sm_90a"), {})
    printed = print_module(run_passes(module, replace(options, stop_after="join-devices", verify_each=True)))
    assert "implied_devices" in printed
    assert print_module(parse_module(printed)) == printed
