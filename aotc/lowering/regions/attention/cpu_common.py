"""Base of the emitters of attention on a CPU: elements of operands, loops and names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, static, sym
from aotc.ir.loop.forms.matmul import View
from aotc.ir.loop.ir import Apply, Buffer, Const, For, Let, Load, Scalar, Stmt, Store, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.attention import attention_axis_sizes
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.cpu import attention_operand_index, attention_operand_layout

Make = Callable[[list[Stmt], Dim], None]
NO_WEIGHT = {"f32": 104.0, "f64": 746.0}  # exp(-x) is 0 for a larger x


class AttentionItem:
    """Sizes and position of one grid item of the op ``attention``, and emitters of its loops and loads.

    Attributes
    ----------
    at : tuple of Dim
        Index of the batch axes.
    row : Dim
        First row.
    height : Dim
        Number of rows that exist.
    split_at : tuple of Dim
        Number of the part of the terms (split-KV), if the op has parts.
    begin, end : Dim
        Range of terms of the item.
    """

    def __init__(self, b: RegionBuilder, op: Op, wide: str, rows: int) -> None:
        """Read the axes of ``op`` and its optional operands: bias, mask and scales of integer keys and values.

        ``wide`` is the dtype of sums, ``rows`` the number of rows of an item.
        """
        self.b, self.op, self.wide, self.e = b, op, wide, b.elements()
        sizes = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)
        self.batch, self.rows, self.terms = sizes[:3]
        self.depth, self.columns = static(sizes[3]), static(sizes[4])
        extra = list(op.operands[3:])
        self.bias = extra.pop(0) if op.attrs["bias_dims"] else None
        self.mask = extra.pop(0) if op.attrs["mask_dims"] else None
        self.k_scale = extra.pop(0) if op.attrs.get("k_scale_dims") else None
        self.v_scale = extra.pop(0) if op.attrs.get("v_scale_dims") else None
        self.parts: int = op.attrs.get("split", 1)
        self.whole = isinstance(self.rows, int) and self.rows % rows == 0
        self.at: tuple[Dim, ...] = ()
        self.row: Dim = 0
        self.height: Dim = rows
        self.split_at: tuple[Dim, ...] = ()
        self.begin: Dim = 0
        self.end: Dim = self.terms

    def _begin_split_kv_part(self, body: list[Stmt], part: Dim) -> None:
        """Emit the first and last term of a part, and the starts of slices that are read in place."""
        self.e.enter(body)
        self.e.precompute_slice_starts(self.op.operands)
        size = ceildiv(self.terms, self.parts)
        self.split_at, self.begin = (part,) if "split" in self.op.attrs else (), part * size
        exact = isinstance(self.terms, int) and self.terms % self.parts == 0
        last = self.begin + size
        self.end = last if exact else self._bind_index(body, minimum(last, self.terms), self.terms + 1)

    @property
    def part_terms(self) -> Dim:
        """Return the number of keys per split-KV part; the last part may have fewer."""
        return ceildiv(self.terms, self.parts)

    def _scratch_buffer(self, name: str, *shape: Dim, dtype: str = "") -> Buffer:
        return Buffer(self.b.fresh(name), dtype or self.wide, shape, "scratch")

    def _private_scalar(self, name: str, dtype: str = "") -> Buffer:
        """Return a private scalar of a worker."""
        return Buffer(self.b.fresh(name), dtype or self.wide, (), "private")

    def _bind_index(self, block: list[Stmt], i: Dim, extent: Dim) -> Dim:
        """Bind ``i``, which is below ``extent``, to a name unless it is a constant."""
        if isinstance(i, int):
            return i
        name = self.b.fresh("n")
        block.append(Let(Var(name, "i64"), IndexScalar(i)))
        return sym(name, 0, extent)

    def _index_loop(self, prefix: str, end: Dim, make: Make, extent: Dim | None = None) -> For:
        """Return the loop of ``make(block, i)`` for ``i`` from 0 to ``end``."""
        name = self.b.fresh(prefix)
        inside: list[Stmt] = []
        self.e.enter(inside)
        make(inside, sym(name, 0, end if extent is None else extent))
        return For(name, 0, end, tuple(inside))

    def _sum_dtype_literal(self, x: float) -> Const:
        return Const(float(x), self.wide)

    def _apply_in_sum_dtype(self, fn: str, *args: Scalar) -> Apply:
        return Apply(fn, args, self.wide)

    def _operand_element(self, value: Value, dims: Sequence[int], *last: Dim, dtype: str = "") -> Scalar:
        """Return an element of an operand at this head and ``last``, in the dtype of the sums or in ``dtype``."""
        x, dtype = self.e.at(value, attention_operand_index(value, dims, (*self.at, *last))), dtype or self.wide
        return x if x.dtype in (dtype, "i1") else Apply("convert", (x,), dtype)

    def _layout_of_head(self, number: int) -> View:
        """Return the layout in memory of the keys or values (operand ``number``) of the item's head."""
        view = attention_operand_layout(self.e, self.op, number, self.at)
        assert view is not None
        return view

    def _subtracted_maximum(self, top: Scalar) -> Scalar:
        """Return the scalar that is subtracted from scores: their maximum, or 0 for a row of only -inf."""
        lowest = Apply("eq", (top, self._sum_dtype_literal(-math.inf)), "i1")
        return self.e.bind(self._apply_in_sum_dtype("select", lowest, self._sum_dtype_literal(0), top))

    def _masked_terms_have_no_weight(self, top: Scalar) -> Apply:
        """Return True at run time if masked terms have no weight relative to a maximum."""
        above = self._apply_in_sum_dtype("sub", top, self._sum_dtype_literal(self.op.attrs["fill"]))
        return Apply("gt", (above, self._sum_dtype_literal(NO_WEIGHT[self.wide])), "i1")

    def _write_attention_row(
        self, block: list[Stmt], r: Dim, numbers: Sequence[Scalar], sums: Buffer, at: Index
    ) -> None:
        """Emit the results of row ``r`` from ``numbers`` (maximum and sum); a row without terms becomes 0."""
        (out, *others), dims = self.b.outputs, self.op.attrs["out_dims"]
        total = numbers[1]
        for buffer, own in zip(others, numbers):
            block.append(Store(buffer, (*self.at, *self.split_at, self.row + r), own))
        if not isinstance(self.terms, int):
            none = Apply("eq", (IndexScalar(self.terms), Const(0, "i64")), "i1")
            total = self.e.bind(self._apply_in_sum_dtype("select", none, self._sum_dtype_literal(1), total))

        def write_element(inner: list[Stmt], c: Dim) -> None:
            """Emit the store of one result element: a weighted sum divided by the row's total."""
            index: list[Dim] = [0] * len(dims)
            for d, i in zip(dims, (*self.at, self.row + r, c), strict=True):
                index[d] = i
            index[len(self.at) : len(self.at)] = self.split_at
            x: Scalar = self._apply_in_sum_dtype("div", Load(sums, (*at, c)), total)
            x = x if out.dtype == self.wide else Apply("convert", (x,), out.dtype)
            inner.append(Store(out, tuple(index), x))

        block.append(self._index_loop("c", self.columns, write_element))
