"""Fast Fourier transforms as functions that CPU kernels call: their parameters, and their meaning in NumPy.

A kernel calls a transform like a library function: ``call(Transform(dtype='f32', radices=(8, 8, 4), inverse=False,
scale=1.0), x[0], table[0, 0], out[0], work[0])``. The arguments are the first element of a signal, the twiddle factors
of :func:`aotc.lowering.analysis.fft_tables.twiddles`, the first element of the spectrum, and memory for intermediate
results. If ``pitch`` is set, a ``width`` or ``stride`` of 0 stands for an i64 argument after these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from aotc.ir.limits import TRANSFORM_LANES
from aotc.ir.loop.forms.records import TextRecord


@dataclass(frozen=True, slots=True)
class FftStage:
    """One pass of a transform.

    Each butterfly has ``radix`` inputs at distance ``m``, and processes ``s`` contiguous results of earlier passes. The
    last field is the position of the pass's first twiddle factor.
    """

    radix: int
    m: int
    s: int
    table: int


def fft_stages(radices: tuple[int, ...]) -> list[FftStage]:
    """Return the stages of an FFT whose butterflies have ``radices``."""
    n, s, table = prod(radices), 1, 0
    passes = []
    for radix in radices:
        n //= radix
        passes.append(FftStage(radix, n, s, table))
        table += (radix - 1) * n if n > 1 else 0
        s *= radix
    return passes


@dataclass(frozen=True, slots=True, repr=False)
class Transform(TextRecord):
    """A function that transforms one signal with contiguous points, or several neighbouring signals.

    Attributes
    ----------
    dtype : str
        Dtype of real and imaginary parts, of ``table`` and of ``work``.
    radices : tuple of int
        Radices of the passes.
    inverse : bool
        True for the inverse transform.
    scale : float
        Factor of the results.
    real : bool
        True for a real signal of twice the length, used as complex pairs. Its spectrum has one point more, and
        ``table`` also has the factors that separate the transforms of even and odd elements.
    pitch : int
        Stride in ``work`` between the points of a signal, where equal points of all signals are contiguous; 0 for a
        single signal.
    width : int
        Number of signals, at most ``pitch``; 0 if it is an argument of the call.
    stride : int
        Stride in memory between neighbouring points of a signal; 0 if it is an argument of the call.
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
    def points(self) -> int:
        """Return the length of a signal."""
        return prod(self.radices)

    @property
    def plane(self) -> int:
        """Return the elements of one plane (all real or all imaginary parts) of the work array.

        It includes padding, as the last vector may extend beyond the last point.
        """
        return self.points * (self.pitch or 1) + (0 if self.pitch else TRANSFORM_LANES)

    @property
    def work(self) -> int:
        """Return the elements of the work array: real and imaginary planes, for reading and for writing."""
        return 2 * min(len(self.radices) - (not self.real), 2) * self.plane

    @property
    def arguments(self) -> int:
        """Return the number of integer arguments of the call after the arrays."""
        return (not self.width) + (not self.stride) if self.pitch else 0


def run_transform(t: Transform, arrays: Sequence[np.ndarray]) -> None:
    """Run a transform with NumPy; ``arrays`` are the memory from each argument's element on, and then its integers."""
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
