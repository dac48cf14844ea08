"""The passes of a fast Fourier transform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FftStage:
    """One pass: ``radix`` inputs ``m`` apart, ``s`` results of earlier stages side by side, first twiddle."""

    radix: int
    m: int
    s: int
    table: int


def stages(radices: tuple[int, ...]) -> list[FftStage]:
    """Return the passes for ``radices``."""
    n, s, table = 1, 1, 0
    for radix in radices:
        n *= radix
    passes = []
    for radix in radices:
        n //= radix
        passes.append(FftStage(radix, n, s, table))
        table += (radix - 1) * n if n > 1 else 0
        s *= radix
    return passes
