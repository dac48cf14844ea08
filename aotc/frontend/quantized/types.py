"""Parsed quantized element types: ``!quant.uniform<i8:f32:0, {0.1:-30,0.5:-20}>`` as a record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.vmfb.dtypes import DTYPES, limits

PREFIX = "!quant."
_TYPE = re.compile(
    r"!quant\.uniform<(?P<storage>[iu]\d+)(<(?P<low>-?\d+):(?P<high>-?\d+)>)?:(?P<expressed>\w+)(:(?P<axis>\d+))?,"
    r" *(?P<pairs>\{[^{}]*\}|[^{}]*)>"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantized type: an integer ``q`` in ``[low, high]`` represents the number ``x = (q - zero) * scale``.

    ``storage`` is the dtype of ``q``, ``expressed`` that of ``x``. With an ``axis``, there is one scale and one zero
    point for each index along it, otherwise one of each for the tensor.
    """

    storage: str
    expressed: str
    low: int
    high: int
    axis: int | None
    scales: tuple[float, ...]
    zeros: tuple[int, ...]

    def same_numbers(self, other: Quantization) -> bool:
        """Return True if equal integers represent equal numbers in both types, whatever their axis."""
        return _without_axis(self) == _without_axis(other)


def _without_axis(q: Quantization) -> tuple:
    return q.storage, q.expressed, q.low, q.high, q.axis is None, q.scales, q.zeros


def quantization_of(t: Any) -> Quantization | None:
    """Return the quantization of an MLIR tensor type, or None if its elements are plain or it has no rank.

    Raises
    ------
    CompileError
        If the type is quantized in a way that is not supported.
    """
    element = str(t.element_type) if getattr(t, "has_rank", False) else ""
    return parse_quantization(element) if element.startswith(PREFIX) else None


@cache
def parse_quantization(text: str) -> Quantization:
    """Return the record of an element type in MLIR's syntax.

    Raises
    ------
    CompileError
        If it is not ``!quant.uniform`` per tensor or per axis, or if aotc lacks the dtype of its integers.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise CompileError.at(
            Loc(), f"element type {text} is not supported",
            hint="quantize uniformly, with one scale for a tensor or one for each index of a dim",
        )  # fmt: skip
    storage, expressed = match["storage"], match["expressed"]
    if storage not in DTYPES or expressed not in DTYPES:
        raise CompileError.at(Loc(), f"element type {text} is not supported", hint="store it in i2, i4, i8, i16 or i32")
    low, high = (int(v) for v in limits(storage))
    if match["low"]:
        low, high = int(match["low"]), int(match["high"])
    pairs = [p.strip().partition(":") for p in match["pairs"].strip("{}").split(",")]
    axis = None if match["axis"] is None else int(match["axis"])
    scales = tuple(float(scale) for scale, _, _ in pairs)
    zeros = tuple(int(zero or 0) for _, _, zero in pairs)
    return Quantization(storage, expressed, low, high, axis, scales, zeros)
