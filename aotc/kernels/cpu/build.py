"""Kernels to one library, executor to another: what the pipeline asks of the CPU back end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims import Dim
from aotc.ir.loop_access import imports
from aotc.ir.loop_ir import Kernel
from aotc.ir.loop_scratch import scratch_bytes
from aotc.kernels.interface import interface, seal
from aotc.kernels.workers.objects import COMPILING, Named, compile_texts, compile_unkept, kernel_requests, name_kernels
from aotc.kernels.workers.pool import POOL, Refusal, default_jobs
from aotc.kernels.workers.worker import target_fields
from aotc.options import Options
from aotc.stages import begin
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What the bundle says about one kernel; ``scratch`` is bytes per worker, ``target`` its own one of several."""

    name: str
    scratch: int
    interface: Mapping[str, Any]
    flops: Dim
    bytes: Dim
    target: str = ""

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        work = {"flops": str(self.flops), "bytes": str(self.bytes)}
        own = {"target": self.target} if self.target else {}
        return {"name": self.name, "scratch": self.scratch, **self.interface, **work, **own}


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library, and the kernels in its table in order."""

    data: bytes
    kernels: tuple[KernelInfo, ...]


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A user's function, and the custom call that it is compiled for: dtype and rank of operands and results."""

    name: str
    symbol: str
    arrays: tuple[tuple[str, int], ...]
    attributes: Mapping[str, Any]
    loc: Loc
    function: Callable[..., Any]


_EXECUTORS: dict[Target, bytes] = {}
"""The executors that were linked in this process."""


def start_workers(options: Options) -> None:
    """Begin starting compiler processes if a target wants them; they are ready when the model has been read."""
    named = (options.target, *options.devices.values())
    if any("cuda" in name for name in named):
        POOL.start(options.jobs or default_jobs(), "cuda")


def build_library(
    kernels: Sequence[Kernel],
    target: Target,
    options: Options,
    custom: Sequence[NativeCall] = (),
    described: Mapping[str, Any] | None = None,
    targets: Sequence[Target] = (),
) -> Library:
    """Compile and link ``kernels`` and the user's functions; those that the cache holds are not compiled again.

    ``described`` is what the manifest says of the variant besides its kernels; the library is sealed with all of it.
    Each kernel is compiled for its own one of ``targets``, which ``target`` stands for, if they are given.

    Raises
    ------
    CompileError
        If a user's function cannot be compiled.
    """
    from aotc.kernels.cpu.link import Linker, function_table

    own_targets = targets or [target] * len(kernels)
    symbols, named = name_kernels(kernels, own_targets)
    fields = target_fields(target)
    users = [_custom_request(c, fields) for c in custom]
    first = [] if target in _EXECUTORS else [{"executor": True, "target": fields}]
    requests = [*first, *kernel_requests(named.values()), *users]
    whole = [*(Named("executor", target) for _ in first), *named.values(), *(Named(c.symbol, target) for c in custom)]
    own = {c.symbol for c in custom}
    with Linker(target) as linker:

        @cache
        def rest() -> tuple[tuple[KernelInfo, ...], bytes]:
            """Start the linker, and make what needs no object."""
            linker.start()
            infos = tuple(map(_info, kernels, own_targets, [target] * len(kernels)))
            return infos, function_table(symbols, target, imported(kernels, ()), own, seal(infos, target, described))

        begin(options, COMPILING)
        try:
            objects, keep = compile_unkept(requests, whole, options, rest)
        except Refusal as refusal:
            refused = next(c for c in custom if c.symbol == refusal.symbol)
            raise _refused(refused, refusal.reason) from None
        executors = [objects.pop(0) for _ in first]
        begin(options, "linking")
        infos, table = rest()
        linker.give([*objects, table])
        keep()
        for made in executors:
            _link_executor(target, made)
        return Library(linker.take(math_symbols() if custom else ()), infos)


def _info(kernel: Kernel, own: Target, target: Target) -> KernelInfo:
    name = "" if own == target else own.name
    return KernelInfo(kernel.name, scratch_bytes(kernel), interface(kernel), kernel.flops, kernel.bytes, name)


def imported(kernels: Sequence[Kernel], custom: Sequence[NativeCall]) -> list[str]:
    """Return the functions that kernels need from outside of a library that holds those of ``custom``."""
    own = {c.symbol for c in custom}
    return sorted({name for k in kernels for name in imports(k)} - own)


def check_native(native: NativeCall, target: Target, options: Options) -> None:
    """Compile a user's function and throw the result away.

    Raises
    ------
    CompileError
        If it cannot be compiled.
    """
    request = _custom_request(native, target_fields(target))
    try:
        compile_texts([request], [Named(native.symbol, target)], options)
    except Refusal as refusal:
        raise _refused(native, refusal.reason) from None


def math_symbols() -> frozenset[str]:
    """Return what a user's function may call of the C library of mathematics."""
    from aotc.kernels.cpu.custom import MATH_SYMBOLS

    return MATH_SYMBOLS


def _custom_request(native: NativeCall, fields: list[Any]) -> dict[str, Any]:
    from aotc.kernels.cpu.custom import Refused, pickled, values_of

    arrays = [list(pair) for pair in native.arrays]
    try:
        values = values_of(native.function, len(arrays), native.attributes)
        data = pickled(native.function)
    except Refused as error:
        raise _refused(native, str(error)) from None
    return {"custom": data, "symbol": native.symbol, "arrays": arrays, "values": values, "target": fields}


def _refused(native: NativeCall, reason: str) -> CompileError:
    return CompileError.at(
        native.loc,
        f"custom call @{native.name}: its function cannot be compiled into the bundle: {reason}",
        hint=f"change it, or register it with native=False and pass custom_calls={{{native.name!r}: function}} "
        "to aotc.load",
    )


def build_executor(target: Target, options: Options) -> bytes:
    """Return the executor's library for ``target``; it is compiled beside the first kernels, and linked once."""
    if target not in _EXECUTORS:
        request = {"executor": True, "target": target_fields(target)}
        _link_executor(target, *compile_texts([request], [Named("executor", target)], options))
    return _EXECUTORS[target]


def _link_executor(target: Target, made: bytes) -> None:
    from aotc.kernels.cpu.link import link

    _EXECUTORS[target] = link([made], target)
