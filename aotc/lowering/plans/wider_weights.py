"""Values of weights that are wider than these: do their readers compute them, or is a wide copy worth its bytes?

A call that reads f32 copies of bf16 weights reads twice the bytes. A conversion is left to those who read it if all of
these compute their operands where they read them: loops, reductions, and products of few rows on a GPU, whose tiles
widen what they load. Packing, products of many rows, convolutions and control flow read memory: for them a copy is made
once, as each call would otherwise write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from aotc.ir.opset import ELEMENTWISE, EXPENSIVE, MOVES
from aotc.ir.tensor.ir import Function, Op, Region, Value, captures
from aotc.lowering.analysis.index_maps import unmoved
from aotc.lowering.cost_model.work import guess_bytes, guess_elements
from aotc.lowering.plans.operand_views import is_widened_in_tiles
from aotc.lowering.plans.thresholds import REPEATED_WORK
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of
from aotc.vmfb.float_formats import SMALL_FLOATS


class WiderWeights:
    """The readers of a function's values.

    Parameters
    ----------
    function : Function
    home : callable
        The target of an op.
    """

    def __init__(self, function: Function, home: Callable[[Op], Target]) -> None:
        self.home = home
        self.makers: dict[Value, Op] = {}
        self._readers: dict[Value, list[tuple[Op, Region]]] = {}
        self._region: dict[Value, Region] = dict.fromkeys(function.body.params, function.body)
        self._results: set[Value] = set()
        self._visit(function.body)

    def _visit(self, region: Region) -> None:
        self._results.update(region.results)
        for op in region.ops:
            self.makers.update((v, op) for v in op.results)
            self._region.update((v, region) for v in op.results)
            for v in dict.fromkeys((*op.operands, *captures(op))):
                self._readers.setdefault(v, []).append((op, region))
            for inner in op.regions:
                self._region.update((v, inner) for v in inner.params)
                self._visit(inner)

    def are_computed(self, v: Value, roots: Iterable[Value]) -> bool:
        """Is ``v``, which is made of ``roots`` alone, wider than these, cheap, and computed by all of its readers?"""
        known = list(roots)
        return self._is_wider(v, known) and self._is_cheap(v, known) and self._is_fused(v)

    def _is_wider(self, v: Value, roots: list[Value]) -> bool:
        """Has ``v`` more bytes than its roots, and would it have no more if its elements were not wider?"""
        bytes_, elements = (sum(map(count, roots)) for count in (guess_bytes, _elements))
        return guess_bytes(v) > bytes_ and size_of(v.type.dtype) * elements > bytes_

    def _is_cheap(self, v: Value, roots: list[Value]) -> bool:
        """Is ``v`` made by few cheap ops, so that each read may repeat them?"""
        ops: dict[Op, None] = {}
        stack = [v]
        while stack:
            x = stack.pop()
            op = self.makers.get(x)
            if x in roots or op is None or op in ops or op.name == "constant":
                continue
            ops[op] = None
            stack += op.operands
        computed = [op for op in ops if op.name not in MOVES]
        cheap = all(op.name in ELEMENTWISE and op.name not in EXPENSIVE for op in computed)
        return cheap and REPEATED_WORK.holds(len(computed)) and all(self._is_read_fast(op) for op in computed)

    def _is_read_fast(self, op: Op) -> bool:
        """Has the target instructions for the dtypes that ``op`` converts from?"""
        dtypes = {x.type.dtype for x in op.operands}
        return dtypes.isdisjoint(SMALL_FLOATS) and dtypes.isdisjoint(self.home(op).lacks)

    def _is_fused(self, v: Value) -> bool:
        """Do all readers of ``v`` compute it where they read it?"""
        if v in self._results:
            return False
        return all(self._region.get(v) is region and self._fuses(op, v) for op, region in self._readers.get(v, ()))

    def _fuses(self, op: Op, v: Value) -> bool:
        match op.name:
            case "reduce":
                return True
            case "matmul":
                return self._product_fuses(op, v)
            case "transpose" if op.attrs["perm"][-1] != v.type.rank - 1:
                # any other reader would have it written: it moves the last dim
                products = all(user.name == "matmul" for user, _ in self._readers.get(op.result, ()))
                return products and self._is_fused(op.result)
            case name if name in MOVES:
                return self._is_fused(op.result)
            case name if name in ELEMENTWISE:
                made_of = [self.makers.get(x) for x in op.operands if x is not v]
                alone = all(m is not None and m.name in ("constant", *MOVES) for m in made_of)
                return self._is_fused(op.result) if alone else True
        return False

    def _product_fuses(self, op: Op, v: Value) -> bool:
        """Does a product on a GPU read ``v`` as what it is made of?"""
        if self.home(op).kind != "cuda":
            return False
        rows, columns = op.result.type.shape[-2:]
        narrow = {_narrow(x, self.makers) for x in op.operands}
        if len(narrow) == 1 and "" not in narrow:  # both are converted from one dtype, which is multiplied
            return True
        if 1 in (rows, columns):  # a sum of products with a vector
            return kind_of(op.result.type.dtype) == "f"
        return v is op.operands[1] and is_widened_in_tiles(v, rows, self.makers)


def _narrow(v: Value, makers: Mapping[Value, Op]) -> str:
    """Return the dtype of 16 bits that ``v`` is converted from, or the empty string."""
    op = makers.get(unmoved(v, makers))
    dtype = op.operands[0].type.dtype if op is not None and op.name == "convert" else ""
    return dtype if dtype in ("bf16", "f16") else ""


def _elements(v: Value) -> int:
    return guess_elements(v.type.shape)
