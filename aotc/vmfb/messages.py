"""Message templates of run-time checks, with fields for integers that the check computes.

``{0}`` is the first of these integers. ``{0:f32}`` is the f32 whose bits are integer 0. ``{0:f32[2,3]:.3f}`` is an
array of the six elements that start there, formatted with ``.3f``; a complex number takes two integers. ``{{`` is a
brace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import DTYPES, to_numpy

_FIELD = r"\{\{|\{(\d+)(?::(\w+)(?:\[([\d,]+)\])?(?::([^{}]*))?)?\}"


def displayed_dtype(dtype: str) -> str:
    """Return the dtype in which messages show a value: f32 for small floats, 32 bits for sub-byte integers."""
    row = DTYPES[dtype]
    if row.kind == "f" and row.bits < 32:
        return "f32"
    return f"{row.kind}32" if row.kind in "iu" and row.bits < 8 else dtype


def escape_braces(text: str) -> str:
    """Escape the braces of ``text``, so that a template shows them unchanged."""
    return text.replace("{", "{{")


def message_field(number: int, dtype: str, shape: Sequence[int] = (), spec: str = "") -> str:
    """Return a template field that shows an array of ``dtype`` and ``shape``.

    Parameters
    ----------
    number : int
        Number of the integer at which the array's bits start.
    dtype : str
    shape : sequence of int
    spec : str
        Format specification of Python, such as ``.3f``.
    """
    dims = f"[{','.join(map(str, shape))}]" if shape else ""
    return f"{{{number}:{dtype}{dims}{':' if spec else ''}{spec}}}"


def render_message(message: str, values: Sequence[int]) -> str:
    """Replace the fields of the template ``message`` by ``values``."""
    import re  # only for a failed check

    def shown(match: Any) -> str:
        if match[0] == "{{":
            return "{"
        at, dtype = int(match[1]), match[2]
        if at >= len(values):
            return str(match[0])
        return str(values[at]) if dtype is None else _array_of_bits(values[at:], dtype, match[3] or "", match[4] or "")

    return re.sub(_FIELD, shown, message)


def _array_of_bits(values: Sequence[int], name: str, dims: str, spec: str) -> str:
    """Format the array of dtype ``name`` whose bits are the first of ``values``; ``dims`` is text such as ``2,3``."""
    dtype = to_numpy(name)
    shape = [int(n) for n in dims.split(",")] if dims else []
    parts = 2 if dtype.kind == "c" else 1
    bits = np.dtype(f"u{dtype.itemsize // parts}")
    words = [v & (1 << 8 * bits.itemsize) - 1 for v in values[: parts * int(np.prod(shape, dtype=np.int64))]]
    array = np.array(words, bits).view(dtype).reshape(shape)
    try:
        return format(array[()], spec)
    except (TypeError, ValueError):  # the format specification is the user's
        return str(array)
