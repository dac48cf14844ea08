"""Which template makes a kernel that has a tiling."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.loop_ir import Kernel
from aotc.kernels.cuda.device_function import DeviceFunction, LoadFunction
from aotc.kernels.cuda.templates.attention import attention_texts
from aotc.kernels.cuda.templates.gemm import product_texts
from aotc.targets import Target


def template_texts(kernel: Kernel, target: Target) -> tuple[list[str], Sequence[DeviceFunction | LoadFunction]]:
    """Return the IR of the template of ``kernel`` for ``target``, and the functions that it calls."""
    is_attention = kernel.tiling is not None and kernel.tiling.is_attention
    return attention_texts(kernel) if is_attention else product_texts(kernel, target)
