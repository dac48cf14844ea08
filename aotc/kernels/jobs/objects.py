"""Objects to compile for kernels: their source texts, symbols and cache keys, and lookups in the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple

from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.printer import print_kernel
from aotc.kernels.jobs import cache
from aotc.kernels.jobs.pool import POOL
from aotc.kernels.jobs.run import CompilerRun, do_nothing
from aotc.kernels.limits import WORKER_FRAMES
from aotc.kernels.worker import begin_kernel, target_fields
from aotc.options import DIRECT, NUMBA, Options
from aotc.support.recursion_limit import deeper_recursion
from aotc.targets import Target
from aotc.vmfb.log import DEBUG, log

_NO_LETTER = re.compile(r"\W")


COMPILING = "compiling kernels"


class NamedKernels(NamedTuple):
    """An object file to compile: source text, target, and compiler (``options.DIRECT`` or ``NUMBA``).

    ``source`` is a module with the user's function in place of the kernel ``replaces``.
    """

    text: str
    target: Target
    compiler: str = DIRECT
    source: str = ""
    replaces: str = ""

    @property
    def key(self) -> str:
        """Return the cache key of the object; "" for a user's module, which is not cached: its imports may change."""
        if self.source:
            return ""
        return cache.object_cache_key(
            self.text if self.compiler == DIRECT else f"{self.compiler}\n{self.text}", self.target
        )


def name_kernels(
    kernels: Sequence[Kernel], targets: Sequence[Target], compiler: str = DIRECT,
    replaced: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[str], dict[str, NamedKernels]]:  # fmt: skip
    """Return each kernel's symbol, and the objects to compile by symbol; equal kernels are compiled once per target.

    A symbol is a digest of the kernel's text, so that equal kernels give equal bundles. If the kernels' ``targets``
    differ, the symbol includes the target's name. ``replaced`` has a user's module for some kernels, by name; the
    symbol of such a kernel includes a digest of the module.
    """
    several = len(set(targets)) > 1
    texts = [print_kernel(replace(k, name="kernel")) for k in kernels]
    symbols: list[str] = []
    named: dict[str, NamedKernels] = {}
    digests = {text: sha256(text.encode()).hexdigest()[:24] for text in dict.fromkeys(texts)}
    for kernel, text, target in zip(kernels, texts, targets, strict=True):
        own = f"_{_NO_LETTER.sub('_', target.name)}" if several else ""
        source = replaced.get(kernel.name, "")
        own += f"_{sha256(source.encode()).hexdigest()[:8]}" if source else ""
        symbols.append(f"aotc_{digests[text]}{own}")
        if symbols[-1] not in named:
            symbol_text = text.replace("def kernel(", f"def {symbols[-1]}(", 1)
            own_compiler = NUMBA if source else compiler if kernel.tiling is None else DIRECT  # templates are Numba's
            named[symbols[-1]] = NamedKernels(symbol_text, target, own_compiler, source, kernel.name)
    return symbols, named


def kernel_requests(named: Iterable[NamedKernels]) -> list[dict[str, Any]]:
    """Return the requests to a compiler process for the objects in ``named``."""
    return [
        {
            "text": k.text,
            "target": target_fields(k.target),
            "compiler": k.compiler,
            "source": k.source,
            "symbol": k.replaces,
        }
        for k in named
    ]


def _is_svml_enabled() -> bool:
    """Return True if Numba has enabled Intel's SVML for LLVM in this process.

    A bundle does not contain the functions of SVML.
    """
    from aotc.kernels.back_end import is_svml_enabled

    return is_svml_enabled()


def compile_texts(requests: list[dict[str, Any]], named: Sequence[NamedKernels], options: Options) -> list[bytes]:
    """Return the objects of ``requests``, from the cache or compiled; afterwards the cache has all of them."""
    with Compilation(requests, named, options) as compilation:
        made = compilation.finish()
        compilation.write_to_cache()
        return made


class Compilation:
    """A compilation of ``requests`` to objects; objects in the cache are not compiled.

    Use it as a context manager, which stops unfinished work at the end. A user's function is always compiled: its text
    does not contain the functions that it calls.
    """

    def __init__(self, requests: list[dict[str, Any]], named: Sequence[NamedKernels], options: Options) -> None:
        rows = zip(requests, named, strict=True)
        self._keys = [
            "" if "custom" in r or not options.cache else k.key for r, k in rows
        ]
        self._finished = {
            n: data for n, key in enumerate(self._keys) if key and (data := cache.read_cached_object(key)) is not None
        }
        self._missing = [n for n in range(len(requests)) if n not in self._finished]
        self.given, self._stack = (requests, named, options), ExitStack()
        missing = [requests[n] for n in self._missing]
        log(DEBUG, "%d of %d kernels are in the cache", len(requests) - len(missing), len(requests))
        self._run = CompilerRun(POOL, missing, options.jobs, None if missing and _is_svml_enabled() else begin_kernel)

    def __enter__(self) -> Compilation:
        from aotc.kernels.loop_addresses import with_fixed_addresses

        if self._missing:
            self._stack.enter_context(deeper_recursion(WORKER_FRAMES))  # some may be compiled in this process
            self._stack.enter_context(with_fixed_addresses())
            self._stack.enter_context(self._run)
        return self

    def begin_ahead(self) -> None:
        """Start compiling in the background where it can overlap with other work.

        See :meth:`.CompilerRun.begin_ahead`.
        """
        self._run.begin_ahead()

    def finish(self, meanwhile: Callable[[], object] = do_nothing) -> list[bytes]:
        """Wait for all objects and return them; ``meanwhile`` is called while kernels compile, if any do."""
        found, count = len(self._finished), len(self._keys)

        def done(more: int) -> None:
            self.given[2].advance(found + more, count, COMPILING)

        if self._missing:
            self._finished |= zip(self._missing, self._run.finish(done, meanwhile), strict=True)
        return [self._finished[n] for n in range(count)]

    def write_to_cache(self) -> None:
        """Write the compiled objects to the cache on disk."""
        for n in self._missing:
            if self._keys[n]:
                cache.write_cached_object(self._keys[n], self._finished[n])

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
