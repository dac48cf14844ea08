"""Kernels to cubins: what the pipeline asks of the CUDA back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Kernel
from aotc.kernels.cuda.emit import block_threads
from aotc.kernels.interface import interface, seal
from aotc.kernels.limits import FLAT_THREADS
from aotc.kernels.workers.objects import compile_texts, kernel_requests, name_kernels
from aotc.options import Options
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """What the bundle says about one kernel.

    Attributes
    ----------
    name, symbol : str
        For people, and in the cubin.
    image : tuple of (int, int)
        First byte and size of its cubin in the segment.
    threads : int
        Of a block.
    items : int
        How many items of the grid a block runs.
    interface : mapping
        What it touches.
    flops, bytes : Dim
        Work of the whole grid.
    """

    name: str
    symbol: str
    image: tuple[int, int]
    threads: int
    items: int
    interface: Mapping[str, Any]
    flops: Dim
    bytes: Dim

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {
            "name": self.name,
            "scratch": 0,
            "symbol": self.symbol,
            "image": list(self.image),
            "threads": self.threads,
            "items": self.items,
            **self.interface,
            "flops": str(self.flops),
            "bytes": str(self.bytes),
        }


@dataclass(frozen=True, slots=True)
class Cubins:
    """All cubins one after the other, then what seals them, and the kernels in them."""

    data: bytes
    kernels: tuple[CudaKernel, ...]


def build_cubins(
    kernels: Sequence[Kernel], target: Target, options: Options, described: Mapping[str, Any] | None = None
) -> Cubins:
    """Compile ``kernels``; those that the cache holds are not compiled again.

    ``described`` is what the manifest says of the variant besides its kernels; the cubins are sealed with all of it.

    Raises
    ------
    CompileError
        If nvJitLink is not installed.
    """
    _need_linker(target)
    symbols, named = name_kernels(kernels)
    images = compile_texts(kernel_requests(named.values(), target), [*named.values()], target, options)
    ends = accumulate(map(len, images))
    places = {symbol: (end - len(image), len(image)) for symbol, image, end in zip(named, images, ends, strict=True)}
    found = []
    for k, symbol in zip(kernels, symbols, strict=True):
        threads = block_threads(k)
        shape = (threads, 1) if threads else (FLAT_THREADS, FLAT_THREADS)
        found.append(CudaKernel(k.name, symbol, places[symbol], *shape, interface(k), k.flops, k.bytes))
    return Cubins(b"".join([*images, seal(found, target, described)]), tuple(found))


def _need_linker(target: Target) -> None:
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except Exception as error:
        raise CompileError.at(
            UNKNOWN,
            f"target {target.name} needs nvJitLink: {error}",
            hint='pip install "aotc[cuda-compile]"',
        ) from error
