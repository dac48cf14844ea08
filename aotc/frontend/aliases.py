"""Aliases of a model's text before MLIR parses it: deep or large attributes and types that short definitions build.

``!b = tuple<!a, !a>`` needs no nested bracket, but 60 of them are a type of 2**60 elements. MLIR parses the
definitions without recursion, because it shares the parts. Code that walks or prints the result crashes or never ends.

MLIR accepts a reference only after its definition, and a definition only outside of all ops. One pass over the
definitions therefore finds the depth and the size of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from aotc.diagnostics import CompileError, Loc

# Characters to which an alias may expand, and characters more for each one of the text. Models share types and
# locations: a stack of 100 frames is 6 kB. A tuple of 100,000 types takes 20 s to compile.
MOST_EXPANDED = 1 << 20
EXPANDED_RATIO = 4
# Characters to which all uses of long aliases may expand together, in addition to EXPANDED_RATIO. Every use of a type
# is walked; 1000 uses of a tuple of 500 arrays are 10 MB.
MOST_EXPANDED_USES = 1 << 26
# Characters from which an alias is long: shorter ones cannot multiply a text by much.
LONG_ALIAS = 4096

# The text has no "->", so that the name of an alias ends before its first "-". Names with the same start count as one.
_DEFINITION = re.compile(rb"#(!?[\w$.]*+)(?:-[\w$.-]*+)?\s*=")
_REFERENCE = re.compile(rb"[#\0](!?[\w$.]*)")
_BRACKETS = b"()[]{}<>"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_OPENING = frozenset(b"([{<")


def check_aliases(bare: bytes, path: str, most_nested: int) -> None:
    """Reject model text with attribute or type aliases that are nested too deep or expand to too much text.

    Parameters
    ----------
    bare : bytes
        The model's text without strings, comments and arrows.
    path : str
        File of the model, for messages.
    most_nested : int
        Maximum depth of brackets, including those of aliases inside of aliases. A location's brackets do not count.
    """
    # A literal first character makes the search 3 times faster, and so do fewer candidates: what follows a "(" is a
    # reference.
    text = bare.replace(b"!", b"#!").replace(b"(#", b"(\0")
    parts = _DEFINITION.split(text)
    most = MOST_EXPANDED + EXPANDED_RATIO * len(text)
    sizes: dict[bytes, tuple[int, int]] = {}
    measured: dict[bytes, tuple[int, int]] = {}  # by definition: without strings, locations repeat
    long: dict[bytes, int] = {}
    for number, (name, body) in enumerate(zip(parts[1::2], parts[2::2])):
        pair = measured.get(body)
        if pair is None:
            pair = measured[body] = _measure_alias_definition(body, sizes)
            if pair[0] > most_nested:
                what = f"is nested {pair[0]:,} deep by way of other aliases, expected at most {most_nested:,}"
                raise _alias_error(text, number, path, what)
            if pair[1] > most:
                what = f"expands to {pair[1]:,} characters, expected at most {most:,}"
                raise _alias_error(text, number, path, what)
            if pair[1] > LONG_ALIAS and not _is_location(body):
                long[name] = max(pair[1], long.get(name, 0))
        if name in sizes:  # names with the same start
            pair = max(pair[0], sizes[name][0]), max(pair[1], sizes[name][1])
        sizes[name] = pair
    if long:
        _check_alias_uses(text, path, long, parts[1::2])


def _check_alias_uses(text: bytes, path: str, long: dict[bytes, int], names: Sequence[bytes]) -> None:
    """Reject text in which the expansions of all uses of ``long`` aliases together are too large."""
    most = MOST_EXPANDED_USES + EXPANDED_RATIO * len(text)
    size = sum(long.get(name, 0) for name in _REFERENCE.findall(text))
    if size > most:
        largest = max(long, key=long.__getitem__)
        what = f"and others expand to {size:,} characters in all uses, expected at most {most:,}"
        raise _alias_error(text, names.index(largest), path, what)


def _measure_alias_definition(body: bytes, sizes: dict[bytes, tuple[int, int]]) -> tuple[int, int]:
    """Return bracket depth and number of characters of an alias definition after expansion of inner aliases."""
    body = body.partition(b"%")[0]  # a value: ops follow the definition
    depth = most = 0
    for bracket in body.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        most = max(most, depth)
    if _is_location(body):
        most -= 1
    inner = [sizes[name] for name in _REFERENCE.findall(body) if name in sizes]
    return most + max((d for d, _ in inner), default=0), len(body) + sum(s for _, s in inner)


def _is_location(body: bytes) -> bool:
    return body.lstrip().startswith(b"loc(")


def _alias_error(text: bytes, number: int, path: str, what: str) -> CompileError:
    """Return the error ``what`` for the alias definition with this number, from 0."""
    definition = next(islice(_DEFINITION.finditer(text), number, None))
    name = definition[0].rpartition(b"=")[0].strip().removeprefix(b"#")
    shown = name if name.startswith(b"!") else b"#" + name
    loc = Loc(path, text.count(b"\n", 0, definition.start()) + 1)
    hint = "use fewer aliases in the definitions of others"
    return CompileError.at(loc, f"the alias {shown.decode()} {what}", hint=hint)
