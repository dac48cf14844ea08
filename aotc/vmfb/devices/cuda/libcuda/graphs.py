"""CUDA graphs built node by node: kernels and copies with edges, and loops and branches that the GPU decides.

A loop or a branch is a *conditional node* with graphs of its own. Its number selects the graph to run, or decides
whether the loop continues. A *decision kernel* of one thread reads a value in GPU memory and sets that number. It runs
before the node, and for a loop also at the end of the body. These kernels are the only GPU code that is not in a
bundle: the driver compiles :data:`DECISIONS` when a process first needs them.

The host can stop a loop: the loop's kernel polls a word in host memory at intervals, and stores time and result of the
last poll in GPU memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from ctypes import POINTER, Structure, addressof, byref, c_int, c_longlong, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from aotc.vmfb.devices.cuda.launch import LaunchShape
from aotc.vmfb.devices.cuda.libcuda.library import DRIVER, call, handle_of
from aotc.vmfb.ranks.gpu_calls import GpuCall, RankGpu

CONDITIONS_SINCE = (12, 8)  # the first CUDA version in which conditional nodes can have several graphs
_CONDITIONAL = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
_WHILE, _SWITCH = 1, 2  # CU_GRAPH_COND_TYPE_*
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

_HEAD = """.version 8.3
.target sm_75
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
"""
_CALL = """
    { .param .b64 a; .param .b32 b; st.param.b64 [a], %handle; st.param.b32 [b], %found;
      call.uni cudaGraphSetConditional, (a, b); }
    ret;
}
"""
# Nanoseconds between two reads of the stop flag in host memory by a GPU's loop. A read takes about 1 us, and a call
# must react within 20 ms.
LOOP_LOOK_NANOSECONDS = 1_000_000


_DECISIONS = f"""{_HEAD}
.visible .entry aotc_goes_on(.param .u64 handle, .param .u64 flag, .param .u64 state, .param .u64 stop)
{{
    .reg .b64 %handle, %flag, %state, %stop, %now, %last; .reg .b32 %found, %one, %word; .reg .pred %on, %both, %early;
    ld.param.u64 %handle, [handle]; ld.param.u64 %flag, [flag];
    ld.param.u64 %state, [state]; ld.param.u64 %stop, [stop];
    ld.global.u8 %one, [%flag]; ld.volatile.global.u64 %last, [%state]; ld.volatile.global.u32 %word, [%state+8];
    mov.u64 %now, %globaltimer; sub.u64 %last, %now, %last;
    setp.lt.u64 %early, %last, {LOOP_LOOK_NANOSECONDS};
    @%early bra decided;
    st.volatile.global.u64 [%state], %now;
    ld.volatile.global.u32 %word, [%stop];
    st.volatile.global.u32 [%state+8], %word;
decided:
    setp.ne.u32 %on, %one, 0; setp.eq.and.u32 %both, %word, 0, %on; selp.u32 %found, 1, 0, %both;{_CALL}
.visible .entry aotc_chosen(.param .u64 handle, .param .u64 number, .param .u64 last)
{{
    .reg .b64 %handle, %number, %most; .reg .b32 %found, %last;
    ld.param.u64 %handle, [handle]; ld.param.u64 %number, [number]; ld.param.u64 %most, [last];
    cvt.u32.u64 %last, %most; ld.global.u32 %found, [%number]; min.u32 %found, %found, %last;{_CALL}"""
DECISIONS = _DECISIONS.encode() + b"\0"
GOES_ON, CHOSEN = "aotc_goes_on", "aotc_chosen"

Node: TypeAlias = int
After: TypeAlias = Sequence[Node]
Cell: TypeAlias = "tuple[Any, int]"  # a ctypes array and the index of an address in it


class _Kernel(Structure):
    """ctypes form of CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", c_void_p),
        ("blocks", c_uint * 3),
        ("threads", c_uint * 3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _End(Structure):
    """One end of a copy: the fields for the source or for the destination of CUDA_MEMCPY3D."""

    _fields_ = (
        ("begin", c_size_t * 4),
        ("kind", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class CopyParameters(Structure):
    """ctypes form of CUDA_MEMCPY3D."""

    _fields_ = (("source", _End), ("target", _End), ("extent", c_size_t * 3))

    @classmethod
    def of(cls, to: int, source: int, size: int) -> CopyParameters:
        """Return the parameters of a copy of ``size`` bytes on the GPU."""
        ends = [_End(kind=_DEVICE, device=address, pitch=size, height=1) for address in (source, to)]
        return cls(*ends, (c_size_t * 3)(size, 1, 1))

    def cells(self) -> list[Cell]:
        """Return the positions of the source and target addresses in this structure, for later changes."""
        rows = CopyParameters.source, CopyParameters.target
        return [((c_uint64 * 1).from_buffer(self, row.offset + _End.device.offset), 0) for row in rows]


class _Fill(Structure):
    """ctypes form of CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def kernel_parameters(function: c_void_p, shape: LaunchShape, table: ctypes.Array[c_void_p]) -> Structure:
    """Return the parameters of a kernel node; ``table`` is an array of pointers to the kernel's parameters."""
    return _Kernel(function, shape.blocks, (shape.threads, 1, 1), shape.shared, ctypes.cast(table, c_void_p))


class _Condition(Structure):
    """ctypes form of CUgraphNodeParams for a conditional node."""

    _fields_ = (
        ("type", c_int),
        ("reserved", c_int * 3),
        ("handle", c_uint64),
        ("kind", c_int),
        ("size", c_uint),
        ("bodies", POINTER(c_void_p)),
        ("context", c_void_p),
        ("rest", c_longlong * 26),
    )


class Recording(NamedTuple):
    """An instantiated CUDA graph, ready to be launched.

    Attributes
    ----------
    ready : c_void_p
        The executable graph.
    source : c_void_p
        The graph from which it was instantiated, to which its nodes belong.
    """

    ready: c_void_p
    source: c_void_p


class LoopState(Protocol):
    """Interface of the state of loops on a GPU: see :class:`aotc.vmfb.devices.cuda.libcuda.loops.Loops`."""

    kernels: Mapping[str, c_void_p]
    word: int
    state: int


class GraphGpu(RankGpu, Protocol):
    """Interface of a GPU that can run graphs: see :class:`aotc.vmfb.devices.cuda.driver.Gpu`."""

    stream: c_void_p
    context: c_void_p

    @property
    def loops(self) -> LoopState:
        """Return the stop flag and decision kernels for loops on this stream."""

    def load_module(self, image: bytes) -> c_void_p:
        """Load a module from PTX."""

    def kernel_handle(self, module: c_void_p, symbol: str) -> c_void_p:
        """Return the handle of kernel ``symbol`` of a module."""

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes and return the address."""

    def capture_graph(self) -> AbstractContextManager[tuple[int, c_void_p]]:
        """Capture the work that the block enqueues in a graph, instead of running it."""


class GraphMaker:
    """Builder of a CUDA graph; each method adds a node that runs after the nodes ``after``.

    Parameters
    ----------
    gpu : Gpu
    handle : c_void_p
        The graph.
    """

    def __init__(self, gpu: GraphGpu, handle: c_void_p) -> None:
        self._gpu, self.handle = gpu, handle

    def launch(self, after: After, function: c_void_p, shape: LaunchShape, table: ctypes.Array[c_void_p]) -> Node:
        """Add a kernel launch; ``table`` is an array of pointers to the kernel's parameters, which are copied now."""
        node = self._add("cuGraphAddKernelNode_v2", after, byref(kernel_parameters(function, shape, table)))
        for number, value in shape.attributes:
            call("cuGraphKernelNodeSetAttribute", node, number, byref((c_uint * 16)(*value)))
        return node

    def copy(self, after: After, to: int, source: int, size: int) -> Node:
        """Add a copy of ``size`` bytes on the GPU."""
        return self._add("cuGraphAddMemcpyNode", after, byref(CopyParameters.of(to, source, size)), self._gpu.context)

    def signal(self, after: After, address: int) -> Node:
        """Add a store of 1 to a word of page-locked host memory."""
        made = _Fill(address, 0, 1, 4, 1, 1)
        return self._add("cuGraphAddMemsetNode", after, byref(made), self._gpu.context)

    def collective(self, after: After, call_on: GpuCall, addresses: Sequence[int]) -> Node:
        """Add a collective as one node: a child graph captured from the work that its library enqueues."""
        with self._gpu.capture_graph() as (stream, graph):
            call_on(self._gpu, stream, addresses)
        try:
            return self._add("cuGraphAddChildGraphNode", after, graph)  # with a copy of the graph
        finally:
            call("cuGraphDestroy", graph)

    def add_join(self, after: After) -> Node:
        """Add an empty node that waits for the nodes ``after``."""
        return self._add("cuGraphAddEmptyNode", after)

    def create_condition(self) -> int:
        """Create a condition handle: a number that kernels set and a conditional node of this graph reads."""
        found = c_uint64()
        call("cuGraphConditionalHandleCreate", byref(found), self.handle, self._gpu.context, 0, 0)
        return found.value

    def add_loop_condition(self, after: After, handle: int, flag: int) -> Node:
        """Add a kernel that sets condition ``handle`` to 1 if the byte at address ``flag`` is not 0, else to 0."""
        loops = self._gpu.loops
        return self._decide(after, GOES_ON, handle, flag, loops.state, loops.word)

    def add_branch_choice(self, after: After, handle: int, number: int, count: int) -> Node:
        """Add a kernel that sets condition ``handle`` to the i32 at address ``number``, at most ``count - 1``.

        A number out of range becomes the last one.
        """
        return self._decide(after, CHOSEN, handle, number, count - 1)

    def add_loop(self, after: After, handle: int) -> tuple[Node, GraphMaker]:
        """Add a loop that runs as long as condition ``handle`` is 1; return the node, and the builder of its body."""
        node, (body,) = self._conditional(after, handle, _WHILE, 1)
        return node, body

    def add_branches(self, after: After, handle: int, count: int) -> tuple[Node, list[GraphMaker]]:
        """Add a branch; return the node, and the builders of its ``count`` graphs.

        Condition ``handle`` is the number of the graph that runs.
        """
        return self._conditional(after, handle, _SWITCH, count)

    def _decide(self, after: After, kernel: str, *values: int) -> Node:
        numbers = (c_uint64 * len(values))(*values)
        table = (c_void_p * len(values))(*(addressof(numbers) + 8 * n for n in range(len(values))))
        return self.launch(after, self._gpu.loops.kernels[kernel], LaunchShape((1, 1, 1), 1), table)

    def _conditional(self, after: After, handle: int, kind: int, size: int) -> tuple[Node, list[GraphMaker]]:
        made = _Condition(type=_CONDITIONAL, handle=handle, kind=kind, size=size, context=self._gpu.context)
        node, before = c_void_p(), _node_array(after)
        call("cuGraphAddNode_v2", byref(node), self.handle, before, None, len(after), byref(made))
        assert node.value is not None
        return node.value, [GraphMaker(self._gpu, c_void_p(made.bodies[n])) for n in range(size)]

    def _add(self, name: str, after: After, *parameters: Any) -> Node:
        node = c_void_p()
        call(name, byref(node), self.handle, _node_array(after), len(after), *parameters)
        assert node.value is not None
        return node.value


def _node_array(after: After) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(after))(*after)


class GraphStream:
    """Mixin of a GPU's stream: creates, instantiates, launches and updates graphs.

    Attributes
    ----------
    stream, context : c_void_p
    """

    stream: c_void_p
    context: c_void_p

    def new_graph(self: GraphGpu) -> GraphMaker:
        """Return the builder of a new, empty graph."""
        return GraphMaker(self, handle_of("cuGraphCreate", 0))

    def instantiate_graph(self, graph: GraphMaker) -> Recording:
        """Instantiate a graph, so that it can be launched."""
        return Recording(handle_of("cuGraphInstantiateWithFlags", graph.handle, 0), graph.handle)

    def destroy_graph(self, graph: GraphMaker) -> None:
        """Destroy a graph that will not be instantiated."""
        call("cuGraphDestroy", graph.handle)

    def run_graph(self, graph: Recording) -> None:
        """Launch a graph on the stream."""
        call("cuGraphLaunch", graph.ready, self.stream)

    def graph_launcher(self, graph: Recording) -> Callable[[], int]:
        """Return a function that launches a graph on the stream and returns the driver's status."""
        return partial(DRIVER.driver_function("cuGraphLaunch"), graph.ready, self.stream)

    def kernel_setter(
        self, graph: Recording, node: int, function: c_void_p, shape: LaunchShape, table: ctypes.Array[c_void_p]
    ) -> Callable[[], int]:
        """Return a function that updates a kernel node of a recorded graph from the values of its parameters."""
        made = byref(kernel_parameters(function, shape, table))
        return partial(DRIVER.driver_function("cuGraphExecKernelNodeSetParams_v2"), graph.ready, c_void_p(node), made)

    def copy_setter(self, graph: Recording, node: int, copy: CopyParameters) -> Callable[[], int]:
        """Return a function that updates a copy node of a recorded graph from the current values of its parameters."""
        function = DRIVER.driver_function("cuGraphExecMemcpyNodeSetParams")
        return partial(function, graph.ready, c_void_p(node), byref(copy), self.context)
