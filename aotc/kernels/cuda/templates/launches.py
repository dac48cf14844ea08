"""How kernels that templates make are launched."""

from __future__ import annotations

from typing import Any

from aotc.ir.loop_ir import Kernel
from aotc.kernels.cuda.templates.attention_launch import attention_launch, attention_tiles
from aotc.kernels.cuda.templates.product_launch import launch_entry, tiles_of


def template_launch(kernel: Kernel) -> tuple[int, dict[str, Any]]:
    """Return the threads of a block, and what the manifest says of the launch."""
    if kernel.tiling is not None and kernel.tiling.is_attention:
        return attention_tiles(kernel).threads, attention_launch(kernel)
    return tiles_of(kernel).threads, launch_entry(kernel)
