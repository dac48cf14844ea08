"""Attention in the loop IR: the form of a kernel whose ``tiling`` is attention, and the layout of its operands.

The body of the kernel is plain loops, which define the meaning. A code template computes the same on tensor cores::

    for z in range(0, batch):
        for row in range(0, rows):
            top = private("f32[]")
            whole = private("f32[]")
            sums = private("f32[width]")
            top[()] = f32(-inf)
            whole[()] = f32(0.0)
            for col in range(0, width):
                sums[col] = f32(0.0)
            for term in range(0, terms):
                total = private("f32[]")
                total[()] = f32(0.0)
                for d in range(0, depth):
                    total[()] += convert(q[z, row, d], "f32") * convert(k[z, term, d], "f32")
                score = total[()] * f32(0.125)
                highest = max(top[()], score)
                base = select(highest == f32(-inf), f32(0.0), highest)
                kept = exp(top[()] - base)
                weight = exp(score - base)
                top[()] = highest
                whole[()] = (whole[()] * kept) + weight
                rounded = convert(convert(weight, "bf16"), "f32")
                for col in range(0, width):
                    sums[col] = (sums[col] * kept) + (rounded * convert(v[z, term, col], "f32"))
            for col in range(0, width):
                mean = div(sums[col], whole[()])
                o[z, row, col] = convert(mean, "bf16")

Rows are queries, terms are keys. The score is any function of its position and of the dot product. The end of the loop
over terms may depend on the row; if keys are split, its begin depends on the head. The *epilogue*, statements after the
mean, is arbitrary, and so are the stores for a row after that.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.compare import upper_bound_in_loops
from aotc.ir.limits import ROWS_APART
from aotc.ir.loop.forms.matmul import (
    View,
    is_contiguous_in_pieces,
    matrix_view_of_load,
    row_major_offset,
    unwidened_operand,
)
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, DecodeAttention, Tiling, WgmmaAttention
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Kernel, Let, Load, Scalar, Stmt, Store

_TAIL = 9  # statements of a term, from its score on


@dataclass(frozen=True, slots=True)
class LoopAttention:
    """The parts of the body of an attention kernel.

    Attributes
    ----------
    batch, row, term, depth, col : (str, Dim)
        Variables and ends of the loops; the end of ``term`` may depend on the row.
    begin : Dim
        The first key.
    queries, keys, values : Load
        Elements of the operands.
    operands : str
        The dtype of the operands for tensor cores.
    total : Buffer
        The dot product of a query and a key.
    lets : tuple of Stmt
        Other definitions that the score uses.
    score : Scalar
    mean : Let
        The weighted mean of values.
    epilogue : tuple of Stmt
        The statements after the mean.
    top, whole : Buffer
        The highest score of a row, and the sum of its weights.
    rest : tuple of Stmt
        Stores of a row's statistics.
    """

    batch: tuple[str, Dim]
    row: tuple[str, Dim]
    term: tuple[str, Dim]
    depth: tuple[str, Dim]
    col: tuple[str, Dim]
    queries: Load
    keys: Load
    values: Load
    operands: str
    total: Buffer
    lets: tuple[Stmt, ...]
    score: Scalar
    mean: Let
    epilogue: tuple[Stmt, ...]
    begin: Dim
    top: Buffer
    whole: Buffer
    rest: tuple[Stmt, ...]

    @property
    def terms(self) -> Dim:
        """Return the number of keys of the row with most keys.

        The keys' buffer may have another extent, as its dims may be merged: ``batch * terms``.
        """
        terms = upper_bound_in_loops(self.term[1], dict((self.batch, self.row)))
        if terms is None:
            raise ValueError(f"the end of the terms, {self.term[1]}, has no known bound")
        return terms

    @property
    def causal(self) -> bool:
        """Return True if the number of keys depends on the row or the head, as with a causal mask."""
        return self.term[1] != self.terms

    @property
    def scale(self) -> float:
        """Return the factor by which the dot product is scaled; 0 if the score is another formula."""
        match self.score:
            case Apply(fn="mul", args=(Load(buffer=total), Const(value=float(factor)))) if total == self.total:
                return factor if factor > 0 else 0.0
        return 0.0

    def views(self) -> tuple[View | None, View | None, View | None]:
        """Return the strided layouts of queries and keys (row x depth) and of values (term x column).

        None stands for an operand that is not strided.
        """
        loops = {name for name, _ in (self.batch, self.row, self.term, self.depth, self.col)}
        places = ((self.queries, self.row, self.depth), (self.keys, self.term, self.depth))
        every = (*places, (self.values, self.term, self.col))
        layouts = [matrix_view_of_load(x, line[0], inner[0], set(), loops) for x, line, inner in every]
        return layouts[0], layouts[1], layouts[2]

    @property
    def place(self) -> Dim | None:
        """Return the offset of an element in the only output if rows consist of whole 16-byte pieces, else None."""
        *lets, last = self.epilogue
        if not isinstance(last, Store) or last.reduce or not all(isinstance(s, Let) for s in lets):
            return None
        flat, count = row_major_offset(last), {"bf16": 8, "f16": 8, "f32": 4}.get(last.buffer.dtype, 0)
        return flat if count and is_contiguous_in_pieces(flat, *self.col, count) else None


def attention_shared(tiling: Tiling, depth: int, width: int, size: int = 2) -> int:
    """Return the bytes of shared memory of a GPU block for attention by ``tiling``.

    Keys and values are stored in rows of whole 128-byte chunks. Warpgroups also store their queries and the barriers of
    both ring buffers there. In the decoding template each warp has a ring buffer, which accumulators reuse at the end.
    """
    keys, values = (-(-count * size // 128) * 128 for count in (depth, width))
    ring = tiling.stages * tiling.cols * (keys + values)
    if isinstance(tiling.template, DecodeAttention):
        warps = tiling.rows // 16
        sums = (warps + (tiling.cluster > 1)) * accumulator_bytes(width)
        queries = 16 * keys if queries_stay_in_shared_memory(depth, width, size) else 0
        return 1024 + max(warps * ring, sums) + queries + 8 * warps * tiling.stages
    if isinstance(tiling.template, WgmmaAttention):
        return 1024 + tiling.rows * keys + ring + 8 * (4 * tiling.stages + 2)
    queries = tiling.rows * keys if queries_stay_in_shared_memory(depth, width, size) else 0
    return 1024 + max(ring, tiling.rows * 128) + queries


# Registers of a thread for the queries and accumulators of a single warp, up to which queries stay in registers. f32 of
# 128 elements needs this many, and the rest of the kernel needs registers too. The linker's log.
MOST_HELD = 128


def queries_stay_in_shared_memory(depth: int, width: int, size: int) -> bool:
    """Return True if single warps keep their queries in shared memory, as accumulators leave too few registers."""
    return size == 4 and 4 * -(-depth // 8) + width // 2 > MOST_HELD


def accumulator_bytes(width: int) -> int:
    """Return the bytes of the accumulators of a warp's 16 rows, including two statistics of each row."""
    return 16 * 4 * (width + ROWS_APART + 2)


def read_attention(kernel: Kernel) -> LoopAttention:
    """Parse the body of ``kernel`` and return the parts of its attention.

    Raises
    ------
    ValueError
        If the body is not attention.
    """
    match kernel.body:
        case (
            For(body=(For(body=[
                Alloc(top), Alloc(whole), _, _, _, For() as clear, For() as terms, For() as last, *rest
            ]) as rows,)) as batch,
        ):
            pass
        case _:
            raise ValueError(f"kernel {kernel.name}: its body is not attention")
    body, tail = terms.body[:-_TAIL], terms.body[-_TAIL:]
    match body, tail, last.body:
        case (
            (Alloc(total), Store(), For(body=(Store(value=Apply(fn="mul", args=(query, key))),)) as sum_, *lets),
            (Let() as score, *_, For(body=(Store(value=Apply(args=(_, Apply(args=(_, value))))),))),
            (Let() as mean, *epilogue),
        ):
            loads, operands = _operand_loads_and_dtype(query, key, value)
            return LoopAttention(
                (batch.var, batch.end), (rows.var, rows.end), (terms.var, terms.end), (sum_.var, sum_.end),
                (clear.var, clear.end), loads[0], loads[1], loads[2], operands, total, tuple(lets), score.value,
                mean, tuple(epilogue), terms.begin, top, whole, tuple(rest),
            )  # fmt: skip
    raise ValueError(f"kernel {kernel.name}: its body is not attention")


def _operand_loads_and_dtype(*operands: Scalar) -> tuple[list[Load], str]:
    """Return the loads of the operands, and their dtype for tensor cores."""
    narrow = [unwidened_operand(x, ()) for x in operands]
    loads = [x[0] for x in narrow if x is not None and isinstance(x[0], Load)]
    kinds = {x[1] for x in narrow if x is not None}
    if len(loads) != len(operands) or len(kinds) != 1:
        raise ValueError(f"{', '.join(map(str, operands))} are no operands of tensor cores")
    return loads, kinds.pop()


def attention_shared_bytes_of_kernel(kernel: Kernel) -> int:
    """Return the bytes of shared memory that the tiling of ``kernel`` needs for a block; 0 without a tiling."""
    tiling = kernel.tiling
    if tiling is None or not tiling.is_attention:
        return 0 if tiling is None else tiling.shared
    attention = read_attention(kernel)
    depth, width = attention.depth[1], attention.col[1]
    assert isinstance(depth, int)
    assert isinstance(width, int)
    return attention_shared(tiling, depth, width, ELEMENT_BYTES[attention.operands])
