"""Print results as text, and compare them with expected values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.tools.largest_error import LargestError, largest_error
from aotc.vmfb.dtypes import DTYPES, from_numpy
from aotc.vmfb.errors import CallError

# Relative and absolute tolerance, by the number of significant bits of a float type.
_TOLERANCES = {
    4: (5e-1, 5e-1),
    6: (2.5e-1, 2.5e-1),
    8: (1e-1, 1e-1),
    16: (2e-2, 1e-2),
    32: (1e-4, 1e-5),
    64: (1e-9, 1e-12),
}


def type_text(array: np.ndarray) -> str:
    """Format the type of an array in IREE's syntax: ``2x3xf32``."""
    return "x".join([*map(str, array.shape), from_numpy(array.dtype)])


def array_text(array: np.ndarray, limit: int) -> str:
    """Format an array in IREE's syntax, ``2x3xf32=[1 2 3][4 5 6]``, with at most ``limit`` elements."""
    flat = array.reshape(-1)
    shown = (
        [_element_text(x) for x in flat[:limit].tolist()]
        if array.dtype.isbuiltin == 1
        else [str(x) for x in flat[:limit]]
    )
    if array.ndim == 0:
        return f"{type_text(array)}={shown[0]}"
    rows = [" ".join(shown[i : i + array.shape[-1]]) for i in range(0, len(shown), max(array.shape[-1], 1))]
    more = "..." if flat.size > limit else ""
    body = rows[0] if array.ndim == 1 and rows else "".join(f"[{row}]" for row in rows)
    return f"{type_text(array)}={body}{more}"


def _element_text(value: Any) -> str:
    match value:
        case bool():
            return "1" if value else "0"
        case float():
            return f"{value:.9g}"
        case complex():
            return f"({value.real:.9g},{value.imag:.9g})"
    return str(value)


def elided_text(array: np.ndarray, width: int) -> str:
    """Format the type and the elements as NumPy prints them, in lines of ``width``; the middle of many is elided."""
    values = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
    text = np.array2string(values, max_line_width=width)
    head = type_text(array)
    return f"{head} = {text}" if "\n" not in text and len(head) + len(text) + 3 <= width else f"{head} =\n{text}"


def check_results(
    results: Sequence[np.ndarray], expected: Sequence[np.ndarray | None], rtol: float | None, atol: float | None
) -> list[LargestError | None]:
    """Compare results with expected values, and return the largest error of each; None skips a result.

    Raises
    ------
    CallError
        Names the first result that differs, its first differing element and its largest errors.
    """
    if len(results) != len(expected):
        raise CallError("", "wrong number of --expected_output", len(expected), f"{len(results)}, one for each result")
    errors: list[LargestError | None] = []
    for number, (got, want) in enumerate(zip(results, expected)):
        errors.append(None if want is None else _check_result(number, got, np.asarray(want), rtol, atol))
    return errors


def _check_result(
    number: int, got: np.ndarray, want: np.ndarray, rtol: float | None, atol: float | None
) -> LargestError:
    """Compare one result with its expected value; return the largest error."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise CallError("", f"result {number} has another type", type_text(got), type_text(want))
    row = DTYPES[from_numpy(got.dtype)]
    if row.kind in "biu":
        bad = np.asarray(got != want)
    else:
        bits = row.bits // 2 if row.kind == "c" else row.bits
        relative, absolute = _TOLERANCES[bits]
        wide = np.complex128 if row.kind == "c" else np.float64
        a, b = got.astype(wide), want.astype(wide)
        close = np.isclose(a, b, relative if rtol is None else rtol, absolute if atol is None else atol, equal_nan=True)
        bad = ~np.asarray(close)
    error = largest_error(got, want)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        count = f"{int(bad.sum()):,} of {bad.size:,} elements"
        what = f"result {number} differs in {count}, first at {list(place)}; {error}"
        raise CallError("", what, got[place], want[place], "--rtol and --atol set how close is close enough")
    return error
