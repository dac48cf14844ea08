"""Trials of kernels: random arguments that keep every access in bounds, calls, and comparison of results."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import Dim, Sym
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.loop.access import imported_functions, scalars_in, statement_index_exprs, statement_scalars
from aotc.ir.loop.ir import (
    Apply,
    Buffer,
    ExternalCall,
    Kernel,
    Let,
    Store,
    Tile,
    While,
    walk,
)
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.ir.opset import SCALARS
from aotc.kernels.numba_front.scalars import numba_storage_dtype
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

# Scalar operations for which the interpreter runs a kernel whose accesses or iterations depend on its inputs; it takes
# about a microsecond for each.
MOST_OPERATIONS = 300_000
# Units in the last place by which two correct results of a scalar function may differ, when each result is rounded from
# operands that may differ, too.
ULPS = 32.0
# The same for results of at most 16 bits that are rounded from wider numbers: a few roundings, whatever the operations.
SHORT_ULPS = 8.0
# Part of the integers and truth values that may differ if they depend on rounded floats: a tie decides otherwise.
FLIPPED = 0.02


_SHORT_BITS = 16


class NoTrial(Exception):
    """No arguments were found on which a kernel can run; the text of the exception is the reason."""


@dataclass(frozen=True, slots=True)
class TrialArguments:
    """Arguments of one call of a kernel: arrays (inputs, then outputs) in their memory form, and the values of dims."""

    arrays: tuple[np.ndarray, ...]
    dims: tuple[int, ...]
    grid: int

    def copied(self) -> TrialArguments:
        """Return the arguments with their own memory."""
        return TrialArguments(tuple(a.copy() for a in self.arrays), self.dims, self.grid)


def memory_form(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array as Numba reads it: small floats as unsigned integers, at least one dim."""
    kind = to_numpy(numba_storage_dtype(dtype))
    return (array if array.dtype == kind else array.view(kind)).reshape(array.shape or (1,))


def random_arguments(
    kernel: Kernel, seed: int = 0, tables: Mapping[str, np.ndarray] = MappingProxyType({})
) -> TrialArguments:
    """Return random arguments for ``kernel``; ``tables`` are the arrays of some inputs.

    Raises
    ------
    NoTrial
        If the kernel calls a library or has an empty array, or if it reads out of bounds, or does not end, on all
        arguments that were tried.
    """
    calls = imported_functions(kernel)
    if calls:
        raise NoTrial(f"it calls {calls[0]}")
    depends = _depends_on_loaded_values(kernel)
    reasons = []
    for most in (5, 2, 1) if depends else (100,):
        arguments = _draw_arguments(kernel, np.random.default_rng(seed), most, tables)
        if not all(a.size for a in arguments.arrays):
            raise NoTrial("an array is empty")
        if not depends:
            return arguments
        try:
            run_kernel(kernel, _interpreter_arrays(kernel, arguments.copied()), dict(zip(kernel.dims, arguments.dims)),
                       executed=_Limited())  # fmt: skip
        except (IndexError, NoTrial) as error:
            reasons.append(str(error))
            continue
        return arguments
    raise NoTrial(reasons[-1])


class _Limited(Counter[str]):
    """Counter of the interpreter's scalar operations that ends the run at a limit."""

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if count > MOST_OPERATIONS:
            raise NoTrial(f"it needs more than {MOST_OPERATIONS:,} operations in the interpreter")


def _interpreter_arrays(kernel: Kernel, arguments: TrialArguments) -> list[np.ndarray]:
    """Return arrays in the form in which the interpreter reads them."""
    buffers = (*kernel.inputs, *kernel.outputs)
    return [
        a.view(to_numpy(b.dtype)).reshape(a.shape if b.shape else ())
        for a, b in zip(arguments.arrays, buffers, strict=True)
    ]


def _depends_on_loaded_values(kernel: Kernel) -> bool:
    """Return True if a loaded value determines an access or a number of iterations."""
    lets = {s.var.name for s in walk(kernel.body) if isinstance(s, Let)}
    if any(isinstance(s, While) for s in walk(kernel.body)):
        return True
    return any(symbol.name in lets for e in _index_expressions(kernel) for symbol in symbols(e))


def _index_expressions(kernel: Kernel) -> Iterator[Dim]:
    """Yield the index expressions of all statements."""
    for stmt in walk(kernel.body):
        yield from statement_index_exprs(stmt)


def _draw_arguments(
    kernel: Kernel, rng: np.random.Generator, most: int, tables: Mapping[str, np.ndarray]
) -> TrialArguments:
    """Return random arguments: integers below ``most``, and small dims."""
    shapes = [d for b in (*kernel.inputs, *kernel.outputs) for d in b.shape]
    ranges = {s.name: s for e in (*_index_expressions(kernel), *shapes) for s in symbols(e)}
    dims: dict[str, int] = {}
    for name in kernel.dims:
        own = ranges.get(name, Sym(name))
        high = 1 << 30 if own.extent is None else evaluate(own.extent, dims)
        dims[name] = max(min(int(rng.integers(3, 9)), high - 1), own.lo)
    arrays = [
        _random_array(b, dims, rng, most) if b.name not in tables else tables[b.name].astype(to_numpy(b.dtype))
        for b in kernel.inputs
    ]
    arrays += [_random_array(b, dims, rng, 1) for b in kernel.outputs]
    return TrialArguments(tuple(arrays), tuple(dims[n] for n in kernel.dims), evaluate(kernel.grid, dims))


def _random_array(buffer: Buffer, dims: dict[str, int], rng: np.random.Generator, most: int) -> np.ndarray:
    shape = tuple(evaluate(d, dims) for d in buffer.shape)
    if any(n < 0 for n in shape):
        raise NoTrial(f"{buffer.name} has a negative size for random dims")
    row, kind = DTYPES[buffer.dtype], to_numpy(buffer.dtype)
    values: np.ndarray
    match row.kind:
        case "b":
            values = rng.integers(0, 2, shape)
        case "i" | "u":
            low = -min(most, 2 ** (row.bits - 1)) if row.kind == "i" and most > 5 else 0
            values = rng.integers(low, min(most, 2 ** (row.bits - (row.kind == "i"))), shape)
        case "f":
            values = rng.standard_normal(shape)
        case _:
            values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    with np.errstate(all="ignore"):
        real = values.astype(np.float32) if row.kind == "f" and row.bits < 16 else values
        return memory_form(np.asarray(real).astype(kind), buffer.dtype)


def call_printed(function: Callable[..., Any], kernel: Kernel, arguments: TrialArguments) -> None:
    """Call a kernel's Python function on ``arguments``."""
    scratch = np.zeros(max(scratch_bytes(kernel), 1), np.uint8)
    function(*arguments.arrays, *arguments.dims, scratch, 0, arguments.grid)


def call_loops(function: Callable[..., Any], kernel: Kernel, arguments: TrialArguments) -> None:
    """Compile a Python function for this CPU, and run its loops on ``arguments``."""
    import numba

    call_printed(numba.njit(error_model="numpy")(function), kernel, arguments)


def is_for_cpus(function: Any) -> bool:
    """Return True if a printed kernel is an ``njit`` function, not one of ``cuda.jit`` or of a template."""
    from numba.core.dispatcher import Dispatcher

    return isinstance(function, Dispatcher)


_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 2)
_GO_ON = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda monitor: 0)


def call_native(address: int, kernel: Kernel, arguments: TrialArguments) -> None:
    """Call a kernel's machine code, the C function at ``address``, on ``arguments``."""
    monitor = (ctypes.c_void_p * 8)(ctypes.cast(_GO_ON, ctypes.c_void_p))
    buffers = (ctypes.c_void_p * len(arguments.arrays))(*[a.ctypes.data for a in arguments.arrays])
    dims = (ctypes.c_int64 * max(len(arguments.dims), 1))(*arguments.dims)
    memory = np.zeros(scratch_bytes(kernel) + ALIGNMENT, np.uint8)
    scratch = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
    _KERNEL(address)(buffers, dims, 0, arguments.grid, scratch, monitor)


def output_difference(kernel: Kernel, expected: TrialArguments, found: TrialArguments) -> str:
    """Describe the difference between the outputs of two calls of a kernel; an empty string if they agree.

    Integers, truth values and moved elements must have equal bits; computed floats may differ by rounding.
    """
    ulps, sums_short = _allowed_ulps(kernel), _sums_short_floats(kernel)
    first = len(kernel.inputs)
    for buffer, a, b in zip(kernel.outputs, expected.arrays[first:], found.arrays[first:], strict=True):
        rounded = DTYPES[buffer.dtype].bits <= _SHORT_BITS and not sums_short
        if said := _array_difference(a, b, buffer.dtype, min(ulps, SHORT_ULPS) if rounded else ulps):
            return f"{buffer.name}: {said}"
    return ""


def _sums_short_floats(kernel: Kernel) -> bool:
    """Return True if the kernel accumulates in floats of at most 16 bits, so that rounding errors add up."""
    kept = (s.buffer.dtype for s in walk(kernel.body) if isinstance(s, Store) and s.reduce)
    return any(kind_of(dtype) == "f" and DTYPES[dtype].bits <= _SHORT_BITS for dtype in kept)


def _allowed_ulps(kernel: Kernel) -> float:
    """Return the tolerance of results in units in the last place of the largest result; 0 for pure data movement."""
    scalars = scalars_in(x for s in walk(kernel.body) for x in statement_scalars(s))
    operations = [x for x in scalars if isinstance(x, Apply)]
    applied = {x.fn for x in operations}
    kinds = {kind_of(dtype) for x in operations for dtype in (x.dtype, *(a.dtype for a in x.args))}
    rounds = any(SCALARS[f].tolerance for f in applied if f in SCALARS)
    exact = not kinds & set("fc") or ("c" not in kinds and not rounds)
    tiles = any(isinstance(s, Tile | ExternalCall) for s in walk(kernel.body))
    reduces = any(isinstance(s, Store) and s.reduce for s in walk(kernel.body))
    if not tiles and not reduces and exact:
        return 0.0
    worst = max([SCALARS[f].tolerance for f in applied if f in SCALARS], default=0.0)
    terms = 1
    for stmt in walk(kernel.body):
        if isinstance(stmt, Tile):
            count = 1
            for extent, _, _ in stmt.levels:
                count *= extent if isinstance(extent, int) else 64
            terms = max(terms, count)
    return (ULPS + worst) * (max(terms, 64 if reduces else 1)) ** 0.5


def _array_difference(expected: np.ndarray, found: np.ndarray, dtype: str, ulps: float) -> str:
    if expected.tobytes() == found.tobytes():
        return ""
    kind = to_numpy(dtype)
    wide = np.complex128 if kind_of(dtype) == "c" else np.float64
    with np.errstate(all="ignore"):
        a, b = (np.asarray(x.view(kind)).astype(np.float32 if kind.itemsize < 4 else wide).astype(wide)
                for x in (expected, found))  # fmt: skip
        bad = expected != found
        if kind_of(dtype) in "fc":
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            size = np.abs(a[np.isfinite(a)]).max(initial=0.0)
            bad = ~equal & ~(np.abs(a - b) <= ulps * _unit_in_last_place(dtype) * max(size, 1e-30))
        elif ulps and bad.mean() <= FLIPPED:
            return ""
    if not bad.any():
        return ""
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    where = f"{int(bad.sum())} of {bad.size} elements differ, the first at {list(at)}"
    return f"{where}: expected {a[at]!s}, found {b[at]!s}"


def _unit_in_last_place(dtype: str) -> float:
    """Return the distance from 1 to the next number of a float, or of the parts of a complex number."""
    if dtype in SMALL_FLOATS:
        return 2.0 ** -SMALL_FLOATS[dtype].mantissa_bits
    return {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "c64": 2.0**-23}.get(dtype, 2.0**-52)
