"""Import of MLIR's ``arith`` and ``tensor`` ops, with which other producers than JAX compute sizes and constants.

A scalar of MLIR, as ``index`` or ``i64``, is a tensor without dimensions here. Integers have no sign in MLIR: the op
states it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.frontend.importers.shape import from_values
from aotc.frontend.mlir_types import DYNAMIC
from aotc.frontend.requirements import with_shape
from aotc.frontend.session import Importer, State
from aotc.ir.dims_compare import decide
from aotc.ir.tensor_ir import TensorType, Value
from aotc.vmfb.dtypes import kind_of, to_numpy

_BINARY = {
    "addi": "add", "subi": "sub", "muli": "mul", "divsi": "div", "remsi": "rem", "maxsi": "max", "minsi": "min",
    "andi": "and", "ori": "or", "xori": "xor", "shli": "shl", "shrsi": "shr_arith", "shrui": "shr_logic",
    "addf": "add", "subf": "sub", "mulf": "mul", "divf": "div", "remf": "rem", "maximumf": "max", "minimumf": "min",
    "negf": "neg",
}  # fmt: skip
_OF_BITS = {"arith.addi": "xor", "arith.subi": "xor", "arith.muli": "and"}
"""Arithmetic on i1 is modulo 2; StableHLO's sum of two i1 is a disjunction."""
_SIGNLESS = frozenset({*_OF_BITS, "arith.andi", "arith.ori", "arith.xori"})
_OF_UNSIGNED = {"divui": "div", "remui": "rem", "maxui": "max", "minui": "min"}
_PREDICATES = {
    0: ("eq", ""), 1: ("ne", ""), 2: ("lt", "signed"), 3: ("le", "signed"), 4: ("gt", "signed"), 5: ("ge", "signed"),
    6: ("lt", "unsigned"), 7: ("le", "unsigned"), 8: ("gt", "unsigned"), 9: ("ge", "unsigned"),
}  # fmt: skip
"""Predicates of ``arith.cmpi`` by number, and the sign of the integers where it matters."""
_ORDERED = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le", 13: "ne"}
"""Predicates of ``arith.cmpf`` that compare as StableHLO does, by number: false for NaN, except ``une``."""


def _binary(name: str) -> Importer:
    def importer(state: State, op: Any) -> None:
        operands = state.operands(op) if op.name in _SIGNLESS else _wide_operands(state, op)
        is_bits = operands[0].type.dtype == "i1"
        state.bind(op, [state.one(_OF_BITS.get(op.name, name) if is_bits else name, operands)])

    return importer


def _wide_operands(state: State, op: Any) -> list[Value]:
    """Return the operands of an op on integers; refuse i1, of which the number is 0 or -1 in MLIR but 0 or 1 here."""
    operands = state.operands(op)
    if operands[0].type.dtype == "i1":
        state.fail(f"{op.name} on i1 is not supported", "extend the operands with arith.extui or arith.extsi")
    return operands


def _unsigned(state: State, values: list[Value]) -> list[Value]:
    """Return ``values`` as unsigned integers of their width, or as they are if none can be negative."""
    if all(_is_natural(state, v) for v in values):
        return values
    return [_as_dtype(state, v, _unsigned_dtype(v.type.dtype)) for v in values]


def _is_natural(state: State, v: Value) -> bool:
    """Return True if ``v`` holds sizes that cannot be negative; values of arguments may be."""
    known = state.known.get(v)
    return known is not None and all(decide("le", 0, d) for d in known) and not from_values(state, known)


def _unsigned_dtype(dtype: str) -> str:
    return dtype.replace("i", "u") if kind_of(dtype) == "i" else dtype


def _as_dtype(state: State, v: Value, dtype: str) -> Value:
    """Return the bits of ``v`` as ``dtype`` of the same width."""
    return v if v.type.dtype == dtype else state.one("bitcast", [v], {}, [TensorType(dtype, v.type.shape)])


def _unsigned_binary(name: str) -> Importer:
    def importer(state: State, op: Any) -> None:
        operands = _wide_operands(state, op)
        result = state.one(name, _unsigned(state, operands))
        state.bind(op, [_as_dtype(state, result, operands[0].type.dtype)])

    return importer


def _rounded_division(sign: int) -> Importer:
    """Import a signed division that rounds down (``sign`` -1) or up (1).

    The quotient is truncated. It is off by ``sign`` if a remainder is left and the exact quotient has that sign.
    """

    def importer(state: State, op: Any) -> None:
        a, b = _wide_operands(state, op)
        t = a.type
        zero = state.constant(np.array(0, to_numpy(t.dtype)), t)
        quotient, rest = state.one("div", [a, b]), state.one("rem", [a, b])
        negative = state.one("ne", [state.one("lt", [a, zero]), state.one("lt", [b, zero])])
        wanted = negative if sign < 0 else state.one("not", [negative])
        wrong = state.one("and", [state.one("ne", [rest, zero]), wanted])
        correction = state.convert(wrong, t.dtype)
        state.bind(op, [state.one("add" if sign > 0 else "sub", [quotient, correction])])

    return importer


def _ceildivui(state: State, op: Any) -> None:
    a, b = _wide_operands(state, op)
    left, right = _unsigned(state, [a, b])
    rest = state.one("rem", [left, right])
    zero = state.constant(np.array(0, to_numpy(rest.type.dtype)), rest.type)
    more = state.convert(state.one("ne", [rest, zero]), rest.type.dtype)
    quotient = state.one("add", [state.one("div", [left, right]), more])
    state.bind(op, [_as_dtype(state, quotient, a.type.dtype)])


def _cmpi(state: State, op: Any) -> None:
    predicate, sign = _PREDICATES[op.attributes["predicate"].value]
    operands = _wide_operands(state, op) if sign else state.operands(op)
    if sign == "unsigned":
        operands = _unsigned(state, operands)
    state.bind(op, [state.one(predicate, operands)])


def _cmpf(state: State, op: Any) -> None:
    predicate = op.attributes["predicate"].value
    if predicate not in _ORDERED:
        state.fail(f"{op.get_asm().strip()} is not supported", "predicates oeq, ogt, oge, olt, ole and une are")
    state.bind(op, [state.one(_ORDERED[predicate], state.operands(op))])


def _select(state: State, op: Any) -> None:
    test, a, b = state.operands(op)
    state.bind(op, [state.one("select", [state.broadcast_scalar(test, a.type.shape), a, b])])


def _convert_signed(state: State, op: Any) -> None:
    """Convert signed integers; those of one bit are 0 and -1."""
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    converted = state.convert(x, dtype)
    state.bind(op, [state.one("neg", [converted]) if x.type.dtype == "i1" != dtype else converted])


def _convert_unsigned(state: State, op: Any) -> None:
    (x,) = _unsigned(state, state.operands(op))
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _trunci(state: State, op: Any) -> None:
    """Drop high bits; of i1 the lowest bit stays, though any number but 0 is true in StableHLO."""
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    if dtype == "i1":
        x = state.one("and", [x, state.constant(np.array(1, to_numpy(x.type.dtype)), x.type)])
    state.bind(op, [state.convert(x, dtype)])


def _convert_float(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    if "roundingmode" in op.attributes and op.attributes["roundingmode"].value != 0:
        state.fail(f"{op.name} with a rounding mode is not supported", "round to nearest, ties to even")
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _float_to_integer(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    if dtype == "i1":
        state.fail(f"{op.name} to i1 is not supported", "compare with arith.cmpf")
    if op.name == "arith.fptosi":
        state.bind(op, [state.convert(x, dtype)])
        return
    state.bind(op, [_as_dtype(state, state.convert(x, _unsigned_dtype(dtype)), dtype)])


def _bitcast(state: State, op: Any) -> None:
    (x,) = state.operands(op)
    state.bind(op, [_as_dtype(state, x, state.dtype(op.results[0].type))])


def _index_of(state: State, v: Value, what: str) -> int:
    """Return an index that is known when the model is compiled."""
    (index,) = state.known.get(v, (None,))
    if not isinstance(index, int):
        state.fail(f"{what} is not a constant", "index with arith.constant")
    return index


def _dim(state: State, op: Any) -> None:
    x, where = state.operands(op)
    index = _index_of(state, where, "the dimension of tensor.dim")
    if not 0 <= index < x.type.rank:
        state.fail(f"tensor.dim {index} of {x.type}", f"an index below {x.type.rank}")
    state.bind(op, [state.one("dim", (), {"expr": x.type.shape[index]}, [TensorType("i64")])])


def _from_elements(state: State, op: Any) -> None:
    t = state.static_type(op.results[0].type)
    elements = state.operands(op)
    if not elements:
        state.bind(op, [state.constant(np.zeros((), to_numpy(t.dtype)), t)])
        return
    rows = [state.one("reshape", [v], {}, [TensorType(t.dtype, (1,))]) for v in elements]
    flat = rows[0] if len(rows) == 1 else state.one("concatenate", rows, {"dim": 0})
    state.bind(op, [flat if flat.type == t else state.one("reshape", [flat], {}, [t])])


def _extract(state: State, op: Any) -> None:
    x, *where = state.operands(op)
    if not where:
        state.bind(op, [x])
        return
    indices = [_index_of(state, v, "an index of tensor.extract") for v in where]
    for index, size in zip(indices, x.type.shape, strict=True):
        if index < 0 or (isinstance(size, int) and index >= size):
            state.fail(f"tensor.extract of element {index} of {x.type}", "an index within the tensor")
        state.require("le", index + 1, size, "tensor.extract of element {0} of {1}", (index, size))
    attrs = {"start": tuple(indices), "limit": tuple(n + 1 for n in indices), "stride": (1,) * len(indices)}
    state.bind(op, [state.one("reshape", [state.one("slice", [x], attrs)], {}, [TensorType(x.type.dtype)])])


def _cast(state: State, op: Any) -> None:
    """Hand the tensor on; sizes that the result states are checked when it is bound."""
    (x,) = state.operands(op)
    _, shape = state.session.parts(op.results[0].type)
    if len(shape) != x.type.rank:
        state.fail(f"tensor.cast of {x.type} to rank {len(shape)}", "keep the rank")
    sizes = tuple(own if n == DYNAMIC else n for n, own in zip(shape, x.type.shape))
    state.bind(op, [with_shape(state, x, sizes)])


def _splat(state: State, op: Any) -> None:
    x = state.value(op.operands[0])
    if len(op.operands) > 1:
        state.fail("tensor.splat of sizes that are not known is not supported", "stablehlo.dynamic_broadcast_in_dim")
    state.bind(op, [state.broadcast_scalar(x, state.static_type(op.results[0].type).shape)])


SHAPE_ARITH: dict[str, Importer] = {
    **{f"arith.{name}": _binary(ours) for name, ours in _BINARY.items()},
    **{f"arith.{name}": _unsigned_binary(ours) for name, ours in _OF_UNSIGNED.items()},
    "arith.floordivsi": _rounded_division(-1),
    "arith.ceildivsi": _rounded_division(1),
    "arith.ceildivui": _ceildivui,
    "arith.cmpi": _cmpi,
    "arith.cmpf": _cmpf,
    "arith.select": _select,
    **dict.fromkeys(("arith.index_cast", "arith.extsi", "arith.sitofp"), _convert_signed),
    **dict.fromkeys(("arith.index_castui", "arith.extui", "arith.uitofp"), _convert_unsigned),
    "arith.trunci": _trunci,
    **dict.fromkeys(("arith.extf", "arith.truncf"), _convert_float),
    **dict.fromkeys(("arith.fptosi", "arith.fptoui"), _float_to_integer),
    "arith.bitcast": _bitcast,
    "tensor.dim": _dim,
    "tensor.from_elements": _from_elements,
    "tensor.extract": _extract,
    "tensor.cast": _cast,
    "tensor.splat": _splat,
}
