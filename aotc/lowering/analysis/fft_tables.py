"""Tables of Fourier transforms: radices, twiddle factors and chirps, computed in extended precision.

Sources: Stockham's self-sorting transform (Van Loan, "Computational Frameworks for the Fast Fourier Transform",
1.7 and 1.8) and Bluestein's chirp transform (ibid., 4.2.3).
"""

from __future__ import annotations

import numpy as np

from aotc.ir.loop.forms.fft import fft_stages


def radices(n: int) -> tuple[int, ...]:
    """Return radices whose product is ``n``, the largest first; the empty tuple if a prime factor is above 13.

    >>> radices(1024)
    (8, 8, 4, 4)
    """
    factors = []
    rest = n
    for radix in (13, 11, 7, 5, 3):
        while rest % radix == 0:
            factors.append(radix)
            rest //= radix
    power = rest.bit_length() - 1
    if rest != 1 << power:
        return ()
    eights, left = divmod(power, 3)
    if left == 1 and eights:
        eights, left = eights - 1, 4
    factors += [8] * eights + {0: [], 1: [2], 2: [4], 4: [4, 4]}[left]
    return tuple(sorted(factors, reverse=True))


def nearest_factors(n: int) -> tuple[int, int]:
    """Return the two factors of ``n`` that are closest to each other; ``n`` is a product of small radices."""
    best = 1
    for d in range(int(n**0.5), 0, -1):
        if n % d == 0:
            best = d
            break
    return best, n // best


def smooth_size(n: int) -> int:
    """Return the size ``2**a * 3**b * 5**c >= n`` whose transform costs least: its elements times its passes."""
    best = 1 << (n - 1).bit_length()
    sizes = [best]
    for odd in (3**b * 5**c for b in range(12) for c in range(8)):
        if odd < best:
            sizes.append(odd << (-(-n // odd) - 1).bit_length())
    return min(sizes, key=lambda size: (size * len(radices(size)), size))


def unit_roots(numerators: np.ndarray, n: int, inverse: bool) -> np.ndarray:
    """Return ``exp(-+ 2 pi i a / n)`` for integers ``a``, reduced modulo ``n`` exactly before sine and cosine."""
    fraction = (np.asarray(numerators, np.int64) % n).astype(np.longdouble) / n
    angle = 2 * np.arccos(np.longdouble(-1)) * fraction
    sine = np.sin(angle)
    return np.cos(angle) + 1j * (sine if inverse else -sine)


def twiddles(factors: tuple[int, ...], inverse: bool) -> np.ndarray:
    """Return the twiddle factors of all stages, flattened from ``[stage][k - 1][p]``.

    The result has two rows: the real parts and the imaginary parts.
    """
    n = int(np.prod(factors, dtype=np.int64))
    parts = []
    for radix in factors:
        m = n // radix
        if m > 1:
            parts.append(unit_roots(np.outer(np.arange(1, radix), np.arange(m)), n, inverse).reshape(-1))
        n = m
    flat = np.concatenate(parts) if parts else np.zeros(1)
    return np.stack([flat.real, flat.imag])


def real_twiddles(factors: tuple[int, ...]) -> np.ndarray:
    """Return the twiddle factors for a real signal of twice the product of ``factors``.

    They are those of the transform of half the length, then the factors that separate even and odd elements.
    """
    half = int(np.prod(factors, dtype=np.int64))
    rotations = -0.5j * unit_roots(np.arange(half + 1), 2 * half, False)
    count = fft_stages(factors)[-1].table
    return np.concatenate([twiddles(factors, False)[:, :count], [rotations.real, rotations.imag]], axis=1)


def chirp(n: int, inverse: bool) -> np.ndarray:
    """Return ``exp(-+ i pi k*k / n)`` for ``k`` below ``n``."""
    k = np.arange(n, dtype=np.int64)
    return unit_roots(k * k, 2 * n, inverse)


def chirp_spectrum(n: int, size: int, inverse: bool) -> np.ndarray:
    """Return the transform, of length ``size``, of the conjugate chirp that Bluestein's convolution multiplies by."""
    wave = np.conj(chirp(n, inverse))
    wrapped = np.zeros(size, wave.dtype)
    wrapped[:n] = wave
    wrapped[size - n + 1 :] = wave[1:][::-1]
    return np.fft.fft(wrapped.astype(np.complex128))
