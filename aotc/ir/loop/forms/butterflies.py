"""The butterflies of a fast Fourier transform: unrolled transforms of 2 to 13 numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from aotc.ir.loop.ir import Apply, Const, Scalar

Pair = tuple[Scalar, Scalar]
Bind = Callable[[Scalar], Scalar]


class Butterfly:
    """Emits a transform as sums and products of pairs (real, imaginary).

    ``sign`` is -1 for the forward transform, +1 for the inverse.
    """

    def __init__(self, bind: Bind, dtype: str, sign: int) -> None:
        self.bind, self.dtype, self.sign = bind, dtype, sign

    def _complex_op(self, fn: str, a: Scalar, b: Scalar) -> Scalar:
        return self.bind(Apply(fn, (a, b), self.dtype))

    def add(self, a: Pair, b: Pair) -> Pair:
        return self._complex_op("add", a[0], b[0]), self._complex_op("add", a[1], b[1])

    def sub(self, a: Pair, b: Pair) -> Pair:
        return self._complex_op("sub", a[0], b[0]), self._complex_op("sub", a[1], b[1])

    def scale(self, a: Pair, by: float) -> Pair:
        number = Const(by, self.dtype)
        return self._complex_op("mul", a[0], number), self._complex_op("mul", a[1], number)

    def rotate(self, a: Pair) -> Pair:
        """Return ``sign * i * a``, a rotation by 90 degrees."""
        re, im = a
        if self.sign < 0:
            return im, self.bind(Apply("neg", (re,), self.dtype))
        return self.bind(Apply("neg", (im,), self.dtype)), re

    def times(self, a: Pair, w: Pair) -> Pair:
        """Return the complex product of ``a`` and the twiddle factor ``w``."""
        op = self._complex_op
        return (
            op("sub", op("mul", a[0], w[0]), op("mul", a[1], w[1])),
            op("add", op("mul", a[0], w[1]), op("mul", a[1], w[0])),
        )

    def transform(self, x: list[Pair]) -> list[Pair]:
        """Return the transform of ``x``, in natural order."""
        match len(x):
            case 1:
                return x
            case 2:
                return [self.add(x[0], x[1]), self.sub(x[0], x[1])]
            case 4:
                return self._transform_four(x)
            case 8:
                return self._transform_eight(x)
        return self._transform_odd(x)

    def _transform_four(self, x: list[Pair]) -> list[Pair]:
        a, b = self.add(x[0], x[2]), self.sub(x[0], x[2])
        c, d = self.add(x[1], x[3]), self.rotate(self.sub(x[1], x[3]))
        return [self.add(a, c), self.add(b, d), self.sub(a, c), self.sub(b, d)]

    def _transform_eight(self, x: list[Pair]) -> list[Pair]:
        """Return the transform of 8 elements from two transforms of 4: the even and the odd elements."""
        even, odd = self._transform_four(x[0::2]), self._transform_four(x[1::2])
        root = math.sqrt(0.5)
        one = self.scale(self.add(odd[1], self.rotate(odd[1])), root)
        three = self.scale(self.sub(self.rotate(odd[3]), odd[3]), root)
        transposed = [odd[0], one, self.rotate(odd[2]), three]
        return [self.add(a, b) for a, b in zip(even, transposed)] + [self.sub(a, b) for a, b in zip(even, transposed)]

    def _transform_odd(self, x: list[Pair]) -> list[Pair]:
        """Return the transform of an odd number of elements.

        Each element is paired with its mirror image: sums are multiplied by cosines, differences by sines.
        """
        n = len(x)
        half = range(1, n // 2 + 1)
        sums = {j: self.add(x[j], x[n - j]) for j in half}
        gaps = {j: self.rotate(self.sub(x[j], x[n - j])) for j in half}
        first = x[0]
        for j in half:
            first = self.add(first, sums[j])
        results = {0: first}
        for k in half:
            even, odd = x[0], None
            for j in half:
                angle = 2 * math.pi * (j * k % n) / n
                even = self.add(even, self.scale(sums[j], math.cos(angle)))
                part = self.scale(gaps[j], math.sin(angle))
                odd = part if odd is None else self.add(odd, part)
            assert odd is not None
            results[k], results[n - k] = self.add(even, odd), self.sub(even, odd)
        return [results[k] for k in range(n)]
