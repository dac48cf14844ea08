"""Launch parameters and LLVM IR of kernels by templates, for matmuls and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.ir.loop.ir import Kernel
from aotc.kernels.cuda.device_function import DeviceFunction, LoadFunction
from aotc.kernels.cuda.templates.attention.launch import attention_launch, attention_tiles
from aotc.kernels.cuda.templates.attention.template import attention_template_texts
from aotc.kernels.cuda.templates.gemm.launch import gemm_launch, gemm_tiles
from aotc.kernels.cuda.templates.gemm.template import gemm_template_texts
from aotc.targets import Target


def template_launch(kernel: Kernel) -> tuple[int, dict[str, Any]]:
    """Return the threads of a block, and the launch entry of the manifest."""
    if kernel.tiling is not None and kernel.tiling.is_attention:
        return attention_tiles(kernel).threads, attention_launch(kernel)
    return gemm_tiles(kernel).threads, gemm_launch(kernel)


def template_texts(kernel: Kernel, target: Target) -> tuple[list[str], Sequence[DeviceFunction | LoadFunction]]:
    """Return the LLVM IR of a kernel's template, and the device functions that the template calls."""
    is_attention = kernel.tiling is not None and kernel.tiling.is_attention
    return attention_template_texts(kernel) if is_attention else gemm_template_texts(kernel, target)
