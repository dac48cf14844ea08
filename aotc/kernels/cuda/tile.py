"""Register tiles, a statement of the loop IR for CPUs: GPUs do not support them, so matmuls are lowered without."""

from __future__ import annotations

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Tile
from aotc.kernels.emit.body import BodyEmitter


def emit_tile(context: BodyEmitter, stmt: Tile) -> None:
    """Raise an error: register tiles are for CPUs only."""
    raise InternalError("kernels: a CUDA kernel has a tile for CPUs")
