"""Transposing copies: calls of functions that transpose blocks in registers and bypass LLVM's passes.

From ``for i in range(n): for j in range(m): out[i * out_row + j] = x[i + j * x_row]`` LLVM generates gathers or
scatters, after long analysis. Here, blocks with as many rows as columns are loaded, transposed by shuffles, and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.ir import Buffer, For, Kernel, Load, Stmt, Store
from aotc.kernels.emit.index import flat_index, stride_of_offset
from aotc.kernels.emit.vector.vector_text import VectorLines
from aotc.kernels.limits import HALF_REGISTER
from aotc.kernels.llvm_types import I64, PTR, VOID
from aotc.kernels.symbol_table import declare_function
from aotc.vmfb.dtypes import size_of

# Bytes of a vector of a transpose, at most, and of a row of the result that one iteration writes: a cache line. A line
# that is written in parts may leave the first-level cache in between, if the rows map to the same cache sets. f32 1024
# x 1024, one core of a Zen 5: 190 us with lines in one vector, 260 in two consecutive ones, 360 in two separate ones.
TURNED_BYTES = 64


_MOVED_AS = {1: "i8", 2: "i16", 4: "f32", 8: "f64"}
"""The dtype in which an element is moved, by its bytes."""


@dataclass(frozen=True, slots=True)
class TransposingCopy:
    """A copy of ``n`` contiguous elements from each of ``m`` rows of ``x``, which become columns of the output."""

    x: Buffer
    x_at: Dim
    x_row: Dim
    out: Buffer
    out_at: Dim
    out_row: Dim
    n: int
    m: int


# Iterations of both loops of a transposing copy, from which it is transposed in registers. Fewer neighbouring elements
# are not worth a vector. Copies of 4 x 128 and of 4 x 16 elements compile in 0.5 of the time and run equally fast.
TURNED_LANES = 4
# Elements of a transposing copy up to which it is transposed in registers. The function that transposes does not poll
# for cancellation. This size takes 16 us at a memory bandwidth of 16 GB/s; loops over the items of a grid have 256 to
# 4096 elements.
TRANSPOSED_ELEMENTS = 65536


def match_transposing_copy(stmt: Stmt, kernel: Kernel) -> TransposingCopy | None:
    """Match a loop nest that copies with a transposition.

    Return None for other statements, and if a loop is too short, the copy is too large for blocks, or source and target
    may overlap.
    """
    match stmt:
        case For(body=(For(body=(Store(value=Load() as load, reduce="") as store,)) as inner,)):
            x, out, loops = load.buffer, store.buffer, (stmt, inner)
        case _:
            return None
    own = out.space in ("private", "scratch") or x.space == "private"
    if not own and (x not in kernel.inputs or out not in kernel.outputs or kernel.aliases):
        return None
    if x is out or x.dtype != out.dtype or size_of(x.dtype) not in _MOVED_AS:
        return None
    x_flat, out_flat = flat_index(x, load.index), flat_index(out, store.index)
    for along, across in (loops, loops[::-1]):
        n, m = _constant_iterations(along), _constant_iterations(across)
        x_row, out_row = (
            _constant_stride(flat, across, loops) for flat, across in ((x_flat, across), (out_flat, along))
        )
        along_both = _constant_stride(x_flat, along, loops) == 1 == _constant_stride(out_flat, across, loops)
        few = min(n, m) < max(TURNED_LANES, HALF_REGISTER // size_of(x.dtype))
        if along_both and x_row is not None and out_row is not None and not few:
            x_at, out_at = (_offset_at_loop_begin(flat, loops) for flat in (x_flat, out_flat))
            return TransposingCopy(x, x_at, x_row, out, out_at, out_row, n, m) if n * m <= TRANSPOSED_ELEMENTS else None
    return None


def _constant_iterations(loop: For) -> int:
    """Return the number of iterations of a loop, or 0 if it is unknown at compile time."""
    iterations = loop.end - loop.begin
    return iterations if isinstance(iterations, int) and loop.step == 1 and loop.kind == "serial" else 0


def _constant_stride(flat: Dim, loop: For, loops: Sequence[For]) -> Dim | None:
    """Return the stride of an offset in ``loop`` if it is the same in all iterations of ``loops``, else None."""
    step = stride_of_offset(flat, loop.var)
    fixed = step is not None and not {s.name for s in symbols(step)} & {loop.var for loop in loops}
    return step if fixed else None


def _offset_at_loop_begin(flat: Dim, loops: Sequence[For]) -> Dim:
    """Return the value of an offset in the first iteration of all ``loops``."""
    for loop in reversed(loops):
        flat = substitute(flat, {loop.var: loop.begin})
    return flat


def emit_transposed(builder: ir.IRBuilder, arguments: Sequence[ir.Value], copy: TransposingCopy) -> None:
    """Emit a call of the function of a copy.

    ``arguments`` are the addresses of the first elements of source and target, and their row strides.
    """
    x_row, out_row = (row.constant if isinstance(row, ir.Constant) else 0 for row in arguments[2:])
    module, dtype = builder.module, _MOVED_AS[size_of(copy.x.dtype)]
    function = TransposeFunction(dtype, copy.n, copy.m, x_row, out_row, module.vector_bytes)
    if function.name not in module.finished.symbols:
        module.finished.add(function.symbols())
    kind = ir.FunctionType(VOID, [PTR, PTR, I64, I64])
    builder.call(declare_function(module, function.name, kind), arguments)


class TransposeFunction:
    """The LLVM function of a transposing copy; row strides are in elements, and 0 stands for a run-time argument."""

    def __init__(self, dtype: str, n: int, m: int, x_row: int, out_row: int, vector_bytes: int) -> None:
        self.dtype, self.n, self.m, self.rows = dtype, n, m, (x_row, out_row)
        self.lanes = min(min(vector_bytes, TURNED_BYTES) // size_of(dtype), 1 << min(n, m).bit_length() - 1)
        self.name = f"turn_{dtype}_{n}x{m}_{x_row}_{out_row}_{self.lanes}"

    def symbols(self) -> dict[str, str]:
        """Return the assembly of the function and of its callees, by symbol."""
        return _TransposeWriter(self).function_assembly()


# Vectors of a block of a transpose that stay in registers at the same time: AVX has 16 registers. The remaining parts
# of a row are read in a later iteration. i8 of 1024 x 1024 by AVX-512 keeps 16 of its 64 vectors, f32 all 16.
TURNED_VECTORS = 16


class _TransposeWriter(VectorLines):
    """Writer of the assembly of a transposing copy: loops over blocks, of which the last may overlap the previous one.

    A block has as many rows as a vector has elements, and 16 bytes of each row for each vector in registers. So no load
    crosses a cache line if rows start at multiples of 16 bytes. A cache line of the result is written in one iteration.
    """

    def __init__(self, function: TransposeFunction) -> None:
        super().__init__(function.dtype)
        self.f, self.lanes = function, function.lanes
        self.piece = min(HALF_REGISTER // self.size, self.lanes)
        self.groups = max(min(self.lanes, TURNED_VECTORS) // self.piece, 1)

    def function_assembly(self) -> dict[str, str]:
        """Return the assembly of the function and of its callees, by symbol."""
        arguments = "ptr noalias readonly %x, ptr noalias %out, i64 %x_row, i64 %out_row"
        head = f'define linkonce_odr void @"{self.f.name}"({arguments}) noinline nounwind {{\nentry:'
        rows = max(min(TURNED_BYTES // self.size, self.f.m) // self.lanes, 1) * self.lanes
        columns = self.piece * self.groups
        self._write_loop(
            self.f.n,
            columns,
            lambda i: self._write_loop(self.f.m, rows, lambda j: self._transpose_line_of_blocks(i, j, rows)),
        )
        return self.symbols | {self.f.name: "\n".join([head, *self.entry, *self.lines, "ret void\n}\n"])}

    def _transpose_line_of_blocks(self, i: str, j: str, rows: int) -> None:
        for k in range(0, rows, self.lanes):
            self._transpose_block(i, self._append_text_line(f"add i64 {j}, {k}") if k else j)

    def _transpose_block(self, i: str, j: str) -> None:
        x = self._row_addresses("x", i, j, self.lanes)
        places = range(0, self.piece * self.groups, self.piece)
        rows = [[self._load_row_parts(x[k :: self.piece], place) for place in places] for k in range(self.piece)]
        columns = [column for group in zip(*rows) for column in self._interleave_rows(group, 1)]
        for place, column in zip(self._row_addresses("out", j, i, len(columns)), columns, strict=True):
            self._store_vector(column, self.lanes, place, 0)

    def _row_addresses(self, array: str, column: str, row: str, count: int) -> list[str]:
        """Return the addresses of ``count`` consecutive rows of a block."""
        known = self.f.rows[array == "out"]
        distance = str(known or f"%{array}_row")
        first = self._append_text_line(f"mul i64 {row}, {distance}")
        base = self._address_of_offset(f"%{array}", self._sum_of_terms((first, 1), (column, 1)), 0)
        if known:
            return [self._address_of_offset(base, "0", k * known) for k in range(count)]
        return [
            base,
            *(
                self._address_of_offset(base, self._append_text_line(f"mul i64 {distance}, {k}"), 0)
                for k in range(1, count)
            ),
        ]

    def _load_row_parts(self, rows: list[str], place: int) -> str:
        """Load a vector with 16 bytes of each row."""
        parts, lanes = [self._load_vector(self.piece, row, place) for row in rows], self.piece
        while len(parts) > 1:
            order = [str(n) for n in range(2 * lanes)]
            parts, lanes = (
                [self._shuffle_vectors(a, b, lanes, order) for a, b in zip(parts[::2], parts[1::2])],
                2 * lanes,
            )
        return parts[0]

    def _interleave_rows(self, rows: Sequence[str], run: int) -> list[str]:
        """Transpose within 128-bit lanes: interleave pairs of rows, in runs of 1, 2, 4 and more elements."""
        if len(rows) == 1:
            return list(rows)
        part = self.piece
        found = []
        for begin in (0, part // 2):
            places = [n + at for n in range(0, self.lanes, part) for at in range(begin, begin + part // 2, run)]
            order = [str(n + at) for at in places for n in (*range(run), *range(self.lanes, self.lanes + run))]
            woven = [self._shuffle_vectors(a, b, self.lanes, order) for a, b in zip(rows[::2], rows[1::2])]
            found += self._interleave_rows(woven, 2 * run)
        return found
