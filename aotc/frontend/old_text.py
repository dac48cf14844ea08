"""StableHLO text of 2023: lists of integers were ``dense<[1, 2]> : tensor<2xi64>``, and are ``array<i64: 1, 2>`` now.

Only attributes that became arrays are rewritten; ``padding`` and ``replica_groups`` are still tensors. Line numbers are
unchanged.
"""

from __future__ import annotations

import re

_NAMES = (
    "broadcast_dimensions", "broadcast_sizes", "known_expanding_dimensions", "known_nonexpanding_dimensions",
    "dimensions", "permutation", "start_indices", "limit_indices", "strides", "slice_sizes", "edge_padding_low",
    "edge_padding_high", "interior_padding", "window_dimensions", "window_strides", "base_dilations",
    "window_dilations", "window_reversal", "lhs_dilation", "rhs_dilation", "fft_length",
)  # fmt: skip
_LIST = re.compile(
    rf"(?<![\w.])({'|'.join(_NAMES)})(\s*=\s*)dense<\s*(\[[\s\w,-]*\]|[\w-]*)\s*>\s*:\s*tensor<\s*(\d+)x(i64|i1)\s*>"
)
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*')


def modern_text(text: str) -> str:
    """Return ``text`` with integer lists in today's form; the same text if there are none in the old form."""
    if not _LIST.search(text):
        return text
    literals = [m.span() for m in _STRING.finditer(text)]
    parts: list[str] = []
    end = 0
    for start, stop in [*literals, (len(text), len(text))]:
        parts += [_LIST.sub(_as_array, text[end:start]), text[start:stop]]
        end = stop
    return "".join(parts)


def _as_array(found: re.Match[str]) -> str:
    name, equals, body, count, element = found.groups()
    values = [v.strip() for v in body.strip("[]").split(",") if v.strip()]
    if not body.startswith("["):
        values *= int(count)  # one value fills the list
    if len(values) != int(count):
        return found[0]  # the parser reports it
    lines = "\n" * found[0].count("\n")
    return f"{name}{equals}array<{element}{': ' if values else ''}{', '.join(values)}>{lines}"
