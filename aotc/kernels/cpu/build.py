"""Kernels to one library, executor to another: what the pipeline asks of the CPU back end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Kernel, imports
from aotc.ir.loop_printer import print_kernel
from aotc.kernels.emit.scratch import scratch_bytes
from aotc.kernels.interface import interface
from aotc.kernels.workers import cache
from aotc.kernels.workers.pool import POOL, Refusal
from aotc.kernels.workers.worker import target_fields
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.abi import COMMANDS_VERSION
from aotc.vmfb.safety.interface import digest


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What the bundle says about one kernel; ``scratch`` is bytes per worker."""

    name: str
    scratch: int
    interface: Mapping[str, Any]
    flops: Dim
    bytes: Dim

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        work = {"flops": str(self.flops), "bytes": str(self.bytes)}
        return {"name": self.name, "scratch": self.scratch, **self.interface, **work}


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


def start_workers(options: Options) -> None:
    """Begin starting compiler processes; they are ready when the model has been read."""
    POOL.start(options.jobs)


def build_library(
    kernels: Sequence[Kernel],
    target: Target,
    options: Options,
    custom: Sequence[NativeCall] = (),
    described: Mapping[str, Any] | None = None,
) -> Library:
    """Compile and link ``kernels`` and the user's functions; those that the cache holds are not compiled again.

    ``described`` is what the manifest says of the variant besides its kernels; the library is sealed with all of it.

    Raises
    ------
    CompileError
        If a user's function cannot be compiled.
    """
    from aotc.kernels.cpu.link import function_table, link

    texts = [print_kernel(replace(k, name="kernel")) for k in kernels]
    order = list(dict.fromkeys(texts))
    symbols = {text: symbol_of(text) for text in order}
    named = [text.replace("def kernel(", f"def {symbols[text]}(", 1) for text in order]
    fields = target_fields(target)
    requests: list[dict[str, Any]] = [{"executor": True, "target": fields}]
    requests += [{"text": t, "target": fields} for t in named]
    users = [_custom_request(c, fields) for c in custom]
    names = ["executor", *named, *(c.symbol for c in custom)]
    try:
        executor, *objects = compile_texts([*requests, *users], names, target, options)
    except Refusal as refusal:
        raise _refused(next(c for c in custom if c.symbol == refusal.symbol), refusal.reason) from None
    _EXECUTORS[target] = executor
    infos = tuple(KernelInfo(k.name, scratch_bytes(k), interface(k), k.flops, k.bytes) for k in kernels)
    about = described or {"kind": target.kind, "features": list(target.features), "commands_version": COMMANDS_VERSION}
    seal = digest({**about, "kernels": [info.entry() for info in infos]})
    own = {c.symbol for c in custom}
    table = function_table([symbols[t] for t in texts], target, imported(kernels, ()), own, seal)
    return Library(link([*objects, table], target, math_symbols() if custom else ()), infos)


def imported(kernels: Sequence[Kernel], custom: Sequence[NativeCall]) -> list[str]:
    """Return the functions that kernels need from outside of a library that holds those of ``custom``."""
    own = {c.symbol for c in custom}
    return sorted({name for k in kernels for name in imports(k)} - own)


def symbol_of(text: str) -> str:
    """Return the symbol of a kernel: a digest of its text alone, so that equal kernels make equal bundles."""
    return f"aotc_{sha256(text.encode()).hexdigest()[:24]}"


def check_native(native: NativeCall, target: Target, options: Options) -> None:
    """Compile a user's function and throw the result away.

    Raises
    ------
    CompileError
        If it cannot be compiled.
    """
    request = _custom_request(native, target_fields(target))
    try:
        compile_texts([request], [native.symbol], target, options)
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
    """Return the executor's library for ``target``; its object is compiled beside the first kernels."""
    from aotc.kernels.cpu.link import link

    if target not in _EXECUTORS:
        request = {"executor": True, "target": target_fields(target)}
        (_EXECUTORS[target],) = compile_texts([request], ["executor"], target, options)
    return link([_EXECUTORS[target]], target)


def compile_texts(requests: list[dict[str, Any]], texts: list[str], target: Target, options: Options) -> list[bytes]:
    """Return the objects of ``requests``, from the cache where it has them.

    A user's function is always compiled: the functions that it calls are not in its text.
    """
    keys = ["" if "custom" in r or not options.cache else cache.key_of(t, target) for r, t in zip(requests, texts)]
    found = {n: data for n, key in enumerate(keys) if key and (data := cache.read(key)) is not None}
    missing = [n for n in range(len(requests)) if n not in found]

    def done(count: int) -> None:
        options.advance(len(found) + count, len(requests), "compiling kernels")

    made = POOL.run([requests[n] for n in missing], options.jobs, done) if missing else []
    compiled = dict(zip(missing, made, strict=True))
    for n, data in compiled.items():
        if keys[n]:
            cache.write(keys[n], data)
    return [found[n] if n in found else compiled[n] for n in range(len(requests))]
