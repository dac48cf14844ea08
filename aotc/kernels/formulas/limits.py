"""Where a formula switches from one form to another. Each has its unit, why, and where its value is from.

A pair is (in 32 bits, in 64 bits). On both sides of every point the error is that of ``MAX_ULP``, which tests check on
the whole range. ``x`` is the function's argument.
"""

from __future__ import annotations

LARGE_ANGLE = 2.0**44
"""unit: x of sin, cos, tan
why: beyond, the rounding of x * 2/pi may miss the nearest quadrant, and a function of many words is called
from: chosen, not measured; the bits that a double has left for the fraction of a turn are then few
"""

ATAN_UPPER = 0.66
"""unit: quotient of the sides in atan2
why: above, the angle is measured from pi/4, where the polynomial converges
from: Cephes, atan.c
"""

EXP_LOW = (-104.0, -746.0)
"""unit: x of exp
why: below, the result is 0, and the scale 2**n would leave its range
from: the logarithm of the least subnormal, rounded down
"""

EXP_HIGH = (88.9, 709.9)
"""unit: x of exp
why: above, the result is infinite, and the scale 2**n would leave its range
from: the logarithm of the largest number, rounded up
"""

DECAY_HIGH = (60.0, 600.0)
"""unit: x of exponentials that are known not to be large
why: above, the exponent that is raised by 32 (64) would leave its range
from: reasoning: 95 ln 2 is 65.8, 958 ln 2 is 664
"""

EXPM1_LOW = (-20.0, -40.0)
"""unit: x of expm1
why: below, the result rounds to -1, and 2**-n would leave the integers that are exact next to it
from: reasoning: exp(-20) is less than 2**-28, exp(-40) than 2**-57
"""

LOG1P_SERIES = 1e-5
"""unit: |x| of log1p
why: below, three terms of the series are exact, where Kahan's form may divide 0 by 0
from: reasoning: the fourth term is less than 2**-50 of the first
"""

TANH_ONE = (8.25, 22.0)
"""unit: |x| of tanh
why: above, the result is 1
from: reasoning: 1 - tanh(x) is 2 exp(-2x): two steps below 1 (32 bits), as many as the clamp is off; less than one (64)
"""

TANH_CLAMP = 7.90531110763549805
"""unit: |x| of tanh in 32 bits
why: above, the rational function would leave 1
from: Eigen, generic_fast_tanh_float
"""

TANH_LINEAR = 0.0004
"""unit: |x| of tanh in 32 bits
why: below, tanh(x) rounds to x, and the products of the rational function to 0
from: Eigen, generic_fast_tanh_float
"""

ERF_CLAMP = 4.0
"""unit: |x| of erf in 32 bits
why: above, the result rounds to 1 and the rational function would leave it
from: reasoning: 1 - erf(4) is less than 2**-25
"""

ERF_NEAR = 0.84375
"""unit: |x| of erf and erfc in 64 bits
why: below, erf is computed, above erfc: either loses digits on the other side
from: fdlibm, s_erf.c
"""

ERF_MIDDLE = 1.25
"""unit: |x| of erfc in 64 bits
why: below, a rational function about 1, above an exponential times one of 1 / x**2
from: fdlibm, s_erf.c
"""

ERF_FAR = 1.0 / 0.35
"""unit: |x| of erfc in 64 bits
why: another rational function of 1 / x**2 on either side
from: fdlibm, s_erf.c
"""

ERF_ONE = 6.0
"""unit: |x| of erf, -x of erfc in 64 bits
why: above, 1 - erf(x) is less than half a step below 1 (of 2, for erfc)
from: fdlibm, s_erf.c
"""

ERFC_ZERO = (10.1, 28.0)
"""unit: |x| of erfc
why: above, the result is 0, less than half of the least subnormal, and the square's own rounding would leave its range
from: erfc(10.06) is less than 2**-150 (32 bits); fdlibm, s_erf.c (64)
"""

ERF_INV_TAIL = 5.0
"""unit: w = -log(1 - x**2) of erf_inv
why: another polynomial on either side
from: Giles, "Approximating the erfinv function"
"""

ERF_INV_NEWTON = 0.5
"""unit: |x| of erf_inv
why: below, the Newton steps measure erf, above erfc: either loses digits on the other side
from: reasoning
"""

ERF_INV_LINEAR = 1e-9
"""unit: |x| of erf_inv
why: below, the result is x * sqrt(pi) / 2, and the polynomial's own error would show
from: reasoning: the cubic term is less than 2**-53 of the first
"""

POW_USUAL = 745.0
"""unit: |y log x| of pow
why: above, the result is 0 or infinite, and the correction of its last digits would be NaN
from: the logarithm of the least subnormal
"""

POW_NORMAL = 2.0**-1022
"""unit: |x| of pow in 64 bits
why: below, the exponent is not where that of a normal number is
from: the least normal number
"""

REM_STEPS = 6
"""unit: steps of rem of 32 bits, of 52 bits of the quotient each
why: enough for any two numbers of 32 bits
from: reasoning: a quotient of two f32 has at most 277 bits
"""

REM_LARGE = 2.0**52
"""unit: quotient of rem
why: below, the rounded quotient is at most 1 too large, and what one step leaves is exact
from: the 53 bits of a double's significand
"""

EXP_SPLIT = 700.0
"""unit: |x| of the functions of complex numbers that grow as e**|x|
why: above, e**x leaves the range although its product with a sine may not; it is taken in two factors
from: the logarithm of the largest number, rounded down
"""

MODERATE = (2.0**-250, 2.0**250)
"""unit: the larger of |re z| and |im z| in divisions and roots of 64 bits
why: between, squares, their products and quotients neither leave the range nor lose digits; beyond, operands are scaled
from: reasoning: a quarter of the exponents' range
"""

EXP_OF_SPLIT = 1.0142320547350045e304
"""unit: a factor
why: the second factor of those: e**EXP_SPLIT
from: its definition
"""

SQUARE_LARGE = 2.0**500
"""unit: the larger of |re z| and |im z| in the complex logarithm
why: above, squares may overflow; both parts are scaled by 2**-600
from: half of the exponents' range, rounded
"""

SQUARE_SMALL = 2.0**-500
"""unit: the larger of |re z| and |im z| in the complex logarithm
why: below, squares may lose digits; both parts are scaled by 2**600
from: half of the exponents' range, rounded
"""

LOG_OF_SHIFT = 415.88830833596718565
"""unit: a term
why: what a scale of 2**600 adds to the logarithm
from: its definition
"""

LOG_NEAR = (0.5, 2.0)
"""unit: |z|**2 of the complex logarithm, |1 + z|**2 of log1p
why: between, the logarithm is that of one plus a difference without cancellation
from: chosen, not measured
"""

INVERSE_LARGE = 2.0**60
"""unit: the larger of |re z| and |im z| of inverse functions of complex numbers in 64 bits
why: above, 1 + z rounds to z and z**-2 is below a unit in the last place: the logarithm of 2 |z| and the angle are left
from: reasoning: below the square root of the largest number, above the 53 bits of a double
"""

COMPLEX_TANH_ONE = 20.0
"""unit: |re z| of the complex tanh
why: above, the real part rounds to 1 and the imaginary part is one term
from: reasoning: e**-40 is less than 2**-53
"""

LOG_GAMMA_STIRLING = 8.0
"""unit: x of lgamma
why: above, nine terms of Stirling's series are exact; below, the recurrence leads to the polynomial between 1 and 2
from: reasoning: the tenth term is less than 2**-60 there
"""

LOG_GAMMA_REFLECTED = -24.5
"""unit: x of lgamma
why: above, there are zeros that numbers come close to, and products in two words are taken; below, the reflection
from: reasoning: beyond -23 the zeros lie within half a unit in the last place of the poles
"""

DIGAMMA_ASYMPTOTIC = 10.0
"""unit: x of digamma
why: above, eight terms of the asymptotic series are exact; below, the recurrence leads to a polynomial
from: reasoning: the ninth term is less than 2**-58 there
"""

CBRT_SMALL = 2.0**-1022
"""unit: |x| of cbrt in 64 bits
why: below, the Newton step would have few digits
from: the least normal number
"""

ERF_INV_FAR = 16.0
"""unit: w = -log(1 - x**2) of erf_inv in 64 bits
why: above, Giles' polynomial, which is for 32 bits, leads Newton's steps nowhere
from: the largest w of 32 bits
"""
