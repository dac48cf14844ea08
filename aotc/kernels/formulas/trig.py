"""Sine, cosine, tangent and the angle of a vector, over the scalar algebra of ``formulas.math``."""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas.forms import INF, NAN, computed_in_64_bits, polynomial, real_function, with_sign_of_first
from aotc.kernels.formulas.llvm_algebra import Algebra

# |x| of sin, cos and tan: above, the rounded x * 2/pi may be off the nearest quadrant, and a multi-word function is
# called. A double has few bits left there for the fraction of a revolution.
LARGE_ANGLE = 2.0**44


_SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
        -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)  # fmt: skip
_COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
        2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)  # fmt: skip


def sine_and_cosine(m: Algebra, r: Any) -> tuple[Any, Any]:
    """Return ``(sin r, cos r)`` for ``|r| <= pi / 4``."""
    z = r * r
    sine = m.multiply_add(r * z, polynomial(m, z, _SIN), r)
    return sine, m.multiply_add(z * z, polynomial(m, z, _COS), m.multiply_add(z, m.const(-0.5), m.const(1.0)))


def _quadrant(m: Algebra, x: Any) -> tuple[Any, Any, Any]:
    """Return (quadrant, sin r, cos r) with ``x = quadrant * pi/2 + r``; arbitrary for ``|x| >= LARGE_ANGLE``."""
    n = m.rint(x * 0.63661977236758134308)
    r = m.fma(n, m.const(-1.57079632679489655800e00), x)
    r = m.fma(n, m.const(-6.12323399573676603587e-17), r)
    r = m.fma(n, m.const(1.49738490485916983e-33), r)
    return (m.to_int(n), *sine_and_cosine(m, r))


def _shifted_sine(m: Algebra, x: Any, turns: int) -> Any:
    """Return ``sin(x + turns * pi / 2)``."""
    n, sine, cosine = _quadrant(m, x)
    n = n + turns
    y = m.select((n & 1) != 0, cosine, sine)
    y = m.select((n & 2) != 0, -y, y)
    y = m.select(m.abs(x) < INF, y, m.const(NAN))
    return m.rarely((m.abs(x) >= LARGE_ANGLE) & (m.abs(x) < INF), "sine_of_large", (x, turns), y)


@real_function(f32=1, f64=2)
@computed_in_64_bits
def sin(m: Algebra, x: Any) -> Any:
    """Return the sine: reduction by multiples of pi/2 (Cody-Waite), then fdlibm's polynomials."""
    return m.select(x == 0.0, x, _shifted_sine(m, x, 0))


@real_function(f32=1, f64=2)
@computed_in_64_bits
def cos(m: Algebra, x: Any) -> Any:
    """Return the cosine: reduction by multiples of pi/2 (Cody-Waite), then fdlibm's polynomials."""
    return _shifted_sine(m, x, 1)


@real_function(f32=1, f64=4)
def tan(m: Algebra, x: Any) -> Any:
    """Return the tangent: sine over cosine of the reduced argument, in 64 bits of a remainder in two words."""
    if m.bits == 32:
        wide = m.widen(x)
        return m.narrow(_tangent(m.wide, wide, *_quadrant(m.wide, wide)))
    n = m.rint(x * 0.63661977236758134308)
    near = m.fma(n, m.const(-1.57079632679489655800e00), x)
    r = m.fma(n, m.const(-6.12323399573676603587e-17), near)
    low = m.fma(n, m.const(-6.12323399573676603587e-17), near - r)
    low = m.multiply_add(n, m.const(1.49738490485916983e-33), low)
    z = r * r
    sine = m.multiply_add(r * z, polynomial(m, z, _SIN), low) + r
    return _tangent(m, x, m.to_int(n), sine, sine_and_cosine(m, r)[1])


def _tangent(m: Algebra, x: Any, n: Any, s: Any, c: Any) -> Any:
    """Return the tangent of ``x``, which is n quarter revolutions plus an angle with the sine s and the cosine c."""
    odd = (n & 1) != 0
    large = (m.abs(x) >= LARGE_ANGLE) & (m.abs(x) < INF)
    above = m.rarely(large, "sine_of_large", (x, 0), m.select(odd, -c, s))
    below = m.rarely(large, "sine_of_large", (x, 1), m.select(odd, s, c))
    y = m.select(m.abs(x) < INF, above / below, m.const(NAN))
    return m.select(x == 0.0, x, y)


_ATAN_P = (-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1,
           -1.228866684490136173410e2, -6.485021904942025371773e1)  # fmt: skip
_ATAN_Q = (1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2,
           4.853903996359136964868e2, 1.945506571482613964425e2)  # fmt: skip


# Quotient of the sides in atan2: above, the angle is measured from pi/4, where the polynomial converges. Cephes,
# atan.c.
ATAN_UPPER = 0.66


@real_function(f32=1, f64=3)
@with_sign_of_first
@computed_in_64_bits
def atan2(m: Algebra, y: Any, x: Any) -> Any:
    """Return the angle of the vector (x, y): that of the smaller over the larger side, moved to its octant."""
    a, b = m.abs(x), m.abs(y)
    swap = b > a
    small, large = m.select(swap, a, b), m.select(swap, b, a)
    t = m.select(large == 0.0, m.const(0.0), small / large)
    t = m.select((small == INF), m.const(1.0), t)
    upper = t > ATAN_UPPER
    u = m.select(upper, (t - 1.0) / (t + 1.0), t)
    z = u * u
    angle = m.multiply_add(u * z, polynomial(m, z, _ATAN_P) / polynomial(m, z, _ATAN_Q), u)
    angle = m.select(upper, angle + 3.061616997868382943065e-17 + 0.78539816339744830962, angle)
    angle = m.select(swap, 6.123233995736765886130e-17 - angle + 1.57079632679489661923, angle)
    left = m.copysign(m.const(1.0), x) < 0.0
    angle = m.select(left, 1.2246467991473531772e-16 - angle + 3.14159265358979323846, angle)
    return m.select((x != x) | (y != y), x + y, angle)
