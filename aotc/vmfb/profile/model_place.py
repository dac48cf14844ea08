"""The place of a kernel in the model as its user names it: name scope, and line of source.

A location in a bundle is text: ``NAME at LINE, in LINE OF A LIBRARY``. ``NAME`` is JAX's name stack, such as
``jit(f)/Net/block_0/attn/q/dot_general``; its scope is ``Net/block_0/attn/q``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

_CALL = re.compile(r"(\w*)\((.*)\)")
_FUNCTIONS = ("jit", "pjit", "xla_call", "core_call", "named_call")  # their argument is a function's name
_BODIES = {"while": r"body|cond", "cond": r"branch_\d+_fun", "scan": r"body"}
_CALLS = ("closed_call", "checkpoint", "remat", "remat2", "rematted_computation", "custom_jvp_call", "custom_vjp_call")
_POSITION = re.compile(r"(?:^|.):\d+(?::\d+)?$")


class ModelPlace(NamedTuple):
    """A place in the model.

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
        """The user's line without the folders of its file, or else the scope."""
        return PurePath(self.line.replace("\\", "/")).name or self.scope


@lru_cache(maxsize=4096)
def model_place(loc: str) -> ModelPlace:
    """Return the place that the text of a location describes."""
    name, at, lines = loc.rpartition(" at ")
    if not at:
        name, lines = ("", loc) if _POSITION.search(loc) else (loc, "")
    line, _, library = lines.partition(", in ")
    return ModelPlace("/".join(scope_of(name)), line, library)


def scope_of(name: str) -> list[str]:
    """Return the scopes in a name stack, without functions, transformations, loops and the primitive at its end."""
    found: list[str] = []
    elements = _elements(name)[:-1]
    for before, element in zip(["", *elements], elements):
        following = _BODIES.get(before)
        if following and re.fullmatch(following, element):
            found.pop()
        elif element not in _CALLS and "->" not in element:  # of jnp.einsum
            found.append(element)
    return [scope for element in found if (scope := _untransformed(element))]


def _untransformed(element: str) -> str:
    """Return ``Net`` for ``vmap(jvp(Net))``; an empty string for ``jit(f)``."""
    while match := _CALL.fullmatch(element):
        if match[1] in _FUNCTIONS:
            return ""
        element = match[2]
    return element


def _elements(name: str) -> list[str]:
    """Split a name stack at the slashes outside parentheses."""
    parts, depth = [""], 0
    for piece in re.split(r"([/()])", name):
        depth += (piece == "(") - (piece == ")")
        if piece == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def at_depth(scope: str, depth: int) -> str:
    """Return the outermost ``depth`` elements of a scope; all of them for 0."""
    return "/".join(scope.split("/")[:depth]) if depth else scope
