"""Fast Fourier transforms as functions that kernels of a CPU call: what they are told, and what they mean.

A kernel says ``call('dft f32 8x8x4 forward 1.0', x[0], table[0, 0], out[0], work[0])``; the text names a
:class:`Transform`. The arguments are where a signal begins, the twiddle factors of
:func:`aotc.lowering.analysis.fft_tables.twiddles`, where the spectrum begins, and memory for what is between the
passes.
``dft f32 8x8x4 forward 1.0 16 10 0`` does so for 10 neighbouring signals, which lie apart by 16 there; a 0 for their
number or for the stride between two points of a signal is an i64 argument at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from aotc.ir.limits import TRANSFORM_LANES

_WORD = "dft"
_DIRECTIONS = ("forward", "inverse", "real")


@dataclass(frozen=True, slots=True)
class FftStage:
    """One pass: ``radix`` inputs ``m`` apart, ``s`` results of earlier stages side by side, first twiddle."""

    radix: int
    m: int
    s: int
    table: int


def stages(radices: tuple[int, ...]) -> list[FftStage]:
    """Return the passes for ``radices``."""
    n, s, table = prod(radices), 1, 0
    passes = []
    for radix in radices:
        n //= radix
        passes.append(FftStage(radix, n, s, table))
        table += (radix - 1) * n if n > 1 else 0
        s *= radix
    return passes


@dataclass(frozen=True, slots=True)
class Transform:
    """One function: the transform of a signal whose points lie side by side, or of neighbouring signals.

    Attributes
    ----------
    dtype : str
        Of real and imaginary parts, and of ``table`` and ``work``.
    radices : tuple of int
        Of the passes.
    inverse : bool
        Are the roots those of the inverse transform?
    scale : float
        What results are multiplied by.
    real : bool
        Is the signal of twice as many real numbers, which pairs are taken of? Then its spectrum has one point more, and
        ``table`` behind the twiddle factors those that part the even numbers' from the odd ones'.
    pitch : int
        How far apart in ``work`` equal points of neighbouring signals begin; 0: there is one signal.
    width : int
        How many signals there are, at most ``pitch``; 0: an argument says it.
    stride : int
        How far apart in memory neighbouring points of a signal are; 0: an argument says it.
    """

    dtype: str
    radices: tuple[int, ...]
    inverse: bool
    scale: float
    real: bool = False
    pitch: int = 0
    width: int = 0
    stride: int = 0

    @property
    def text(self) -> str:
        """Return the name that a kernel calls the function by."""
        direction = _DIRECTIONS[2 if self.real else self.inverse]
        words = [_WORD, self.dtype, "x".join(map(str, self.radices)), direction, repr(self.scale)]
        words += map(str, (self.pitch, self.width, self.stride) if self.pitch else ())
        return " ".join(words)

    @property
    def points(self) -> int:
        """Return the length of a signal."""
        return prod(self.radices)

    @property
    def plane(self) -> int:
        """Return the elements of ``work`` that hold real parts, or imaginary ones; some more than signals have.

        The last vector may reach beyond the last point.
        """
        return self.points * (self.pitch or 1) + (0 if self.pitch else TRANSFORM_LANES)

    @property
    def work(self) -> int:
        """Return the elements of ``work``: planes to read and planes to write."""
        return 2 * min(len(self.radices) - (not self.real), 2) * self.plane

    @property
    def arguments(self) -> int:
        """Return how many numbers are passed behind the arrays."""
        return (not self.width) + (not self.stride) if self.pitch else 0


def is_transform(function: str) -> bool:
    """Is what a kernel calls no library's function, but one of these?"""
    return function.startswith(f"{_WORD} ")


def read_transform(function: str) -> Transform:
    """Return what a name says."""
    _, dtype, radices, direction, scale, *block = function.split()
    factors = tuple(map(int, radices.split("x")))
    _, inverse, real = (direction == d for d in _DIRECTIONS)
    return Transform(dtype, factors, inverse, float(scale), real, *map(int, block))


def run_transform(function: str, arrays: Sequence[np.ndarray]) -> None:
    """Do what a name says with flat arrays that begin where the arguments are."""
    t = read_transform(function)
    x, _, out, *rest = arrays
    numbers = [int(a[0]) for a in rest[len(rest) - t.arguments :]]
    if t.real:
        out[: t.points + 1] = np.fft.rfft(x[: 2 * t.points].astype(np.float64)) * t.scale
        return
    width, stride = t.width or 1, t.stride or 1
    if t.pitch:
        width = t.width or numbers.pop(0)
        stride = t.stride or numbers.pop(0)
    places = stride * np.arange(t.points)[:, None] + np.arange(width)
    signal = x[places].astype(np.complex128)
    spectrum = np.fft.ifft(signal, axis=0, norm="forward") if t.inverse else np.fft.fft(signal, axis=0)
    out[places] = spectrum * t.scale
