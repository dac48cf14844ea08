"""``log gamma(x)`` of positive x in 64 bits, and with the digits of 32 bits for any x, without branches.

Near the zeros at 1 and 2 it is ``(x - 1) (x - 2)`` times a polynomial (a Chebyshev fit with an error of 1e-18). The
recurrence leads there from arguments up to :data:`LOG_GAMMA_STIRLING`; above, Stirling's series is used.

For 32 bits, ``log |gamma(x)|`` is computed in 64 with errors of about 2**-40. Negative numbers are reflected:
``1 / |gamma(-a)| = gamma(a) a |t| sin(pi t) / (pi t)``, where ``t`` is the distance to the nearest integer. The
coefficients are Chebyshev fits (mpmath's ``chebyfit``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas.forms import INF, polynomial, polynomial_by_squares
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.logarithm import parts_of_normal

# Coefficients of log gamma(x) / ((x - 1) (x - 2)) in x - 3/2, highest power first.
_BETWEEN = (-7.760660152513446e-06, 1.2140008083973407e-05, -8.355075869795273e-06, 1.3186019073996835e-05,
            -2.7201673025504752e-05, 4.30276814976503e-05, -6.614136022346414e-05, 0.00010535512483785591,
            -0.0001689178215524898, 0.00027131373861446925, -0.00043799307479613914, 0.000711519067515296,
            -0.0011644145847310124, 0.0019229163127905161, -0.0032120740737152814, 0.005446457839126065,
            -0.009425622448525798, 0.01679709863127416, -0.031308487501010646, 0.06291140107456439,
            -0.14595989591430608, 0.4831289505409809)  # fmt: skip
# Stirling's series in 1 / x**2: B(2n) / (2n (2n - 1)), highest first.
_STIRLING = (43867 / 244188, -3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_HALF_LOG_TURN = 0.91893853320467274178  # log(2 pi) / 2


# x of lgamma: above, Stirling's series of nine terms, whose tenth term is less than 2**-60; below, the recurrence down
# to the polynomial between 1 and 2.
LOG_GAMMA_STIRLING = 8.0


def log_gamma_of_positive(m: Algebra, x: Any, log: Callable[..., Any]) -> Any:
    """Return ``log gamma(x)`` for ``x >= 0``; ``log`` is the logarithm of the same algebra."""
    whole = m.floor(x)
    fraction = x - whole
    between = fraction * (fraction - 1.0) * polynomial(m, fraction - 0.5, _BETWEEN)
    product = m.select(x < 1.0, x, m.const(1.0))
    for n in range(1, int(LOG_GAMMA_STIRLING) - 1):
        product = product * m.select(x - float(n) >= 1.0, x - float(n), m.const(1.0))
    above = x >= LOG_GAMMA_STIRLING
    logarithm = log(m, m.select(above, x, product))
    inverse = 1.0 / m.select(above, x, m.const(LOG_GAMMA_STIRLING))
    series = inverse * polynomial(m, inverse * inverse, _STIRLING)
    large = (x - 0.5) * (logarithm - 1.0) + (series + (_HALF_LOG_TURN - 0.5))
    return m.select(above, large, m.select(x < 1.0, between - logarithm, between + logarithm))


# Coefficients of log gamma(x) / ((x - 1) (x - 2)) in x - 3/2, highest power first; the product is off by 7e-14.
_NARROW_BETWEEN = (0.0001554628166894359, -0.0002478916673369644, 0.00025115620873100323, -0.0004061154878568,
                   0.0007155033551216316, -0.0011707209343160166, 0.001922500778924697, -0.0032114161736407905,
                   0.0054464799099685785, -0.009425657396331987, 0.016797098117016827, -0.03130848668668238,
                   0.06291140107801733, -0.14595989591977382, 0.4831289505409809)  # fmt: skip
# Coefficients of Stirling's remainder times x in 1 / x**2 for x >= 3; the remainder is off by 5e-14.
_NARROW_STIRLING = (0.0017901800692895539, -0.0014233123861739818, 0.000810120660174383, -0.0005941137380865464,
                    0.0007936309810201604, -0.002777777643542962, 0.08333333333318188)  # fmt: skip
# Coefficients of log(sin(pi t) / (pi t)) / t**2 in t**2 for t <= 1/2; the logarithm is off by 2e-13.
_SINE = (-0.35115998565923, 0.05351903108683041, -0.17863911902818588, -0.13273987683603986, -0.16786570888879254,
         -0.20011932115711933, -0.2510224542499876, -0.33911429247346714, -0.5411616173243817,
         -1.6449340668476398)  # fmt: skip
# Coefficients of (log(1 + f) - f) / f**2 for sqrt(1/2) <= 1 + f < sqrt(2); the logarithm is off by 6e-13.
_LOG = (0.04401409864965619, -0.08455622952110388, 0.08637944223751945, -0.08298787919108902, 0.0897747491074773,
        -0.09992412115497984, 0.11117336334911962, -0.12500610205369486, 0.14285548798558848, -0.1666665070394823,
        0.20000001919978497, -0.25000000137028106, 0.3333333332674602, -0.49999999999820705)  # fmt: skip
_LN2 = 0.69314718055994530942

# x of lgamma in 32 bits: above, Stirling's series, of which seven terms are enough; below, the polynomial between 1
# and 2 and one step of the recurrence.
STIRLING_NARROW = 3.0
# |log gamma(x)| of negative x in 32 bits: below, it is computed in two words, as the terms of the reflection cancel.
# Their errors of 2**-40 are a hundredth of a unit in the last place of this.
LOG_GAMMA_CANCELS = 0.004


def log_gamma_of_narrow(m: Algebra, x: Any) -> Any:
    """Return ``log |gamma(x)|`` of an f32 number, computed in 64 bits with the precision of f32; infinite at poles."""
    a, negative = m.abs(x), x < 0.0
    below, above = a < 1.0, a >= STIRLING_NARROW
    fraction = a - m.floor(a)
    between = fraction * (fraction - 1.0) * polynomial_by_squares(m, fraction - 0.5, _NARROW_BETWEEN)
    product = m.select(a < 2.0, m.const(1.0), a - 1.0)
    t = a - m.rint(a)
    size = m.abs(t)
    distance = size * m.select(below, m.const(1.0), a)
    own = m.select(negative, product * distance, m.select(below, a, product))
    logarithm = _log(m, m.select(above, a, own))
    small = between + m.select(below & ~negative, -logarithm, logarithm)
    y = m.select(above, _stirling(m, a, logarithm), small)
    square = t * t
    sine = m.multiply_add(square, polynomial_by_squares(m, square, _SINE), y)
    y = m.select(negative, -sine - _log(m, m.select(above & negative, distance, m.const(1.0))), y)
    y = m.select((x <= 0.0) & (t == 0.0), m.const(INF), m.select(a == INF, a, y))
    return m.rarely(negative & (m.abs(y) < LOG_GAMMA_CANCELS), "log_gamma_of_negative", (x, a), y)


def _log(m: Algebra, x: Any) -> Any:
    """Return the logarithm of a positive normal number."""
    e, f = parts_of_normal(m, x)
    return m.multiply_add(e, m.const(_LN2), m.multiply_add(f * f, polynomial_by_squares(m, f, _LOG), f))


def _stirling(m: Algebra, x: Any, logarithm: Any) -> Any:
    """Return ``log gamma(x)`` for ``x >= STIRLING_NARROW``."""
    inverse = 1.0 / m.select(x >= STIRLING_NARROW, x, m.const(STIRLING_NARROW))
    remainder = inverse * polynomial_by_squares(m, inverse * inverse, _NARROW_STIRLING)
    return m.multiply_add(x - 0.5, logarithm - 1.0, remainder + (_HALF_LOG_TURN - 0.5))
