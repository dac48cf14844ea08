"""Kernels to cubins: what the pipeline asks of the CUDA back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Kernel
from aotc.ir.loop_printer import print_kernel
from aotc.kernels.cpu.build import compile_texts, symbol_of
from aotc.kernels.cuda.emit import block_threads
from aotc.kernels.interface import interface
from aotc.kernels.limits import FLAT_THREADS
from aotc.kernels.workers.worker import target_fields
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.abi import COMMANDS_VERSION
from aotc.vmfb.safety.interface import digest


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
    texts = [print_kernel(replace(k, name="kernel")) for k in kernels]
    order = list(dict.fromkeys(texts))
    symbols = {text: symbol_of(text) for text in order}
    named = [text.replace("def kernel(", f"def {symbols[text]}(", 1) for text in order]
    requests = [{"text": text, "target": target_fields(target)} for text in named]
    images = dict(zip(order, compile_texts(requests, named, target, options), strict=True))
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for text in order:
        places[text] = (end, len(images[text]))
        end += len(images[text])
    found = []
    for k, text in zip(kernels, texts, strict=True):
        threads = block_threads(k)
        shape = (threads, 1) if threads else (FLAT_THREADS, FLAT_THREADS)
        found.append(CudaKernel(k.name, symbols[text], places[text], *shape, interface(k), k.flops, k.bytes))
    about = described or {"kind": target.kind, "features": list(target.features), "commands_version": COMMANDS_VERSION}
    seal = digest({**about, "kernels": [k.entry() for k in found]})
    return Cubins(b"".join([*(images[text] for text in order), seal]), tuple(found))


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
