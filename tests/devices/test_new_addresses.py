"""Graphs over addresses: those that come again have their own, new ones are put into the nodes that name them."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import ORDERS
from devices.test_calls_ahead import close, loaded, step, want
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.cuda import graph_cache as recorded
from aotc.vmfb.devices.cuda.graph_cache import MOVING, RECORDED_ADDRESSES

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]


@pytest.fixture
def module(monkeypatch):
    return loaded(monkeypatch, step, array(4, 4), array(4, 4))


@pytest.mark.parametrize("order", ORDERS)
def test_new_addresses_move_the_nodes_that_name_them(order, monkeypatch):
    """Of graphs that are under way, too; nothing is launched by itself, and two of three kernels are not touched."""

    def three(x, w):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)

    module = loaded(monkeypatch, three, array(4, 4), array(4, 4), order=ORDERS[order])
    w = module.put(array(4, 4, seed=1))
    xs, outs = ([module.put(array(4, 4, seed=n)) for n in range(20)] for _ in range(2))
    bound, log = module.bind({1: w}), module._executable.gpu.log
    for x, out in zip(xs[: MOVING + 1], outs):
        bound.invoke(x, out=[out])
    for x, out in zip(xs[MOVING + 1 :], outs[MOVING + 1 :]):
        log.clear()
        bound.invoke(x, out=[out])
        assert (log.count("launch"), log.count("graph"), log.count("set_kernel")) == (0, 1, 2)
    for n, out in enumerate(outs):
        close(out.numpy(), want(array(4, 4, seed=n), w.numpy(), 3))
    for n, x in enumerate(xs):
        np.testing.assert_array_equal(x.numpy(), array(4, 4, seed=n))


def test_a_copy_of_a_graph_moves(monkeypatch):
    """An argument that is a result as well is copied by a node of its own."""
    module = loaded(monkeypatch, lambda x, y: (x, y + 1, y), array(3), array(3))
    held = [[module.put(array(3, seed=n)), module.put(array(3, seed=n + 50))] for n in range(6)]
    made = [module.invoke("main", x, y, results="device") for x, y in held]
    assert "set_copy" in module._executable.gpu.log
    for n, (a, b, c) in enumerate(made):
        x, y = array(3, seed=n), array(3, seed=n + 50)
        for found, expected in ((a, x), (b, y + 1), (c, y)):
            np.testing.assert_array_equal(found.numpy(), expected)


def test_addresses_that_come_again_get_graphs(module, monkeypatch):
    """Few sets are kept; where all are in use, others are put into the one that moves."""
    w, log = module.put(array(4, 4, seed=1)), module._executable.gpu.log
    xs = [(module.put(array(4, 4, seed=n)), module.put(array(4, 4))) for n in range(RECORDED_ADDRESSES + 4)]

    def moved():
        log.clear()
        for x, out in xs:
            module.invoke("main", x, w, out=[out])
        return log.count("set_kernel")

    counts = [moved() for _ in range(4)]
    assert counts[0] == len(xs) - MOVING
    assert counts[-1] <= 4
    monkeypatch.setattr(recorded, "STALE_CALLS", 3)
    for x, out in xs[-3:] * 3:
        module.invoke("main", x, w, out=[out])
        close(out.numpy(), want(x.numpy(), w.numpy()))
    log.clear()
    module.invoke("main", xs[-1][0], w, out=[xs[-1][1]])
    assert log == ["graph"]


def until(limit, x):
    return jax.lax.while_loop(lambda y: y[0, 0] < limit, lambda y: jnp.sin(y @ x) + y + 1, x)


@pytest.mark.parametrize("conditions", [True, False])
def test_loops_are_not_moved(conditions, monkeypatch, set_costs):
    """What a loop's own graph names, and what decides, stays where it was recorded; such calls end with a wait."""
    monkeypatch.setattr(SimulatedGpu, "conditions", conditions)
    set_costs(LOOP_TURNS=1)
    limit, xs = np.float32(6), [array(12, 12, seed=n) / 9 for n in range(4)]
    data = aotc.compile(jax.jit(until), limit, xs[0], target="cuda:sm_90")
    install(monkeypatch, data, order=ORDERS["chance"])
    module = aotc.load(data)
    most, given = module.put(limit), [module.put(x) for x in xs]
    made = [module.invoke("main", most, x, results="device")[0] for x in given * 2]
    log = module._executable.gpu.log
    assert ("set_kernel" in log) != conditions  # the host's loops are of graphs that can be
    assert ("loop" in log) == conditions
    for n, y in enumerate(made):
        close(y.numpy(), until(limit, xs[n % len(xs)]))
