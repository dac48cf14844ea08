"""Bytes that the kernels and copies of a GPU's program read and write, counted from the program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Buffer, Kernel
from aotc.ir.program.ir import Branch, Buffered, Copy, Launch, Loop, Step
from aotc.ir.tensor.ir import Function, Region, Value
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True)
class Traffic:
    """Bytes of the operands and of the results of one kernel."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def nbytes(v: Value) -> int:
    """Return the bytes of a value of known size."""
    size = product(v.type.shape)
    assert isinstance(size, int), v.type
    return size * size_of(v.type.dtype)


def traffic(function: Function) -> list[Traffic]:
    """Return the operand and result bytes of each kernel of a function; kernels in loops and branches count once."""
    return list(_traffic(function.body))


def _traffic(region: Region) -> Iterator[Traffic]:
    for op in region.ops:
        if op.name == "dispatch":
            reads, writes = tuple(map(nbytes, op.operands)), tuple(map(nbytes, op.results))
            yield Traffic(str(op.attrs["callee"]), reads, writes)
        for inner in op.regions:
            yield from _traffic(inner)


def written(function: Function) -> int:
    """Return the number of bytes of all results of kernels."""
    return sum(sum(t.writes) for t in traffic(function))


def nbytes_of(buffer: Buffer) -> int:
    """Return the bytes of a buffer of known size."""
    size = product(buffer.shape)
    assert isinstance(size, int), buffer
    return size * size_of(buffer.dtype)


def kernels(program: Buffered) -> list[Kernel]:
    """Return the kernel of each launch of a program; launches in loops and branches count once."""
    return [step.kernel for step in _leaves(program.steps) if isinstance(step, Launch)]


def copies(program: Buffered) -> list[int]:
    """Return the bytes of each copy of a program; copies in loops and branches count once."""
    sizes = [step.size for step in _leaves(program.steps) if isinstance(step, Copy)]
    known = [size for size in sizes if isinstance(size, int)]
    assert len(known) == len(sizes)
    return known


def _leaves(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        match step:
            case Loop(cond=condition, body=body):
                yield from _leaves((*condition, *body))
            case Branch(branches=branches):
                for branch in branches:
                    yield from _leaves(branch)
            case _:
                yield step
