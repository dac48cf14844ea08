"""Register tiles on the GPU: not supported; matmuls are lowered without them."""

from __future__ import annotations

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Tile
from aotc.kernels.emit.body import BodyEmitter


def emit_tile(context: BodyEmitter, stmt: Tile) -> None:
    """Refuse a tile statement."""
    raise InternalError("kernels: a tile of the CPU's kind in a CUDA kernel")
