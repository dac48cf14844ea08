"""Register tiles of the loop IR, which only CPUs support; matmuls for GPUs are lowered without tiles."""

from __future__ import annotations

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Tile
from aotc.kernels.emit.body import BodyEmitter


def emit_tile(context: BodyEmitter, stmt: Tile) -> None:
    """Raise an InternalError, because GPUs do not support register tiles."""
    raise InternalError("kernels: a CUDA kernel has a tile for CPUs")
