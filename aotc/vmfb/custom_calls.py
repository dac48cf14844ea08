"""Ops of the user's own: the registry, and Python functions bound to a bundle when it loads.

A function takes the op's operands, then its results, as NumPy arrays, and fills the
results in; the op's attributes are keywords. One that Numba can compile goes into the
bundle; one that it cannot stays Python and is found by name when the bundle loads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, VmError
from aotc.vmfb.process.interruption import notice

Function = Callable[..., Any]


class Registered(NamedTuple):
    """A registered function, and whether it is compiled into bundles."""

    function: Function | None
    native: bool


_REGISTRY: dict[str, Registered] = {}


def register_custom_call(name: str, function: Function | None = None, *, native: bool = True) -> None:
    """Say what the custom call ``name`` does; a second registration replaces the first.

    Parameters
    ----------
    name : str
        The target of the ``stablehlo.custom_call``, e.g. that of ``jax.ffi.ffi_call``.
    function : callable
        ``function(*operands, *results, **attributes)`` fills the results in. Operands
        must not be written to. Arrays are in row-major order and valid during the call
        only. May be left out if ``native`` is False: then :func:`aotc.load` needs it.
    native : bool
        Compile the function with Numba into every bundle that calls it, which then needs
        neither it nor Numba. It must not allocate arrays. bf16, f16 and smaller floats
        arrive as unsigned integers of their bits. Otherwise the function is Python, is
        bound by name at load, and may be called from any thread.

    Raises
    ------
    TypeError
        If a native function is missing, or ``function`` cannot be called.
    """
    if function is not None and not callable(function):
        raise TypeError(f"custom call {name!r}: {function!r} is not a function")
    if native and function is None:
        raise TypeError(f"custom call {name!r}: native=True needs the function; native=False takes it at load")
    _REGISTRY[name] = Registered(function, native)


def any_registered() -> bool:
    """Tell whether any custom call is registered in this process."""
    return bool(_REGISTRY)


def registered(name: str) -> Registered | None:
    """Return what was registered as ``name``, or None."""
    return _REGISTRY.get(name)


class Callbacks:
    """The Python functions of one loaded bundle, as native functions.

    Parameters
    ----------
    where : str
        The bundle.
    calls : sequence of dict
        The manifest's ``custom_calls``.
    given : mapping of str to callable
        Functions by name; those that are missing are looked up in the registry.

    Raises
    ------
    BundleError
        If a function is in neither.
    """

    def __init__(self, where: str, calls: Sequence[Mapping[str, Any]], given: Mapping[str, Function]) -> None:
        self.where = where
        self._failed: list[tuple[str, BaseException]] = []
        self._natives: dict[str, Any] = {}
        for row in calls:
            function = given.get(row["name"]) or _registered_function(row["name"])
            if function is None:
                raise BundleError(
                    where,
                    f"the bundle calls the Python function {row['name']!r}, which is not here",
                    hint=f"aotc.load(..., custom_calls={{{row['name']!r}: function}}), or before loading "
                    f"aotc.register_custom_call({row['name']!r}, function, native=False); with the command line "
                    "--custom-calls=FILE, which does that",
                )
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(row["operands"]) + len(row["results"]) + 1))
            self._natives[row["symbol"]] = kind(self._guarded(row, function))

    def addresses(self) -> dict[str, int]:
        """Return the address of each function by its symbol."""
        return {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._natives.items()}

    def _guarded(self, row: Mapping[str, Any], function: Function) -> Function:
        """Return ``function`` on addresses; what it raises is kept for :meth:`check`."""
        types = [(to_numpy(dtype), rank) for dtype, rank in (*row["operands"], *row["results"])]
        inputs, attributes = len(row["operands"]), row["attributes"]
        failed = self._failed  # not this object, which holds what is made here: there must be no cycle

        def call(*addresses: int) -> None:
            try:
                arrays = _arrays(addresses, types)
                for array in arrays[:inputs]:
                    array.flags.writeable = False
                function(*arrays, **attributes)
            except BaseException as error:  # also an interrupt, which would be printed and lost
                failed.append((row["name"], error))
                for array in _arrays(addresses, types)[inputs:]:
                    array[...] = np.zeros((), array.dtype)

        return call

    def notice(self) -> None:
        """End a call under way in which a function raised something, or that is to end for another reason."""
        self.check()
        notice()

    def check(self) -> None:
        """Raise what a function raised since the last check."""
        if self._failed:
            name, error = self._failed[0]
            self._failed.clear()
            if not isinstance(error, Exception):
                raise error
            raise VmError(self.where, f"custom call {name!r} failed: {type(error).__name__}: {error}") from error


def _registered_function(name: str) -> Function | None:
    found = _REGISTRY.get(name)
    return found.function if found is not None else None


def _arrays(addresses: Sequence[int], types: Sequence[tuple[np.dtype, int]]) -> list[np.ndarray]:
    """Return arrays over memory; the last address is that of all their sizes."""
    ranks = [rank for _, rank in types]
    sizes = list((ctypes.c_int64 * sum(ranks)).from_address(addresses[-1]))
    found = []
    at = 0
    for address, (dtype, rank) in zip(addresses, types, strict=False):
        shape = tuple(sizes[at : at + rank])
        at += rank
        count = int(np.prod(shape, dtype=np.int64))
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address) if count else b""
        found.append(np.frombuffer(memory, dtype).reshape(shape))
    return found
