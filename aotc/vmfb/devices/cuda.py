"""The CUDA device: loads cubins, keeps the constants on the GPU, runs command buffers as CUDA graphs.

A plan (one tuple of shapes) gets memory for its arguments, results and arena the
first time it runs, and each GRAPH node of its command buffers is recorded as a
CUDA graph over those addresses; later calls copy in, launch the graphs and copy
out. Loops and branches read their predicate back to the host. Calls on one
executable run one after the other.
"""

from __future__ import annotations

import ctypes
from _thread import RLock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.vmfb.abi import CASE, COMMAND_HEADER, COPY, GRAPH, GRAPH_HEADER, WHILE
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.commands import load_commands
from aotc.vmfb.constants import load_constants
from aotc.vmfb.device import Plan
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, VmError
from aotc.vmfb.pointers import address_of

MAX_BLOCKS = (1 << 31) - 1


def _architecture(variant: dict[str, Any]) -> tuple[int, int]:
    """Return the compute capability that a variant was compiled for: ``cuda:sm_90`` is (9, 0)."""
    digits = variant["target"].rpartition("sm_")[2]
    return int(digits[:-1]), int(digits[-1])


def obstacle(variant: dict[str, Any]) -> str:
    """Return why no GPU of this machine can run the variant, or an empty string."""
    missing = cuda_driver.missing()
    if missing:
        return missing
    found = {n: cuda_driver.capability(n) for n in range(cuda_driver.device_count())}
    if any(_runs(variant, have) for have in found.values()):
        return ""
    names = ", ".join(f"{cuda_driver.device_name(n)} is sm_{a}{b}" for n, (a, b) in found.items())
    return f"its code is for another GPU ({names})"


def _runs(variant: dict[str, Any], have: tuple[int, int]) -> bool:
    major, minor = _architecture(variant)
    return have[0] == major and have[1] >= minor


def rank(variant: dict[str, Any]) -> int:
    """Return how new the variant's architecture is: newer is better."""
    major, minor = _architecture(variant)
    return 10 * major + minor


def open_executable(
    bundle: Bundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> CudaExecutable:
    """Load a CUDA variant on GPU ``ordinal``."""
    count = cuda_driver.device_count()
    if not 0 <= ordinal < count:
        raise BundleError(bundle.where, f"there is no GPU {ordinal}", expected=f"below {count}")
    if not _runs(variant, cuda_driver.capability(ordinal)):
        name, (major, minor) = cuda_driver.device_name(ordinal), cuda_driver.capability(ordinal)
        raise BundleError(bundle.where, f"GPU {ordinal} cannot run it", f"{name}, sm_{major}{minor}", variant["target"])
    return CudaExecutable(bundle, variant, ordinal)


def _check_kernels(bundle: Bundle, variant: dict[str, Any]) -> None:
    for kernel in variant["kernels"]:
        fits = len(kernel.get("image", ())) == 2 and "inputs" in kernel and "symbol" in kernel
        if not fits or not 0 < kernel.get("threads", 0) <= 1024 or kernel.get("items", 0) < 1:
            raise BundleError(bundle.where, f"the entry of kernel {kernel['name']!r} is incomplete")
    if variant["kernels"] and "cubin" not in variant:
        raise BundleError(bundle.where, "the variant has kernels but no cubins")


class CudaExecutable:
    """A CUDA variant on a GPU.

    Parameters
    ----------
    bundle : Bundle
    variant : dict
        Its entry in the manifest.
    ordinal : int
        The GPU's number.

    Raises
    ------
    BundleError
        If a cubin or a command buffer is damaged.
    """

    def __init__(self, bundle: Bundle, variant: dict[str, Any], ordinal: int) -> None:
        _check_kernels(bundle, variant)
        self.lock = RLock()
        self.where = bundle.where
        self._variant = variant
        self._ordinal = ordinal
        self.buffers = load_commands(bundle, variant)
        self.gpu = cuda_driver.Gpu(ordinal)
        self.kernels = variant["kernels"]
        self.functions = self._load_functions(bundle)
        self.constants, self._constant_bytes = self._upload_constants(bundle)
        self.bytes = self._constant_bytes
        self._memories: list[Memory] = []

    def _load_functions(self, bundle: Bundle) -> list[Any]:
        if not self.kernels:
            return []
        data = bytes(bundle.checked(self._variant["cubin"]))
        modules: dict[tuple[int, int], Any] = {}
        functions = []
        for kernel in self.kernels:
            begin, size = kernel["image"]
            if not 0 <= begin <= begin + size <= len(data):
                raise BundleError(bundle.where, f"kernel {kernel['name']!r} lies outside of the cubins")
            try:
                if (begin, size) not in modules:
                    modules[begin, size] = self.gpu.load(data[begin : begin + size])
                functions.append(self.gpu.function(modules[begin, size], kernel["symbol"]))
            except VmError as error:
                raise BundleError(bundle.where, f"kernel {kernel['name']!r} does not load: {error}") from None
        return functions

    def _upload_constants(self, bundle: Bundle) -> tuple[int, int]:
        constants = load_constants(bundle, self._variant.get("constants"))
        address = self.gpu.allocate(constants.size)
        self.gpu.upload(address, constants.address, constants.size)
        self.gpu.wait()
        return address, constants.size

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return the function that runs ``plan`` on argument and result arrays."""
        memory = Memory(self, plan.arguments + len(plan.results) + 2)
        self._memories.append(memory)
        programs: list[Program] = []

        def run(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            with self.lock:
                self.gpu.enter()
                if not memory.ready:
                    sizes = [x.nbytes for x in (*arrays, *results)]
                    memory.reserve([*sizes, plan.arena])
                    programs[:] = [Program(self, memory, n, values) for n, values in plan.submissions]
                for slot, x in enumerate(arrays):
                    self.gpu.upload(memory.slots[slot], address_of(x), x.nbytes)
                for program in programs:
                    program.run()
                for slot, x in enumerate(results, start=len(arrays)):
                    self.gpu.download(address_of(x), memory.slots[slot], x.nbytes)
                self.gpu.wait()

        return run

    def session(self, slots: int) -> CudaSession:
        """Begin a call with a pointer table of ``slots`` slots."""
        return CudaSession(self, slots)

    def stats(self) -> dict[str, Any]:
        """Return the GPU, kernels and memory (bytes)."""
        return {
            "target": self._variant["target"],
            "device": cuda_driver.device_name(self._ordinal),
            "kernels": len(self.kernels),
            "command_buffers": len(self.buffers),
            "arena_peak": self._variant.get("arena_peak"),
            "constants_bytes": self._constant_bytes,
            "device_bytes": self.bytes,
        }

    def trim(self) -> int:
        """Free the memory of all plans; return how many bytes that were."""
        with self.lock:
            self.gpu.enter()
            before = self.bytes
            for memory in self._memories:
                memory.release()
            return before - self.bytes


class Memory:
    """The pointer table of a call: addresses on the GPU, and the graphs that were made for them."""

    def __init__(self, executable: CudaExecutable, slots: int) -> None:
        self._executable = executable
        self.slots = [0] * (slots - 1) + [executable.constants]
        self.sizes = [0] * (slots - 1)
        self.ready = False
        self.graphs: list[Any] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take memory for all slots but the constants."""
        for slot, size in enumerate(sizes):
            self.take(slot, size)
        self.ready = True

    def take(self, slot: int, size: int) -> None:
        """Take memory for one slot; what it had is given back."""
        self.drop(slot)
        self.slots[slot] = self._executable.gpu.allocate(size)
        self.sizes[slot] = size
        self._executable.bytes += size

    def drop(self, slot: int) -> None:
        """Give the memory of one slot back."""
        if self.slots[slot]:
            self._executable.gpu.free(self.slots[slot])
            self._executable.bytes -= self.sizes[slot]
            self.slots[slot] = 0

    def release(self) -> None:
        """Give everything back."""
        for graph in self.graphs:
            self._executable.gpu.destroy_graph(graph)
        self.graphs.clear()
        for slot in range(len(self.slots) - 1):
            self.drop(slot)
        self.ready = False


class Program:
    """A command buffer with its parameters and addresses put in.

    Graphs are recorded once; ``record=False`` runs their commands directly, for a
    call whose addresses are used only once.
    """

    def __init__(
        self, executable: CudaExecutable, memory: Memory, number: int, parameters: Sequence[int], record: bool = True
    ) -> None:
        self._executable, self._memory, self._parameters, self._record = executable, memory, parameters, record
        self._words: list[int] = executable.buffers[number].words
        self._keep: list[Any] = []
        self._flag = np.zeros(8, np.uint8)
        self._steps = self._nodes(0, len(self._words))

    def run(self) -> None:
        """Put the whole command buffer on the stream; waits where the host must read a predicate."""
        for step in self._steps:
            step()

    def _value(self, operand: int) -> int:
        return self._parameters[operand >> 1] if operand & 1 else operand >> 1

    def _place(self, at: int) -> int:
        return self._memory.slots[self._words[at]] + self._value(self._words[at + 1])

    def _nodes(self, at: int, end: int) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        while at < end:
            match self._words[at]:
                case code if code == GRAPH:
                    steps.append(self._graph(at))
                case code if code == WHILE:
                    steps.append(self._while(at))
                case code if code == CASE:
                    steps.append(self._case(at))
            at += self._words[at + 1]
        return steps

    def _graph(self, at: int) -> Callable[[], None]:
        """Return what runs a graph; its commands are in an order that respects the edges."""
        words, gpu = self._words, self._executable.gpu
        commands = [self._command(at + words[at + GRAPH_HEADER + n]) for n in range(words[at + 2])]

        def run_all() -> None:
            for command in commands:
                command()

        if not self._record:
            return run_all
        gpu.begin_capture()
        try:
            run_all()
        finally:
            graph = gpu.end_capture()
        self._memory.graphs.append(graph)
        return lambda: gpu.run_graph(graph)

    def _command(self, at: int) -> Callable[[], None]:
        words, gpu = self._words, self._executable.gpu
        kind, number, items, _, _, successors, places, dims = words[at : at + COMMAND_HEADER]
        first = at + COMMAND_HEADER + successors
        pointers = [self._place(p) for p in range(first, first + 2 * places, 2)]
        values = [self._value(w) for w in words[first + 2 * places : first + 2 * places + dims]]
        if kind == COPY:
            return lambda: gpu.copy(pointers[1], pointers[0], values[0])
        kernel, function = self._executable.kernels[number], self._executable.functions[number]
        count = self._value(items)
        blocks, threads = -(-count // kernel["items"]), kernel["threads"]
        if blocks > MAX_BLOCKS:
            raise VmError(self._executable.where, f"kernel {kernel['name']!r} has too large a grid", blocks, MAX_BLOCKS)
        given = (ctypes.c_int64 * (places + dims + 1))(*pointers, *values, count)
        start = ctypes.addressof(given)
        table = (ctypes.c_void_p * len(given))(*[start + 8 * n for n in range(len(given))])
        self._keep += [given, table]
        return (lambda: gpu.launch(function, blocks, threads, table)) if blocks else (lambda: None)

    def _read(self, at: int, size: int) -> Callable[[], None]:
        """Return what brings a scalar to ``_flag``."""
        gpu, to = self._executable.gpu, self._flag.ctypes.data
        source = self._place(at)

        def read() -> None:
            gpu.download(to, source, size)
            gpu.wait()

        return read

    def _while(self, at: int) -> Callable[[], None]:
        words = self._words
        begin = at + 6
        condition = self._nodes(begin, begin + words[at + 2])
        body = self._nodes(begin + words[at + 2], begin + words[at + 2] + words[at + 3])
        read = self._read(at + 4, 1)

        def run() -> None:
            while True:
                for step in condition:
                    step()
                read()
                if not self._flag[0]:
                    return
                for step in body:
                    step()

        return run

    def _case(self, at: int) -> Callable[[], None]:
        words = self._words
        count = words[at + 2]
        begin = at + 5 + count
        branches = []
        for length in words[at + 5 : at + 5 + count]:
            branches.append(self._nodes(begin, begin + length))
            begin += length
        read = self._read(at + 3, 4)

        def run() -> None:
            read()
            number = int(self._flag.view(np.int32)[0])
            for step in branches[number if 0 <= number < count else -1]:
                step()

        return run


class CudaSession:
    """One call of a function whose course depends on its data; it has the executable for itself."""

    def __init__(self, executable: CudaExecutable, slots: int) -> None:
        self._executable = executable
        executable.lock.acquire()
        executable.gpu.enter()
        self._memory = Memory(executable, slots)
        self._arrays: dict[int, np.ndarray] = {}
        self._written: set[int] = set()

    def arena(self, size: int) -> None:
        """Take an arena of ``size`` bytes; what an earlier one held is kept."""
        memory, gpu, slot = self._memory, self._executable.gpu, len(self._memory.slots) - 2
        old, held = memory.slots[slot], memory.sizes[slot]
        memory.slots[slot] = 0
        memory.take(slot, size)
        if old:
            gpu.copy(memory.slots[slot], old, min(held, size))
            gpu.wait()
            gpu.free(old)
            self._executable.bytes -= held

    def bind(self, slot: int, array: np.ndarray) -> None:
        """Put an argument or a result in the pointer table."""
        self._memory.take(slot, array.nbytes)
        self._executable.gpu.upload(self._memory.slots[slot], address_of(array), array.nbytes)
        self._arrays[slot] = array

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer, wait for it, and bring home the arrays that it wrote."""
        Program(self._executable, self._memory, number, parameters, record=False).run()
        for slot in self._executable.buffers[number].writes & self._arrays.keys():
            array = self._arrays[slot]
            self._executable.gpu.download(address_of(array), self._memory.slots[slot], array.nbytes)
        self._executable.gpu.wait()

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        found = np.zeros(1, to_numpy(dtype))
        self._executable.gpu.download(found.ctypes.data, self._memory.slots[slot] + offset, found.nbytes)
        self._executable.gpu.wait()
        return int(found[0])

    def close(self) -> None:
        """Give the memory back."""
        try:
            self._executable.gpu.wait()
            self._memory.release()
        finally:
            self._executable.lock.release()
