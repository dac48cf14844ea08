"""Merge kernels that read equal parts of arrays at different offsets into one kernel, launched with the offset.

    o0[i] = sin(a0[3, i])          o0[i] = sin(a0[0, i]) of a0 from its fourth row on
    o0[i] = sin(a0[5, i])    ->    the same kernel, of a0 from its sixth row on

Such kernels come from unrolled steps, layers with stacked weights, and branches that read rows of one array. A *part*
is a range of rows along the first axis of size above 1, and begins at an aligned address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod

from aotc.ir.dims.algebra import bounds, static
from aotc.ir.loop.access import scalars_in, statement_scalars, with_scalars
from aotc.ir.loop.ir import Apply, Buffer, Either, ExternalCall, Kernel, Load, Prefetch, Scalar, Stmt, Store, Tile, walk
from aotc.ir.program.ir import Branch, Buffered, Launch, Loop, Step
from aotc.lowering.analysis.thresholds import REGION_FRAMES
from aotc.support.recursion_limit import deeper_recursion
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows ``first`` and following of the array ``whole`` along ``axis``, as one kernel reads them."""

    whole: Buffer
    axis: int
    first: int
    rows: int

    @property
    def rows_buffer(self) -> Buffer:
        """Return the rows as an array."""
        shape = (*self.whole.shape[: self.axis], self.rows, *self.whole.shape[self.axis + 1 :])
        return replace(self.whole, shape=shape)

    @property
    def begin_offset(self) -> int:
        """Return the offset of the rows in the whole array, in bytes."""
        return self.first * _row_bytes_of_buffer(self.whole, self.axis)

    def load_from_rows(self, old: Load) -> Load:
        """Return a load of the same element from the rows' own buffer, for a load ``old`` from the whole array."""
        index = list(old.index)
        index[self.axis] -= self.first
        return Load(self.rows_buffer, tuple(index))


def merge_by_offsets(
    kernels: Mapping[str, Kernel], programs: Mapping[str, Buffered]
) -> tuple[dict[str, Kernel], dict[str, Buffered]]:
    """Merge kernels that differ only in the offset of the rows they read; the offset becomes a parameter."""
    alike: dict[tuple, list[Kernel]] = {}
    for kernel in kernels.values():
        alike.setdefault(_merge_key(kernel), []).append(kernel)
    with deeper_recursion(REGION_FRAMES):
        merged = [moved for some in alike.values() if _kernels_differ(some) for moved in _kernels_equal_by_offset(some)]
    chosen = {kernel.name: (kernel, begins) for kernel, begins in merged}
    if not chosen:
        return dict(kernels), dict(programs)
    new = {name: chosen[name][0] if name in chosen else kernel for name, kernel in kernels.items()}
    return new, {
        name: replace(p, steps=_launch_merged_kernels(p.steps, chosen), kernels={k: new[k] for k in p.kernels})
        for name, p in programs.items()
    }


def _merge_key(kernel: Kernel) -> tuple:
    """Return a key that is equal for kernels that may become equal, and cheap to compare."""
    inputs = tuple((b.dtype, b.shape[1:]) for b in kernel.inputs)
    return inputs, kernel.outputs, kernel.dims, kernel.grid, kernel.aliases, kernel.tiling, len(kernel.body)


def _kernels_differ(kernels: Sequence[Kernel]) -> bool:
    """Return True if some kernel differs from the first in more than its name."""
    return any(k.body is not kernels[0].body or k.inputs is not kernels[0].inputs for k in kernels)


def _kernels_equal_by_offset(kernels: Sequence[Kernel]) -> list[tuple[Kernel, tuple[int, ...]]]:
    """Return the kernels that become equal if they read rows through an offset, with these offsets."""
    groups: dict[Kernel, list[tuple[Kernel, tuple[int, ...]]]] = {}
    originals: dict[Kernel, set[Kernel]] = {}
    for kernel in kernels:
        parts = rows_read_by_kernel(kernel)
        if parts:
            key = replace(_RowReader(parts).kernel(kernel), name="")
            begins = tuple(parts[b.name].begin_offset if b.name in parts else 0 for b in kernel.inputs)
            groups.setdefault(key, []).append((replace(key, name=kernel.name), begins))
            originals.setdefault(key, set()).add(replace(kernel, name=""))
    return [moved for key, some in groups.items() if len(originals[key]) > 1 for moved in some]


def rows_read_by_kernel(kernel: Kernel) -> dict[str, ReadRows]:
    """Return the rows that ``kernel`` reads of each input, by name, for inputs that it only loads at known rows."""
    loads: dict[str, list[Load]] = {}
    others = {kernel.inputs[source].name for _, source in kernel.aliases}
    for stmt in walk(kernel.body):
        others |= _buffers_not_only_loaded(stmt)
        for scalar in scalars_in(statement_scalars(stmt)):
            if isinstance(scalar, Load):
                loads.setdefault(scalar.buffer.name, []).append(scalar)
    inputs = [b for b in kernel.inputs if b.name in loads and b.name not in others]
    rows = {b.name: _loaded_rows_of_buffer(b, loads[b.name]) for b in inputs}
    return {name: part for name, part in rows.items() if part is not None}


def _buffers_not_only_loaded(stmt: Stmt) -> set[str]:
    """Return the buffers that a statement accesses other than by loads."""
    match stmt:
        case Tile(out=out, a=a, b=b):
            return {out.name, a.name, b.name}
        case ExternalCall(args=args) | Either(places=args):
            return {buffer.name for buffer, _ in args}
        case Store(buffer=buffer) | Prefetch(buffer=buffer):
            return {buffer.name}
    return set()


def _loaded_rows_of_buffer(buffer: Buffer, loads: Iterable[Load]) -> ReadRows | None:
    """Return the rows of ``buffer`` that ``loads`` read; None if they read all rows or unknown ones."""
    axis = next((k for k, n in enumerate(buffer.shape) if n != 1), None)
    if axis is None or not all(isinstance(n, int) for n in buffer.shape) or not prod(buffer.shape):
        return None
    ranges = [bounds(load.index[axis]) for load in loads]
    if any(low is None or high is None for low, high in ranges):
        return None
    aligned = ALIGNMENT // gcd(ALIGNMENT, _row_bytes_of_buffer(buffer, axis))
    low = max(min(low for low, _ in ranges if low is not None), 0)
    first = low - low % aligned
    whole = static(buffer.shape[axis])
    rows = min(max(high for _, high in ranges if high is not None), whole - 1) - first + 1
    return ReadRows(buffer, axis, first, rows) if 0 < rows < whole else None


def _row_bytes_of_buffer(buffer: Buffer, axis: int) -> int:
    return prod(map(static, buffer.shape[axis + 1 :])) * size_of(buffer.dtype)


@dataclass(slots=True)
class _RowReader:
    """Rewrite a kernel to read ``parts`` of its inputs through offsets."""

    parts: Mapping[str, ReadRows]
    _scalars: dict[int, Scalar] = field(default_factory=dict)  # by the identity of the old scalar

    def kernel(self, kernel: Kernel) -> Kernel:
        inputs = tuple(self.parts[b.name].rows_buffer if b.name in self.parts else b for b in kernel.inputs)
        return replace(kernel, inputs=inputs, body=with_scalars(kernel.body, self.scalar))

    def scalar(self, s: Scalar) -> Scalar:
        if id(s) not in self._scalars:
            self._scalars[id(s)] = self._load_through_offset(s)
        return self._scalars[id(s)]

    def _load_through_offset(self, s: Scalar) -> Scalar:
        """Return a scalar whose loads of the merged inputs read rows from the offset parameter on."""
        match s:
            case Load(buffer=buffer) if buffer.name in self.parts:
                return self.parts[buffer.name].load_from_rows(s)
            case Apply(fn=fn, args=args, dtype=dtype):
                return Apply(fn, tuple(map(self.scalar, args)), dtype)
        return s


def _launch_merged_kernels(
    steps: Sequence[Step], chosen: Mapping[str, tuple[Kernel, tuple[int, ...]]]
) -> tuple[Step, ...]:
    """Return ``steps`` with launches of merged kernels at their offsets."""
    launches: list[Step] = []
    for step in steps:
        match step:
            case Launch() if step.kernel.name in chosen:
                kernel, begins = chosen[step.kernel.name]
                launches.append(replace(step, kernel=kernel, begins=begins))
            case Loop():
                launches.append(
                    replace(
                        step,
                        cond=_launch_merged_kernels(step.cond, chosen),
                        body=_launch_merged_kernels(step.body, chosen),
                    )
                )
            case Branch():
                launches.append(replace(step, branches=tuple(_launch_merged_kernels(b, chosen) for b in step.branches)))
            case _:
                launches.append(step)
    return tuple(launches)
