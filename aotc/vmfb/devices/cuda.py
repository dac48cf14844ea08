"""The CUDA device: loads cubins, keeps the constants on the GPU, runs command buffers as CUDA graphs.

A plan (one tuple of shapes) gets memory for its arguments, results and arena the
first time it runs, and each GRAPH node of its command buffers is recorded as a
CUDA graph over those addresses; later calls copy in, launch the graphs and copy
out. Loops and branches read their predicate back to the host. Calls on one
executable run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from aotc.vmfb.abi import COPY, INTERFACE_BYTES, Node, Slots
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.commands import all_commands
from aotc.vmfb.device import Plan, judge
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.devices.buffers import check_digest, load_buffers
from aotc.vmfb.devices.cuda_program import CudaMemory, CudaProgram
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, VmError
from aotc.vmfb.limits import MAX_THREADS
from aotc.vmfb.pointers import address_of
from aotc.vmfb.process.locks import new_recursive_lock
from aotc.vmfb.weights.constants import load_constants


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


def check(bundle: Bundle, variant: dict[str, Any]) -> None:
    """Check what can be checked of a variant without a GPU: see :class:`aotc.vmfb.device.Device`."""
    _check_kernels(bundle, variant)
    load_buffers(bundle, variant)
    _images(bundle, variant)


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
        fits = len(kernel.get("image", ())) == 2 and "symbol" in kernel
        if not fits or not 0 < kernel.get("threads", 0) <= MAX_THREADS or kernel.get("items", 0) < 1:
            raise BundleError(bundle.where, f"the entry of kernel {kernel['name']!r} is incomplete")
    if variant["kernels"] and "cubin" not in variant:
        raise BundleError(bundle.where, "the variant has kernels but no cubins")


def _images(bundle: Bundle, variant: dict[str, Any]) -> list[memoryview]:
    """Return the code of each kernel."""
    if not variant["kernels"]:
        return []
    whole = bundle.checked(variant["cubin"])
    check_digest(bundle.where, variant, bytes(whole[-INTERFACE_BYTES:]))
    data = whole[:-INTERFACE_BYTES]
    images = []
    for kernel in variant["kernels"]:
        begin, size = kernel["image"]
        if not 0 <= begin <= begin + size <= data.nbytes:
            raise BundleError(bundle.where, f"kernel {kernel['name']!r} lies outside of the cubins")
        images.append(data[begin : begin + size])
    return images


def _slots_written(nodes: Sequence[Node], kernels: list[dict[str, Any]]) -> frozenset[int]:
    """Return the slots that some command writes."""
    slots: set[int] = set()
    for command in all_commands(nodes):
        inputs = 1 if command.kind == COPY else kernels[command.kernel]["inputs"]
        slots.update(slot for slot, _ in command.places[inputs:])
    return frozenset(slots)


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
        self.lock = new_recursive_lock()
        self.where = bundle.where
        self._variant = variant
        self._ordinal = ordinal
        self.buffers = load_buffers(bundle, variant)
        self.gpu = cuda_driver.Gpu(ordinal)
        self.kernels = variant["kernels"]
        self.writes = [_slots_written(nodes, self.kernels) for nodes in self.buffers.nodes]
        self.functions = self._load_functions(bundle)
        self.constants, self.constants_bytes = self._upload_constants(bundle)
        self.bytes = self.most_bytes = self.constants_bytes
        self._memories: WeakSet[CudaMemory] = WeakSet()  # of plans, which hold them, and they this object

    def _load_functions(self, bundle: Bundle) -> list[Any]:
        modules: dict[tuple[int, ...], Any] = {}
        functions = []
        for kernel, image in zip(self.kernels, _images(bundle, self._variant)):
            place = tuple(kernel["image"])
            try:
                if place not in modules:
                    modules[place] = self.gpu.load(bytes(image))
                functions.append(self.gpu.function(modules[place], kernel["symbol"]))
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
        """Return the function that runs ``plan`` on argument and result arrays, and judges what it computed."""
        memory = CudaMemory(self, Slots(plan.arguments, len(plan.results)))
        self._memories.add(memory)
        programs: list[CudaProgram] = []
        homes = plan.slots_of_results()
        judged, read = plan.judged_after(), partial(_read_scalar, self.gpu, memory)

        def run(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            with self.lock:
                self.gpu.enter()
                if not memory.ready:
                    sizes = [x.nbytes for x in (*arrays, *results)]
                    memory.reserve([*sizes, plan.arena])
                    nodes = self.buffers.nodes
                    programs[:] = [CudaProgram(self, memory, nodes[n], values) for n, values in plan.submissions]
                    memory.ready = True
                for slot, x in enumerate(arrays):
                    self.gpu.upload(memory.slots[slot], address_of(x), x.nbytes)
                judge(judged[0], read)
                for program, after in zip(programs, judged[1:]):
                    program.run()
                    if after:
                        self.gpu.wait()
                        judge(after, read)
                for slot, x in zip(homes, results, strict=True):
                    self.gpu.download(address_of(x), memory.slots[slot], x.nbytes)
                self.gpu.wait()

        return run

    def session(self, layout: Slots) -> CudaSession:
        """Begin a call with a pointer table of this layout."""
        return CudaSession(self, layout)

    def stats(self) -> dict[str, Any]:
        """Return the GPU, kernels and memory (bytes)."""
        return {
            "target": self._variant["target"],
            "device": cuda_driver.device_name(self._ordinal),
            "kernels": len(self.kernels),
            "command_buffers": len(self.buffers.nodes),
            "arena_peak": self._variant.get("arena_peak"),
            "constants_bytes": self.constants_bytes,
            "device_bytes": self.bytes,
            "memory": {f"cuda:{self._ordinal}": {"in_use": self.bytes, "high_water": self.most_bytes}},
        }

    def trim(self) -> int:
        """Free the memory of all plans; return how many bytes that were."""
        with self.lock:
            self.gpu.enter()
            before = self.bytes
            for memory in list(self._memories):
                memory.release()
            return before - self.bytes


def _read_scalar(gpu: cuda_driver.Gpu, memory: CudaMemory, slot: int, offset: int, dtype: str) -> int:
    found = np.zeros(1, to_numpy(dtype))
    gpu.download(found.ctypes.data, memory.slots[slot] + offset, found.nbytes)
    gpu.wait()
    return int(found[0])


class CudaSession:
    """One call of a function whose course depends on its data; it has the executable for itself."""

    def __init__(self, executable: CudaExecutable, layout: Slots) -> None:
        self._executable = executable
        executable.gpu.enter()
        executable.lock.acquire()
        self._memory = CudaMemory(executable, layout)
        self._arena_slot = layout.arena
        self._arrays: dict[int, np.ndarray] = {}

    def arena(self, size: int) -> None:
        """Take an arena of ``size`` bytes; what an earlier one held is kept."""
        self._memory.grow(self._arena_slot, size)

    def bind(self, slot: int, array: np.ndarray) -> None:
        """Put an argument or a result in the pointer table."""
        self._memory.take(slot, array.nbytes)
        self._executable.gpu.upload(self._memory.slots[slot], address_of(array), array.nbytes)
        self._arrays[slot] = array

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer, wait for it, and bring home the arrays that it wrote."""
        nodes = self._executable.buffers.nodes[number]
        CudaProgram(self._executable, self._memory, nodes, parameters, record=False).run()
        for slot in self._executable.writes[number] & self._arrays.keys():
            array = self._arrays[slot]
            self._executable.gpu.download(address_of(array), self._memory.slots[slot], array.nbytes)
        self._executable.gpu.wait()

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        return _read_scalar(self._executable.gpu, self._memory, slot, offset, dtype)

    def block(self, slot: int, offset: int, size: int) -> None:
        """Do nothing: the memory of a GPU has no guards."""

    def close(self) -> None:
        """Give the memory back."""
        try:
            self._executable.gpu.wait()
            self._memory.release()
        finally:
            self._executable.lock.release()
