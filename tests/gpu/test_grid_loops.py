"""Loops that are one kernel of all blocks of a GPU, on a simulated one: values, barriers, launches, how they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.test_gpu_loops import CASES, ORDERS, kernels, raced
from support.small_models import array, close
from vmfb.simulated_gpu import install

import aotc
from aotc.ir.loop.ir import For, GridBarrier, While, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.program.while_kernels import grid_barriers
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda.launch import launch_of
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]


def cell(n, xs, h, c, w, u):
    """A recurrent cell, whose products are large enough for tensor cores."""

    def step(i, state):
        h, c, rows = state
        a, b, f, o = jnp.split(xs[i % xs.shape[0]] @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(a) * jnp.tanh(b)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return h, c, rows.at[i].set(h)

    return jax.lax.fori_loop(0, n, step, (h, c, jnp.zeros((3, *h.shape))))


CELL = (
    np.int32(3), array(4, 8, 32), array(8, 32, seed=1), array(8, 32, seed=2), array(32, 128, seed=3, scale=0.2),
    array(32, 128, seed=4, scale=0.2),
)  # fmt: skip
ALL = {**CASES, "cell": (cell, CELL)}
TF32 = 1e-3  # of the product before the loop, which is done on tensor cores


@pytest.fixture(autouse=True)
def small_grid(set_costs):
    """Few blocks of few threads, and none alone."""
    set_costs(LOOP_BLOCK_FLOPS=-1, LOOP_GRID_BLOCKS=3, LOOP_GRID_THREADS=32)


def compiled(name):
    function, arrays = ALL[name]
    return aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90", verify_each=True)


def grid_kernels(data):
    return [k for k in kernels(data) if any(isinstance(s, For) and s.kind == "blocks" for s in walk(k.body))]


@pytest.mark.parametrize("name", ALL)
def test_loops_of_all_blocks(name, monkeypatch):
    """In any order that the edges allow; the second call is that of the recorded graph too."""
    data = compiled(name)
    function, arrays = ALL[name]
    want = jax.tree.leaves(jax.jit(function)(*arrays))
    assert grid_kernels(data)
    for order in ORDERS:
        install(monkeypatch, data, order=order)
        module = aotc.load(data)
        for _ in range(2):
            close(module.invoke("main", *jax.tree.leaves(arrays)), want, TF32 if name == "cell" else 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_blocks_wait_for_each_other(name, monkeypatch):
    """Between two barriers no thread touches what another writes, of whatever block."""
    assert not raced(compiled(name), ALL[name][1], monkeypatch)


@pytest.mark.parametrize("name", ["scan", "counted 7", "nested", "largest", "cell"])
def test_a_grid_barrier_that_is_missing_is_seen(name, monkeypatch):
    def never(self, later, found):
        self.touched = self.touched | later

    monkeypatch.setattr(grid_barriers.BarrierPlacer, "_insert_barrier_on_conflict", never)
    assert raced(compiled(name), ALL[name][1], monkeypatch)


def test_a_turn_of_a_cell_waits_twice():
    """The product with the inputs is done before; one kernel writes both halves of the state where it reads them."""
    (kernel,) = grid_kernels(compiled("cell"))
    (loop,) = [s for s in walk(kernel.body) if isinstance(s, While)]
    barriers = [s for s in walk((*loop.cond, *loop.body)) if isinstance(s, GridBarrier)]
    assert len(barriers) == 2
    assert sum(b.space == "global" and b.name.startswith("w") for b in kernel.outputs) == 1


@pytest.mark.parametrize("iterations", [0, 2, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_all_blocks_do_some_turns_at_a_time(iterations, monkeypatch, set_costs):
    set_costs(LOOP_TURNS=2)
    function, (_, *arrays) = ALL["cell"]
    data = compiled("cell")
    install(monkeypatch, data)
    module = aotc.load(data)
    for _ in range(2):
        found = module.invoke("main", np.int32(iterations), *arrays)
        close(found, jax.tree.leaves(jax.jit(function)(np.int32(iterations), *arrays)), TF32)
    (kernel,) = grid_kernels(data)
    assert "goes_on" in [out.name for out in kernel.outputs]


def test_an_endless_loop_of_all_blocks_ends(monkeypatch, set_costs):
    set_costs(LOOP_TURNS=3)

    def endless(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 2, lambda c: jnp.sin(c @ w), x)

    x, w = array(4, 12), array(12, 12, seed=1)
    data = aotc.compile(jax.jit(endless), x, w, target="cuda:sm_90")
    assert grid_kernels(data)
    install(monkeypatch, data)
    with pytest.raises(CallError, match="deadline"):
        aotc.load(data).submit("main", x, w, deadline=0.2).result(60)


@pytest.mark.parametrize(("multiprocessors", "blocks"), [(132, 3), (2, 2)])
def test_all_blocks_are_there_at_once(multiprocessors, blocks):
    """The driver is told so, and there is at most one for each multiprocessor."""
    data = compiled("cell")
    (variant,) = open_bundle(data).manifest["variants"]
    (row,) = [k for k in variant["kernels"] if k.get("launch", {}).get("cooperative")]
    shape = launch_of("here", row, [], 1, multiprocessors)
    assert (shape.blocks, shape.cooperative) == ((blocks, 1, 1), True)
    assert shape.attributes == [(2, (1,))]  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert row["resources"]["blocks"] >= 1


def test_a_loop_with_too_much_work_stays_a_graph(set_costs):
    set_costs(LOOP_GRID_FLOPS=1000)
    assert not grid_kernels(compiled("cell"))


def test_text_of_grid_statements():
    """It reads back, and says where something is wrong."""
    text = (
        'def k(x: "f32[64]", /, y: "f32[64]", met: "u32[]", *, grid: "1"):\n'
        "    for b in blocks(0, 2):\n"
        "        for t in thread(0, 32):\n"
        "            y[32*b + t] = x[32*b + t]\n"
        "    grid_barrier(met)\n"
    )
    kernel = parse_kernel(text)
    assert print_kernel(kernel) == text
