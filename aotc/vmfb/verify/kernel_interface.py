"""Declared memory accesses of kernels: bytes of each array and size of the grid, from the manifest.

A *size* in the manifest is an integer, ``[i]`` for the kernel's dim ``i``, or ``[op, a, b, ...]`` with an op of
:data:`OPERATIONS`. Accesses cannot be determined from machine code, so the compiler declares them, and the digest of
all declarations is part of the library itself (:data:`aotc.vmfb.abi.INTERFACE_SYMBOL`). A library that does not match
the declared sizes is refused when the bundle is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import msgpack

from aotc.vmfb.host.digests import sha256_of

Size: TypeAlias = "int | list[Any]"

OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "+": sum,
    "*": prod,
    "//": lambda x: x[0] // x[1],
    "%": lambda x: x[0] % x[1],
    "max": max,
    "min": min,
}

# Keys of a kernel's entry that its digest covers, with the GPU launch parameters if present. Other keys are
# informative.
_SEALED = ("scratch", "inputs", "dims", "grid", "extents", "aliases", "symbol", "image", "threads", "items")


MAP_ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "i32": 4, "i64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2, "tf32": 4,
}  # fmt: skip
"""Bytes of an element, by element type of a tensor map."""


class Invalid(Exception):
    """A program, command buffer or kernel declaration violates a rule; the loader turns it into a BundleError."""


def evaluate_size(size: Size, dims: Sequence[int]) -> int:
    """Evaluate a declared size, a formula of the manifest, for the kernel's ``dims``.

    Raises
    ------
    Invalid
        If ``size`` is malformed, or divides by 0.
    """
    try:
        return _size_value(size, dims)
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"a kernel's size {str(size)[:100]} has no value: {error}") from None


def _size_value(size: Size, dims: Sequence[int]) -> int:
    if isinstance(size, int):
        return size
    if len(size) == 1:
        return dims[size[0]]
    return OPERATIONS[size[0]]([x if type(x) is int else _size_value(x, dims) for x in size[1:]])


def check_tensor_map(name: str, row: Mapping[str, Any], extents: Sequence[int], dims: Sequence[int]) -> None:
    """Refuse a tensor map that describes bytes outside its array.

    The hardware reads zeros beyond the end of a map, so a map must not extend beyond its array.

    Parameters
    ----------
    name : str
        The name of the kernel.
    row : mapping
        The map's entry, see :mod:`aotc.vmfb.devices.cuda.launch`.
    extents : sequence of int
        Bytes of each array of the kernel.
    dims : sequence of int
        Dims of the kernel.

    Raises
    ------
    Invalid
        Its message has the kernel and the array.

    Notes
    -----
    A map must not have a size of 0: an array that may be empty has sizes ``["max", 1, n]`` and is then not read.
    """
    number, size = row["buffer"], MAP_ELEMENT_BYTES[row["type"]]
    begin, steps = evaluate_size(row.get("offset", 0), dims), [size, *(evaluate_size(s, dims) for s in row["strides"])]
    end = begin + size + sum((evaluate_size(n, dims) - 1) * step for n, step in zip(row["sizes"], steps, strict=True))
    inside = begin >= 0 and min(steps) >= 0 and end <= extents[number]
    if not inside and extents[number] and not any(_is_size_of_empty_array(n, dims) for n in row["sizes"]):
        found = f"bytes {begin} to {end} of its array {number}, which has {extents[number]}"
        raise Invalid(f"a tensor map of kernel {name!r} describes {found}")


def _is_size_of_empty_array(size: Size, dims: Sequence[int]) -> bool:
    """Return True if ``size`` is ``["max", 1, n]`` with ``n`` below 1: the array is empty and never read."""
    if isinstance(size, int) or size[0] != "max" or 1 not in size[1:]:
        return False
    return min(evaluate_size(n, dims) for n in size[1:]) < 1


def interface_digest(variant: Mapping[str, Any]) -> bytes:
    """Return the sha256 of a variant's kernel declarations; the machine code contains the same digest."""
    calls = [
        [c["symbol"], c["operands"], c["results"], *([True] if c.get("answers") else [])]
        for c in variant.get("custom_calls", ())
    ]
    kernels = [
        [*map(k.get, _SEALED), *([k["launch"]] if "launch" in k else [])] for k in variant["kernels"]
    ]
    versions = [variant.get("executor_version"), variant["commands_version"]]
    declarations = [variant["kind"], versions, variant["features"], variant.get("imports", {}), calls, kernels]
    return sha256_of(msgpack.packb(declarations))


class Interface:
    """Declared memory accesses of one kernel, validated.

    Attributes
    ----------
    inputs : int
        Number of its read-only arrays; they come first.
    dims : int
        Number of its dims.
    grid : Size
        Formula of the number of items.
    extents : list of Size
        Formula of the bytes of each array, counted from the offset that a command passes.
    aliases : set of (int, int)
        Pairs of output and input that may be the same memory.
    sizes : set of tuple of int
        Tuples of dims that the kernel supports, if it dispatches to several kernels of static sizes; else empty.
    maps : sequence of dict
        Its tensor maps.

    Raises
    ------
    Invalid
        If the kernel has too few arrays, or a tensor map of static size exceeds its array.
    """

    __slots__ = ("aliases", "dims", "extents", "grid", "inputs", "maps", "name", "sizes", "static")

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.name: str = row["name"]
        self.inputs: int = row["inputs"]
        self.dims: int = row["dims"]
        self.grid: Size = row["grid"]
        self.extents: list[Size] = row["extents"]
        self.aliases = set(zip(row["aliases"][::2], row["aliases"][1::2]))
        self.sizes = set(map(tuple, row.get("sizes", ())))
        self.maps: Sequence[Mapping[str, Any]] = row.get("launch", {}).get("maps", ())
        in_maps = [x for m in self.maps for x in (m.get("offset", 0), *m["sizes"], *m["strides"])]
        self.static = all(isinstance(x, int) for x in (self.grid, *self.extents, *in_maps))
        if self.inputs > len(self.extents):
            raise Invalid(f"kernel {self.name!r} has {self.inputs} inputs and {len(self.extents)} arrays")
        if self.static:
            self._check_maps(self.extents, ())

    def evaluate_sizes(self, dims: Sequence[int]) -> tuple[int, list[int]]:
        """Return the number of grid items, and the bytes of each array, for the kernel's ``dims``.

        Raises
        ------
        Invalid
            If the kernel does not support these dims, or a tensor map exceeds its array.
        """
        if self.sizes and tuple(dims) not in self.sizes:
            raise Invalid(f"kernel {self.name!r} is not made for the sizes {', '.join(map(str, dims))}")
        if self.static:
            return self.grid, self.extents  # type: ignore[return-value]
        extents = [max(evaluate_size(x, dims), 0) for x in self.extents]
        self._check_maps(extents, dims)
        return evaluate_size(self.grid, dims), extents

    def _check_maps(self, extents: Sequence[Any], dims: Sequence[int]) -> None:
        for row in self.maps:
            check_tensor_map(self.name, row, extents, dims)
