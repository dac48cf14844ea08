"""Prepare products for the register tiles: choose a form and pack the right operand.

Before::

    %3 = matmul %x, %w : f32[128, 3072]                 // %w: f32[768, 3072]
After::

    %2 = ... pad, reshape, transpose of %w : f32[96, 768, 32]      // folds if %w is constant
    %3 = packed_matmul %x, %2 {n = 3072, group = 1} : f32[128, 3072]

:mod:`aotc.lowering.analysis.cost` decides. A ``matmul`` that is to read its right
operand in place gets the width of its tiles, ``cols``; what stays ``matmul`` without
it, or ``conv``, is lowered as plain loops. A product of few rows with a right operand
stored by columns is a set of dot products: it becomes multiply and reduce.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from aotc.ir.dims import Dim, product, static
from aotc.ir.opset import CONTROL_FLOW, FOLDED
from aotc.ir.tensor_ir import Module, Op, Region, TensorType, Value, walk
from aotc.ir.tile_forms import FORMS
from aotc.lowering.analysis.cost import conv_strategy, matmul_strategy
from aotc.lowering.analysis.tiling import best_tile, in_place_cols
from aotc.options import Options
from aotc.targets import Target, resolve
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

_WIDENED = frozenset({"f16", "bf16", "f32", *SMALL_FLOATS})


def form_of(lhs: str, rhs: str, result: str) -> str:
    """Return the tile form for the dtypes of operands and result, or the empty string."""
    if result == "f64" and {lhs, rhs} <= _WIDENED:
        return result
    if lhs == rhs and lhs in ("f32", "f64", "i8"):
        return lhs
    return "f32" if {lhs, rhs} <= _WIDENED else ""


def pack_contractions(module: Module, options: Options) -> Module:
    """Rewrite every ``matmul`` and ``conv`` for the first target of ``options``."""
    target = resolve(options.target)[0]
    if target.kind != "cpu":
        return module
    changed = {}
    for function in module.functions.values():
        rewriter = _Rewriter(target, function.body)
        changed[function.name] = replace(function, body=rewriter.region(function.body))
    return replace(module, functions=changed)


class _Rewriter:
    """Rebuilds regions with prepared products."""

    def __init__(self, target: Target, body: Region) -> None:
        self.target = target
        self.names = count()
        self.constants = {op.result for op in walk(body) if op.name == "constant"}
        self.taken = {v.name for op in walk(body) for v in op.results}
        self.new: list[Op] = []
        self.makers: dict[Value, Op] = {}

    def region(self, region: Region) -> Region:
        """Return ``region`` with its products prepared, nested regions first."""
        saved, self.new = self.new, []
        for op in region.ops:
            if op.regions and op.name in CONTROL_FLOW:
                op = replace(op, regions=tuple(self.region(r) for r in op.regions))
            handler = {"matmul": self._matmul, "conv": self._conv}.get(op.name)
            if handler is None:
                self.new.append(op)
            else:
                handler(op)
            self.makers.update((v, op) for v in op.results)
        ops, self.new = self.new, saved
        return Region(region.params, tuple(ops), region.results)

    # --- small builders ---

    def emit(self, name: str, operands: tuple[Value, ...], type_: TensorType, source: Op, **attrs: object) -> Value:
        """Append an op with a fresh result."""
        fresh = f"t{next(self.names)}"
        while fresh in self.taken:
            fresh = f"t{next(self.names)}"
        self.taken.add(fresh)
        result = Value(fresh, type_)
        self.new.append(Op(name, operands, (result,), attrs, (), source.loc))
        if (name in FOLDED or name == "constant") and all(v in self.constants for v in operands):
            self.constants.add(result)
        return result

    def convert(self, value: Value, dtype: str, op: Op) -> Value:
        """Return ``value`` as ``dtype``."""
        if value.type.dtype == dtype:
            return value
        return self.emit("convert", (value,), TensorType(dtype, value.type.shape), op)

    def reshape(self, value: Value, shape: tuple[Dim, ...], op: Op) -> Value:
        """Return ``value`` with another shape of as many elements."""
        return self.emit("reshape", (value,), TensorType(value.type.dtype, shape), op)

    def transpose(self, value: Value, perm: tuple[int, ...], op: Op) -> Value:
        """Return ``value`` with its dims permuted."""
        shape = tuple(value.type.shape[p] for p in perm)
        return self.emit("transpose", (value,), TensorType(value.type.dtype, shape), op, perm=perm)

    def pad_end(self, value: Value, axis: int, extent: Dim, op: Op) -> Value:
        """Return ``value`` with zeros after its end along ``axis`` up to ``extent``."""
        shape = list(value.type.shape)
        if shape[axis] == extent:
            return value
        rank = len(shape)
        high = tuple(extent - shape[d] if d == axis else 0 for d in range(rank))
        shape[axis] = extent
        dtype = value.type.dtype
        zero = self.emit("constant", (), TensorType(dtype), op, value=np.zeros((), to_numpy(dtype)))
        return self.emit(
            "pad", (value, zero), TensorType(dtype, tuple(shape)), op, low=(0,) * rank, high=high, interior=(0,) * rank
        )

    def finish(self, op: Op, name: str, operands: tuple[Value, ...], dtype: str, **attrs: object) -> None:
        """Append the product itself, converted to the result's dtype if the tile makes another."""
        (result,) = op.results
        if result.type.dtype == dtype:
            self.new.append(replace(op, name=name, operands=operands, attrs=attrs))
            return
        made = self.emit(name, operands, TensorType(dtype, result.type.shape), op, **attrs)
        self.new.append(Op("convert", (made,), (result,), {}, (), op.loc))

    # --- the two products ---

    def _stored(self, op: Op) -> Op:
        """Return a matmul that reads its operands as they are stored, not their transposes."""
        operands = list(op.operands)
        flags = {name: bool(op.attrs[name]) for name in ("lhs_transposed", "rhs_transposed")}
        for n, name in enumerate(flags):
            maker = self.makers.get(operands[n])
            rank = operands[n].type.rank
            swapped = (*range(rank - 2), rank - 1, rank - 2)
            if maker is not None and maker.name == "transpose" and tuple(maker.attrs["perm"]) == swapped:
                operands[n], flags[name] = maker.operands[0], not flags[name]
        return replace(op, operands=tuple(operands), attrs={**op.attrs, **flags})

    def _matmul(self, op: Op) -> None:
        op = self._stored(op)
        lhs, rhs = op.operands
        form = form_of(lhs.type.dtype, rhs.type.dtype, op.result.type.dtype)
        m, n = op.result.type.shape[-2:]
        k = lhs.type.shape[-2 if op.attrs["lhs_transposed"] else -1]
        match matmul_strategy(op, form, rhs in self.constants, self.target):
            case "loops":
                self.new.append(op)
            case "dots":
                self._dot_products(op, form, k)
            case "in_place":
                a, b = self.convert(lhs, form, op), self.convert(rhs, form, op)
                cols = in_place_cols(m, static(n), k, form, self.target)
                self.finish(op, "matmul", (a, b), FORMS[form].out, **op.attrs, cols=cols)
            case "packed":
                self._packed_matmul(op, form, m, static(n), static(k))

    def _packed_matmul(self, op: Op, form: str, m: Dim, n: int, k: int) -> None:
        group = FORMS[form].group
        lhs, rhs = op.operands
        lhs, rhs = self.convert(lhs, form, op), self.convert(rhs, form, op)
        lhs_transposed = bool(op.attrs["lhs_transposed"])
        if group > 1 and lhs_transposed:
            rank = lhs.type.rank
            lhs, lhs_transposed = self.transpose(lhs, (*range(rank - 2), rank - 1, rank - 2), op), False
        steps = -(-k // group)
        lhs = self.pad_end(lhs, lhs.type.rank - (2 if lhs_transposed else 1), steps * group, op)
        _, cols = best_tile(m, n, k, form, self.target)
        panels = self.pack(rhs, cols, group, bool(op.attrs["rhs_transposed"]), op)
        attrs = {"n": n, "group": group, "lhs_transposed": lhs_transposed}
        self.finish(op, "packed_matmul", (lhs, panels), FORMS[form].out, **attrs)

    def pack(self, rhs: Value, cols: int, group: int, transposed: bool, op: Op) -> Value:
        """Return ``rhs`` ([B,] K, N) as panels ([B,] P, K/group, cols*group), zero padded."""
        batch = rhs.type.rank - 2
        lead = rhs.type.shape[:batch]
        k_axis, n_axis = (batch + 1, batch) if transposed else (batch, batch + 1)
        k, n = rhs.type.shape[k_axis], rhs.type.shape[n_axis]
        steps, count_ = (k + (group - 1)) // group, (n + (cols - 1)) // cols
        rhs = self.pad_end(self.pad_end(rhs, k_axis, steps * group, op), n_axis, count_ * cols, op)
        ids = tuple(range(batch))
        if transposed:
            split = self.reshape(rhs, (*lead, count_, cols, steps, group), op)
            perm = (*ids, batch, batch + 2, batch + 1, batch + 3)
        else:
            split = self.reshape(rhs, (*lead, steps, group, count_, cols), op)
            perm = (*ids, batch + 2, batch, batch + 3, batch + 1)
        moved = self.transpose(split, perm, op)
        return self.reshape(moved, (*lead, count_, steps, cols * group), op)

    def _dot_products(self, op: Op, form: str, k: Dim) -> None:
        """``out[m, n] = sum_k lhs[m, k] * rhs[n, k]`` as one row reduction."""
        lhs, rhs = op.operands
        if op.attrs["lhs_transposed"]:
            rank = lhs.type.rank
            lhs = self.transpose(lhs, (*range(rank - 2), rank - 1, rank - 2), op)
        shape = (*op.result.type.shape, k)
        batch = tuple(range(len(shape) - 3))
        last = len(shape) - 1
        full = TensorType(form, shape)
        a = self.emit("broadcast", (self.convert(lhs, form, op),), full, op, dims=(*batch, last - 2, last))
        b = self.emit("broadcast", (self.convert(rhs, form, op),), full, op, dims=(*batch, last - 1, last))
        both = self.emit("mul", (a, b), full, op)
        zero = self.emit("constant", (), TensorType(form), op, value=np.zeros((), to_numpy(form)))
        add = _adder(form, f"t{next(self.names)}_{op.result.name}")
        (result,) = op.results
        if result.type.dtype == form:
            self.new.append(Op("reduce", (both, zero), (result,), {"dims": (last,)}, (add,), op.loc))
            return
        total = Value(f"t{next(self.names)}_sum_{result.name}", TensorType(form, result.type.shape))
        self.new.append(Op("reduce", (both, zero), (total,), {"dims": (last,)}, (add,), op.loc))
        self.new.append(Op("convert", (total,), (result,), {}, (), op.loc))

    def _conv(self, op: Op) -> None:
        lhs, rhs = op.operands
        form = form_of(lhs.type.dtype, rhs.type.dtype, op.result.type.dtype)
        *kernel, c, n = rhs.type.shape
        if conv_strategy(op, form) == "loops":
            self._plain_conv(op, form)
            return
        lhs, rhs = self.convert(lhs, form, op), self.convert(rhs, form, op)
        k = static(product((*kernel, c)))
        _, cols = best_tile(op.result.type.shape[-2], n, k, form, self.target)
        panels = self.pack(self.reshape(rhs, (k, n), op), cols, 1, False, op)
        attrs = {
            "kernel": tuple(kernel),
            "strides": op.attrs["strides"],
            "rhs_dilation": op.attrs["rhs_dilation"],
            "n": n,
        }
        self.finish(op, "packed_conv", (lhs, panels), FORMS[form].out, **attrs)

    def _plain_conv(self, op: Op, form: str) -> None:
        """Accumulate 16-bit floats in f32, as XLA does; the loops are the same."""
        if form != "f32":
            self.new.append(op)
            return
        a, b = (self.convert(v, form, op) for v in op.operands)
        self.finish(op, "conv", (a, b), form, **op.attrs)


def _adder(dtype: str, name: str) -> Region:
    x, y = Value(f"{name}_x", TensorType(dtype)), Value(f"{name}_y", TensorType(dtype))
    total = Value(f"{name}_z", TensorType(dtype))
    return Region((x, y), (Op("add", (x, y), (total,)),), (total,))
