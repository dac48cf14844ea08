"""Custom calls: the registry of user-defined ops, and their binding when a bundle is loaded.

A function gets the op's operands and results as NumPy arrays, and its attributes as keywords; it fills in the results.
A function that Numba can compile is compiled into the bundle. Any other remains Python and is looked up by name when
the bundle is loaded.
"""

from __future__ import annotations

import ctypes
import signal
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, CallError, RankLost
from aotc.vmfb.host.interruption import RUNNING, raise_if_interrupted
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.host.release import keep_alive_forever

Function = Callable[..., Any]


class GpuFunction(NamedTuple):
    """GPU implementation of a custom call: a function for numba.cuda, and the launch.

    ``per`` is the part of the results that one invocation computes: ``element``, ``row`` or ``launch``. ``threads`` is
    the block size, ``blocks`` the number of blocks or a function of all shapes that returns the number.
    """

    function: Function
    per: str
    threads: int
    blocks: int | Callable[..., Any]


class Registered(NamedTuple):
    """Registration of a custom call: CPU function, True if that is compiled into bundles, GPU function."""

    function: Function | None
    native: bool
    gpu: GpuFunction | None = None


_REGISTRY: dict[str, Registered] = {}


PER_ELEMENT, PER_ROW, PER_LAUNCH = "element", "row", "launch"


def register_custom_call(
    name: str, function: Function | None = None, *, native: bool = True, gpu: Function | None = None,
    per: str = PER_ELEMENT, threads: int = 128, blocks: int | Callable[..., Any] = 0,
) -> None:  # fmt: skip
    """Register the implementation of the custom call ``name``, replacing an earlier one.

    Parameters
    ----------
    name : str
        The target name of the ``stablehlo.custom_call``, such as that of ``jax.ffi.ffi_call``.
    function : callable
        ``function(*operands, *results, **attributes)`` fills in the results. Operands are read-only. Arrays are
        C-contiguous and valid only during the call. Optional if ``native`` is False: then :func:`aotc.load` needs it.
    native : bool
        Compile the function with Numba into every bundle that calls it; the bundle then needs neither the function nor
        Numba. It must not allocate arrays. bf16, f16 and smaller floats are passed as unsigned integers of their bits.
        If False, the function remains Python, is bound by name at load, and may be called from any thread.
    gpu : callable
        The function for GPUs: a device function of ``numba.cuda``, a kernel, or a plain function that Numba compiles
        as one. It is compiled into the bundle. Without it the call runs on the host.
    per : str
        ``element``: a thread calls ``gpu(*elements, **attributes)`` for each element of the results, with the elements
        of the operands there; it returns the element of the result, or a tuple with one for each result. An operand
        without dims is passed as its value. ``row``: a thread calls ``gpu(*rows, *result_rows, **attributes)`` for each
        row (last dim) of the results, and the function fills in the rows. ``launch``: ``gpu`` is a kernel
        ``gpu(*operands, *results, **attributes)``, launched once.
    threads, blocks : int
        The launch of a kernel. ``blocks`` may be a function of the shapes of all operands and results that returns the
        number: ``lambda x, out: (out[0] + 127) // 128``; sizes may be symbolic.

    Raises
    ------
    TypeError
        If the name is not a string, a native function is missing, ``function`` is not callable, or the launch of a
        kernel is not one.
    """
    if function is not None and not callable(function):
        raise TypeError(f"custom call {name!r}: {function!r} is not a function")
    if not isinstance(name, str):
        raise TypeError(f"the name of a custom call is a {type(name).__name__}: register_custom_call('name', function)")
    if native and function is None and gpu is None:
        raise TypeError(f"custom call {name!r}: native=True needs the function; native=False takes it at load")
    _check_gpu(name, gpu, per, threads, blocks)
    on_gpus = GpuFunction(gpu, per, threads, blocks) if gpu is not None else None
    _REGISTRY[name] = Registered(function, native and function is not None, on_gpus)


_MOST_THREADS = 1024  # of a block, on every GPU


def _check_gpu(name: str, gpu: Any, per: Any, threads: Any, blocks: Any) -> None:
    """Refuse a registration whose GPU function or launch is invalid."""
    where = f"custom call {name!r}"
    if gpu is None:
        if per != PER_ELEMENT or blocks:
            raise TypeError(f"{where}: per and blocks are about the function for GPUs: gpu=function")
        return
    if not callable(gpu) and not hasattr(gpu, "py_func"):
        raise TypeError(f"{where}: {gpu!r} is not a function")
    if per not in (PER_ELEMENT, PER_ROW, PER_LAUNCH):
        raise TypeError(f"{where}: per is {per!r}, expected {PER_ELEMENT!r}, {PER_ROW!r} or {PER_LAUNCH!r}")
    if per == PER_LAUNCH and not (callable(blocks) or (isinstance(blocks, int) and blocks > 0)):
        raise TypeError(f"{where}: a launch needs blocks=NUMBER, or blocks=function of the shapes, found {blocks!r}")
    if not isinstance(threads, int) or not 0 < threads <= _MOST_THREADS:
        raise TypeError(f"{where}: threads of a block are 1 to {_MOST_THREADS}, found {threads!r}")


def any_registered() -> bool:
    """Return True if any custom call is registered in this process."""
    return bool(_REGISTRY)


def registered_call(name: str) -> Registered | None:
    """Return the registration of the custom call ``name``, or None."""
    return _REGISTRY.get(name)


class Callbacks:
    """The Python functions of a loaded bundle, as native callbacks.

    Parameters
    ----------
    where : str
        The bundle, for messages.
    calls : sequence of dict
        The manifest's ``custom_calls``.
    given : mapping of str to callable
        Functions by name; missing ones are looked up in the registry.

    Raises
    ------
    BundleError
        If a function is in neither ``given`` nor the registry.
    """

    def __init__(self, where: str, calls: Sequence[Mapping[str, Any]], functions: Mapping[str, Function]) -> None:
        self.where = where
        self._failures = _CallbackFailures()
        self._natives: dict[str, Any] = {}
        for row in calls:
            function = functions.get(row["name"]) or _registered_function(row["name"])
            if function is None:
                raise BundleError(
                    where,
                    f"the bundle calls the Python function {row['name']!r}, which is not here",
                    hint=f"aotc.load(..., custom_calls={{{row['name']!r}: function}}), or before loading "
                    f"aotc.register_custom_call({row['name']!r}, function, native=False); with the command line "
                    "--custom-calls=FILE, which does that",
                )
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(row["operands"]) + len(row["results"]) + 1))
            self._natives[row["symbol"]] = kind(self._make_callback(row, function))

    def addresses(self) -> dict[str, int]:
        """Return the address of each native callback, by the symbol that the kernel library imports."""
        return {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._natives.items()}

    def _make_callback(self, row: Mapping[str, Any], function: Function) -> Function:
        """Return a callback with native parameters that calls ``function`` on NumPy arrays.

        ``row`` is the call's entry in the manifest. An exception of ``function`` is stored for the bundle call that it
        belongs to, and the results are set to zero.
        """
        types = [(to_numpy(dtype), rank) for dtype, rank in (*row["operands"], *row["results"])]
        inputs, attributes = len(row["operands"]), row["attributes"]
        name, last, answers = row["name"], sum(rank for _, rank in types), row.get("answers", False)
        failures = self._failures  # not self, which references the callbacks: a cycle would delay their release

        def call(*addresses: int) -> None:
            """Call the function on arrays over the memory at ``addresses``, those of operands, results, and sizes."""
            # An exception outside of the `try`, for instance from a signal handler that runs before it, is printed and
            # dropped by ctypes. The kernel then finds that the last word is unchanged, and calls again.
            words = (ctypes.c_int64 * (last + 1)).from_address(addresses[-1]) if answers else [1]
            try:
                if words[-1] != 1:
                    raise _lost_exception()
                arrays = _arrays_at_addresses(addresses, types)
                for array in arrays[:inputs]:
                    array.flags.writeable = False
                function(*arrays, **attributes)
            except BaseException as error:
                failures.store_exception(name, error)
                for array in _arrays_at_addresses(addresses, types)[inputs:]:
                    array[...] = np.zeros((), array.dtype)
            words[-1] = -1

        return call

    def wrap_native_call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``run``, which executes native code, so that it raises the exceptions of Python callbacks at its end."""
        failures = self._failures

        def call(*arguments: Any) -> Any:
            """Run the native code, then raise the exception that a callback stored, if any."""
            failures.begin_call()
            try:
                result = run(*arguments)
                self.raise_callback_error()
            except CallError:
                self.raise_callback_error()  # a function's exception is the cause of the failed assertion
                raise
            finally:
                failures.end_call()
            return result

        return call

    @keep_alive_forever
    def stop_if_needed(self) -> None:
        """Raise if a callback of the running native call has raised, or if the call was cancelled or interrupted."""
        self.raise_callback_error()
        raise_if_interrupted()

    def raise_callback_error(self) -> None:
        """Raise the first stored exception of a callback that belongs to this thread's call, if there is one."""
        failed = self._failures.pop_exception()
        if failed is not None:
            name, error = failed
            if not isinstance(error, Exception) or isinstance(error, RankLost):
                raise error
            raise CallError(self.where, f"custom call {name!r} failed: {type(error).__name__}: {error}") from error


class _CallbackFailures:
    """Exceptions of Python callbacks, stored until the native calls that they belong to have returned.

    A callback on a caller's thread belongs to the call of that thread. A callback on a worker thread may belong to any
    running call, so its exception is stored for all.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._calling: list[int] = []
        self._errors: list[tuple[str, BaseException, set[int]]] = []

    def begin_call(self) -> None:
        """Record that this thread starts a native call."""
        self._calling.append(get_ident())

    def end_call(self) -> None:
        """Record that this thread's native call has returned, and drop its unreported exceptions."""
        self._calling.remove(get_ident())
        while self._errors and self.pop_exception() is not None:
            pass

    def store_exception(self, name: str, error: BaseException) -> None:
        """Store an exception that the callback ``name`` raised on this thread."""
        me = get_ident()
        with self._lock:
            calls = {me} if me in self._calling else set(self._calling)
            self._errors.append((name, error, calls))
        for thread in calls:  # later results may depend on its results and are not valid
            running = RUNNING.get(thread)
            if running is not None:
                running.end_early_results()

    def pop_exception(self) -> tuple[str, BaseException] | None:
        """Remove and return the first exception for this thread's call, with the callback's name; None without one."""
        if not self._errors:
            return None
        me = get_ident()
        with self._lock:
            for row in self._errors:
                name, error, calls = row
                if me in calls:
                    calls.remove(me)
                    if not calls:
                        self._errors.remove(row)
                    return name, error
        return None


def _lost_exception() -> BaseException:
    """Return a substitute for an exception that Python printed and dropped because the callback had not started yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return KeyboardInterrupt()
    return RuntimeError("an exception, as of a signal handler, arrived before it began; Python printed it")


def _registered_function(name: str) -> Function | None:
    found = _REGISTRY.get(name)
    return found.function if found is not None else None


def _arrays_at_addresses(addresses: Sequence[int], types: Sequence[tuple[np.dtype, int]]) -> list[np.ndarray]:
    """Return NumPy arrays over native memory.

    Parameters
    ----------
    addresses : sequence of int
        Address of each array, then the address of an i64 array with the sizes of all dims.
    types : sequence of (dtype, int)
        Dtype and number of dims of each array.
    """
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
