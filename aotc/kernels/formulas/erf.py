"""The complementary error function, the error function in 64 bits, and its inverse, without branches.

The inverse is ``a`` times a polynomial of ``w = -log(1 - a**2)``, or of its root in the tail. The form, and the 64-bit
coefficients up to :data:`ERF_INV_END`, are from M. Giles, "Approximating the erfinv function" (GPU Computing Gems, Jade
Edition, 2011). Giles computes ``1 - a**2`` from the rounded square, which loses the digits of the tail; the product
``(1 - a) (1 + a)`` is as exact as its factors. The 32-bit coefficients are minimax fits with relative errors of 4e-8
and 8e-9. The last 64-bit ones are a Chebyshev fit (mpmath's ``chebyfit``) with 3e-17.
"""

from __future__ import annotations

from typing import Any

from aotc.kernels.formulas.exponential import less_one_of_two_words, times_power
from aotc.kernels.formulas.forms import INF, polynomial, polynomial_by_squares, real_function, with_sign_of_first
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.logarithm import log

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


def _rational_function(m: Algebra, x: Any, p: tuple[float, ...], q: tuple[float, ...]) -> Any:
    return polynomial(m, x, p) / polynomial(m, x, q)


# |x| of erfc: above, the argument is clamped. The result is 0, as it is less than half of the smallest subnormal, and
# the exponential of the square would leave its range. erfc(10.06) is below 2**-150, erfc(27.23) below 2**-1075.
ERFC_ZERO = (10.1, 27.3)


def erfc_of_positive(m: Algebra, a: Any) -> Any:
    """Return ``erfc(a)`` for ``a >= 0``: ``exp(-a * a)`` times :func:`_scaled`."""
    end = m.const(ERFC_ZERO[m.bits == 64])
    a = m.select(a > end, end, a)
    square = a * a
    scaled, low = _scaled_erfc(m, a, -m.fma(a, a, -square))
    word, power = less_one_of_two_words(m, -square, low)
    return times_power(m, m.multiply_add(scaled, power, scaled), word)


def _scaled_erfc(m: Algebra, a: Any, low: Any) -> tuple[Any, Any]:
    """Return ``s`` and ``l`` with ``exp(a * a + low) * erfc(a) == s * exp(l)``.

    In 64 bits the form is that of M. Shepherd and J. Laframboise, "Chebyshev approximation of (1 + 2x) exp(x**2) erfc
    x"; the rounding of ``1 + 2 a`` is corrected. In 32 bits a polynomial of ``1 / (1 + a)`` would be two units in the
    last place more accurate, and erfc 22 % slower.
    """
    if m.bits == 32:
        return _rational_function(m, a, _P32, _Q32), low
    w = a / (a + 4.0)
    twice = a + a
    below = twice + 1.0
    scaled = m.multiply_add(w, polynomial_by_squares(m, w - 0.75, _SCALED64), m.const(1.0)) / below
    return scaled, m.multiply_add((below - twice) - 1.0, scaled, low)


# |x| of erf in 64 bits: below, an odd rational function; above, 1 - erfc(x), which loses digits below. fdlibm, s_erf.c.
ERF_NEAR = 0.84375


def erf64(m: Algebra, x: Any) -> Any:
    """Return ``erf(x)`` in 64 bits."""
    a = m.abs(x)
    near = x + x * _rational_function(m, x * x, _PP, _QQ)
    return m.select(a < ERF_NEAR, near, m.copysign(1.0 - erfc_of_positive(m, a), x))


# Coefficients for 32 bits, highest power first: of w - 5/2, then of sqrt(w) - 3.
_NEAR32 = (-8.25304003e-09, 2.80492518e-08, 4.60145486e-07, -3.5221949e-06, -4.9441569e-06, 2.18572997e-04,
           -1.25275517e-03, -4.1776658e-03, 2.4664028e-01, 1.50140941)  # fmt: skip
_TAIL32 = (1.30670305e-04, -3.16471182e-04, -8.25958923e-05, 1.49280962e-03, -3.58157256e-03, 5.68472035e-03,
           -7.6411441e-03, 9.44534596e-03, 1.00167525, 2.83297682)  # fmt: skip
# Coefficients for 64 bits, highest power first: of w - 25/8, then of sqrt(w) - 13/4 and of sqrt(w) - 5.
_NEAR64 = (-3.6444120640178197e-21, -1.6850591381820166e-19, 1.28584807152564e-18, 1.1157877678025181e-17,
           -1.3331716628546209e-16, 2.0972767875968562e-17, 6.6376381343583238e-15, -4.0545662729752069e-14,
           -8.1519341976054721e-14, 2.6335093153082323e-12, -1.2975133253453532e-11, -5.4154120542946279e-11,
           1.0512122733215323e-09, -4.1126339803469837e-09, -2.9070369957882005e-08, 4.2347877827932404e-07,
           -1.3654692000834679e-06, -1.3882523362786469e-05, 1.8673420803405714e-04, -7.4070253416626698e-04,
           -6.0336708714301491e-03, 2.4015818242558962e-01, 1.6536545626831027e+00)  # fmt: skip
_TAIL64 = (2.2137376921775787e-09, 9.075656193888539e-08, -2.7517406297064545e-07, 1.8239629214389228e-08,
           1.5027403968909828e-06, -4.013867526981546e-06, 2.9234449089955446e-06, 1.2475304481671779e-05,
           -4.7318229009055734e-05, 6.8284851459573175e-05, 2.4031110387097894e-05, -3.5503752036284748e-04,
           9.5328937973738049e-04, -1.6882755560235047e-03, 2.4914420961078508e-03, -3.7512085075692412e-03,
           5.3709145535900636e-03, 1.0052589676941592e+00, 3.0838856104922208e+00)  # fmt: skip
_END64 = (-1.9998735266531134e-11, 4.276040715485875e-11, 6.780047197701464e-11, -4.370229021372322e-10,
          1.319328078032574e-09, -3.4724215389819335e-09, 7.818027832507429e-09, -1.5253916541239166e-08,
          2.9020681908421832e-08, -6.75568672833795e-08, 2.2905210682908635e-07, -9.930291720091029e-07,
          4.526052665073511e-06, -1.9681770734145603e-05, 7.599527808324833e-05, -2.1503011982556763e-04,
          -1.3871931837964221e-04, 1.0103004648645453e00, 4.849906401408584e00)  # fmt: skip

# w of erf_inv (32 and 64 bits): below, a polynomial of w; above, a polynomial of sqrt(w). Giles.
ERF_INV_TAIL = (5.0, 6.25)
# w of erf_inv in 64 bits at which one polynomial of sqrt(w) replaces the other. Giles.
ERF_INV_END = 16.0


@real_function(f32=3, f64=4)
@with_sign_of_first
def erf_inv(m: Algebra, x: Any) -> Any:
    """Return the inverse of erf by Giles' formula: infinite at 1, NaN beyond."""
    a = m.abs(x)
    w = -log(m, (1.0 - a) * (a + 1.0))
    root = m.sqrt(w)
    if m.bits == 32:
        tail = polynomial(m, root - 3.0, _TAIL32)  # infinite at 1, as w and the leading coefficient are
        return m.select(w < ERF_INV_TAIL[0], polynomial(m, w - 2.5, _NEAR32), tail) * a
    end = polynomial(m, root - 5.0, _END64)
    tail = m.select(w < ERF_INV_END, polynomial(m, root - 3.25, _TAIL64), end)
    factor = m.select(w < ERF_INV_TAIL[1], polynomial(m, w - 3.125, _NEAR64), tail)
    return m.select(a == 1.0, m.const(INF), factor * a)
