"""Emulation of a CPU's matrix unit (AMX) in Python: the back end's code for it runs on any CPU with AVX-512.

The instructions of a kernel's LLVM IR become calls of :class:`MatrixUnit`, which refuses what the processor would
refuse.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import unoptimized_kernel_module
from aotc.targets import TARGETS, Target
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.host.machine import cpu_features
from aotc.vmfb.memory.pointers import aligned_bytes
from benchmarks.engines import load_module

REGISTERS, ROWS, LINE = 8, 16, 64
HERE = TARGETS["cpu:x86-64-v4"]
"""What the code around the instructions is compiled for."""
runs_here = cpu_features().issuperset(HERE.features)

_I, _P, _L = ctypes.c_int8, ctypes.c_void_p, ctypes.c_int64
_INSTRUCTIONS = {
    "ldtilecfg": (_P,), "tilerelease": (), "tilezero": (_I,), "tileloadd64": (_I, _P, _L),
    "tilestored64": (_I, _P, _L), "tdpbf16ps": (_I, _I, _I), "tdpbssd": (_I, _I, _I), "tdpbusd": (_I, _I, _I),
}  # fmt: skip


class MatrixUnit:
    """Tile registers of one thread; ``faults`` are operations that a processor would refuse, ``seen`` are all."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.seen: list[str] = []
        self.shapes: list[tuple[int, int]] = []
        self.tiles: list[np.ndarray] = []

    def ldtilecfg(self, address: int) -> None:
        said = ctypes.string_at(address, LINE)
        if said[0] != 1 or any(said[1:16]) or any(said[32:48]) or any(said[56:]):
            self.faults.append(f"configuration {said.hex()}")
        widths = np.frombuffer(said[16:32], "<u2").tolist()
        self.shapes = list(zip(said[48:56], widths, strict=True))
        if any(not (0 < rows <= ROWS and 0 < width <= LINE) for rows, width in self.shapes):
            self.faults.append(f"shapes {self.shapes}")
        self.tiles = [np.zeros(shape, "u1") for shape in self.shapes]

    def tilerelease(self) -> None:
        self.shapes, self.tiles = [], []

    def tilezero(self, number: int) -> None:
        self.tiles[number][:] = 0

    def tileloadd64(self, number: int, address: int, stride: int) -> None:
        rows, width = self.shapes[number]
        for row in range(rows):
            self.tiles[number][row] = np.frombuffer(ctypes.string_at(address + row * stride, width), "u1")

    def tilestored64(self, number: int, address: int, stride: int) -> None:
        for row, values in enumerate(self.tiles[number]):
            ctypes.memmove(address + row * stride, values.tobytes(), len(values))

    def tdpbf16ps(self, to: int, left: int, right: int) -> None:
        self.product(to, left, right, ml_dtypes.bfloat16, ml_dtypes.bfloat16, "f4")

    def tdpbssd(self, to: int, left: int, right: int) -> None:
        self.product(to, left, right, "i1", "i1", "i4")

    def tdpbusd(self, to: int, left: int, right: int) -> None:
        self.product(to, left, right, "u1", "i1", "i4")

    def product(self, to: int, left: int, right: int, of_left: object, of_right: object, sums: str) -> None:
        (rows, width), (depth, columns) = self.shapes[left], self.shapes[right]
        if len({to, left, right}) != 3 or self.shapes[to] != (rows, columns) or width != 4 * depth:
            self.faults.append(f"product of {to}, {left}, {right} in {self.shapes}")
        a = self.tiles[left].view(of_left).astype(sums)
        group = a.shape[1] // depth
        b = self.tiles[right].view(of_right).astype(sums).reshape(depth, -1, group).transpose(0, 2, 1)
        self.tiles[to].view(sums)[:] += a @ b.reshape(depth * group, -1)

    def entry(self, name: str) -> Callable[..., None]:
        """Return the callback of an instruction, which records its operands, and an exception as a fault."""

        def call(*args: int) -> None:
            self.seen.append(name)
            try:
                getattr(self, name)(*args)
            except (IndexError, ValueError) as error:
                self.faults.append(f"{name}{args}: {error}")

        return call


class Emulated:
    """LLVM IR with emulated matrix instructions, compiled for this machine."""

    def __init__(self, text: str) -> None:
        self.unit = MatrixUnit()
        self._entries = {n: ctypes.CFUNCTYPE(None, *kinds)(self.unit.entry(n)) for n, kinds in _INSTRUCTIONS.items()}
        for name, entry in self._entries.items():
            symbol = f"played_{id(self)}_{name}"
            llvm.add_symbol(symbol, ctypes.cast(entry, ctypes.c_void_p).value)
            text = text.replace(f'"llvm.x86.{name}"', f'"{symbol}"')
            text = re.sub(rf"@llvm\.x86\.{name}\b", f"@{symbol}", text)
        text = re.sub(r"\bimmarg\b", "", text)
        library = back_end.parse_assembly_for_target(text, HERE)
        library.retarget(HERE)
        library.verify()
        self._engine = load_module(library.module, HERE)

    def address(self, name: str) -> int:
        """Return the address of a function."""
        return self._engine.get_function_address(name)


def run_emulated(kernel: Kernel, target: Target, buffers: Sequence[np.ndarray], dims: Sequence[int] = ()) -> MatrixUnit:
    """Run the whole grid of a kernel compiled for ``target`` on this machine; return the matrix unit afterwards."""
    module = unoptimized_kernel_module(kernel, target)
    played = Emulated(str(module))
    pointers = (ctypes.c_void_p * len(buffers))(*(x.ctypes.data for x in buffers))
    sizes = (ctypes.c_int64 * max(len(dims), 1))(*dims)
    memory, scratch = aligned_bytes(scratch_bytes(kernel) + ALIGNMENT, ALIGNMENT)
    monitor = (ctypes.c_int64 * 64)()
    kinds = (_P, _P, _L, _L, _P, _P)
    grid = evaluate(kernel.grid, dict(zip(kernel.dims, dims, strict=True)))
    ctypes.CFUNCTYPE(None, *kinds)(played.address(kernel.name))(pointers, sizes, 0, grid, scratch, monitor)
    del memory
    return played.unit
