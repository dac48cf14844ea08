"""How a matmul kernel is tiled for a GPU's tensor cores: the contents of ``tiling``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

FP8 = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
"""The tensor core names of 8-bit floats."""
FP8_PAIRS = {f"{a}.{b}": (left, right) for left, a in FP8.items() for right, b in FP8.items()}
"""The dtypes of A and B of a matmul of 8-bit floats, by its name: ``e4m3.e5m2``."""
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "f64": 8, "i8": 1, **dict.fromkeys(FP8_PAIRS, 1)}
"""The bytes of an operand's element, by the name of the operands."""


def stored_dtypes(operands: str) -> tuple[str, str]:
    """Return the dtypes of A and B in memory, by the name of the operands."""
    stored = "f32" if operands == "tf32" else operands
    return FP8_PAIRS.get(operands, (stored, stored))


@dataclass(frozen=True, slots=True)
class Window:
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
        True if the channels of all taps of the last dim, which are contiguous, are copied as those of one tap.
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
        """The taps that are copied separately, and the channels of each."""
        if self.merged:
            return (*self.taps[:-1], 1), self.taps[-1] * self.channels
        return self.taps, self.channels

    def turns(self, depth: int) -> int:
        """Return the number of slices of up to ``depth`` channels of one tap in a part."""
        taps, channels = self.copied
        return prod(taps) * -(-channels // depth) // self.parts

    def __str__(self) -> str:
        sizes = self.taps, self.strides, self.gaps, self.low, self.high, self.pixels
        return str((*sizes, self.channels, self.parts, self.merged))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matmul is distributed to the tensor cores of a GPU.

    Attributes
    ----------
    template : str
        ``wgmma`` or ``mma``: the instructions; after ``attention_`` for attention. ``wgmma_in_turn``: two warpgroups
        alternate between tiles, and one multiplies while the other stores. ``wgmma_turned``: swapped operands, columns
        of the result are rows to the instructions. ``attention_few``: all warps have the same 16 queries and split the
        keys; their scores count as 16 rows each.
    rows, cols : int
        The part of the result that a block computes; for attention, the part of the scores.
    stages : int
        Slices of both operands in shared memory.
    window : Window or None
        For a convolution whose input is copied by im2col: see :mod:`aotc.ir.loop.forms.conv`.
    cluster : int
        Blocks that compute a part together: for ``attention_few``, each the scores of some keys.
    """

    template: str
    rows: int
    cols: int
    stages: int
    window: Window | None = None
    cluster: int = 1

    @property
    def shared(self) -> int:
        """The bytes of shared memory of a block: slices in rows of 128 bytes, barriers and staging areas."""
        ring = self.stages * (self.rows + self.cols) * 128
        if self.is_wgmma:
            warps = 8 if self.is_in_turn else (self.cols if self.is_turned else self.rows) // 16
            return 1024 + ring + 16 * self.stages + warps * 2048
        warps = self.rows // 32 * max(self.cols // 64, 1) if self.rows >= 32 else self.cols // 32
        return 1024 + max(ring, warps * 2048)

    @property
    def is_wgmma(self) -> bool:
        """Is it a matmul by warpgroups?"""
        return self.template in ("wgmma", "wgmma_in_turn", "wgmma_turned")

    @property
    def is_in_turn(self) -> bool:
        """Do two warpgroups alternate between tiles?"""
        return self.template == "wgmma_in_turn"

    @property
    def is_turned(self) -> bool:
        """Are the operands swapped: are columns of the result rows to the instructions?"""
        return self.template == "wgmma_turned"

    @property
    def is_attention(self) -> bool:
        """Is the kernel attention, and not a matmul?"""
        return self.template.startswith("attention_")

    def __str__(self) -> str:
        more = "" if self.window is None else f", window={self.window}"
        more += "" if self.cluster == 1 else f", cluster={self.cluster}"
        return f"{self.template}({self.rows}, {self.cols}, {self.stages}{more})"
