"""Kernels to objects: which texts are compiled, under which names, and whether the cache has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from aotc.ir.loop_ir import Kernel
from aotc.ir.loop_printer import print_kernel
from aotc.kernels.workers import cache
from aotc.kernels.workers.pool import POOL
from aotc.kernels.workers.worker import target_fields
from aotc.options import Options
from aotc.targets import Target


def name_kernels(kernels: Sequence[Kernel]) -> tuple[list[str], dict[str, str]]:
    """Return each kernel's symbol, and by symbol the text that is compiled: equal kernels are compiled once.

    A symbol is a digest of the kernel's text alone, so that equal kernels make equal bundles.
    """
    texts = [print_kernel(replace(k, name="kernel")) for k in kernels]
    symbols = {text: f"aotc_{sha256(text.encode()).hexdigest()[:24]}" for text in dict.fromkeys(texts)}
    named = {symbol: text.replace("def kernel(", f"def {symbol}(", 1) for text, symbol in symbols.items()}
    return [symbols[text] for text in texts], named


def kernel_requests(texts: Iterable[str], target: Target) -> list[dict[str, Any]]:
    """Return what a compiling process is asked for each of the kernels ``texts``."""
    return [{"text": text, "target": target_fields(target)} for text in texts]


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
