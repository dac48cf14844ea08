"""Import of MLIR's ``arith`` ops, by which producers other than JAX compute sizes and constants.

An MLIR scalar, such as ``index`` or ``i64``, is a tensor without dims here. Integers are signless in MLIR: the op
determines the sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.frontend.importers.shape import dims_depend_on_values
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.compare import decide_relation
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy

_BINARY = {
    "addi": "add", "subi": "sub", "muli": "mul", "divsi": "div", "remsi": "rem", "maxsi": "max", "minsi": "min",
    "andi": "and", "ori": "or", "xori": "xor", "shli": "shl", "shrsi": "shr_arith", "shrui": "shr_logic",
    "addf": "add", "subf": "sub", "mulf": "mul", "divf": "div", "remf": "rem", "maximumf": "max", "minimumf": "min",
    "negf": "neg",
}  # fmt: skip
_OF_BITS = {"arith.addi": "xor", "arith.subi": "xor", "arith.muli": "and"}
"""Arithmetic on i1 is modulo 2; StableHLO's sum of two i1 is a disjunction."""
_EXTREMES_OF_BITS = {"arith.maxsi": "and", "arith.minsi": "or", "arith.maxui": "or", "arith.minui": "and"}
"""The larger of two i1, where true is -1 for signed and 1 for unsigned numbers."""
_SIGNLESS = frozenset({*_OF_BITS, *_EXTREMES_OF_BITS, "arith.andi", "arith.ori", "arith.xori"})
_OF_UNSIGNED = {"divui": "div", "remui": "rem", "maxui": "max", "minui": "min"}
_PREDICATES = {
    0: ("eq", ""), 1: ("ne", ""), 2: ("lt", "signed"), 3: ("le", "signed"), 4: ("gt", "signed"), 5: ("ge", "signed"),
    6: ("lt", "unsigned"), 7: ("le", "unsigned"), 8: ("gt", "unsigned"), 9: ("ge", "unsigned"),
}  # fmt: skip
"""Predicates of ``arith.cmpi`` by number, with the sign of the integers where it matters."""
_ORDERED = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le", 13: "ne"}
"""Predicates of ``arith.cmpf`` that compare as StableHLO does, by number: false for NaN, except ``une``."""
_OPPOSITE = {8: 6, 9: 5, 10: 4, 11: 3, 12: 2, 14: 7}
"""Predicates of ``arith.cmpf`` that are true for NaN, with their negations."""


def _binary_importer(name: str) -> Importer:
    """Return the importer of an ``arith`` op on signed integers or floats that is the tensor op ``name``."""

    def importer(state: ImportState, op: Any) -> None:
        operands = state.operands(op) if op.name in _SIGNLESS else _wide_operands(state, op)
        is_bits = operands[0].type.dtype == "i1"
        of_bits = _OF_BITS | _EXTREMES_OF_BITS
        state.bind(op, [state.one(of_bits.get(op.name, name) if is_bits else name, operands)])

    return importer


def _wide_operands(state: ImportState, op: Any) -> list[Value]:
    """Return the operands of an integer op; reject i1: true is -1 in MLIR's arithmetic, but 1 in tensor IR."""
    operands = state.operands(op)
    if operands[0].type.dtype == "i1":
        state.fail(f"{op.name} on i1 is not supported", "extend the operands with arith.extui or arith.extsi")
    return operands


def _as_unsigned(state: ImportState, values: list[Value]) -> list[Value]:
    """Return ``values`` as unsigned integers of the same width, or unchanged if none can be negative."""
    if all(_is_natural(state, v) for v in values):
        return values
    return [as_dtype(state, v, _unsigned_dtype(v.type.dtype)) for v in values]


def _is_natural(state: ImportState, v: Value) -> bool:
    """Return True if the elements of ``v`` are sizes and cannot be negative; values of integer arguments can be."""
    dims = state.known.get(v)
    return (
        dims is not None
        and all(decide_relation("le", 0, d) for d in dims)
        and not dims_depend_on_values(state, dims)
    )


def _unsigned_dtype(dtype: str) -> str:
    return dtype.replace("i", "u") if kind_of(dtype) == "i" else dtype


def as_dtype(state: ImportState, v: Value, dtype: str) -> Value:
    """Return the bits of ``v`` as ``dtype`` of the same width."""
    return v if v.type.dtype == dtype else state.one("bitcast", [v], {}, [TensorType(dtype, v.type.shape)])


def _unsigned_binary_importer(name: str) -> Importer:
    """Return the importer of an ``arith`` op on unsigned integers: the tensor op ``name`` on unsigned types."""

    def importer(state: ImportState, op: Any) -> None:
        """Import an op on the bits of integers as unsigned numbers."""
        if state.dtype(op.operands[0].type) == "i1" and op.name in _EXTREMES_OF_BITS:
            state.bind(op, [state.one(_EXTREMES_OF_BITS[op.name], state.operands(op))])
            return
        operands = _wide_operands(state, op)
        result = state.one(name, _as_unsigned(state, operands))
        state.bind(op, [as_dtype(state, result, operands[0].type.dtype)])

    return importer


def _rounded_division_importer(sign: int) -> Importer:
    """Return the importer of a signed division that rounds down (``sign`` -1) or up (1).

    The truncated quotient is off by ``sign`` if there is a remainder and the exact quotient has that sign.
    """

    def importer(state: ImportState, op: Any) -> None:
        """Import the division; correct the truncated quotient by 1 where the remainder requires it."""
        a, b = _wide_operands(state, op)
        t = a.type
        zero = state.constant(np.array(0, to_numpy(t.dtype)), t)
        quotient, rest = state.one("div", [a, b]), state.one("rem", [a, b])
        negative = state.one("ne", [state.one("lt", [a, zero]), state.one("lt", [b, zero])])
        has_sign = negative if sign < 0 else state.one("not", [negative])
        wrong = state.one("and", [state.one("ne", [rest, zero]), has_sign])
        correction = state.convert(wrong, t.dtype)
        state.bind(op, [state.one("add" if sign > 0 else "sub", [quotient, correction])])

    return importer


def _import_ceildivui(state: ImportState, op: Any) -> None:
    """Import ``ceildivui``: the quotient of unsigned numbers, plus 1 if there is a remainder."""
    a, b = _wide_operands(state, op)
    left, right = _as_unsigned(state, [a, b])
    rest = state.one("rem", [left, right])
    zero = state.constant(np.array(0, to_numpy(rest.type.dtype)), rest.type)
    more = state.convert(state.one("ne", [rest, zero]), rest.type.dtype)
    quotient = state.one("add", [state.one("div", [left, right]), more])
    state.bind(op, [as_dtype(state, quotient, a.type.dtype)])


def _import_cmpi(state: ImportState, op: Any) -> None:
    """Import ``cmpi`` by the signedness of its predicate."""
    predicate, sign = _PREDICATES[op.attributes["predicate"].value]
    operands = state.operands(op)
    if operands[0].type.dtype == "i1":  # a signed true is -1
        operands = operands[::-1] if sign == "signed" else operands
    elif sign == "unsigned":
        operands = _as_unsigned(state, operands)
    state.bind(op, [state.one(predicate, operands)])


def _import_cmpf(state: ImportState, op: Any) -> None:
    state.bind(op, [_float_comparison(state, op.attributes["predicate"].value, *state.operands(op))])


def _float_comparison(state: ImportState, predicate: int, a: Value, b: Value) -> Value:
    """Return the float comparison of an ``arith.cmpf`` predicate number."""
    if predicate in _ORDERED:
        return state.one(_ORDERED[predicate], [a, b])
    if predicate in _OPPOSITE:
        return state.one("not", [_float_comparison(state, _OPPOSITE[predicate], a, b)])
    match predicate:
        case 6:  # one: below or above
            return state.one("or", [state.one("lt", [a, b]), state.one("gt", [a, b])])
        case 7:  # ord: neither is NaN
            return state.one("and", [state.one("eq", [v, v]) for v in (a, b)])
    return state.constant(np.array(predicate == 15), TensorType("i1", a.type.shape))


def _nan_ignoring_importer(name: str) -> Importer:
    """Return the importer of ``name``, the maximum or minimum of two floats that ignores a NaN."""

    def importer(state: ImportState, op: Any) -> None:
        """Import a minimum or maximum that returns the other operand for NaN."""
        a, b = state.operands(op)
        result = state.one(name, [a, b])
        for nan, other in ((a, b), (b, a)):
            result = state.one("select", [state.one("ne", [nan, nan]), other, result])
        state.bind(op, [result])

    return importer


def _carry_importer(name: str) -> Importer:
    """Return the importer of an unsigned sum or difference with its carry."""

    def importer(state: ImportState, op: Any) -> None:
        """Import an unsigned sum or difference with its overflow bit."""
        a, b = _wide_operands(state, op)
        x, y = (as_dtype(state, v, _unsigned_dtype(v.type.dtype)) for v in (a, b))
        result = state.one(name, [x, y])
        overflows = state.one("lt", [result, x] if name == "add" else [x, y])
        state.bind(op, [as_dtype(state, result, a.type.dtype), overflows])

    return importer


def _extended_product_importer(signed: bool) -> Importer:
    """Return the importer of a product as low and high half, computed in twice the width."""

    def importer(state: ImportState, op: Any) -> None:
        """Import a product with twice the bits, as its low and its high half."""
        operands = _wide_operands(state, op)
        dtype = operands[0].type.dtype
        bits = DTYPES[dtype].bits
        if bits > 32:
            state.fail(f"{op.name} on {dtype} is not supported", "split the operands into halves of 32 bits")
        wide = f"{'i' if signed else 'u'}{2 * bits}"
        factors = operands if signed else [as_dtype(state, v, _unsigned_dtype(dtype)) for v in operands]
        product = state.one("mul", [state.convert(v, wide) for v in factors])
        shift = state.constant(np.array(bits, to_numpy(wide)), product.type)
        high = state.one("shr_arith" if signed else "shr_logic", [product, shift])
        state.bind(op, [as_dtype(state, state.convert(v, factors[0].type.dtype), dtype) for v in (product, high)])

    return importer


def _import_select(state: ImportState, op: Any) -> None:
    test, a, b = state.operands(op)
    state.bind(op, [state.one("select", [state.broadcast_scalar(test, a.type.shape), a, b])])


def _import_convert_signed(state: ImportState, op: Any) -> None:
    """Convert signed integers; one-bit ones are 0 and -1."""
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    converted = state.convert(x, dtype)
    state.bind(op, [state.one("neg", [converted]) if x.type.dtype == "i1" != dtype else converted])


def _import_convert_unsigned(state: ImportState, op: Any) -> None:
    (x,) = _as_unsigned(state, state.operands(op))
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _import_trunci(state: ImportState, op: Any) -> None:
    """Drop high bits; for i1 the lowest bit remains, whereas StableHLO converts any nonzero number to true."""
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    if dtype == "i1":
        x = state.one("and", [x, state.constant(np.array(1, to_numpy(x.type.dtype)), x.type)])
    state.bind(op, [state.convert(x, dtype)])


def _import_convert_float(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    if "roundingmode" in op.attributes and op.attributes["roundingmode"].value != 0:
        state.fail(f"{op.name} with a rounding mode is not supported", "round to nearest, ties to even")
    state.bind(op, [state.convert(x, state.dtype(op.results[0].type))])


def _import_float_to_integer(state: ImportState, op: Any) -> None:
    """Import a conversion of floats to signed or unsigned integers; i1 is an error."""
    (x,) = state.operands(op)
    dtype = state.dtype(op.results[0].type)
    if dtype == "i1":
        state.fail(f"{op.name} to i1 is not supported", "compare with arith.cmpf")
    if op.name == "arith.fptosi":
        state.bind(op, [state.convert(x, dtype)])
        return
    state.bind(op, [as_dtype(state, state.convert(x, _unsigned_dtype(dtype)), dtype)])


def bitcast(state: ImportState, op: Any) -> None:
    """Import a bitcast: a change of the element type that preserves the bits."""
    (x,) = state.operands(op)
    state.bind(op, [as_dtype(state, x, state.dtype(op.results[0].type))])


SHAPE_ARITH: dict[str, Importer] = {
    **{f"arith.{name}": _binary_importer(ours) for name, ours in _BINARY.items()},
    **{f"arith.{name}": _unsigned_binary_importer(ours) for name, ours in _OF_UNSIGNED.items()},
    "arith.floordivsi": _rounded_division_importer(-1),
    "arith.ceildivsi": _rounded_division_importer(1),
    "arith.ceildivui": _import_ceildivui,
    "arith.cmpi": _import_cmpi,
    "arith.cmpf": _import_cmpf,
    "arith.maxnumf": _nan_ignoring_importer("max"),
    "arith.minnumf": _nan_ignoring_importer("min"),
    "arith.addui_extended": _carry_importer("add"),
    "arith.subui_extended": _carry_importer("sub"),
    "arith.mulsi_extended": _extended_product_importer(signed=True),
    "arith.mului_extended": _extended_product_importer(signed=False),
    "arith.select": _import_select,
    **dict.fromkeys(("arith.index_cast", "arith.extsi", "arith.sitofp"), _import_convert_signed),
    **dict.fromkeys(("arith.index_castui", "arith.extui", "arith.uitofp"), _import_convert_unsigned),
    "arith.trunci": _import_trunci,
    **dict.fromkeys(("arith.extf", "arith.truncf", "arith.convertf"), _import_convert_float),
    **dict.fromkeys(("arith.fptosi", "arith.fptoui"), _import_float_to_integer),
    "arith.bitcast": bitcast,
}
