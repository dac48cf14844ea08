"""Recognize attention: two matmuls with a softmax of rows between them.

The match goes backward from the second matmul. Each value is read at a symbolic index: one symbol for each axis of the
scores, 0 for dims of one element. So reshapes, transposes and broadcasts between the ops do not matter. The maximum and
the sum belong to the right row if and only if they are read at the same index as the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.opset import MOVES
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.attention_int_cache import Scale, narrow_read_before_widening
from aotc.lowering.analysis.attention_masks import ElementRead, Makers, earliest_read, uniform_number
from aotc.lowering.analysis.index_maps import Index, operand_index_of_movement
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.vmfb.dtypes import DTYPES, kind_of, limits

Users = Mapping[Value, Sequence["Op | None"]]


@dataclass(frozen=True, slots=True)
class Attention:
    """Ops that together compute attention.

    Attributes
    ----------
    root : Op
        The last of the ops; attention computes its result.
    q, k, v : ElementRead
        The queries, keys and values.
    out : Index
        The index of the result of ``root``.
    term, depth, column : Dim
        The symbols of the axes of keys, of the elements of a key, and of the elements of a value. All other axes are
        batch axes or the rows (queries).
    scale, fill : float
        The factor of the scores, and the score of a masked term.
    biases : tuple of (ElementRead, bool)
        Terms of the scores; True if the bias is added, False if it is subtracted.
    masks : tuple of (ElementRead, bool)
        Conditions for a score to count; True if the mask must be true, False if it must be false.
    precision : str or None
        The precision of the first matmul.
    extents : mapping of Dim to Dim
        The sizes of the axes.
    k_scale, v_scale : ElementRead or float, optional
        The scales of integer keys and values: one for each key or value, or one number.
    """

    root: Op
    q: ElementRead
    k: ElementRead
    v: ElementRead
    out: Index
    term: Dim
    depth: Dim
    column: Dim
    scale: float
    fill: float
    biases: tuple[tuple[ElementRead, bool], ...]
    masks: tuple[tuple[ElementRead, bool], ...]
    precision: str | None
    extents: Mapping[Dim, Dim]
    k_scale: Scale | None = None
    v_scale: Scale | None = None


@dataclass(slots=True)
class _Scores:
    """Scale, biases and masks between the first matmul and the softmax."""

    scale: float = 1.0
    fill: float | None = None
    biases: list[tuple[ElementRead, bool]] = field(default_factory=list)
    masks: list[tuple[ElementRead, bool]] = field(default_factory=list)


def attention_of(product: Op, makers: Makers, users: Users, narrow: bool = False) -> Attention | None:
    """Return the attention of which the ``dot_general`` ``product`` is the second matmul, or None.

    ``narrow`` requires integer keys and values.
    """
    for side in (n for n, v in enumerate(product.operands) if _may_be_weights(v, makers)):
        matcher = _AttentionMatcher(product, side, makers, narrow)
        attention = matcher.match_attention()
        if attention is not None and matcher.has_no_other_readers(users):
            return _attention_with_result_movement(attention, users)
    return None


def _may_be_weights(v: Value, makers: Makers) -> bool:
    """Return True if ``v``, behind movements and conversions, is a division or matmul: a cheap test before matching."""
    while (op := makers.get(v)) is not None and (op.name in MOVES or op.name == "convert"):
        v = op.operands[0]
    return op is not None and (op.name == "div" or op.name == "dot_general")


class _AttentionMatcher:
    """Match attention backward from one operand of the second matmul.

    ``inside`` collects the matched ops. If the match succeeds, none of their results may have another reader.
    """

    def __init__(self, product: Op, side: int, makers: Makers, narrow: bool) -> None:
        """Start at the second matmul ``product``; its operand ``side`` may be the softmax."""
        self.product, self.side, self.makers, self.narrow = product, side, makers, narrow
        self.inside: dict[Op, None] = {}
        shape = product.operands[side].type.shape
        self.index: Index = tuple(0 if n == 1 else sym(f"axis{d}", 0, n) for d, n in enumerate(shape))
        self.extents = {i: n for i, n in zip(self.index, shape, strict=True) if i != 0}

    def has_no_other_readers(self, users: Users) -> bool:
        """Return True if no op outside of the match reads an intermediate value."""
        matched = {*self.inside, self.product}
        return all(user in matched for op in self.inside for user in users.get(op.results[0], ()))

    def match_attention(self) -> Attention | None:
        """Match the softmax between two matmuls; return the attention, or None."""
        contracted = [self.index[d] for d in self._agreed_attribute("contract") if self.index[d] != 0]
        if len(contracted) != 1:
            return None
        (self.term,) = contracted
        scores = self._softmax_scores(ElementRead(self.product.operands[self.side], self.index))
        collected = _Scores()
        first = self._match_scores(scores, collected, 0) if scores else None
        if first is None:
            return None
        return self._match_both_matmuls(self.makers[first.value], first.index, collected)

    def _agreed_attribute(self, what: str, other: bool = False) -> tuple[int, ...]:
        return tuple(self.product.attrs[f"{('lhs', 'rhs')[self.side ^ other]}_{what}"])

    # --- steps backward ---

    def _read_before_movement(self, read: ElementRead, record: bool = True) -> ElementRead:
        """Follow ``read`` back through movement ops and float conversions."""
        value, index = read.value, read.index
        while (op := self.makers.get(value)) is not None:
            if op.name in MOVES:
                index = operand_index_of_movement(op, index)
            elif not (op.name == "convert" and kind_of(value.type.dtype) == kind_of(op.operands[0].type.dtype) == "f"):
                break
            self.inside.update({op: None} if record else {})
            value = op.operands[0]
        return ElementRead(value, index)

    def _read_of_operand(self, op: Op, number: int, read: ElementRead) -> ElementRead:
        self.inside[op] = None
        return self._read_before_movement(replace(read, value=op.operands[number]))

    def _op_of_read(self, read: ElementRead | None) -> Op | None:
        return self.makers.get(read.value) if read else None

    def _operand_of_reduction(self, read: ElementRead, name: str, start: float) -> ElementRead | None:
        """Return the operand of the reduction ``name`` at ``read`` if it reduces along the terms alone, else None."""
        op = self._op_of_read(read)
        if op is None or op.name != "reduce" or len(op.operands) != 2 or combiner_op_name(op) != name:
            return None
        init = uniform_number(op.operands[1], self.makers)
        lowest = limits(op.operands[1].type.dtype)[0] if name == "max" else start
        if init is None or init not in (start, lowest):
            return None
        x, other_axes = op.operands[0], iter(read.index)
        index: list[Dim] = []
        for d, n in enumerate(x.type.shape):
            index.append((0 if n == 1 else self.term) if d in op.attrs["dims"] else next(other_axes))
        self.inside[op] = None
        return self._read_before_movement(ElementRead(x, tuple(index))) if index.count(self.term) == 1 else None

    # --- softmax ---

    def _softmax_scores(self, read: ElementRead) -> ElementRead | None:
        """Return the scores of which ``read`` is the softmax along the terms, or None."""
        weights = self._read_before_movement(read)
        while (op := self._op_of_read(weights)) is not None and op.name == "dot_general":
            inner = self._operand_times_one(op, weights)
            if inner is None:
                return None
            weights = inner
        if op is None or op.name != "div":
            return None
        above, below = (self._read_of_operand(op, n, weights) for n in (0, 1))
        exp = self._op_of_read(above)
        if exp is None or exp.name != "exp" or self._operand_of_reduction(below, "add", 0.0) != above:
            return None
        shifted = self._read_of_operand(exp, 0, above)
        minus = self._op_of_read(shifted)
        if minus is None or minus.name != "sub":
            return None
        scores, top = (self._read_of_operand(minus, n, shifted) for n in (0, 1))
        return scores if self._operand_of_maximum(top) == scores else None

    def _operand_times_one(self, op: Op, read: ElementRead) -> ElementRead | None:
        """Return the operand that a ``dot_general`` without contraction multiplies by 1, or None.

        Models with a mask for attention heads contain such a product.
        """
        ones = [n for n, v in enumerate(op.operands) if uniform_number(v, self.makers) == 1]
        if not ones or op.attrs["lhs_contract"]:
            return None
        _, index = _matmul_operand_indices(op, 1 - ones[0], read.index)
        self.inside[op] = None
        return self._read_before_movement(
            ElementRead(op.operands[1 - ones[0]], tuple(0 if i is None else i for i in index))
        )

    def _operand_of_maximum(self, read: ElementRead) -> ElementRead | None:
        """Return the operand of the maximum at ``read``, or None; it may be replaced by 0 where it is infinite."""
        while (op := self._op_of_read(read)) is not None:
            match op.name:
                case "max":
                    splats = [uniform_number(v, self.makers) for v in op.operands]
                    at = next((n for n, x in enumerate(splats) if x is not None and x == -np.inf), None)
                    if at is None:
                        return None
                    read = self._read_of_operand(op, 1 - at, read)
                case "select":
                    other = uniform_number(op.operands[2], self.makers)
                    inner, test = (
                        self._read_of_operand(op, 1, read),
                        self._op_of_read(self._read_of_operand(op, 0, read)),
                    )
                    if other is None or other != 0 or test is None or test.name != "is_finite":
                        return None
                    if self._read_of_operand(test, 0, read) != inner:
                        return None
                    read = inner
                case _:
                    return self._operand_of_reduction(read, "max", -np.inf)
        return None

    # --- scores ---

    def _match_scores(self, read: ElementRead, collected: _Scores, stage: int) -> ElementRead | None:
        """Follow scores back to the first matmul, collecting scale, biases and masks in ``collected``; or None.

        In program order, scores are scaled, then biased, then masked. ``stage`` is 0 where masks may still follow
        backward, 1 after the first bias, 2 after the first scale.
        """
        op = self._op_of_read(read)
        if op is None:
            return None
        scaled = self._scale_of_op(op)
        match op.name:
            case "dot_general":
                self.inside[op] = None
                return read
            case "select" if stage == 0 and op.operands[0].type.rank == op.result.type.rank:
                return self._match_mask(op, read, collected)
            case "add" | "sub" if stage <= 1:
                for n in (0, 1) if op.name == "add" else (0,):
                    trial = _Scores(collected.scale, collected.fill, [*collected.biases], [*collected.masks])
                    before = dict(self.inside)
                    trial.biases.append((replace(read, value=op.operands[1 - n]), op.name == "add"))
                    first = self._match_scores(self._read_of_operand(op, n, read), trial, 1)
                    if first is not None:
                        collected.scale, collected.fill, collected.biases, collected.masks = (
                            trial.scale, trial.fill, trial.biases, trial.masks
                        )  # fmt: skip
                        return first
                    self.inside = before
            case "mul" | "div" if scaled is not None:
                n, number = scaled
                collected.scale = collected.scale * number if op.name == "mul" else collected.scale / number
                return self._match_scores(self._read_of_operand(op, n, read), collected, 2)
        return None

    def _scale_of_op(self, op: Op) -> tuple[int, float] | None:
        """Return the position of the operand that ``op`` multiplies or divides by a number, and the number; or None."""
        if op.name != "mul" and op.name != "div":
            return None
        left, right = (uniform_number(v, self.makers) for v in op.operands)
        if right is not None and (right != 0 or op.name == "mul"):
            return 0, right
        return (1, left) if left is not None and op.name == "mul" else None

    def _match_mask(self, op: Op, read: ElementRead, collected: _Scores) -> ElementRead | None:
        """Match a select between scores and a fill value, in either order; return the scores, or None.

        All masks must have the same fill value.
        """
        for n in (1, 2):
            fill = uniform_number(op.operands[3 - n], self.makers)
            if fill is None or np.isnan(fill) or collected.fill not in (None, fill):
                continue
            collected.fill = fill
            collected.masks.append((replace(read, value=op.operands[0]), n == 1))
            return self._match_scores(self._read_of_operand(op, n, read), collected, 0)
        return None

    # --- products ---

    def _match_both_matmuls(self, first: Op, at: Index, collected: _Scores) -> Attention | None:
        """Return the attention with the operands of both matmuls, if their dims form one index space; else None."""
        sides = [_matmul_operand_indices(first, side, at) for side in (0, 1)]
        contracted = {n for n in (first.operands[0].type.shape[d] for d in first.attrs["lhs_contract"]) if n != 1}
        holders = [n for n, (free, _) in enumerate(sides) if self.term in free]
        if len(holders) != 1 or len(contracted) != 1:
            return None
        (key,), (extent,) = holders, contracted
        if [i for i in sides[key][0] if i != 0] != [self.term]:
            return None
        depth, self.extents[d] = (d := sym("depth", 0, extent)), extent
        q, k = (self._matmul_side(first, n, sides[n][1], depth, collected) for n in (1 - key, key))
        other = self.product.operands[1 - self.side]
        values = self._match_values(other)
        if q is None or k is None or values is None:
            return None
        v, out, column = values
        own = self._operand_before_scaling(v, collected, scaled=False)
        scales: dict[str, Scale | None] = {}
        if self.narrow:
            keys, wide = (
                narrow_read_before_widening(x, self.extents, self.makers, i) for x, i in ((k, depth), (v, column))
            )
            if keys is None or wide is None:
                return None
            (k, scales["k_scale"]), (own, scales["v_scale"]) = keys, wide
        axes = {i for i in self.index if i not in (0, self.term)}
        masks, biases = self._bases_of_reads(collected.masks), self._bases_of_reads(collected.biases)
        if own is None or masks is None or biases is None or {i for i in q.index if i != 0} != {*axes, depth}:
            return None
        fill = collected.fill if collected.fill is not None else -np.inf
        return Attention(
            self.product, q, k, own, out, self.term, depth, column, collected.scale, fill, biases, masks,
            first.attrs.get("precision"), self.extents, **scales,
        )  # fmt: skip

    def _bases_of_reads(self, reads: Sequence[tuple[ElementRead, bool]]) -> tuple[tuple[ElementRead, bool], ...] | None:
        bases = tuple((x, sign) for r, sign in reads if (x := earliest_read(r, self.extents, self.makers)) is not None)
        return bases if len(bases) == len(reads) else None

    def _matmul_side(
        self, first: Op, side: int, index: list[Dim | None], depth: Dim, collected: _Scores
    ) -> ElementRead | None:
        """Return the read of operand ``side`` of the first matmul, before widening and scaling, or None."""
        shape = first.operands[side].type.shape
        full = tuple((0 if n == 1 else depth) if i is None else i for i, n in zip(index, shape, strict=True))
        return self._operand_before_scaling(ElementRead(first.operands[side], full), collected)

    def _operand_before_scaling(self, read: ElementRead, collected: _Scores, scaled: bool = True) -> ElementRead | None:
        """Return a matmul operand before widening and scaling; ``collected`` collects the scale."""
        best = earliest_read(read, self.extents, self.makers)
        while best is not None and (op := self.makers.get(best.value)) is not None:
            inner = None
            if op.name == "convert" and is_widening_conversion(op):
                inner = op.operands[0]
            elif scaled and (scale := self._scale_of_op(op)) is not None:
                n, number = scale
                inner = op.operands[n]
                collected.scale *= number if op.name == "mul" else 1 / number
            if inner is None:
                return best
            best = earliest_read(replace(best, value=inner), self.extents, self.makers)
        return best

    def _match_values(self, other: Value) -> tuple[ElementRead, Index, Dim] | None:
        """Return the read of the values, the index of the result, and the symbol of a column; or None."""
        index: list[Dim | None] = [None] * other.type.rank
        for name in ("batch", "contract"):
            for mine, theirs in zip(
                self._agreed_attribute(name), self._agreed_attribute(name, other=True), strict=True
            ):
                index[theirs] = self.index[mine]
        free = [d for d, i in enumerate(index) if i is None]
        wide = [d for d in free if other.type.shape[d] != 1]
        if len(wide) != 1:
            return None
        column = sym("column", 0, other.type.shape[wide[0]])
        self.extents[column] = other.type.shape[wide[0]]
        shared = (*self._agreed_attribute("batch"), *self._agreed_attribute("contract"))
        own: list[Dim] = [i for d, i in enumerate(self.index) if d not in shared]
        others: list[Dim] = [column if d in wide else 0 for d in free]
        batch = [self.index[d] for d in self._agreed_attribute("batch")]
        out = (*batch, *(own + others if self.side == 0 else others + own))
        full = tuple((column if d in wide else 0) if i is None else i for d, i in enumerate(index))
        return ElementRead(other, full), out, column


def _matmul_operand_indices(first: Op, side: int, at: Index) -> tuple[list[Dim], list[Dim | None]]:
    """Return the indices of the free dims, and of all dims, of operand ``side`` of a matmul read ``at`` an index.

    Contracted dims have the index None.
    """
    name = ("lhs", "rhs")[side]
    batch, contract = (list(first.attrs[f"{name}_{x}"]) for x in ("batch", "contract"))
    count = first.operands[0].type.rank - len(batch) - len(contract)
    index: list[Dim | None] = [None] * first.operands[side].type.rank
    for n, d in enumerate(batch):
        index[d] = at[n]
    free = [d for d in range(len(index)) if d not in (*batch, *contract)]
    places = at[len(batch) : len(batch) + count] if side == 0 else at[len(batch) + count :]
    for d, i in zip(free, places, strict=True):
        index[d] = i
    return list(places), index


def is_widening_conversion(op: Op) -> bool:
    """Return True if a conversion widens floats of at least 16 bits to at most f32."""
    source, target = op.operands[0].type.dtype, op.result.type.dtype
    floats = kind_of(source) == kind_of(target) == "f" and DTYPES[source].bits >= 16
    return floats and DTYPES[source].bits < DTYPES[target].bits <= 32


def _attention_with_result_movement(attention: Attention, users: Users) -> Attention:
    """Return the attention extended by movements and roundings of its result, as long as each has a single reader."""
    while len(readers := users.get(attention.root.result, ())) == 1 and (op := readers[0]) is not None:
        out = _index_after_movement(op, attention.out)
        if out is None:
            break
        attention = replace(attention, root=op, out=out)
    return attention


def _index_after_movement(op: Op, at: Index) -> Index | None:
    """Return the index of the result of an op that moves or rounds a value read ``at``; None for other ops."""
    match op.name:
        case "transpose":
            return tuple(at[d] for d in op.attrs["perm"])
        case "convert":
            narrows = op.operands[0].type.dtype == "f32" and op.result.type.dtype in ("bf16", "f16")
            return at if narrows else None
        case "reshape":
            before, after = op.operands[0].type.shape, op.result.type.shape
            if [n for n in before if n != 1] == [n for n in after if n != 1]:
                axes = iter([i for i in at if i != 0])
                return tuple(0 if n == 1 else next(axes) for n in after)
    return None
