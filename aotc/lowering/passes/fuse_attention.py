"""Replace attention, two matmuls with a row softmax between them, by one op.

Before::

    %s = dot_general %q, %k : f32[8, 12, 512, 512]
    ...                                               // scale, bias, mask, max, sub, exp, sum, div
    %o = dot_general %p, %v : f32[8, 12, 512, 64]
After::

    %o = attention %q, %k, %v {...} : f32[8, 12, 512, 64]

:mod:`aotc.lowering.analysis.attention_pattern` recognises attention; :mod:`aotc.lowering.plans.attention.cpu_blocks`
decides what a CPU supports, and when it pays. If another op reads the scores or weights, the pattern does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.attention import ABSENT
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, values_captured_by_op, walk
from aotc.lowering.analysis.attention_masks import ElementRead, causal_offset, earliest_read, mask_conjuncts
from aotc.lowering.analysis.attention_pattern import Attention, attention_of, is_widening_conversion
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.passes.split_attention import split_on_cpu
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.attention.cpu_blocks import split_kv_parts, takes_attention
from aotc.options import Options
from aotc.targets import Target

Home = Callable[[Op], Target]


def fuse_attention(module: Module, options: Options) -> Module:
    """Return ``module`` with one op for each attention that its target computes as one."""
    if options.opt_level < 2 or not any(_may_contain_attention(f) for f in module.functions.values()):
        return module
    live = dce(module, options)
    home, _ = op_targets(live, options)
    changed = {name: _AttentionRewriter(f, home).function_with_attention() for name, f in live.functions.items()}
    if all(changed[name] is f for name, f in live.functions.items()):
        return module
    return dce(live.with_functions(changed), options)


def _may_contain_attention(function: Function) -> bool:
    """Return True if ``function`` has the ops of attention: two matmuls, ``exp`` and ``div``."""
    names = function.body.names
    if not ("dot_general" in names and "exp" in names and "div" in names):
        return False
    return sum(op.name == "dot_general" for op in walk(function.body)) > 1


class _AttentionRewriter:
    """Replace the attention patterns of one function by ``attention`` ops."""

    def __init__(self, function: Function, home: Home) -> None:
        self._function, self._home = function, home
        self._names = Names(function.body)
        self._makers: dict[Value, Op] = {}
        self._users: dict[Value, list[Op | None]] = {}
        self._note_makers_and_users(function.body)

    def _note_makers_and_users(self, region: Region) -> None:
        """Record the definition and the readers of each value; None stands for a region that returns the value."""
        for op in region.ops:
            self._makers.update((v, op) for v in op.results)
            for v in (*op.operands, *values_captured_by_op(op)):
                self._users.setdefault(v, []).append(op)
            for inner in op.regions:
                self._note_makers_and_users(inner)
        for v in region.results:
            self._users.setdefault(v, []).append(None)

    def function_with_attention(self) -> Function:
        """Return the rewritten function, or the same object if it has no attention to replace."""
        return self._function.with_body(self._rewrite_region(self._function.body))

    def _rewrite_region(self, region: Region) -> Region:
        """Return ``region`` with ``attention`` in place of each pattern that its target supports."""
        if "dot_general" not in region.names:
            return region
        members = set(region.ops)
        products = [op for op in region.ops if op.name == "dot_general"]
        roots: dict[Op, list[Attention]] = {}
        for narrow in (True, False):
            candidates = [attention_of(op, self._makers, self._users, narrow) for op in products]
            for a in candidates:
                if a is not None and a.root in members:
                    roots.setdefault(a.root, []).append(a)
        ops: list[Op] = []
        for op in region.ops:
            new = next((x for a in roots.get(op, ()) if (x := self._attention_replacement(a)) is not None), None)
            if new is None:
                new = [op.on(op.operands, tuple(map(self._rewrite_region, op.regions))) if op.regions else op]
            ops += new
        return region.with_ops(ops, region.results)

    def _attention_replacement(self, attention: Attention) -> list[Op] | None:
        """Return the ops that replace the root of an attention, or None if the target computes its ops separately."""
        b = Builder(self._names, dict(self._makers), loc=attention.root.loc)
        op, target = _AttentionOpWriter(attention, b).attention_op(), self._home(attention.root)
        if not takes_attention(op, target):
            return None
        parts = split_kv_parts(op, target)
        return (
            [*b.ops, *_ops_after_attention(op, attention.root)]
            if parts == 1
            else split_on_cpu(op, parts, attention.root.results, b)
        )


def _ops_after_attention(op: Op, root: Op) -> list[Op]:
    """Return the ops that compute the result of ``root`` from the result of the attention ``op``."""
    if op.result.type == root.result.type:
        return [replace(op, results=root.results)]
    return [op, Op("reshape", op.results, root.results, loc=root.loc)]


class _AttentionOpWriter:
    """Creates the op ``attention`` and the ops that compute its operands."""

    def __init__(self, attention: Attention, b: Builder) -> None:
        """Choose the axis of rows, and separate a causal mask along it from the other masks."""
        self.found, self.b = attention, b
        own = [i for i in attention.q.index if i not in (0, attention.depth)]
        shared = {*attention.k.index, *attention.v.index}
        causal, rest = self._split_causal_mask(own)
        rows = [i for i in own if i not in shared]
        self.row: Dim | None = (
            causal[0] if causal and causal[0] in rows else max(rows, key=self._extent_of_axis, default=None)
        )
        self.offset: tuple[Dim, ...] = (causal[1],) if causal and causal[0] == self.row else ()
        self.masks = rest if self.offset or not causal else self._mask_conjuncts()
        self.batch = [i for i in own if i != self.row]

    def _extent_of_axis(self, axis: Dim) -> int:
        attention = self.found
        n = attention.q.value.type.shape[attention.q.index.index(axis)]
        return n if isinstance(n, int) else 1 << 40

    # --- masks ---

    def _mask_conjuncts(self) -> list[tuple[ElementRead, bool]]:
        """Return the conjuncts of the masks, as ``(mask, sign)``, without those that allow every element.

        A score counts where ``mask`` equals ``sign``: with False, the mask is True where the score is masked out.
        """
        makers, extents = self.b.definitions, self.found.extents
        needed = [p for r, sign in self.found.masks if sign for p in mask_conjuncts(r, extents, makers)]
        refused = [(r, False) for r, sign in self.found.masks if not sign]
        return [*((p, True) for p in needed if not _is_all_true(p.value, self.b)), *refused]

    def _split_causal_mask(self, axes: Sequence[Dim]) -> tuple[tuple[Dim, Dim] | None, list[tuple[ElementRead, bool]]]:
        """Split the masks into the causal conjunct, as (row axis, offset), or None, and the other conjuncts.

        The others are ``(mask, sign)`` as in :meth:`_mask_conjuncts`.
        """
        parts = self._mask_conjuncts()
        for n, (part, sign) in enumerate(parts):
            causal = causal_offset(part, self.found.term, self.b.definitions) if sign else None
            if causal is not None and causal[0] in axes:
                return causal, [*parts[:n], *parts[n + 1 :]]
        return None, parts

    # --- operands ---

    def attention_op(self) -> Op:
        """Return the fused ``attention`` op; append the ops that compute its operands."""
        attention, b = self.found, self.b
        ends = {
            "q": (attention.q, self.row, attention.depth), "k": (attention.k, attention.term, attention.depth),
            "v": (attention.v, attention.term, attention.column),
        }  # fmt: skip
        operands: list[Value] = []
        attrs: dict[str, object] = {}
        for name, (read, *last) in ends.items():
            operands.append(self._dense_operand(read.value, read.index, name == "q"))
            attrs[f"{name}_dims"] = self._operand_axis_places(read.index, last, name == "q")
        for name, extra in (("bias", self._summed_bias()), ("mask", self._joined_mask())):
            attrs[f"{name}_dims"] = (
                () if extra is None else self._operand_axis_places(extra.index, [self.row, attention.term])
            )
            operands += [] if extra is None else [self._dense_operand(extra.value, extra.index)]
        for name, scale in (("k_scale", attention.k_scale), ("v_scale", attention.v_scale)):
            if scale is not None:
                wide = TensorType("f32")
                factor = scale if isinstance(scale, ElementRead) else ElementRead(b.constant(scale, wide), ())
                attrs[f"{name}_dims"] = self._operand_axis_places(factor.index, [self.row, attention.term])
                operands.append(self._dense_operand(factor.value, factor.index))
        attrs["out_dims"] = self._operand_axis_places(attention.out, [self.row, attention.column], True)
        attrs |= {"scale": attention.scale, "fill": attention.fill, "causal": self.offset}
        if attention.precision not in (None, "DEFAULT"):
            attrs["precision"] = attention.precision
        type_ = TensorType(attention.root.result.type.dtype)
        return b.op("attention", operands, attrs, (type_,))

    def _axes_of_operand(self, index: Sequence[Dim], rows: bool = False) -> list[Dim | None]:
        """Return the axis of each dim of an operand or result, without dims of size 1.

        None stands for the axis of a single row.
        """
        entries: list[Dim | None] = [i for i in index if i != 0]
        return [*entries[:-1], None, entries[-1]] if rows and self.row is None else entries

    def _operand_axis_places(
        self, index: Sequence[Dim], last: Sequence[Dim | None], rows: bool = False
    ) -> tuple[int, ...]:
        """Return the dim of an operand for each batch axis and for ``last``; ``ABSENT`` for missing ones."""
        entries = self._axes_of_operand(index, rows)
        return tuple(entries.index(i) if i in entries else ABSENT for i in (*self.batch, *last))

    def _dense_operand(self, value: Value, index: Sequence[Dim], rows: bool = False) -> Value:
        sizes = dict(zip(index, value.type.shape, strict=True))
        return self.b.reshape(value, [1 if i is None else sizes[i] for i in self._axes_of_operand(index, rows)])

    def _summed_bias(self) -> ElementRead | None:
        """Return the sum of all biases of the scores, or None without any."""
        if not self.found.biases:
            return None
        dtypes = {read.value.type.dtype for read, _ in self.found.biases}
        dtype = dtypes.pop() if len(dtypes) == 1 else "f64" if "f64" in dtypes else "f32"
        terms = []
        for read, sign in self.found.biases:
            value = self.b.convert(read.value, dtype)
            terms.append(replace(read, value=value if sign else self.b.make("neg", (value,))))
        return self._bias_before_widening(terms[0]) if len(terms) == 1 else self._join_masks_or_biases(terms, "add")

    def _bias_before_widening(self, bias: ElementRead) -> ElementRead:
        """Return the bias before it is widened: kernels widen its elements when they add them."""
        maker = self.b.definitions.get(bias.value)
        if maker is None or maker.name != "convert" or not is_widening_conversion(maker):
            return bias
        return earliest_read(replace(bias, value=maker.operands[0]), self.found.extents, self.b.definitions) or bias

    def _joined_mask(self) -> ElementRead | None:
        """Return the conjunction of all masks, or None without any."""
        parts = [r if sign else replace(r, value=self.b.make("not", (r.value,))) for r, sign in self.masks]
        return self._join_masks_or_biases(parts, "and") if parts else None

    def _join_masks_or_biases(self, parts: Sequence[ElementRead], name: str) -> ElementRead:
        """Combine masks or biases ``parts`` by op ``name``, broadcast to the union of their axes."""
        if len(parts) == 1:
            return parts[0]
        sizes = {i: n for p in parts for i, n in zip(p.index, p.value.type.shape, strict=True) if i != 0}
        order = [i for i in (*self.batch, self.row, self.found.term) if i in sizes]
        shape = [sizes[i] for i in order]
        spread = [self._broadcast_to_axes(p, order, shape) for p in parts]
        total = spread[0]
        for x in spread[1:]:
            total = self.b.make(name, (total, x))
        return ElementRead(total, tuple(order))

    def _broadcast_to_axes(self, part: ElementRead, order: Sequence[Dim | None], shape: Sequence[Dim]) -> Value:
        dense = self._dense_operand(part.value, part.index)
        places = [order.index(i) for i in part.index if i != 0]
        return self.b.broadcast(dense, places, shape)


def _is_all_true(value: Value, b: Builder) -> bool:
    number = splat_of(value, b.definitions)
    return number is not None and bool(number)
