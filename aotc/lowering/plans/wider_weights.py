"""Decide whether weights are stored narrow and widened by their readers, or converted once to a wide copy.

A call that reads f32 copies of bf16 weights reads twice the bytes. So a conversion stays in the call if all readers
fuse it: loops, reductions, and matmuls of few rows on a GPU, whose tiles widen the loaded elements. Packing, matmuls of
many rows, convolutions and control flow read their operands from memory: for these, a wide copy is stored once before
calls, as otherwise each call would write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from aotc.ir.opset import ELEMENTWISE, EXPENSIVE, MOVES
from aotc.ir.tensor.ir import Function, Op, Region, Value, values_captured_by_op
from aotc.lowering.analysis.index_maps import value_before_movement
from aotc.lowering.cost_model.work import estimated_bytes, estimated_elements
from aotc.lowering.plans.operand_views import is_widened_in_tiles
from aotc.lowering.plans.thresholds import REPEATED_WORK
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of
from aotc.vmfb.float_formats import SMALL_FLOATS


class WiderWeights:
    """Analysis of a function: the values that readers should compute from narrower weights.

    Parameters
    ----------
    function : Function
    home : callable
        Returns the target on which an op runs.
    """

    def __init__(self, function: Function, home: Callable[[Op], Target]) -> None:
        """Record the definitions, readers and regions of the values of ``function``."""
        self.home = home
        self.makers: dict[Value, Op] = {}
        self._readers: dict[Value, list[tuple[Op, Region]]] = {}
        self._region: dict[Value, Region] = dict.fromkeys(function.body.params, function.body)
        self._results: set[Value] = set()
        self._record_definitions_and_readers(function.body)

    def _record_definitions_and_readers(self, region: Region) -> None:
        """Record, for each value of ``region``, the op that defines it, its readers and its region."""
        self._results.update(region.results)
        for op in region.ops:
            self.makers.update((v, op) for v in op.results)
            self._region.update((v, region) for v in op.results)
            for v in dict.fromkeys((*op.operands, *values_captured_by_op(op))):
                self._readers.setdefault(v, []).append((op, region))
            for inner in op.regions:
                self._region.update((v, inner) for v in inner.params)
                self._record_definitions_and_readers(inner)

    def is_computed_by_readers(self, v: Value, roots: Iterable[Value]) -> bool:
        """Return True if readers compute ``v`` from smaller ``roots`` instead of loading it."""
        sources = list(roots)
        return self._is_wider(v, sources) and self._is_cheap_to_recompute(v, sources) and self._is_fused_into_readers(v)

    def _is_wider(self, v: Value, roots: list[Value]) -> bool:
        """Return True if ``v`` has more bytes than the weights ``roots`` together, and wider elements."""
        bytes_, elements = (sum(map(count, roots)) for count in (estimated_bytes, _weight_element_count))
        return estimated_bytes(v) > bytes_ and size_of(v.type.dtype) * elements > bytes_

    def _is_cheap_to_recompute(self, v: Value, roots: list[Value]) -> bool:
        """Return True if few cheap ops compute ``v``, so that each read may repeat them."""
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
        """Return True if the target has instructions for the dtypes of the operands of ``op``."""
        dtypes = {x.type.dtype for x in op.operands}
        return dtypes.isdisjoint(SMALL_FLOATS) and dtypes.isdisjoint(self.home(op).lacks)

    def _is_fused_into_readers(self, v: Value) -> bool:
        """Return True if all readers of ``v`` compute it as they read it, and ``v`` is not a result."""
        if v in self._results:
            return False
        return all(
            self._region.get(v) is region and self._op_fuses_operand(op, v) for op, region in self._readers.get(v, ())
        )

    def _op_fuses_operand(self, op: Op, v: Value) -> bool:
        """Return True if ``op`` computes its operand ``v`` inline while reading it."""
        match op.name:
            case "reduce":
                return True
            case "matmul":
                return self._matmul_converts_operand(op, v)
            case "transpose" if op.attrs["perm"][-1] != v.type.rank - 1:
                # It moves the last dim, so it is written to memory unless all of its readers are matmuls.
                products = all(user.name == "matmul" for user, _ in self._readers.get(op.result, ()))
                return products and self._is_fused_into_readers(op.result)
            case name if name in MOVES:
                return self._is_fused_into_readers(op.result)
            case name if name in ELEMENTWISE:
                made_of = [self.makers.get(x) for x in op.operands if x is not v]
                alone = all(m is not None and m.name in ("constant", *MOVES) for m in made_of)
                return self._is_fused_into_readers(op.result) if alone else True
        return False

    def _matmul_converts_operand(self, op: Op, v: Value) -> bool:
        """Return True if a GPU matmul reads the narrow sources of ``v`` and converts them itself."""
        if self.home(op).kind != "cuda":
            return False
        rows, columns = op.result.type.shape[-2:]
        narrow = {_narrow_float_source(x, self.makers) for x in op.operands}
        if len(narrow) == 1 and "" not in narrow:  # both were converted from the same dtype: that one is multiplied
            return True
        if 1 in (rows, columns):  # a matrix times a vector is a fused reduction
            return kind_of(op.result.type.dtype) == "f"
        return v is op.operands[1] and is_widened_in_tiles(v, rows, self.makers)


def _narrow_float_source(v: Value, makers: Mapping[Value, Op]) -> str:
    """Return the 16-bit float dtype from which ``v`` is converted, or the empty string."""
    op = makers.get(value_before_movement(v, makers))
    dtype = op.operands[0].type.dtype if op is not None and op.name == "convert" else ""
    return dtype if dtype in ("bf16", "f16") else ""


def _weight_element_count(v: Value) -> int:
    return estimated_elements(v.type.shape)
