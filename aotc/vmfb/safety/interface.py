"""What a kernel touches: the bytes of its arrays and its grid, as the manifest says it and the machine code seals it.

A *size* in the manifest is an integer, ``[i]`` for the kernel's dim ``i``, or ``[op, a, b, ...]`` with an op of
:data:`OPERATIONS`. Nobody can read off machine code what it will touch, so its maker says it, and the digest of all
that was said stands in the library itself (:data:`aotc.vmfb.abi.INTERFACE_SYMBOL`): another library, or other
sizes, are refused when the bundle loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import msgpack

from aotc.vmfb.process.digests import sha256_of

Size: TypeAlias = "int | list[Any]"

OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "+": sum,
    "*": prod,
    "//": lambda x: x[0] // x[1],
    "%": lambda x: x[0] % x[1],
    "max": max,
    "min": min,
}

# What the digest covers of a kernel's entry, and how a GPU launches it where that is said; the rest is for people.
_SEALED = ("scratch", "inputs", "dims", "grid", "extents", "aliases", "symbol", "image", "threads", "items")


class Invalid(Exception):
    """A program, a command buffer or an interface breaks a rule; the loader adds the bundle's name."""


def evaluate(size: Size, dims: Sequence[int]) -> int:
    """Return the number that a size is for a kernel's ``dims``.

    Raises
    ------
    Invalid
        If it is no size, or divides by 0.
    """
    try:
        return _value(size, dims)
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"a kernel's size {str(size)[:100]} has no value: {error}") from None


def _value(size: Size, dims: Sequence[int]) -> int:
    if isinstance(size, int):
        return size
    if len(size) == 1:
        return dims[size[0]]
    return OPERATIONS[size[0]]([x if type(x) is int else _value(x, dims) for x in size[1:]])


def digest(variant: Mapping[str, Any]) -> bytes:
    """Return the sha256 of what a variant's entry says about its machine code."""
    calls = [
        [c["symbol"], c["operands"], c["results"], *([True] if c.get("answers") else [])]
        for c in variant.get("custom_calls", ())
    ]
    kernels = [
        [*map(k.get, _SEALED), *([k["launch"]] if "launch" in k else [])] for k in variant["kernels"]
    ]
    versions = [variant.get("executor_version"), variant["commands_version"]]
    said = [variant["kind"], versions, variant["features"], variant.get("imports", {}), calls, kernels]
    return sha256_of(msgpack.packb(said))


class Interface:
    """What one kernel touches: an entry of the manifest, checked.

    Attributes
    ----------
    inputs : int
        How many of its places are only read; they come first.
    dims : int
        How many dims it takes.
    grid : Size
    extents : list of Size
        The bytes at each place, from its offset on.
    aliases : set of (int, int)
        Output and input that may be the same bytes.
    sizes : set of tuple of int
        The dims that it is made for, if it stands for several kernels; else empty.
    """

    __slots__ = ("aliases", "dims", "extents", "grid", "inputs", "name", "sizes", "static")

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.name: str = row["name"]
        self.inputs: int = row["inputs"]
        self.dims: int = row["dims"]
        self.grid: Size = row["grid"]
        self.extents: list[Size] = row["extents"]
        self.aliases = set(zip(row["aliases"][::2], row["aliases"][1::2]))
        self.sizes = set(map(tuple, row.get("sizes", ())))
        self.static = all(isinstance(x, int) for x in (self.grid, *self.extents))
        if self.inputs > len(self.extents):
            raise Invalid(f"kernel {self.name!r} has {self.inputs} inputs and {len(self.extents)} arrays")

    def at(self, dims: Sequence[int]) -> tuple[int, list[int]]:
        """Return the grid, and the bytes at each place, for a kernel's ``dims``.

        Raises
        ------
        Invalid
            If it is not made for them.
        """
        if self.sizes and tuple(dims) not in self.sizes:
            raise Invalid(f"kernel {self.name!r} is not made for the sizes {', '.join(map(str, dims))}")
        if self.static:
            return self.grid, self.extents  # type: ignore[return-value]
        return evaluate(self.grid, dims), [max(evaluate(x, dims), 0) for x in self.extents]
