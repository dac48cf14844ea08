"""Tile shapes of the attention templates: queries of a block, and ring buffers of keys and values in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.forms.attention import accumulator_bytes, queries_stay_in_shared_memory
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES
from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.templates.fragments import STEP_BYTES
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, SWIZZLE_BYTES, OperandSource
from aotc.kernels.cuda.templates.threads import BARRIER_BYTES, WARPGROUP, WARPGROUP_TILE
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Parameters of an attention template.

    Attributes
    ----------
    operands : str
        Dtype of queries, keys and values: ``bf16``, ``f16`` or, for single warps, ``tf32``.
    result : str
        ``bf16``, ``f16`` or ``f32``.
    rows : int
        Queries of a block.
    terms : int
        Keys, and values, of a stage.
    stages : int
        Stages of the ring buffers of keys and of values.
    depth, width : int
        Elements of a key, and of a value.
    k, v, q : OperandSource
        How the operands are loaded; ``q`` is None if device functions of the kernel return the queries.
    out : int
        Index of the result among the kernel's pointers.
    scale : float
        The factor of a score that is a scaled dot product; 0 if a device function of the kernel computes the score.
    ragged : bool
        True if the last stage may have fewer keys.
    causal : bool
        True if the number of keys depends on the row.
    in_lines : bool
        True if the template stores results in pieces of 16 bytes; otherwise a device function from the loop IR stores
        each element.
    """

    operands: str
    result: str
    rows: int
    terms: int
    stages: int
    depth: int
    width: int
    k: OperandSource
    v: OperandSource
    q: OperandSource | None = None
    out: int = -1
    scale: float = 0.0
    ragged: bool = True
    causal: bool = False
    in_lines: bool = True

    @property
    def size(self) -> int:
        """Return the bytes of one element of queries, keys or values."""
        return ELEMENT_BYTES[self.operands]

    @property
    def result_size(self) -> int:
        """Return the bytes of one element of the result."""
        return size_of(self.result)

    @property
    def threads(self) -> int:
        """Return the number of threads per block."""
        raise NotImplementedError

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block."""
        raise NotImplementedError

    @property
    def key_chunks(self) -> int:
        """Return the number of 128-byte pieces of a key; the last may be partial."""
        return -(-self.depth * self.size // CHUNK)

    @property
    def value_chunks(self) -> int:
        """Return the number of 128-byte pieces of a value."""
        return -(-self.width * self.size // CHUNK)

    @property
    def steps(self) -> int:
        """Return the number of tensor core instructions along a key; each multiplies 32 bytes."""
        return -(-self.depth * self.size // STEP_BYTES)

    @property
    def key_bytes(self) -> int:
        """Return the bytes of a stage of keys."""
        return self.terms * self.key_chunks * CHUNK

    @property
    def value_bytes(self) -> int:
        """Return the bytes of a stage of values."""
        return self.terms * self.value_chunks * CHUNK

    @property
    def queries_stay(self) -> bool:
        """Return True if single warps keep their queries in shared memory instead of registers."""
        return queries_stay_in_shared_memory(self.depth, self.width, self.size)

    @property
    def query_bytes(self) -> int:
        """Return the bytes of a block's queries; the results are staged in the same memory."""
        return self.rows * self.key_chunks * CHUNK


@dataclass(frozen=True, slots=True)
class WarpgroupAttention(AttentionTiles):
    """Tiles of :mod:`aotc.kernels.cuda.templates.attention.wgmma`: 64 queries for each consumer warpgroup."""

    @property
    def consumers(self) -> int:
        """Return the number of consumer warpgroups, which compute; one more warpgroup copies."""
        return self.rows // WARPGROUP_TILE

    @property
    def threads(self) -> int:
        """Return the number of threads per block, including the warpgroup that copies (the producer)."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory: queries, two ring buffers, barriers of stages and queries."""
        ring = self.stages * (self.key_bytes + self.value_bytes)
        return SWIZZLE_BYTES + self.query_bytes + ring + BARRIER_BYTES * (2 * 2 * self.stages + 2)


@dataclass(frozen=True, slots=True)
class FewAttention(AttentionTiles):
    """Tiles of :mod:`aotc.kernels.cuda.templates.attention.decode`: all warps share 16 queries and split the keys.

    Attributes
    ----------
    warps : int
        Warps of a block.
    cluster : int
        Blocks that share the keys of a head.
    split : bool
        True if the kernel processes only a part of the keys, and so must also store the softmax statistics.
    """

    warps: int = 8
    cluster: int = 1
    split: bool = False

    @property
    def threads(self) -> int:
        """Return the number of threads per block."""
        return WARP * self.warps

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage of a warp's ring buffer: keys, then values."""
        return self.key_bytes + self.value_bytes

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a warp's accumulators and of the softmax statistics of its rows."""
        return accumulator_bytes(self.width)

    @property
    def queries(self) -> int:
        """Return the offset of the queries in shared memory in bytes, after ring buffers and accumulators.

        Ring buffers and accumulators overlap.
        """
        sums = (self.warps + (self.cluster > 1)) * self.sum_bytes
        return max(self.warps * self.stages * self.stage_bytes, sums)

    @property
    def barriers(self) -> int:
        """Return the offset of the barriers of the warps' stages in shared memory, in bytes."""
        return self.queries + (self.query_bytes if self.queries_stay else 0)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block."""
        return SWIZZLE_BYTES + self.barriers + BARRIER_BYTES * self.warps * self.stages


@dataclass(frozen=True, slots=True)
class WarpAttention(AttentionTiles):
    """Tiles of :mod:`aotc.kernels.cuda.templates.attention.mma`: 16 queries for each warp.

    Attributes
    ----------
    split : bool
        True if the kernel processes only a part of the keys, and so must also store the softmax statistics.
    """

    split: bool = False

    @property
    def threads(self) -> int:
        """Return the number of threads per block."""
        return 2 * self.rows

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage of the ring buffer: keys, then values."""
        return self.key_bytes + self.value_bytes

    @property
    def queries(self) -> int:
        """Return the offset of the queries in shared memory, after the ring buffer, in bytes."""
        return max(self.stages * self.stage_bytes, self.rows * CHUNK)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block."""
        return SWIZZLE_BYTES + self.queries + (self.query_bytes if self.queries_stay else 0)
