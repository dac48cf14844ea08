"""The complementary error function, and the error function in 64 bits, without branches."""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas.exponential import less_one_of_two_words, times_power
from aotc.kernels.formulas.forms import polynomial, polynomial_by_squares

# Coefficients of erf(x) / x - 1 in x**2 for |x| up to ERF_NEAR. fdlibm, s_erf.c.
_PP = (-2.37630166566501626084e-05, -5.77027029648944159157e-03, -2.84817495755985104766e-02,
       -3.25042107247001499370e-01, 1.28379167095512558561e-01)  # fmt: skip
_QQ = (-3.96022827877536812320e-06, 1.32494738004321644526e-04, 5.08130628187576562776e-03,
       6.50222499887672944485e-02, 3.97917223959155352819e-01, 1.0)  # fmt: skip
# Coefficients of exp(a * a) * erfc(a) in 32 bits for a <= 10.1, highest power first: a least-squares fit weighted by
# the error, off by 6e-9.
_P32 = (3.279844085167479e-02, 2.292279732684094e-01, 7.316233837471930e-01, 1.238428791974819, 1.0)
_Q32 = (5.813302406541341e-02, 4.063224031278450e-01, 1.325404511206379e+00, 2.402271484559909e+00,
        2.366808537780483e+00, 1.0)  # fmt: skip
# Coefficients of (exp(a * a) * erfc(a) * (1 + 2 a) - 1) / w in w - 3/4, where w = a / (a + 4), for a <= 27.3, highest
# power first; off by 6e-17 (mpmath's chebyfit).
_SCALED64 = (-0.011648494194719092, -0.09021851649280208, -0.29215406623528356, -0.4972112529260214,
             -0.4625552504763525, -0.26268113729484793, -0.1754676065523684, -0.05394788177659051, 0.08908353894987245,
             -0.13354287627897052, 0.040202184182536294, 0.23027371631564428, -0.6520901435524609, 1.1352658721595594,
             -1.5599206510715884, 1.822420766651596, -1.868923385303114, 1.705361878021666, -1.385259927622394,
             0.9853861952723549, -0.5809521664306952, 0.22847403382979212)  # fmt: skip


def _ratio(m: Any, x: Any, p: tuple[float, ...], q: tuple[float, ...]) -> Any:
    return polynomial(m, x, p) / polynomial(m, x, q)


# |x| of erfc: above, the argument is clamped. The result is 0, as it is less than half of the smallest subnormal, and
# the exponential of the square would leave its range. erfc(10.06) is below 2**-150, erfc(27.23) below 2**-1075.
ERFC_ZERO = (10.1, 27.3)


def erfc_of_positive(m: Any, a: Any) -> Any:
    """Return ``erfc(a)`` for ``a >= 0``: ``exp(-a * a)`` times :func:`_scaled`."""
    end = m.const(ERFC_ZERO[m.bits == 64])
    a = m.select(a > end, end, a)
    square = a * a
    scaled, low = _scaled(m, a, -m.fma(a, a, -square))
    word, power = less_one_of_two_words(m, -square, low)
    return times_power(m, m.multiply_add(scaled, power, scaled), word)


def _scaled(m: Any, a: Any, low: Any) -> tuple[Any, Any]:
    """Return ``s`` and ``l`` with ``exp(a * a + low) * erfc(a) == s * exp(l)``.

    In 64 bits the form is that of M. Shepherd and J. Laframboise, "Chebyshev approximation of (1 + 2x) exp(x**2)
    erfc x"; the rounding of ``1 + 2 a`` is corrected. In 32 bits a polynomial of ``1 / (1 + a)`` would be two units in
    the last place more accurate, and erfc 22 % slower.
    """
    if m.bits == 32:
        return _ratio(m, a, _P32, _Q32), low
    w = a / (a + 4.0)
    twice = a + a
    below = twice + 1.0
    scaled = m.multiply_add(w, polynomial_by_squares(m, w - 0.75, _SCALED64), m.const(1.0)) / below
    return scaled, m.multiply_add((below - twice) - 1.0, scaled, low)


# |x| of erf in 64 bits: below, an odd rational function; above, 1 - erfc(x), which loses digits below. fdlibm, s_erf.c.
ERF_NEAR = 0.84375


def erf64(m: Any, x: Any) -> Any:
    """Return ``erf(x)`` in 64 bits."""
    a = m.abs(x)
    near = x + x * _ratio(m, x * x, _PP, _QQ)
    return m.select(a < ERF_NEAR, near, m.copysign(1.0 - erfc_of_positive(m, a), x))
