"""Run a bufferized program on NumPy: steps in order, kernels in the loop IR interpreter, one arena as planned.

Bufferize and plan_memory must agree with it: unwritten memory contains garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.loop.ir import Buffer
from aotc.ir.loop.run import run_kernel
from aotc.ir.program.ir import (
    Bind,
    Branch,
    Buffered,
    Check,
    Constants,
    Copy,
    Launch,
    Loop,
    Step,
    Storage,
    storages_with_offsets,
)
from aotc.ir.semantics.run import bind_arguments
from aotc.ir.tensor.ir import Function
from aotc.vmfb.dtypes import size_of, to_numpy

RUBBISH = 0xA5


def run_program(
    program: Buffered, function: Function, constants: Constants, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the results of ``function`` for arguments.

    Raises
    ------
    AssertionError
        If a check of the program fails, or a step accesses memory outside of the arena.
    """
    run = _Run(program, function, constants, arrays)
    run.take_arena()
    run.steps(program.steps)
    return [run.result(n) for n in range(len(function.body.results))]


class _Run:
    def __init__(
        self, program: Buffered, function: Function, constants: Constants, arrays: Sequence[np.ndarray]
    ) -> None:
        self.function, self.program = function, program
        self.dims, _ = bind_arguments(function, arrays)
        self.arguments = [np.frombuffer(bytearray(a.tobytes()), np.uint8) for a in arrays]
        self.constants = np.frombuffer(b"".join(constants.parts()), np.uint8)
        self.arena = np.zeros(0, np.uint8)
        self.results: dict[int, np.ndarray] = {}

    def number(self, e: Dim) -> int:
        """Return the value of a dim in this call."""
        return evaluate(e, self.dims)

    def bytes(self, s: Storage) -> np.ndarray:
        """Return the bytes of a storage, as a view."""
        size = self.number(s.size)
        match s.kind:
            case "argument":
                memory, begin = self.arguments[s.number], 0
            case "constant":
                memory, begin = self.constants, s.number
            case "result":
                memory, begin = self.results.setdefault(s.number, np.full(size, RUBBISH, np.uint8)), 0
            case _:
                memory, begin = self.arena, self.number(s.offset)
        assert 0 <= begin <= begin + size <= len(memory)
        return memory[begin : begin + size]

    def scalar(self, s: Storage, dtype: str) -> int:
        """Return the integer in a storage."""
        return int(self.bytes(s).view(to_numpy(dtype))[0])

    def array(self, s: Storage, begin: int, b: Buffer) -> np.ndarray:
        """Return the bytes of a storage from ``begin`` on as the array of a kernel's buffer."""
        shape = [self.number(d) for d in b.shape]
        memory = self.bytes(s)[begin:][: prod(shape) * size_of(b.dtype)]
        return memory.view(to_numpy(b.dtype)).reshape(shape)

    def result(self, n: int) -> np.ndarray:
        """Return result ``n``; a result without elements was never written."""
        if n in self.program.taken:
            return self.shaped(self.arguments[self.program.taken[n]], n)
        return self.shaped(self.results.get(n, np.zeros(0, np.uint8)), n)

    def shaped(self, memory: np.ndarray, n: int) -> np.ndarray:
        """Return memory as the array of result ``n``."""
        t = self.function.body.results[n].type
        shape = [self.number(d) for d in t.shape]
        return memory.view(to_numpy(t.dtype)).reshape(shape)

    def take_arena(self) -> None:
        """Grow the arena for the sizes known so far, and preserve its contents."""
        known = [s for s in self.program.arena if not _unknown(s, self.dims)]
        size = max((self.number(s.offset) + self.number(s.size) for s in known), default=0)
        grown = np.full(max(size, len(self.arena)), RUBBISH, np.uint8)
        grown[: len(self.arena)] = self.arena
        self.arena = grown

    def steps(self, steps: Sequence[Step]) -> None:
        """Run steps in order."""
        for step in steps:
            match step:
                case Launch(kernel):
                    buffers = (*kernel.inputs, *kernel.outputs)
                    arrays = [
                        self.array(*part, b) for part, b in zip(storages_with_offsets(step), buffers, strict=True)
                    ]
                    run_kernel(kernel, arrays, {name: self.dims[name] for name in kernel.dims})
                case Copy(source, target, size):
                    count = self.number(size)
                    self.bytes(target)[:count] = self.bytes(source)[:count]
                case Loop(predicate, cond, body):
                    self.steps(cond)
                    while self.bytes(predicate)[0]:
                        self.steps(body)
                        self.steps(cond)
                case Branch(index, branches):
                    chosen = self.scalar(index, "i32")
                    self.steps(branches[chosen if 0 <= chosen < len(branches) else -1])
                case Check(predicate, message):
                    assert self.scalar(predicate, "i1"), message
                case Bind(dim, value, dtype):
                    self.dims[str(dim)] = self.scalar(value, dtype)
                    self.take_arena()


def _unknown(s: Storage, dims: dict[str, int]) -> bool:
    return any(x.name not in dims for e in (s.size, s.offset) for x in symbols(e))
