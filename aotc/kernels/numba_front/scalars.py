"""Print scalars of the loop IR as expressions that Numba types exactly.

Numba computes integers in 64 bits, so each result of fewer bits is cast. A small float is its code; arithmetic on it
reads f32 values and rounds the result.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Apply, Const, Scalar
from aotc.ir.opset import COMPARISONS, INFIX, ORDERINGS, SCALARS, TOTAL
from aotc.ir.opset.elementwise_scalars import exponent_bits_rounded
from aotc.vmfb.dtypes import DTYPES, kind_of, real_of

_STORED = {"b": "i1", "i": "i8", "u": "u8", "f": "u8"}
_SAME_WIDTH = {"f32": "u32", "f64": "u64"}
_NAN = struct.pack("<d", math.nan)
_EXACT_IN_F32 = 24  # bits of an integer


def is_small_float(dtype: str) -> bool:
    """Return True if Numba lacks the float ``dtype``, and represents a value by its bits in an unsigned integer."""
    return kind_of(dtype) == "f" and DTYPES[dtype].bits <= 16


def numba_storage_dtype(dtype: str) -> str:
    """Return the dtype in which Numba stores elements of ``dtype`` in memory."""
    row = DTYPES[dtype]
    if is_small_float(dtype):
        return "u16" if row.bits == 16 else "u8"
    return _STORED[row.kind] if row.bits < 8 else dtype


def strip_parens(text: str) -> str:
    """Return an expression without the parentheses around it; a tuple keeps its own."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0 or (depth == 1 and letter == ","):
            return text[1:-1] if text[0] == "(" and at == len(text) - 1 else text
    return text


def _runtime_name(fn: str) -> str:
    """Return the runtime's name of a function of floats; the runtime avoids names of Python's builtins."""
    match fn:
        case "pow":
            return "power"
        case "rem":
            return "remainder"
        case "max":
            return "maximum"
        case "min":
            return "minimum"
        case "decay":
            return "exp"
    return fn


class ScalarPrinter:
    """Printer of operations on printed operands; ``used`` collects the runtime functions that the text calls."""

    def __init__(self) -> None:
        self.used: dict[str, None] = {}

    def call(self, name: str, *arguments: str) -> str:
        """Return the text of a call of a runtime function."""
        return f"{self.name(name)}({', '.join(map(strip_parens, arguments))})"

    def name(self, name: str) -> str:
        """Return the name of a runtime object, and add it to ``used``."""
        self.used[name] = None
        return name

    def cast(self, text: str, dtype: str) -> str:
        """Return the text that casts a number to ``dtype``, which wraps an integer and rounds a float."""
        return self.call(dtype, text)

    def constant(self, s: Const) -> str:
        """Return the text of a literal."""
        if s.dtype == "i1":
            return str(bool(s.value))
        value = s.value
        if isinstance(value, complex):
            return self.cast(f"complex({self._float_literal(value.real)}, {self._float_literal(value.imag)})", s.dtype)
        return self.cast(self._float_literal(value) if isinstance(value, float) else repr(value), s.dtype)

    def _float_literal(self, value: float) -> str:
        if math.isinf(value):
            return self.name("inf") if value > 0 else f"-{self.name('inf')}"
        if not math.isnan(value):
            return repr(value)
        bits = struct.pack("<d", value)
        return self.name("nan") if bits == _NAN else self.call("nan_bits", hex(int.from_bytes(bits, "little")))

    def wide(self, text: str, dtype: str) -> str:
        """Return the text of a float in the dtype of its arithmetic: a small float is decoded, others are unchanged."""
        return self.call(f"from_{dtype}", text) if is_small_float(dtype) else text

    def _print_as_unsigned(self, text: str, dtype: str) -> str:
        return self.cast(text, f"u{DTYPES[dtype].bits}")

    # --- operations ---

    def apply(self, s: Apply, texts: list[str]) -> str:
        """Return the text of operation ``s`` on the operands ``texts``."""
        dtype = s.args[-1].dtype
        match s.fn:
            case "select":
                return f"({texts[1]} if {texts[0]} else {texts[2]})"
            case "convert":
                return self.convert(texts[0], s.args[0].dtype, s.dtype)
            case "bitcast":
                return self._print_bitcast(texts[0], s.args[0].dtype, s.dtype)
            case "reduce_precision":
                return self._print_reduce_precision(s, texts)
            case fn if fn in TOTAL and kind_of(dtype) == "f":
                keys = [self.call(f"order_{dtype}", text) for text in texts]
                return f"({keys[0]} {SCALARS[fn].symbol} {keys[1]})"
        printers: dict[str, Callable[[str, list[str], str], str]] = {
            "b": self._print_boolean_op,
            "i": self._print_integer_op,
            "u": self._print_integer_op,
            "f": self._print_float_op,
            "c": self._print_complex_op,
        }
        return printers[kind_of(dtype)](s.fn, texts, dtype)

    def combine(self, fn: str, old: str, value: str, dtype: str) -> str:
        """Return the text of the reduction ``fn`` of two numbers of a dtype."""
        return self.apply(Apply(fn, (_operand_dtype_of(dtype), _operand_dtype_of(dtype)), dtype), [old, value])

    def _print_reduce_precision(self, s: Apply, texts: list[str]) -> str:
        dtype = s.args[0].dtype
        bits = [repr(a.value) for a in s.args[1:] if isinstance(a, Const)]
        own = str(exponent_bits_rounded(dtype))
        return self.cast(self.call("reduce_precision", self.wide(texts[0], dtype), *bits, own), dtype)

    def _print_boolean_op(self, fn: str, texts: list[str], dtype: str) -> str:
        fn = SCALARS[fn].on_bool or fn
        if fn == "not":
            return f"(not {texts[0]})"
        if fn in INFIX and fn not in ORDERINGS:
            return f"({texts[0]} {INFIX[fn]} {texts[1]})"
        left, right = (self.cast(text, "u8") for text in texts)
        return f"({left} {COMPARISONS[fn]} {right})"

    def _print_integer_op(self, fn: str, texts: list[str], dtype: str) -> str:
        if fn in COMPARISONS:
            return f"({texts[0]} {COMPARISONS[fn]} {texts[1]})"
        row = DTYPES[dtype]
        signed, bits = row.kind == "i", str(row.bits)
        prefix = "signed" if signed else "unsigned"
        match fn:
            case "neg":
                text = f"-{texts[0]}" if signed else f"{self.cast('0', dtype)} - {texts[0]}"
            case "abs":
                text = f"abs({texts[0]})" if signed else texts[0]
            case "sign":
                text = self.call("integer_sign", texts[0])
            case "not":
                text = f"~{texts[0]}"
            case "div" | "rem" | "pow":
                text = self.call(f"{prefix}_{fn}", *texts)
            case "max" | "min":
                text = f"{fn}({texts[0]}, {texts[1]})"
            case "shl":
                text = self.call("shift_left", *texts, bits)
            case "shr_logic":
                text = self.call("shift_right", self._print_as_unsigned(texts[0], dtype), texts[1], bits)
            case "shr_arith":
                text = self.call("shift_right_signed", self.cast(texts[0], f"i{bits}"), texts[1], bits)
            case "popcnt":
                text = self.call("bit_count", self._print_as_unsigned(texts[0], dtype))
            case "clz":
                text = self.call("leading_zeros", self._print_as_unsigned(texts[0], dtype), bits)
            case _ if fn in INFIX:
                text = f"{texts[0]} {INFIX[fn]} {texts[1]}"
                if row.bits == 64:
                    return f"({text})"
            case _:
                raise InternalError(f"kernels: {fn} of {dtype} has no text for Numba")
        return self.cast(text, dtype)

    def _print_float_op(self, fn: str, texts: list[str], dtype: str) -> str:
        small = is_small_float(dtype)
        if fn == "next_after":
            return self.call(f"next_after_{dtype}", *texts)
        values = [self.wide(text, dtype) for text in texts]
        if fn in COMPARISONS:
            return f"({values[0]} {COMPARISONS[fn]} {values[1]})"
        fn = fn.removeprefix("short_")
        match fn:
            case "is_finite":
                return self.call(fn, values[0])
            case "complex":
                return self.cast(f"complex({values[0]}, {values[1]})", {"f32": "c64", "f64": "c128"}[dtype])
            case "real" | "conj":
                return texts[0]
            case "imag":
                return self.cast("0.0", dtype)
            case "neg":
                text, natural = f"(-{values[0]})", True
            case "abs":
                text, natural = f"abs({values[0]})", True
            case "add" | "sub" | "mul" | "div":
                symbol = {"div": "/"}.get(fn) or INFIX[fn]
                text, natural = f"({values[0]} {symbol} {values[1]})", True
            case _:
                text = self.call(_runtime_name(fn), *values)
                natural = dtype == "f64" or (fn in ("max", "min", "max_number") and not small)
        return text if natural and not small else self.cast(text, dtype)

    def _print_complex_op(self, fn: str, texts: list[str], dtype: str) -> str:
        if fn in INFIX:
            return f"({texts[0]} {INFIX[fn]} {texts[1]})"
        match fn:
            case "neg":
                return f"(-{texts[0]})"
            case "real" | "imag":
                return f"{texts[0]}.{fn}"
            case "abs":
                return self.cast(self.call("complex_abs", texts[0]), real_of(dtype))
            case "conj":
                return self.cast(self.call("conjugate", texts[0]), dtype)
        return self.cast(self.call(f"complex_{fn}", *texts), dtype)

    # --- conversions ---

    def convert(self, text: str, source: str, target: str) -> str:
        """Return a number of dtype ``source`` as one of ``target``."""
        if source == target:
            return text
        given, goal = DTYPES[source], DTYPES[target]
        if given.kind == "c":
            if goal.kind == "c":
                return self.cast(text, target)
            return self.convert(f"{text}.real", real_of(source), target)
        if goal.kind == "c":
            real = self.convert(text, source, real_of(target))
            return self.cast(f"complex({real}, {self.cast('0.0', real_of(target))})", target)
        if goal.kind == "b":
            return f"({self.wide(text, source)} != 0)"
        if given.kind == "f":
            return self._print_float_conversion(self.wide(text, source), source, target)
        if goal.kind in "iu":
            return self.cast(text, target)
        number = self.cast(text, "i64") if given.kind == "b" else text
        if not is_small_float(target):
            return self.cast(number, target)
        if given.bits > _EXACT_IN_F32:
            exact = self.call("odd_f64", number) if given.bits == 64 else self.cast(number, "f64")
            return self.cast(self.call("odd_f32", exact), target)
        return self.cast(self.cast(number, "f32"), target)

    def _print_float_conversion(self, value: str, source: str, target: str) -> str:
        goal = DTYPES[target]
        if goal.kind in "iu":
            name = "saturate_signed" if goal.kind == "i" else "saturate_unsigned"
            return self.cast(self.call(name, self.cast(value, "f64"), str(goal.bits)), target)
        if target == "f32" and source != "f64":
            return value
        if is_small_float(target) and source == "f64":
            value = self.call("odd_f32", value)
        return self.cast(value, target)

    def _print_bitcast(self, text: str, source: str, target: str) -> str:
        if source == target or kind_of(source) == "c":
            return text
        if source in _SAME_WIDTH:
            text = self.call("bits_as", text, self.name(_SAME_WIDTH[source]))
        if target in _SAME_WIDTH:
            return self.call("bits_as", self.cast(text, _SAME_WIDTH[target]), self.name(target))
        if target == "i1":
            return f"({text} != 0)"
        if is_small_float(target):
            bits = DTYPES[target].bits
            return self.cast(text if bits >= 8 else f"{text} & {(1 << bits) - 1}", numba_storage_dtype(target))
        return self.cast(text, target)


def _operand_dtype_of(dtype: str) -> Scalar:
    return Const(0, dtype)
