"""Build the GPU part of a bundle: compile kernels to images, and describe them in the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Kernel, collective_symbol
from aotc.kernels.cuda.emit import block_threads
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.kernels.cuda.image import unpack_image
from aotc.kernels.cuda.nvvm import oldest_cuda_driver
from aotc.kernels.cuda.shared_memory import block_launch, gpu_kernel_resources
from aotc.kernels.cuda.templates.launches import template_launch
from aotc.kernels.interface import interface_seal, kernel_interface_fields
from aotc.kernels.jobs.objects import COMPILING, compile_texts, kernel_requests, name_kernels
from aotc.options import Options
from aotc.progress import begin_stage
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """The manifest's facts about a kernel.

    Attributes
    ----------
    name, symbol : str
        Its name for people, and its symbol in the image.
    image : tuple of (int, int)
        First byte and size of its cubin or PTX in the segment.
    threads : int
        Threads of a block.
    items : int
        Items of the grid that a block runs.
    interface : mapping
        The arrays that it accesses.
    flops, bytes : Dim
        Work of the whole grid.
    resources : mapping of str to int
        Resources of a cubin, as in :class:`aotc.kernels.cuda.image.Image`, and the ``blocks`` that fit a
        multiprocessor.
    launch : mapping
        Launch parameters of a kernel with dynamic shared memory or from a template: see
        :mod:`aotc.vmfb.devices.cuda.launch`.
    """

    name: str
    symbol: str
    image: tuple[int, int]
    threads: int
    items: int
    interface: Mapping[str, Any]
    flops: Dim
    bytes: Dim
    resources: Mapping[str, int]
    launch: Mapping[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """Return the kernel's entry for the bundle manifest."""
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
            **({"resources": dict(self.resources)} if self.resources else {}),
            **({"launch": dict(self.launch)} if self.launch else {}),
        }


@dataclass(frozen=True, slots=True)
class CollectiveKernel:
    """The manifest's facts about a kernel without code, which stands for a collective of the runtime.

    Attributes
    ----------
    name : str
    symbol : str
        The symbol of the collective among the custom calls of the manifest.
    interface : mapping
    bytes : Dim
        As of :class:`CudaKernel`.
    """

    name: str
    symbol: str
    interface: Mapping[str, Any]
    bytes: Dim

    def entry(self) -> dict[str, Any]:
        """Return the kernel's entry for the bundle manifest."""
        own = {"name": self.name, "scratch": 0, "symbol": self.symbol}
        return {**own, **self.interface, "flops": "0", "bytes": str(self.bytes)}


@dataclass(frozen=True, slots=True)
class KernelImages:
    """All images of a target, one after the other, with their seal (a digest of the manifest), and the kernels in them.

    Attributes
    ----------
    data : bytes
        The segment.
    kernels : tuple of CudaKernel or CollectiveKernel
        In the order of the input.
    driver : tuple of int
        The oldest CUDA version whose driver compiles the images, if they are PTX: (13, 0).
    """

    data: bytes
    kernels: tuple[CudaKernel | CollectiveKernel, ...]
    driver: tuple[int, ...] = ()

    def entry(self, segment: int) -> dict[str, Any]:
        """Return the manifest entry of these kernels; their code is segment number ``segment`` of the bundle."""
        return {"ptx": segment, "driver": list(self.driver)} if self.driver else {"cubin": segment}


def build_images(
    kernels: Sequence[Kernel], target: Target, options: Options, described: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> KernelImages:  # fmt: skip
    """Compile GPU ``kernels`` to images; cached kernels are not compiled again.

    ``sources`` has the text of a module for some kernels, by name, which defines the kernel's function. ``described``
    is the manifest of the variant without its kernels; the images are sealed with all of it.

    Call :func:`aotc.kernels.cuda.nvvm.check_cuda_packages` first.
    """
    compiled = [k for k in kernels if not collective_symbol(k)]
    symbols, named = name_kernels(compiled, [target] * len(compiled), options.kernel_compiler, sources)
    begin_stage(options, COMPILING)
    packed = compile_texts(kernel_requests(named.values()), [*named.values()], options)
    images = dict(zip(named, map(unpack_image, packed), strict=True))
    begin_stage(options, "linking")
    ends = accumulate(len(image.data) for image in images.values())
    places = {symbol: (end - len(i.data), len(i.data)) for (symbol, i), end in zip(images.items(), ends, strict=True)}
    symbol_of = dict(zip((k.name for k in compiled), symbols, strict=True))
    found: list[CudaKernel | CollectiveKernel] = []
    for k in kernels:
        if called := collective_symbol(k):
            found.append(CollectiveKernel(k.name, called, kernel_interface_fields(k), k.bytes))
            continue
        symbol = symbol_of[k.name]
        threads, items, launch = _launch_parameters(k, target)
        place, resources = (
            places[symbol],
            gpu_kernel_resources(images[symbol].resources, threads, launch.get("shared", 0), target),
        )
        row = CudaKernel(
            k.name, symbol, place, threads, items, kernel_interface_fields(k), k.flops, k.bytes, resources, launch
        )
        found.append(row)
    data = b"".join([*(image.data for image in images.values()), interface_seal(found, target, described)])
    drivers = [oldest_cuda_driver(image.data) for image in images.values()] if target.portable else []
    return KernelImages(data, tuple(found), max(drivers, default=()))


def _launch_parameters(kernel: Kernel, target: Target) -> tuple[int, int, Mapping[str, Any]]:
    """Return the threads of a block, the number of grid items that a block runs, and the launch parameters."""
    if kernel.tiling is not None:
        threads, entry = template_launch(kernel)
        return threads, 1, entry
    threads = block_threads(kernel)
    if threads:
        return threads, 1, block_launch(kernel, target)
    threads = block_threads_of_flat_kernel(kernel)
    return threads, threads, {}
