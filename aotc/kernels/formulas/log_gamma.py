"""``log gamma(x)`` of positive x in 64 bits, without branches.

Near the zeros at 1 and 2 it is ``(x - 1) (x - 2)`` times a polynomial (a Chebyshev fit with an error of 1e-18). The
recurrence leads there from arguments up to :data:`LOG_GAMMA_STIRLING`; above, Stirling's series is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas.forms import polynomial

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


def log_gamma_of_positive(m: Any, x: Any, log: Callable[..., Any]) -> Any:
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
