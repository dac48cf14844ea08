"""What the driver is told of graphs, and how a loop that it never ends is ended; the driver is made up."""

import ctypes

import pytest

from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda import graphs, library, loops

pytestmark = pytest.mark.ir
NOT_READY = 600
MAKES = {
    "cuMemAlloc_v2", "cuStreamCreate", "cuModuleLoadData", "cuModuleGetFunction", "cuGraphCreate",
    "cuGraphConditionalHandleCreate", "cuDevicePrimaryCtxRetain",
}  # fmt: skip


class EndlessDriver:
    """The driver's functions; a stream is done when the host's word says so, and waiting for it before never ends."""

    def __init__(self):
        self.calls, self.words, self.is_endless, self.handles = [], ctypes.create_string_buffer(4096), False, 100

    def __getitem__(self, name):
        return getattr(self, name)

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append((name, arguments))
            if name == "cuMemHostAlloc":
                arguments[0]._obj.value = ctypes.addressof(self.words)
            elif name in MAKES or name.startswith("cuGraphAdd"):
                self.handles += 1
                arguments[0]._obj.value = self.handles
            if name == "cuGraphAddNode_v2":
                self.bodies = (ctypes.c_void_p * 3)(7, 8, 9)
                arguments[5]._obj.bodies = self.bodies
            if name == "cuStreamQuery":
                return NOT_READY if self.is_endless else 0
            if name == "cuStreamSynchronize" and self.is_endless:
                assert any(self.words.raw), "this would never come back"
                self.is_endless = False
            return 0

        return function


@pytest.fixture
def made_up(monkeypatch):
    found = EndlessDriver()
    monkeypatch.setattr(library.DRIVER, "library", found)
    monkeypatch.setattr(driver, "_WORDS", [])
    return found


def names(made_up):
    return [name for name, _ in made_up.calls]


class Stop(Exception):
    """What is to end a call."""


def raised():
    raise Stop


def test_loops_stop_when_their_call_is_cancelled(made_up, monkeypatch):
    gpu = driver.Gpu(0)
    assert gpu.loops.word
    gpu.expect_loops()
    made_up.is_endless = True
    monkeypatch.setattr(loops.Watch, "raise_pending_exception", lambda self: raised())
    with pytest.raises(Stop):
        gpu.wait()
    assert not gpu.may_run_loops
    assert not any(made_up.words.raw)
    gpu.wait()


def test_a_call_that_failed_ends_its_loops(made_up):
    gpu = driver.Gpu(0)
    assert gpu.loops.word
    gpu.stop_loops()
    gpu.expect_loops()
    made_up.is_endless = True
    gpu.stop_loops()
    assert not gpu.may_run_loops


def test_memory_is_freed_after_running_loops_end(made_up):
    """To free it waits for all streams, by whoever does."""
    gpu = driver.Gpu(0)
    other = gpu.with_new_stream()
    block = gpu.allocate(5)
    assert gpu.loops.word != other.loops.word
    gpu.expect_loops()
    other.free([block])
    assert "cuMemFree_v2" not in names(made_up)
    other.wait()
    assert "cuMemFree_v2" not in names(made_up)
    gpu.wait()
    assert ("cuMemFree_v2", (block,)) in made_up.calls


def test_stop_flags_are_reused(made_up):
    for _ in range(3):
        assert driver.Gpu(0).loops.word  # and the GPU goes, for nothing that it has refers to it
    assert names(made_up).count("cuMemHostAlloc") == 1


def test_arguments_of_graph_nodes(made_up):
    sizes = {graphs._Kernel: 72, graphs.CopyParameters: 200, graphs._Condition: 256}
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    gpu = driver.Gpu(0)
    made = gpu.new_graph()
    first = made.copy((), 16, 32, 64)
    shape = LaunchShape((2, 3, 4), 64, 1024, (2, 1, 1))
    node = made.launch((first,), ctypes.c_void_p(5), shape, (ctypes.c_void_p * 1)())
    handle = made.create_condition()
    branch, bodies = made.add_branches((made.add_branch_choice((node,), handle, 48, 3),), handle, 3)
    assert [body.handle.value for body in bodies] == [7, 8, 9]
    rows = dict(made_up.calls)
    copy = rows["cuGraphAddMemcpyNode"][4]._obj
    assert (copy.source.device, copy.target.device, list(copy.extent)) == (32, 16, [64, 1, 1])
    launches = [a for name, a in made_up.calls if name == "cuGraphAddKernelNode_v2"]
    assert [list(a[2]) for a in launches] == [[first], [node]]
    kernel = launches[0][4]._obj
    assert (list(kernel.blocks), list(kernel.threads), kernel.shared) == ([2, 3, 4], [64, 1, 1], 1024)
    assert rows["cuGraphKernelNodeSetAttribute"][:2] == (node, 4)
    condition = rows["cuGraphAddNode_v2"][5]._obj
    assert (condition.type, condition.handle, condition.kind, condition.size) == (13, handle, 2, 3)
    assert branch not in (first, node)
