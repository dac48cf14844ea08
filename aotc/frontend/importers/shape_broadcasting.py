"""CHLO's broadcasting ops, rewritten in the MLIR module before it is imported.

Before: ``chlo.broadcast_add %x, %y``. After: ``%a, %b = aotc.broadcast %x, %y`` and ``stablehlo.add %a, %b``. The
importer knows the shapes of ``aotc.broadcast``, also the symbolic ones; jaxlib's own pass would read them at run time.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError
from aotc.frontend.locations import to_loc
from aotc.frontend.mlir_types import integers
from aotc.frontend.requirements import with_shape
from aotc.frontend.session import Importer, State
from aotc.ir.dims import Dim
from aotc.ir.tensor_ir import TensorType, Value

PREFIX = "chlo.broadcast_"
_TOGETHER = "aotc.broadcast"
_IN_CHLO = ("next_after", "polygamma", "zeta")


def rewrite_broadcasting(op: Any, path: str = "") -> Any:
    """Replace one ``chlo.broadcast_*`` op; return the op over equal shapes that stands in its place.

    CHLO lets more types pass than that op takes; jaxlib's passes, which do not expect them, end the process.
    """
    check_ranks(op, path)
    name, loc = op.name.removeprefix(PREFIX), to_loc(op.location, path)
    result = op.results[0].type
    attributes = [op.attributes[n] for n in range(len(op.attributes))]
    dims = {a.name: a.attr for a in attributes if a.name == "broadcast_dimensions"}
    others = {a.name: _of_stablehlo(a.attr) for a in attributes if a.name not in dims}
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
    """Refuse an op at which jaxlib's passes end the process, though MLIR's verifier takes it."""
    check_ranks(op, path)
    left = op.operands[0].type if op.name == "chlo.ragged_dot" else None
    if left is not None and not isinstance(left.element_type, ir.IntegerType | ir.FloatType):
        message = f"{op.name}: its left operand is {left}, expected integers or floats"
        hint = "one dot_general for each group, or the real and imaginary parts by themselves"
        raise CompileError.at(to_loc(op.location, path), message, hint=hint, snippet=str(op))


def check_ranks(op: Any, path: str) -> None:
    """Refuse an op with a tensor without rank, where that would not be found out before something fails at it."""
    if not all(isinstance(v.type, ir.RankedTensorType) for v in (*op.operands, *op.results)):
        raise CompileError.at(
            to_loc(op.location, path), f"{op.name}: an operand or a result has no rank",
            hint="give every tensor a rank", snippet=str(op),
        )  # fmt: skip


def _of_stablehlo(attribute: Any) -> Any:
    text = str(attribute)
    return ir.Attribute.parse(text.replace("#chlo<", "#stablehlo<")) if text.startswith("#chlo<") else attribute


def _common(state: State, sizes: list[Dim]) -> Dim:
    """Return the size that ``sizes`` of one dim broadcast to; ones give way, the others must be equal."""
    rest = [n for n in sizes if n != 1]
    static = [n for n in rest if isinstance(n, int)]
    if any(n != static[0] for n in static):
        state.fail(f"sizes {static[0]} and {next(n for n in static if n != static[0])} cannot be broadcast together")
    return (static or rest or [1])[0]


def _together(state: State, op: Any) -> None:
    """Spread the operands over their common shape; trailing dims match unless ``broadcast_dimensions`` says where."""
    operands = state.operands(op)
    rank = max(v.type.rank for v in operands)
    given = op.attributes.get("broadcast_dimensions")
    places = [
        integers(given) if given is not None and v.type.rank < rank else tuple(range(rank - v.type.rank, rank))
        for v in operands
    ]
    shape = tuple(
        _common(state, [v.type.shape[dims.index(d)] for v, dims in zip(operands, places) if d in dims])
        for d in range(rank)
    )
    state.bind(op, [_spread(state, v, dims, shape) for v, dims in zip(operands, places)])


def _spread(state: State, v: Value, dims: tuple[int, ...], shape: tuple[Dim, ...]) -> Value:
    sizes = tuple(n if n == 1 else shape[d] for n, d in zip(v.type.shape, dims, strict=True))
    v = with_shape(state, v, sizes)
    if sizes == shape:
        return v
    return state.one("broadcast", [v], {"dims": dims}, [TensorType(v.type.dtype, shape)])


SHAPE_BROADCASTING: dict[str, Importer] = {_TOGETHER: _together}
