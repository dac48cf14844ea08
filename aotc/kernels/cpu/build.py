"""Build the native libraries of a bundle's CPU variant: one with all kernels, and one with the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

from aotc.diagnostics import UNKNOWN, CompileError, Loc
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.access import imported_functions
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.kernels.interface import interface_seal, kernel_interface_fields
from aotc.kernels.jobs.objects import COMPILING, Compilation, NamedKernels, compile_texts, kernel_requests, name_kernels
from aotc.kernels.jobs.pool import POOL, default_jobs
from aotc.kernels.jobs.run import Refusal
from aotc.kernels.worker import target_fields
from aotc.options import NUMBA, Options
from aotc.progress import begin_stage
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Facts about a CPU kernel for the manifest of the bundle.

    Attributes
    ----------
    scratch : int
        Thread-local workspace in bytes.
    interface : mapping
        Buffers and dims of the kernel, see :func:`aotc.kernels.interface.kernel_interface_fields`.
    flops, bytes : Dim
        Number of floating-point operations, and of bytes read and written.
    target : str
        Name of the kernel's target if it differs from that of the library, else empty.
    """

    name: str
    scratch: int
    interface: Mapping[str, Any]
    flops: Dim
    bytes: Dim
    target: str = ""

    def entry(self) -> dict[str, Any]:
        """Return the kernel's entry of the manifest, as msgpack writes it."""
        work = {"flops": str(self.flops), "bytes": str(self.bytes)}
        own = {"target": self.target} if self.target else {}
        return {"name": self.name, "scratch": self.scratch, **self.interface, **work, **own}


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """A linked shared library, and facts about its kernels in the order of its function table."""

    data: bytes
    kernels: tuple[KernelInfo, ...]


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A user's function for a custom call, with the attributes of the call.

    ``arrays`` has the dtype and the rank of each operand and result.
    """

    name: str
    symbol: str
    arrays: tuple[tuple[str, int], ...]
    attributes: Mapping[str, Any]
    loc: Loc
    function: Callable[..., Any]


_EXECUTORS: dict[Target, bytes] = {}
"""The executors that were linked in this process."""


def start_workers(options: Options) -> None:
    """Start compiler processes if a target needs them, so that they are ready when the model has been read."""
    named = (options.target, *options.devices.values())
    if any("cuda" in name for name in named):
        POOL.start_processes(options.jobs or default_jobs(), "cuda")


class LibraryBuild:
    """A library under construction: its kernels can be compiled before the rest of its manifest is known.

    Use it as a context manager, which stops unfinished work at the end.

    Parameters
    ----------
    kernels : sequence of Kernel
        Kernels to compile; those in the cache are not compiled again.
    target : Target
        The target of the library.
    options : Options
        As :func:`aotc.compile` takes them.
    custom : sequence of NativeCall
        The user's functions to compile into the library.
    targets : sequence of Target
        The target of each kernel, if they differ.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        target: Target,
        options: Options,
        custom: Sequence[NativeCall] = (),
        targets: Sequence[Target] = (),
    ) -> None:
        from aotc.kernels.cpu.link import Linker

        self._kernels, self._target, self._options, self._custom = kernels, target, options, custom
        self._targets = targets or [target] * len(kernels)
        replaced = options.replaced("cpu")
        self._symbols, named = name_kernels(kernels, self._targets, options.kernel_compiler, replaced)
        fields = target_fields(target)
        users = [_custom_call_request(c, fields) for c in custom]
        self._first = [] if target in _EXECUTORS else [NamedKernels("executor", target)]
        first = [{"executor": True, "target": fields} for _ in self._first]
        requests = [*first, *kernel_requests(named.values()), *users]
        whole = [*self._first, *named.values(), *(NamedKernels(c.symbol, target) for c in custom)]
        self._linker = Linker(target)
        self._compilation = Compilation(requests, whole, options)
        self._stack = ExitStack()

    def __enter__(self) -> LibraryBuild:
        self._stack.enter_context(self._linker)
        self._stack.enter_context(self._compilation)
        return self

    def begin_ahead(self) -> None:
        """Start compiling kernels in the background if the caller has other work meanwhile."""
        self._compilation.begin_ahead()

    def finish(self, described: Mapping[str, Any] | None = None) -> SharedLibrary:
        """Compile the remaining kernels and link them; return the library.

        Parameters
        ----------
        described : mapping, optional
            The manifest of the variant. The library contains a digest of it, which the loader checks.

        Raises
        ------
        CompileError
            If a user's function cannot be compiled.
        """

        @cache
        def start_linker_and_create_table() -> tuple[tuple[KernelInfo, ...], bytes]:
            """Start the linker, and create the function table, while kernels are compiled."""
            self._linker.start()
            return self._kernel_table(described)

        begin_stage(self._options, COMPILING)
        try:
            objects = self._compilation.finish(start_linker_and_create_table)
        except Refusal as refusal:
            refused = next((c for c in self._custom if c.symbol == refusal.symbol), None)
            error = (
                _refused_function_error(refused, refusal.reason)
                if refused
                else replacement_error(refusal.symbol, refusal.reason)
            )
            raise error from None
        executors = [objects.pop(0) for _ in self._first]
        begin_stage(self._options, "linking")
        infos, table = start_linker_and_create_table()
        self._linker.send_objects([*objects, table])
        self._compilation.write_to_cache()
        for made in executors:
            _link_executor(self._target, made)
        allowed = math_library_symbols() if self._may_call_math_library() else ()
        return SharedLibrary(self._linker.linked_library(allowed), infos)

    def _kernel_table(self, described: Mapping[str, Any] | None) -> tuple[tuple[KernelInfo, ...], bytes]:
        """Return the manifest's facts about all kernels, and the object file with the table of their addresses."""
        from aotc.kernels.cpu.link import function_table_object

        infos = tuple(_kernel_info(k, own, self._target) for k, own in zip(self._kernels, self._targets, strict=True))
        own = {c.symbol for c in self._custom}
        seals = interface_seal(infos, self._target, described)
        imported = imported_symbols(self._kernels, ())
        return infos, function_table_object(self._symbols, self._target, imported, own, seals)

    def _may_call_math_library(self) -> bool:
        """May the library call the C math library? Kernels that are emitted directly do not."""
        return bool(self._custom) or self._options.kernel_compiler == NUMBA or bool(self._options.replace)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _kernel_info(kernel: Kernel, own: Target, target: Target) -> KernelInfo:
    """Collect the manifest's facts about a kernel of target ``own`` in a library for ``target``."""
    name = "" if own == target else own.name
    return KernelInfo(
        kernel.name, scratch_bytes(kernel), kernel_interface_fields(kernel), kernel.flops, kernel.bytes, name
    )


def imported_symbols(kernels: Sequence[Kernel], custom: Sequence[NativeCall]) -> list[str]:
    """Return the functions that kernels import and that their library, which contains ``custom``, does not define."""
    own = {c.symbol for c in custom}
    return sorted({name for k in kernels for name in imported_functions(k)} - own)


def check_native_function_compiles(native: NativeCall, target: Target, options: Options) -> None:
    """Compile a user's function and discard the result.

    Raises
    ------
    CompileError
        If Numba cannot compile the function.
    """
    request = _custom_call_request(native, target_fields(target))
    try:
        compile_texts([request], [NamedKernels(native.symbol, target)], options)
    except Refusal as refusal:
        raise _refused_function_error(native, refusal.reason) from None


def math_library_symbols() -> frozenset[str]:
    """Return the names of the functions in the C math library that a user's function may call."""
    from aotc.kernels.cpu.custom import MATH_SYMBOLS

    return MATH_SYMBOLS


def _custom_call_request(native: NativeCall, fields: list[Any]) -> dict[str, Any]:
    """Return the request that makes a compiler process compile a user's function; ``fields`` describe the target."""
    from aotc.kernels.cpu.custom import NativeFunctionRefused, parameter_values_of, pickle_function

    arrays = [list(pair) for pair in native.arrays]
    try:
        values = parameter_values_of(native.function, len(arrays), native.attributes)
        data = pickle_function(native.function)
    except NativeFunctionRefused as error:
        raise _refused_function_error(native, str(error)) from None
    return {"custom": data, "symbol": native.symbol, "arrays": arrays, "values": values, "target": fields}


def _refused_function_error(native: NativeCall, reason: str) -> CompileError:
    """Return the error about a user's function that cannot be compiled, with the place of its custom call."""
    return CompileError.at(
        native.loc,
        f"custom call @{native.name}: its function cannot be compiled into the bundle: {reason}",
        hint=f"change it, or register it with native=False and pass custom_calls={{{native.name!r}: function}} "
        "to aotc.load",
    )


def replacement_error(kernel: str, reason: str) -> CompileError:
    """Return the error about a user's function that cannot replace a kernel."""
    hint = "edit the function that `aotc dump --kernels -o kernels.py` prints, and keep its name and its parameters"
    return CompileError.at(UNKNOWN, f"the function cannot replace kernel {kernel}: {reason}", hint=hint)


def build_executor(target: Target, options: Options) -> bytes:
    """Return the executor's shared library for ``target``; each process links it once."""
    if target not in _EXECUTORS:
        request = {"executor": True, "target": target_fields(target)}
        _link_executor(target, *compile_texts([request], [NamedKernels("executor", target)], options))
    return _EXECUTORS[target]


def _link_executor(target: Target, made: bytes) -> None:
    """Link the object ``made`` to the executor's library, and cache the library in this process."""
    from aotc.kernels.cpu.link import link_shared_library

    _EXECUTORS[target] = link_shared_library([made], target)
