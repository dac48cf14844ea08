"""The logarithmic derivative of gamma in 64 bits, without branches.

Between 1 and 2 it is ``x - x0``, with the zero ``x0`` in two words, times a polynomial (a Chebyshev fit of mpmath's
``chebyfit``, with an error of 4e-18). The recurrence ``digamma(x + 1) = digamma(x) + 1 / x`` leads there from arguments
below :data:`DIGAMMA_ASYMPTOTIC`, and all of its terms are positive. Above, the asymptotic series is used. Negative
numbers are reflected.
"""

from __future__ import annotations

import math
from typing import Any

from aotc.kernels.formulas.forms import NAN, computed_in_64_bits, polynomial, real_function
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.logarithm import log
from aotc.kernels.formulas.trig import sine_and_cosine

_ZERO = (1.4616321449683622, 9.549995429965697e-17)
# Coefficients of digamma(x) / (x - x0) in x - 3/2, highest power first.
_BETWEEN = (0.00011881232908510335, -0.0001782188548855923, 9.653646261410062e-05, -0.00014480643368061614,
            0.00032395945401345196, -0.00048595039220036254, 0.0006909255761282986, -0.0010364584817312839,
            0.0015633696313653504, -0.0023454947397380833, 0.003518106563802472, -0.005279937255532708,
            0.007927021796868154, -0.011908220105959716, 0.017907248317313294, -0.026975796659787055,
            0.040760833940846085, -0.06192213327548831, 0.09498872445289039, -0.14840492305388092,
            0.24054248424078697, -0.4236274212814606, 0.9510558760318328)  # fmt: skip
# The asymptotic series in 1 / x**2: -B(2n) / 2n, highest first.
_SERIES = (3617 / 8160, -1 / 12, 691 / 32760, -1 / 132, 1 / 240, -1 / 252, 1 / 120, -1 / 12)


@real_function(f32=1, f64=4)
@computed_in_64_bits
def digamma(m: Algebra, x: Any) -> Any:
    """Return digamma; negative numbers by the reflection formula, NaN at the poles and at 0."""
    negative = x < 0.0
    y = _digamma_of_positive(m, m.select(negative, 1.0 - x, x))
    t = x - m.rint(x)
    size = m.abs(t)
    upper = size > 0.25
    sine, cosine = sine_and_cosine(m, m.select(upper, 0.5 - size, size) * math.pi)
    above, below = m.select(upper, sine, cosine), m.select(upper, cosine, sine)
    reflected = y - m.copysign(above / below, t) * math.pi
    y = m.select(negative, m.select(t == 0.0, m.const(NAN), reflected), y)
    return m.select(x == 0.0, m.const(NAN), y)


# x of digamma: above, the asymptotic series of eight terms, whose ninth term is less than 2**-58; below, the recurrence
# down to a polynomial.
DIGAMMA_ASYMPTOTIC = 10.0


def _digamma_of_positive(m: Algebra, x: Any) -> Any:
    low = x < 1.0
    y = m.select(low, x + 1.0, (x - m.floor(x)) + 1.0)
    between = ((y - _ZERO[0]) - _ZERO[1]) * polynomial(m, y - 1.5, _BETWEEN)
    above, below = m.const(0.0), m.const(1.0)  # the sum of 1 / (x - 1), 1 / (x - 2), ... as one fraction
    for n in range(1, int(DIGAMMA_ASYMPTOTIC) - 1):
        step = x - float(n)
        more = step >= 1.0
        above = m.select(more, m.multiply_add(above, step, below), above)
        below = m.select(more, below * step, below)
    small = between + m.select(low, m.const(-1.0), above) / m.select(low, x, below)
    inverse = 1.0 / x
    square = inverse * inverse
    large = log(m, x) + m.multiply_add(square, polynomial(m, square, _SERIES), inverse * -0.5)
    return m.select(x >= DIGAMMA_ASYMPTOTIC, large, small)
