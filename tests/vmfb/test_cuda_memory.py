"""What a CUDA bundle holds on a GPU, and when it gives it back: on a simulated GPU, and through a made-up driver."""

import gc
import os
import weakref

import jax
import numpy as np
import pytest
from support.growing import GROWING, check_growing
from support.small_models import MODELS, array, close
from vmfb import simulated_gpu
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda.libcuda import library as driver_library
from aotc.vmfb.errors import CallError
from aotc.vmfb.limits import PLANS

pytest.importorskip("numba_cuda")

pytestmark = pytest.mark.cudasim


@pytest.fixture
def no_collection():
    """What is dropped goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def steps(n, x):
    return jax.lax.fori_loop(0, n, lambda i, c: jax.lax.cond(i > 1, lambda: c @ x, lambda: c + x), x)


def loaded(monkeypatch, function, *args):
    data = aotc.compile(function, *args, target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


def test_a_dropped_module_gives_everything_back(monkeypatch, no_collection):
    """Also one with a loop and a branch, whose steps are closures."""
    x = array(12, 12, scale=0.3)
    module = loaded(monkeypatch, jax.jit(steps), np.int32(3), x)
    memory = module._executable.gpu.memory
    constants = len(memory)
    close(module.invoke("main", np.int32(3), x), steps(np.int32(3), x), 1e-5)
    gpu, executable = weakref.ref(module._executable.gpu), weakref.ref(module._executable)
    assert len(memory) > constants
    del module
    assert executable() is None
    assert gpu() is None
    assert len(memory) == constants  # which go with the GPU


def test_a_dropped_module_whose_course_depends_on_data(monkeypatch, no_collection):
    data = aotc.compile(GROWING.replace("64", "8").encode(), target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    check_growing(module, 8)
    executable = weakref.ref(module._executable)
    del module
    assert executable() is None


def test_an_evicted_plan_frees_its_memory(monkeypatch, no_collection):
    shape = jax.export.symbolic_shape("b, 3")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(shape, "float32"))
    module = loaded(monkeypatch, exported)
    blocks = []
    for size in range(1, PLANS + 4):
        module.invoke("main", array(size, 3))
        blocks.append(len(module._executable.gpu.memory))
    assert blocks[-1] == blocks[PLANS - 1]
    before = module.stats()["device_bytes"]
    assert module.trim() == before - module.stats()["constants_bytes"]


def test_a_recording_that_fails_is_made_again(monkeypatch):
    """The first call after it finds memory, and must not take it for the results of programs that are not there."""
    function, w, x, tolerance = MODELS["mlp"]
    module = loaded(monkeypatch, jax.jit(lambda x: function(w, x)), x)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedGpu, "new_graph", lambda self: (_ for _ in ()).throw(CallError("", "planted")))
        with pytest.raises(CallError, match="planted"):
            module.invoke("main", x)
    close(module.invoke("main", x), jax.jit(function)(w, x), tolerance)


class MadeUp:
    """The driver's functions: which were called, and which of them fail."""

    def __init__(self):
        self.calls, self.failing = [], set()

    def __getitem__(self, name):
        return getattr(self, name)

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            if name == "cuGetErrorName":
                return 1
            if name in ("cuMemAlloc_v2", "cuStreamCreate", "cuModuleLoadData", "cuDevicePrimaryCtxRetain"):
                arguments[0]._obj.value = len(self.calls)
            return 1 if name in self.failing else 0

        return function


@pytest.fixture
def made_up(monkeypatch):
    library = MadeUp()
    monkeypatch.setattr(driver_library.DRIVER, "library", library)
    return library


GIVES_BACK = ["cuStreamSynchronize", "cuMemFree_v2", "cuModuleUnload", "cuStreamDestroy_v2"]


@pytest.mark.parametrize("failing", [None, "cuCtxPushCurrent_v2", *GIVES_BACK])
def test_a_dropped_gpu_gives_back_what_it_took(made_up, no_collection, failing, capsys):
    """In the context that it took it in; one failure does not keep the rest, and a finalizer says nothing."""
    gpu = driver.Gpu(0)
    gpu.allocate(5)
    gpu.free([gpu.allocate(7)])
    gpu.load_module(b"cubin")
    made_up.calls.clear()
    made_up.failing.add(failing)
    del gpu
    seen = [name for name in made_up.calls if name in GIVES_BACK]
    assert seen == ([] if failing == "cuCtxPushCurrent_v2" else GIVES_BACK)
    pushed, popped = (made_up.calls.count(f"cuCtx{what}Current_v2") for what in ("Push", "Pop"))
    assert popped == (0 if failing == "cuCtxPushCurrent_v2" else pushed)
    assert capsys.readouterr() == ("", "")


def test_a_forked_child_gives_nothing_back(made_up, no_collection, monkeypatch):
    """The memory is its parent's."""
    gpu = driver.Gpu(0)
    gpu.allocate(5)
    made_up.calls.clear()
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    del gpu
    assert made_up.calls == []


def test_a_gpu_goes_quietly_when_modules_are_gone(monkeypatch):
    """As at the end of the interpreter, which sets their names to None before it drops what tests hold."""
    gpu = SimulatedGpu(0)
    monkeypatch.setattr(simulated_gpu, "sys", None)
    gpu.__del__()
    assert not gpu.mark.handle
