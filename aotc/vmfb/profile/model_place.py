"""Source location of a kernel in the terms of the model's user: JAX name scope, and line of source.

A location in a bundle is text: ``NAME at LINE, in LINE OF A LIBRARY``. ``NAME`` is JAX's name stack, such as
``jit(f)/Net/block_0/attn/q/dot_general``; its scope is ``Net/block_0/attn/q``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any, NamedTuple

_CALL = re.compile(r"(\w*)\((.*)\)")
_FUNCTIONS = ("jit", "pjit", "xla_call", "core_call", "named_call")  # their argument is a function's name
_BODIES = {"while": r"body|cond", "cond": r"branch_\d+_fun", "scan": r"body"}
_CALLS = ("closed_call", "checkpoint", "remat", "remat2", "rematted_computation", "custom_jvp_call", "custom_vjp_call")
_POSITION = re.compile(r"(?:^|.):\d+(?::\d+)?$")


class ModelPlace(NamedTuple):
    """Name scope and source line of a kernel.

    Attributes
    ----------
    scope : str
        Names of modules and of ``jax.named_scope``, the outermost first, without JAX's transformations; may be empty.
    line : str
        Line of the user's source, ``/home/me/train.py:41``; a line of the model's text if it was not traced.
    library : str
        Line of an installed package that the user's line called; may be empty.
    """

    scope: str
    line: str
    library: str

    @property
    def short(self) -> str:
        """The file name and line number of the user's line; without a line, the scope."""
        return PurePath(self.line.replace("\\", "/")).name or self.scope


@lru_cache(maxsize=4096)
def model_place(loc: str) -> ModelPlace:
    """Parse a location of a bundle: name scope, user's line, line of a library."""
    name, at, lines = loc.rpartition(" at ")
    if not at:
        name, lines = ("", loc) if _POSITION.search(loc) else (loc, "")
    line, _, library = lines.partition(", in ")
    return ModelPlace("/".join(scopes_in_name_stack(name)), line, library)


def scopes_in_name_stack(name: str) -> list[str]:
    """Return the scopes in a JAX name stack, without functions, transformations, loops and the primitive at its end."""
    found: list[str] = []
    elements = _name_stack_elements(name)[:-1]
    for before, element in zip(["", *elements], elements):
        following = _BODIES.get(before)
        if following and re.fullmatch(following, element):
            found.pop()
        elif element not in _CALLS and "->" not in element:  # of jnp.einsum
            found.append(element)
    return [scope for element in found if (scope := _strip_transformations(element))]


def _strip_transformations(element: str) -> str:
    """Return ``Net`` for ``vmap(jvp(Net))``, an element of a name stack; an empty string for ``jit(f)``."""
    while match := _CALL.fullmatch(element):
        if match[1] in _FUNCTIONS:
            return ""
        element = match[2]
    return element


def _name_stack_elements(name: str) -> list[str]:
    """Split a name stack at the slashes outside of parentheses."""
    parts, depth = [""], 0
    for piece in re.split(r"([/()])", name):
        depth += (piece == "(") - (piece == ")")
        if piece == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def truncate_scope(scope: str, depth: int) -> str:
    """Return the outermost ``depth`` elements of a scope; all of them if ``depth`` is 0."""
    return "/".join(scope.split("/")[:depth]) if depth else scope


# ---------------------------------------------------------------- records

PLACES = ("scope", "line")
"""What the times of a record can be summed by."""


class PlaceTime(NamedTuple):
    """Cost of the kernels in a scope, or of a source line, in one call: runs, nanoseconds, bytes and operations."""

    name: str
    kernels: frozenset[str]
    runs: int
    ns: float
    bytes: int
    flops: int


def runs_by_location(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of runs at each location, for one row of a cost record."""
    return row.get("places") or {row["loc"]: row["runs"]}


def line_and_scope(locs: Iterable[str]) -> tuple[str, str]:
    """Return line and scope for a kernel that runs at the locations ``locs``, with the number of further scopes."""
    places = [model_place(loc) for loc in locs]
    scopes = list(dict.fromkeys(p.scope for p in places))
    more = f" and {len(scopes) - 1} more" if len(scopes) > 1 else ""
    return places[0].short, scopes[0] + more


def times_by_place(record: Mapping[str, Any], by: str, depth: int = 0) -> list[PlaceTime]:
    """Sum the times of a cost record by scope or by line (``by``, of :data:`PLACES`), the longest first.

    With a ``depth``, scopes are truncated to that many names.
    """
    sums: dict[str, PlaceTime] = {}
    for row in record["kernels"]:
        ns = next(iter(row["ns"].values()))
        for loc, runs in runs_by_location(row).items():
            place = model_place(loc)
            name = truncate_scope(place.scope, depth) if by == "scope" else place.line or place.scope
            t = sums.get(name, PlaceTime(name, frozenset(), 0, 0.0, 0, 0))
            work = runs * row["bytes"], runs * row.get("flops", 0)
            sums[name] = PlaceTime(
                name, t.kernels | {row["name"]}, t.runs + runs, t.ns + runs * ns, t.bytes + work[0], t.flops + work[1]
            )
    return sorted(sums.values(), key=lambda t: -t.ns)
