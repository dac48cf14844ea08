"""Records of ``Kernel.tiling``: the distribution of a matmul or attention kernel to a GPU's tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from aotc.ir.loop.forms.records import TextRecord

FP8 = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
"""The tensor core names of 8-bit floats."""
FP8_PAIRS = {f"{a}.{b}": (left, right) for left, a in FP8.items() for right, b in FP8.items()}
"""The dtypes of A and B of a matmul of 8-bit floats, by its name: ``e4m3.e5m2``."""
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "f64": 8, "i8": 1, **dict.fromkeys(FP8_PAIRS, 1)}
"""The bytes of an operand's element, by the name of the operands."""


def stored_dtypes(operands: str) -> tuple[str, str]:
    """Return the dtypes of A and B in memory for ``operands``, a dtype for tensor cores or a pair of them."""
    stored = "f32" if operands == "tf32" else operands
    return FP8_PAIRS.get(operands, (stored, stored))


@dataclass(frozen=True, slots=True, repr=False)
class Window(TextRecord):
    """The window of a convolution with known sizes, except for the number of images.

    Attributes
    ----------
    taps, strides, gaps, low, high, pixels : tuple of int
        For each spatial dim: taps, strides between pixels and between taps (dilation), padding at both ends, and pixels
        of the result.
    channels : int
        Channels of the input.
    parts : int
        Number of matmuls that the contraction is split into (split-K).
    merged : bool
        True if all taps of the last dim, whose channels are contiguous, are copied like one tap.
    """

    taps: tuple[int, ...]
    strides: tuple[int, ...]
    gaps: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    pixels: tuple[int, ...]
    channels: int
    parts: int = 1
    merged: bool = False

    @property
    def copied(self) -> tuple[tuple[int, ...], int]:
        """Return the taps per dim that need separate copies, and the channels of each copy."""
        if self.merged:
            return (*self.taps[:-1], 1), self.taps[-1] * self.channels
        return self.taps, self.channels

    def slices(self, depth: int) -> int:
        """Return the number of k-slices of a convolution: each has up to ``depth`` channels of one tap."""
        taps, channels = self.copied
        return prod(taps) * -(-channels // depth) // self.parts

@dataclass(frozen=True, slots=True, repr=False)
class Wgmma(TextRecord):
    """The matmul of warpgroups on Hopper, by ``wgmma`` instructions and copies of the tensor memory accelerator.

    Attributes
    ----------
    transposed : bool
        True if the operands are swapped: columns of the result are rows to the instructions.
    ping_pong : bool
        True if two warpgroups alternate between tiles: one multiplies while the other stores.
    """

    transposed: bool = False
    ping_pong: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Mma(TextRecord):
    """The matmul of single warps on Ampere and later, by ``mma`` instructions."""


@dataclass(frozen=True, slots=True, repr=False)
class WgmmaAttention(TextRecord):
    """Flash attention of warpgroups on Hopper."""


@dataclass(frozen=True, slots=True, repr=False)
class MmaAttention(TextRecord):
    """Flash attention of single warps on Ampere and later."""


@dataclass(frozen=True, slots=True, repr=False)
class DecodeAttention(TextRecord):
    """Split-KV attention for few queries: the warps of a block share 16 queries and split the keys.

    In ``Tiling.rows`` each warp counts as 16 rows.

    Attributes
    ----------
    cluster : int
        Blocks that split the keys of a head.
    """

    cluster: int = 1


Template: TypeAlias = Wgmma | Mma | WgmmaAttention | MmaAttention | DecodeAttention
ATTENTION = (WgmmaAttention, MmaAttention, DecodeAttention)
"""The templates of attention; the others multiply matrices."""


@dataclass(frozen=True, slots=True, repr=False)
class Tiling(TextRecord):
    """How a matmul is distributed to the tensor cores of a GPU.

    Attributes
    ----------
    template : Template
        The instructions, and how warps share the work.
    rows, cols : int
        The tile of the result that a block computes; for attention, the tile of the scores.
    stages : int
        Number of slices of both operands in shared memory at the same time.
    window : Window or None
        For a convolution whose input is copied by im2col: see :mod:`aotc.ir.loop.forms.conv`.
    """

    template: Template
    rows: int
    cols: int
    stages: int
    window: Window | None = None

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a block: slices in rows of 128 bytes, barriers and staging areas."""
        ring = self.stages * (self.rows + self.cols) * 128
        match self.template:
            case Wgmma(transposed, ping_pong):
                warps = 8 if ping_pong else (self.cols if transposed else self.rows) // 16
                return 1024 + ring + 16 * self.stages + warps * 2048
        warps = self.rows // 32 * max(self.cols // 64, 1) if self.rows >= 32 else self.cols // 32
        return 1024 + max(ring, warps * 2048)

    @property
    def is_wgmma(self) -> bool:
        """Return True if warpgroups compute the matmul by wgmma instructions."""
        return isinstance(self.template, Wgmma)

    @property
    def is_ping_pong(self) -> bool:
        """Return True if two warpgroups alternate between tiles, so that one computes while one stores."""
        return isinstance(self.template, Wgmma) and self.template.ping_pong

    @property
    def is_transposed(self) -> bool:
        """Return True if the operands are swapped, so that columns of the result are rows to the instructions."""
        return isinstance(self.template, Wgmma) and self.template.transposed

    @property
    def cluster(self) -> int:
        """Return the number of blocks that compute a tile together."""
        return self.template.cluster if isinstance(self.template, DecodeAttention) else 1

    @property
    def is_attention(self) -> bool:
        """Return True if the kernel is attention, False if a matmul."""
        return isinstance(self.template, ATTENTION)


TILING_CLASSES = {c.__name__: c for c in (Tiling, Window, Wgmma, Mma, *ATTENTION)}
"""The records of a tiling, by the names in its text."""
