"""CHLO's broadcasting ops, rewritten in the MLIR module before it is imported.

Before: ``chlo.broadcast_add %x, %y``. After: ``%a, %b = aotc.broadcast %x, %y`` and ``stablehlo.add %a, %b``. The
importer knows the shapes of ``aotc.broadcast``, also the symbolic ones; jaxlib's own pass would read them at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError
from aotc.frontend.importers.shape import broadcast_to_type
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.mlir_types import integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim, maximum, minimum
from aotc.ir.tensor.ir import TensorType

PREFIX = "chlo.broadcast_"
_TOGETHER = "aotc.broadcast"
_DIFFER = "sizes {0} and {1} cannot be broadcast together"
_IN_CHLO = ("next_after", "polygamma", "zeta")


def rewrite_broadcasting(op: Any, path: str = "") -> Any:
    """Replace one ``chlo.broadcast_*`` op by broadcasts and an op over equal shapes; return that op.

    jaxlib's passes crash on some operand types that CHLO accepts; these are rejected here.
    """
    check_ranks(op, path)
    name, loc = op.name.removeprefix(PREFIX), loc_from_mlir(op.location, path)
    result = op.results[0].type
    attributes = [op.attributes[n] for n in range(len(op.attributes))]
    dims = {a.name: a.attr for a in attributes if a.name == "broadcast_dimensions"}
    others = {a.name: _stablehlo_attribute(a.attr) for a in attributes if a.name not in dims}
    with ir.InsertionPoint(op), op.location:
        shapes = [ir.RankedTensorType.get(result.shape, v.type.element_type) for v in op.operands]
        wide = ir.Operation.create(_TOGETHER, results=shapes, operands=list(op.operands), attributes=dims)
        dialect = "chlo" if name in _IN_CHLO else "stablehlo"
        new = ir.Operation.create(
            f"{dialect}.{name}", results=[result], operands=list(wide.results), attributes=others
        )
    try:
        new.verify()
    except ir.MLIRError as error:
        what = "; ".join(d.message for d in error.error_diagnostics) or str(error)
        hint = f"element types that {dialect}.{name} takes"
        raise CompileError.at(loc, f"{op.name}: {what}", hint=hint, snippet=str(op)) from None
    op.results[0].replace_all_uses_with(new.results[0])
    op.erase()
    return new


def check_decomposable(op: Any, path: str) -> None:
    """Reject a CHLO op that passes MLIR's verifier but crashes jaxlib's passes."""
    check_ranks(op, path)
    left = op.operands[0].type if op.name == "chlo.ragged_dot" else None
    if left is not None and not isinstance(left.element_type, ir.IntegerType | ir.FloatType):
        message = f"{op.name}: its left operand is {left}, expected integers or floats"
        hint = "one dot_general for each group, or the real and imaginary parts by themselves"
        raise CompileError.at(loc_from_mlir(op.location, path), message, hint=hint, snippet=str(op))


def check_ranks(op: Any, path: str) -> None:
    """Reject an op with an unranked operand or result."""
    if not all(isinstance(v.type, ir.RankedTensorType) for v in (*op.operands, *op.results)):
        raise CompileError.at(
            loc_from_mlir(op.location, path), f"{op.name}: an operand or a result has no rank",
            hint="give every tensor a rank", snippet=str(op),
        )  # fmt: skip


def _stablehlo_attribute(attribute: Any) -> Any:
    text = str(attribute)
    return ir.Attribute.parse(text.replace("#chlo<", "#stablehlo<")) if text.startswith("#chlo<") else attribute


def common_size(state: ImportState, sizes: Sequence[Dim]) -> Dim:
    """Return the size to which ``sizes`` of one dim broadcast; sizes other than 1 must be equal.

    Two different unknown sizes are allowed: a call may pass 1 for either.
    """
    common: Dim = 1
    for size in sizes:
        if common == size or size == 1:
            continue
        if common == 1:
            common = size
            continue
        if isinstance(common, int) and isinstance(size, int):
            state.fail(f"sizes {common} and {size} cannot be broadcast together", "equal sizes, or sizes of 1")
        pair = (common, size)
        state.require("eq", (common - 1) * (size - 1) * (common - size), 0, _DIFFER, pair)
        lone = [n for n in pair if isinstance(n, int)]
        common = lone[0] if lone else maximum(*pair) * minimum(minimum(*pair), 1)  # 0 next to 1 is 0
    return common


def _import_broadcast_together(state: ImportState, op: Any) -> None:
    """Import ``aotc.broadcast``: broadcast the operands to their common shape.

    Dims are aligned by ``broadcast_dimensions``, or else from the right.
    """
    operands = state.operands(op)
    rank = max(v.type.rank for v in operands)
    stated = op.attributes.get("broadcast_dimensions")
    places = [
        integer_tuple(stated) if stated is not None and v.type.rank < rank else tuple(range(rank - v.type.rank, rank))
        for v in operands
    ]
    shape = tuple(
        common_size(state, [v.type.shape[dims.index(d)] for v, dims in zip(operands, places) if d in dims])
        for d in range(rank)
    )
    types = [TensorType(v.type.dtype, shape) for v in operands]
    state.bind(op, [broadcast_to_type(state, v, d, t) for v, d, t in zip(operands, places, types, strict=True)])


SHAPE_BROADCASTING: dict[str, Importer] = {_TOGETHER: _import_broadcast_together}
