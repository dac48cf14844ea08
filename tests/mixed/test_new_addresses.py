"""Graphs over addresses: those that come again have their own, new ones are put into the nodes that name them."""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from mixed.mixes import ORDERS
from mixed.test_calls_ahead import close, loaded, step, want
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu

import aotc
from aotc.vmfb.devices.cuda_program import CudaProgram, Recordings
from aotc.vmfb.devices.gpu import recorded
from aotc.vmfb.limits import MOVING, RECORDED_ADDRESSES, STEPS_AHEAD
from aotc.vmfb.process.interruption import RUNNING

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim


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


def test_a_submission_is_few_graphs_ahead(module, monkeypatch):
    """What is cancelled while graphs are asked for has no further ones."""
    h, w = module.put(array(4, 4)), module.put(array(4, 4, seed=1))
    out = module.invoke("main", h, w, results="device")
    executable = module._executable
    (gpu,), (call,) = executable.gpus, next(iter(module._functions["main"]._plans.values()))[1].__self__._calls.values()
    nodes = executable.buffers.nodes[0] * 6
    program = CudaProgram(gpu, call._call.slots, nodes, (), Recordings(gpu.gpu))
    log, finish, task = gpu.gpu.log, SimulatedGpu.finish, SimpleNamespace(stopped=None)
    log.clear()
    monkeypatch.setitem(RUNNING, threading.get_ident(), task)
    program.run()
    assert (log.count("graph"), log.count("finish")) == (6, 6 - STEPS_AHEAD)

    def cancelled(gpu, event):
        finish(gpu, event)
        task.stopped = aotc.FenceCancelled("", "somebody did")

    monkeypatch.setattr(SimulatedGpu, "finish", cancelled)
    log.clear()
    with pytest.raises(aotc.FenceCancelled):
        program.run()
    assert log.count("graph") == STEPS_AHEAD
    close(out[0].numpy(), want(h.numpy(), w.numpy()))
