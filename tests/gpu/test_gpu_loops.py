"""Loops and branches on a GPU: graphs that turn them, kernels that hold them, on a simulated GPU."""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_races import Races, checked
from support.small_models import array, close
from vmfb import simulated_gpu
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.ir.loop.ir import Barrier, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.lowering.program.while_kernels import block_loops
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda.libcuda import graphs as driver_graphs
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]

ORDERS = [SimulatedGpu.LATE, SimulatedGpu.EARLY, random.Random(7)]
W, X = array(12, 12, scale=0.3), array(2, 12)


def scan(x, w):
    def step(c, row):
        c = jnp.tanh(c @ w + row)
        return c, c.sum(1)

    return jax.lax.scan(step, x, jnp.stack([x, x * 2, x * 3]))


def counted(n, x, w):
    return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ w) + i, x)


def until(x, w):
    return jax.lax.while_loop(lambda s: jnp.abs(s[1]).max() > 0.05, lambda s: (s[0] + 1, s[1] @ w * 0.5), (0, x))


def swapped(n, x, y):
    """Values that change places, one that is there twice, and one that stays."""
    return jax.lax.fori_loop(0, n, lambda i, s: (s[1], s[0], s[0] + s[1], s[3]), (x, y, x, y))


def nested(n, x, w):
    def inner(c):
        return jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: jnp.sin(c @ w) + c + 1, c)

    return jax.lax.fori_loop(0, n, lambda i, c: inner(c) * 0.1, x)


def branches(n, x, w):
    some = [lambda c: c @ w, lambda c: c * 0.5, lambda c: jnp.sin(c)]
    return jax.lax.fori_loop(0, n, lambda i, c: jax.lax.switch(i % 4, some, c) + 1, x)


def randoms(n, key):
    def step(i, total):
        return total + jax.random.uniform(jax.random.fold_in(key, i), (20,))

    return jax.lax.fori_loop(0, n, step, jnp.zeros(20))


def rows(n, x):
    """A row of a large array is written in each turn."""
    return jax.lax.fori_loop(0, n, lambda i, c: (c[0].at[i].set(jnp.cos(c[1])), c[1] + 1), (jnp.zeros((300, 12)), x[0]))


def largest(x):
    """Threads of a block exchange the parts of a maximum."""
    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.3, lambda x: x * 0.7, x)


def sorted_again(n, x):
    return jax.lax.fori_loop(0, n, lambda i, c: jnp.sort(jnp.sin(c * 3), 1), x)


def summed(x):
    """Warps exchange what they have summed in the condition, and in the body."""
    return jax.lax.while_loop(lambda s: s.sum() < 100, lambda s: jnp.sin(s) * 0.5 + s + s.max(), x)


CASES = {
    "scan": (scan, (X, W)),
    **{f"counted {n}": (counted, (np.int32(n), X, W)) for n in (0, 1, 7)},
    "until": (until, (X, W)),
    "swapped": (swapped, (np.int32(5), X, X + 1)),
    "nested": (nested, (np.int32(2), X, W)),
    "branches": (branches, (np.int32(6), X, W)),
    "randoms": (randoms, (np.int32(3), np.array([1, 2], "u4"))),
    "rows": (rows, (np.int32(4), X)),
    "largest": (largest, (array(512),)),
    "sorted": (sorted_again, (np.int32(3), X)),
    "summed": (summed, (array(4, 40, scale=0.3),)),
}


def kernels(data):
    """The kernels of a bundle."""
    manifest = open_bundle(data).manifest
    return [parse_kernel(row["text"]) for row in manifest["debug"]["kernels"].values()]


@pytest.fixture
def as_graphs(set_costs):
    """No loop is a kernel."""
    set_costs(LOOP_BLOCK_FLOPS=-1, LOOP_GRID_FLOPS=-1)


@pytest.fixture(params=[None, "as_graphs"], ids=["kernels", "graphs"])
def alone(request):
    """Are loops graphs that turn alone, or kernels?"""
    if request.param:
        request.getfixturevalue(request.param)
    return bool(request.param)


def compiled(name):
    function, arrays = CASES[name]
    return aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90", verify_each=True)


@pytest.mark.parametrize("name", CASES)
def test_loops(name, alone, monkeypatch):
    """In any order that the edges allow; the second call is that of the recorded graph too."""
    data = compiled(name)
    function, arrays = CASES[name]
    want = jax.jit(function)(*arrays)
    for order in ORDERS:
        install(monkeypatch, data, order=order)
        module = aotc.load(data)
        log = module._executable.gpu.log
        for _ in range(2):
            close(module.invoke("main", *jax.tree.leaves(arrays)), jax.tree.leaves(want), 1e-5)
        assert log.count("graph") == 2  # no turn of a loop is a call of its own
        assert log.count("loop") > 0 or not alone


@pytest.mark.parametrize("name", CASES)
def test_threads_wait_for_each_other(name, monkeypatch):
    """Between two barriers no thread touches what another writes."""
    data = compiled(name)
    assert not raced(data, CASES[name][1], monkeypatch)


@pytest.mark.parametrize("name", ["scan", "counted 7", "nested"])
def test_a_barrier_that_is_missing_is_seen(name, monkeypatch):
    monkeypatch.setattr(block_loops.BlockLoopWriter, "_emit_barrier", lambda self, block: self._forget_accesses())
    assert raced(compiled(name), CASES[name][1], monkeypatch)


def raced(data, arrays, monkeypatch):
    """What threads of a block did to each other."""
    races = Races()
    install(monkeypatch, data)
    monkeypatch.setattr(simulated_gpu, "run_kernel", checked(races))
    aotc.load(data).invoke("main", *jax.tree.leaves(arrays))
    return races.found


@pytest.mark.usefixtures("as_graphs")
@pytest.mark.parametrize("name", ["counted 7", "nested", "branches", "until"])
def test_the_host_runs_loops_with_older_drivers(name, monkeypatch):
    data = compiled(name)
    function, arrays = CASES[name]
    install(monkeypatch, data)
    monkeypatch.setattr(SimulatedGpu, "conditions", False)
    module = aotc.load(data)
    for _ in range(2):
        close(module.invoke("main", *arrays), jax.tree.leaves(jax.jit(function)(*arrays)), 1e-5)
    log = module._executable.gpu.log
    assert "loop" not in log
    assert log.count("graph") > 2


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("name", ["counted 7", "swapped"])
def test_loop_kernels_run_some_iterations_per_launch(name, iterations, monkeypatch, set_costs):
    """So that somebody can end them; a loop whose turns are few and known is one launch."""
    set_costs(LOOP_TURNS=2)
    function, arrays = CASES[name]
    data = aotc.compile(jax.jit(function), *arrays, target="cuda:sm_90")
    arrays = np.int32(iterations), *arrays[1:]
    install(monkeypatch, data)
    module = aotc.load(data)
    for _ in range(2):
        close(module.invoke("main", *arrays), jax.tree.leaves(jax.jit(function)(*arrays)), 1e-5)
    assert [k.outputs[-1].name for k in kernels(data)] == ["goes_on"]


def test_a_loop_of_few_turns_is_one_launch(monkeypatch):
    data = compiled("scan")
    install(monkeypatch, data)
    module = aotc.load(data)
    module.invoke("main", *CASES["scan"][1])
    assert "loop" not in module._executable.gpu.log
    (loop,) = [k for k in kernels(data) if "loop" in k.name]
    assert any(isinstance(s, Barrier) for s in walk(loop.body))


@pytest.mark.parametrize("size", [1, 5])
def test_a_number_of_turns_that_follows_from_a_size(size, monkeypatch):
    (n,) = jax.export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((2, 12), (n, 2, 12), (12, 12))]

    def run(x, rows, w):
        return jax.lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c), x, rows)

    data = aotc.compile(jax.export.export(jax.jit(run))(*shapes), target="cuda:sm_90")
    install(monkeypatch, data)
    arrays = X, array(size, 2, 12, seed=3), W
    close(aotc.load(data).invoke("main", *arrays), jax.tree.leaves(jax.jit(run)(*arrays)), 1e-5)


@pytest.mark.usefixtures("alone")
def test_a_donated_state(monkeypatch):
    function = jax.jit(counted, donate_argnums=1)
    data = aotc.compile(function, np.int32(3), X, W, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    held = module.put(X)
    (found,) = module.invoke("main", np.int32(3), held, W, donate=True, results="device")
    close([found.numpy()], [jax.jit(counted)(np.int32(3), X, W)], 1e-5)


@pytest.mark.usefixtures("alone")
def test_an_endless_loop_ends(monkeypatch, set_costs):
    set_costs(LOOP_TURNS=3)

    def endless(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 2, lambda c: jnp.sin(c @ w), x)

    data = aotc.compile(jax.jit(endless), X, W, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    for _ in range(2):
        with pytest.raises(CallError, match="deadline"):
            module.submit("main", X, W, deadline=0.2).result(60)


def test_decision_kernels_link_for_old_and_new_gpus():
    """NVIDIA's linker takes it for the oldest and the newest; the function that it calls is the driver's."""
    from cuda.bindings import nvjitlink

    for architecture in ("sm_80", "sm_120"):
        linker = nvjitlink.create(1, [f"-arch={architecture}"])
        nvjitlink.add_data(
            linker, nvjitlink.InputType.PTX, driver_graphs.DECISIONS, len(driver_graphs.DECISIONS), "decisions"
        )
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        nvjitlink.destroy(linker)
        assert set(re.findall(rb"\.text\.(\w+)", bytes(cubin))) >= {b"aotc_goes_on", b"aotc_chosen"}
