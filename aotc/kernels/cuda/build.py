"""Build the GPU variant of a bundle: compile kernels to images, and describe them in the manifest."""

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
from aotc.kernels.cuda.shared_memory import block_launch_entry, gpu_kernel_resources
from aotc.kernels.cuda.templates.launches import template_launch
from aotc.kernels.interface import interface_seal, kernel_interface_fields
from aotc.kernels.jobs.objects import COMPILING, compile_texts, kernel_requests, name_kernels
from aotc.options import Options
from aotc.progress import begin_stage
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """Facts about a GPU kernel for the manifest of the bundle.

    Attributes
    ----------
    name, symbol : str
        Name in reports, and symbol in the image.
    image : tuple of (int, int)
        First byte and size of the kernel's cubin or PTX in the segment.
    threads : int
        Threads of a block.
    items : int
        Items of the grid that a block runs.
    interface : mapping
        Buffers and dims of the kernel, see :func:`aotc.kernels.interface.kernel_interface_fields`.
    flops, bytes : Dim
        Number of floating-point operations, and of bytes read and written, by the whole grid.
    resources : mapping of str to int
        Resources of a cubin, as in :class:`aotc.kernels.cuda.image.Image`, and the number of ``blocks`` that fit a
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
        """Return the kernel's entry of the manifest, as msgpack writes it."""
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
    """Facts for the manifest about a kernel without code, in whose place the runtime runs a collective.

    Attributes
    ----------
    name : str
        Name in reports.
    symbol : str
        Symbol of the collective among the custom calls of the manifest.
    interface : mapping
        As in :class:`CudaKernel`.
    bytes : Dim
        As in :class:`CudaKernel`.
    """

    name: str
    symbol: str
    interface: Mapping[str, Any]
    bytes: Dim

    def entry(self) -> dict[str, Any]:
        """Return the kernel's entry of the manifest, as msgpack writes it."""
        own = {"name": self.name, "scratch": 0, "symbol": self.symbol}
        return {**own, **self.interface, "flops": "0", "bytes": str(self.bytes)}


@dataclass(frozen=True, slots=True)
class KernelImages:
    """The segment with all images of a target and a digest of the manifest (seal), and facts about the kernels in it.

    Attributes
    ----------
    data : bytes
        The segment.
    kernels : tuple of CudaKernel or CollectiveKernel
        In the order of the input.
    driver : tuple of int
        If the images are PTX, the oldest CUDA version whose driver compiles them, such as (13, 0).
    """

    data: bytes
    kernels: tuple[CudaKernel | CollectiveKernel, ...]
    driver: tuple[int, ...] = ()

    def entry(self, segment: int) -> dict[str, Any]:
        """Return the entry of the manifest for these kernels; ``segment`` is the index of their segment."""
        return {"ptx": segment, "driver": list(self.driver)} if self.driver else {"cubin": segment}


def build_kernel_images(
    kernels: Sequence[Kernel], target: Target, options: Options, described: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> KernelImages:  # fmt: skip
    """Compile GPU kernels to images; kernels in the cache are not compiled again.

    Parameters
    ----------
    kernels : sequence of Kernel
        Kernels to compile. Call :func:`aotc.kernels.cuda.nvvm.check_cuda_packages` first.
    target : Target
        The GPU.
    options : Options
        As :func:`aotc.compile` takes them.
    described : mapping, optional
        The manifest of the variant without its kernels; the segment contains a digest of the whole manifest.
    sources : mapping of str to str
        Text of a module that defines the kernel's function, for kernels that a user's function replaces, by name.
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
        threads, items, launch = _block_launch_parameters(k, target)
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


def _block_launch_parameters(kernel: Kernel, target: Target) -> tuple[int, int, Mapping[str, Any]]:
    """Return the threads of a block, the number of grid items that a block runs, and further launch parameters."""
    if kernel.tiling is not None:
        threads, entry = template_launch(kernel)
        return threads, 1, entry
    threads = block_threads(kernel)
    if threads:
        return threads, 1, block_launch_entry(kernel, target)
    threads = block_threads_of_flat_kernel(kernel)
    return threads, threads, {}
