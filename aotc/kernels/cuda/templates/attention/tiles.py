"""How templates of attention split it: rows of queries a block has, keys and values in rings in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.loop.forms.attention import few_sums, queries_stay
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, SWIZZLE_BYTES, OperandSource


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """What the template is made for.

    Attributes
    ----------
    operands : str
        ``bf16``, ``f16`` or, of single warps, ``tf32``: of queries, keys and values.
    result : str
        ``bf16``, ``f16`` or ``f32``.
    rows : int
        Queries of a block.
    terms : int
        Keys, and values, that a block takes at a time.
    stages : int
        Of the rings of keys and of values.
    depth, width : int
        Elements of a key, and of a value.
    k, v, q : OperandSource
        What is known of the operands in memory; of queries nothing, where functions of the kernel return them.
    out : int
        The number of the result's pointer.
    scale : float
        What a product is multiplied with, if the score is that; else 0, and a function of the kernel returns it.
    ragged : bool
        May there be fewer terms than whole blocks of them have?
    causal : bool
        Does how many terms there are depend on the row?
    in_lines : bool
        Are results stored in pieces of 16 bytes? Otherwise the program's own statements store each element.
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
        """The bytes of an element of an operand."""
        return ELEMENT_BYTES[self.operands]

    @property
    def result_size(self) -> int:
        """The bytes of an element of the result."""
        return 2 if self.result in ("bf16", "f16") else 4

    @property
    def threads(self) -> int:
        """Of a block."""
        raise NotImplementedError

    @property
    def shared(self) -> int:
        """The bytes of shared memory of a block."""
        raise NotImplementedError

    @property
    def key_chunks(self) -> int:
        """How many pieces of 128 bytes a key has, the last perhaps not whole."""
        return -(-self.depth * self.size // CHUNK)

    @property
    def value_chunks(self) -> int:
        """How many pieces of 128 bytes a value has."""
        return -(-self.width * self.size // CHUNK)

    @property
    def steps(self) -> int:
        """How many times tensor cores take 32 bytes of a key."""
        return -(-self.depth * self.size // 32)

    @property
    def key_bytes(self) -> int:
        """The bytes of a stage of keys."""
        return self.terms * self.key_chunks * CHUNK

    @property
    def value_bytes(self) -> int:
        """The bytes of a stage of values."""
        return self.terms * self.value_chunks * CHUNK

    @property
    def queries_stay(self) -> bool:
        """Do queries of single warps stay in shared memory, and not in registers?"""
        return queries_stay(self.depth, self.width, self.size)

    @property
    def query_bytes(self) -> int:
        """The bytes of a block's queries, in whose place its results are staged."""
        return self.rows * self.key_chunks * CHUNK


@dataclass(frozen=True, slots=True)
class WarpgroupAttention(AttentionTiles):
    """Of :mod:`aotc.kernels.cuda.templates.attention.wgmma`: each of the warpgroups that multiply has 64 rows."""

    @property
    def consumers(self) -> int:
        """How many warpgroups multiply."""
        return self.rows // 64

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup copies."""
        return 128 * (self.consumers + 1)

    @property
    def shared(self) -> int:
        """The bytes of shared memory: queries, both rings, two barriers for each stage and for the queries."""
        ring = self.stages * (self.key_bytes + self.value_bytes)
        return SWIZZLE_BYTES + self.query_bytes + ring + 8 * (4 * self.stages + 2)


@dataclass(frozen=True, slots=True)
class FewAttention(AttentionTiles):
    """Of :mod:`aotc.kernels.cuda.templates.attention.decode`: all warps have the same 16 rows, and each its own terms.

    Attributes
    ----------
    warps : int
        Of a block.
    cluster : int
        Blocks that have the terms of a head together.
    parted : bool
        Is a part of the terms done, of which the weights are wanted too?
    """

    warps: int = 8
    cluster: int = 1
    parted: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage of a warp's ring: keys, then values."""
        return self.key_bytes + self.value_bytes

    @property
    def sum_bytes(self) -> int:
        """The bytes of a warp's sums, and of what it knows of its rows."""
        return few_sums(self.width)

    @property
    def queries(self) -> int:
        """Where queries are that stay: after the rings, and the sums that come in their place."""
        sums = (self.warps + (self.cluster > 1)) * self.sum_bytes
        return max(self.warps * self.stages * self.stage_bytes, sums)

    @property
    def barriers(self) -> int:
        """Where the barriers of the warps' stages are."""
        return self.queries + (self.query_bytes if self.queries_stay else 0)

    @property
    def shared(self) -> int:
        """The bytes of shared memory."""
        return SWIZZLE_BYTES + self.barriers + 8 * self.warps * self.stages


@dataclass(frozen=True, slots=True)
class WarpAttention(AttentionTiles):
    """Of :mod:`aotc.kernels.cuda.templates.attention.mma`: each warp has 16 rows.

    Attributes
    ----------
    parted : bool
        Is a part of the terms done, of which the weights are wanted too?
    """

    parted: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return 2 * self.rows

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: keys, then values."""
        return self.key_bytes + self.value_bytes

    @property
    def queries(self) -> int:
        """Where queries are that stay: after the ring, in whose place the warps' staging areas come at the end."""
        return max(self.stages * self.stage_bytes, self.rows * CHUNK)

    @property
    def shared(self) -> int:
        """The bytes of shared memory."""
        return SWIZZLE_BYTES + self.queries + (self.query_bytes if self.queries_stay else 0)
