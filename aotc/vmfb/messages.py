"""Message templates of run-time checks.

``{0}`` is the first of the integers that accompany a message. ``{0:f32}`` is the f32 whose bits it holds,
``{0:f32[2,3]:.3f}`` an array of the six that start there, formatted with ``.3f``; a complex number takes two integers.
``{{`` is a brace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import DTYPES, to_numpy

_FIELD = r"\{\{|\{(\d+)(?::(\w+)(?:\[([\d,]+)\])?(?::([^{}]*))?)?\}"


def shown_as(dtype: str) -> str:
    """Return the dtype in which a message shows values of ``dtype``: f32 for small floats, 32-bit integers."""
    row = DTYPES[dtype]
    if row.kind == "f" and row.bits < 32:
        return "f32"
    return f"{row.kind}32" if row.kind in "iu" and row.bits < 8 else dtype


def literal(text: str) -> str:
    """Escape ``text`` for use in a template."""
    return text.replace("{", "{{")


def field_text(number: int, dtype: str, shape: Sequence[int] = (), spec: str = "") -> str:
    """Return the template field for a value of ``dtype`` whose bits start at integer ``number`` of the message."""
    dims = f"[{','.join(map(str, shape))}]" if shape else ""
    return f"{{{number}:{dtype}{dims}{':' if spec else ''}{spec}}}"


def render(message: str, values: Sequence[int]) -> str:
    """Fill ``values`` into the fields of ``message``."""
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
