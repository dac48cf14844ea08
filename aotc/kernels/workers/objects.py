"""Kernels to objects: which texts are compiled, under which names, and whether the cache has them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

from aotc.ir.loop_ir import Kernel
from aotc.ir.loop_printer import print_kernel
from aotc.kernels.limits import WORKER_FRAMES
from aotc.kernels.workers import cache
from aotc.kernels.workers.pool import POOL, nothing
from aotc.kernels.workers.worker import answer, target_fields
from aotc.options import Options
from aotc.recursion_limit import room_for
from aotc.targets import Target

_NO_LETTER = re.compile(r"\W")


COMPILING = "compiling kernels"


class Named(NamedTuple):
    """The text of what becomes an object, by which the cache knows it, and the target that it is compiled for."""

    text: str
    target: Target


def name_kernels(kernels: Sequence[Kernel], targets: Sequence[Target]) -> tuple[list[str], dict[str, Named]]:
    """Return each kernel's symbol, and by symbol what is compiled: equal kernels for one target are compiled once.

    A symbol is a digest of the kernel's text, so that equal kernels make equal bundles, and has the target's name where
    ``targets``, those of the kernels, are several.
    """
    several = len(set(targets)) > 1
    texts = [print_kernel(replace(k, name="kernel")) for k in kernels]
    symbols: list[str] = []
    named: dict[str, Named] = {}
    digests = {text: sha256(text.encode()).hexdigest()[:24] for text in dict.fromkeys(texts)}
    for text, target in zip(texts, targets, strict=True):
        own = f"_{_NO_LETTER.sub('_', target.name)}" if several else ""
        symbols.append(f"aotc_{digests[text]}{own}")
        if symbols[-1] not in named:
            named[symbols[-1]] = Named(text.replace("def kernel(", f"def {symbols[-1]}(", 1), target)
    return symbols, named


def kernel_requests(named: Iterable[Named]) -> list[dict[str, Any]]:
    """Return what a compiling process is asked for each of some kernels."""
    return [{"text": kernel.text, "target": target_fields(kernel.target)} for kernel in named]


def _uses_svml() -> bool:
    """Has the user's Numba told LLVM, for the whole process, to call Intel's functions of mathematics?"""
    return bool(getattr(sys.modules.get("numba.core.config"), "USING_SVML", False))


def compile_texts(requests: list[dict[str, Any]], named: Sequence[Named], options: Options) -> list[bytes]:
    """Return the objects of ``requests``, from the cache where it has them, where it has all of them then."""
    made, keep = compile_unkept(requests, named, options)
    keep()
    return made


def compile_unkept(
    requests: list[dict[str, Any]], named: Sequence[Named], options: Options, meanwhile: Callable[[], object] = nothing
) -> tuple[list[bytes], Callable[[], None]]:
    """Return the objects of ``requests``, from the cache where it has them, and what keeps the others there.

    A user's function is always compiled: the functions that it calls are not in its text. If anything is, ``meanwhile``
    is called beside it.
    """
    from aotc.kernels.loop_addresses import kept_addresses

    rows = zip(requests, named, strict=True)
    keys = ["" if "custom" in r or not options.cache else cache.key_of(k.text, k.target) for r, k in rows]
    found = {n: data for n, key in enumerate(keys) if key and (data := cache.read(key)) is not None}
    missing = [n for n in range(len(requests)) if n not in found]

    def done(count: int) -> None:
        options.advance(len(found) + count, len(requests), COMPILING)

    def keep() -> None:
        for n in missing:
            if keys[n]:
                cache.write(keys[n], made[n])

    here = None if _uses_svml() else answer
    with room_for(WORKER_FRAMES), kept_addresses():  # some may be compiled here
        compiled = POOL.run([requests[n] for n in missing], options.jobs, done, here, meanwhile) if missing else []
    made = found | dict(zip(missing, compiled, strict=True))
    return [made[n] for n in range(len(requests))], keep
