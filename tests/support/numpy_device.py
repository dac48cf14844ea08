"""Device that interprets kernels on NumPy; docs/add_a_device.md adds it to the compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.vmfb.abi import COPY, Case, Command, Graph, Node, Place, Slots, WhileNode, operand_value
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.plan import Plan, check_assertions
from aotc.vmfb.verify.buffers import load_command_buffers
from aotc.vmfb.weights.constants import load_constants


def obstacle(variant: dict[str, Any]) -> str:
    """Return an empty string: every machine can run the variant."""
    return ""


def rank(variant: dict[str, Any]) -> int:
    """Return the rank of the variant: there is only one."""
    return 0


def check(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Verify the parts of a variant that need no device."""
    load_command_buffers(bundle, variant)


def open_executable(
    bundle: OpenedBundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> NumpyExecutable:
    """Load a variant; the number of the device does not matter."""
    return NumpyExecutable(bundle, variant)


class NumpyExecutable:
    """A loaded variant: its kernels parsed, its command buffers as records."""

    def __init__(self, bundle: OpenedBundle, variant: dict[str, Any]) -> None:
        texts = bytes(bundle.verified_segment(variant["texts"])).decode().split("\0")[:-1]
        self.kernels = [(parse_kernel(text), text) for text in texts]
        self.buffers = load_command_buffers(bundle, variant)
        self._constants = load_constants(bundle, variant.get("constants"))
        self.constants_bytes = self._constants.size

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return the function that runs ``plan`` on argument and result arrays."""

        def run(arguments: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            session = self.session(Slots(plan.arguments, len(plan.results)))
            session.allocate_arena(plan.arena)
            for slot, array in [*enumerate(arguments), *zip(plan.slots_of_results(), results)]:
                session.bind_array(slot, array)
            first, *judged = plan.assertions_by_submission()
            check_assertions(first, session.load_scalar)
            for (number, parameters), after in zip(plan.submissions, judged, strict=True):
                session.submit(number, parameters)
                check_assertions(after, session.load_scalar)

        return run

    def session(self, layout: Slots) -> NumpySession:
        """Begin a call with a pointer table of this layout."""
        address, size = self._constants.address, self._constants.size
        constants = (ctypes.c_uint8 * size).from_address(address) if size else b""
        return NumpySession(self, layout, np.frombuffer(memoryview(constants), np.uint8))

    def stats(self) -> dict[str, Any]:
        """Return counters for display."""
        return {"kernels": len(self.kernels)}

    def trim(self) -> int:
        """Return 0: each call has its own memory, so nothing is cached."""
        return 0


class NumpySession:
    """One call: the bytes of each slot, and the execution of commands on them."""

    def __init__(self, executable: NumpyExecutable, layout: Slots, constants: np.ndarray) -> None:
        self._executable, self._layout = executable, layout
        self._slots = [np.zeros(0, np.uint8)] * layout.count
        self._slots[layout.constants] = constants

    def allocate_arena(self, size: int) -> None:
        """Allocate an arena; bytes of an earlier arena of this call are preserved."""
        old = self._slots[self._layout.arena]
        self._slots[self._layout.arena] = np.concatenate([old[:size], np.zeros(max(size - len(old), 0), np.uint8)])

    def bind_array(self, slot: int, array: np.ndarray) -> None:
        """Bind an argument or a result to a slot."""
        self._slots[slot] = array.reshape(-1).view(np.uint8)

    def submit(self, number: int, parameters: Sequence[int]) -> None:
        """Run a command buffer."""
        self._run(self._executable.buffers.nodes[number], parameters)

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        return int(np.frombuffer(self._slots[slot][offset:], to_numpy(dtype), 1)[0])

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Do nothing: there are no guard pages."""

    def close(self) -> None:
        """Do nothing: Python frees the memory."""

    def _run(self, nodes: Sequence[Node], parameters: Sequence[int]) -> None:
        for node in nodes:
            match node:
                case Graph(commands=commands):
                    for command in commands:
                        self._command(command, parameters)
                case WhileNode(condition=condition, body=body, place=place):
                    self._run(condition, parameters)
                    while self._bytes(place, parameters)[0]:
                        self._run(body, parameters)
                        self._run(condition, parameters)
                case Case(branches=branches, place=place):
                    chosen = int(self._bytes(place, parameters)[:4].view(np.int32)[0])
                    self._run(branches[chosen if 0 <= chosen < len(branches) else -1], parameters)

    def _bytes(self, place: Place, parameters: Sequence[int]) -> np.ndarray:
        slot, offset = place
        return self._slots[slot][operand_value(offset, parameters) :]

    def _command(self, command: Command, parameters: Sequence[int]) -> None:
        memory = [self._bytes(place, parameters) for place in command.places]
        numbers = [operand_value(word, parameters) for word in command.dims]
        if command.kind == COPY:
            memory[1][: numbers[0]] = memory[0][: numbers[0]]
            return
        kernel, text = self._executable.kernels[command.kernel]
        dims = dict(zip(kernel.dims, numbers, strict=True))
        arrays = []
        for data, buffer in zip(memory, (*kernel.inputs, *kernel.outputs), strict=True):
            shape, dtype = [evaluate(d, dims) for d in buffer.shape], to_numpy(buffer.dtype)
            arrays.append(data[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape))
        run_kernel(text, arrays, dims)
