"""Where a formula switches from one form to another, if several formulas do.

A pair is (in 32 bits, in 64 bits). On both sides of every point the error is that of ``MAX_ULP``, which tests check on
the whole range. ``x`` is the function's argument.
"""

from __future__ import annotations

# x of exp: below, the result is 0, and the scale 2**n would leave its range. The logarithm of the least subnormal,
# rounded down.
EXP_LOW = (-104.0, -746.0)

# x of exp: above, the result is infinite, and the scale 2**n would leave its range. The logarithm of the largest
# number, rounded up.
EXP_HIGH = (88.9, 709.9)

# |x| of log1p: below, three terms of the series are exact, where Kahan's form may divide 0 by 0. The fourth term is
# less than 2**-50 of the first.
LOG1P_SERIES = 1e-5

# |x| of erf and erfc in 64 bits: below, erf is computed, above erfc; either loses digits on the other side. fdlibm,
# s_erf.c.
ERF_NEAR = 0.84375

# |x| of erf, -x of erfc in 64 bits: above, 1 - erf(x) is less than half a step below 1 (of 2, for erfc). fdlibm,
# s_erf.c.
ERF_ONE = 6.0

# |x| of erfc: above, the result is 0, less than half of the least subnormal, and the square's own rounding would leave
# its range. erfc(10.06) is less than 2**-150 (32 bits); fdlibm, s_erf.c (64).
ERFC_ZERO = (10.1, 28.0)

# |x| of the functions of complex numbers that grow as e**|x|: above, e**x leaves the range although its product with a
# sine may not; it is taken in two factors. The logarithm of the largest number, rounded down.
EXP_SPLIT = 700.0

# A factor: the second factor of those; e**EXP_SPLIT. Its definition.
EXP_OF_SPLIT = 1.0142320547350045e304

# The larger of |re z| and |im z| in the complex logarithm: below, squares may lose digits; both parts are scaled by
# 2**600. Half of the exponents' range, rounded.
SQUARE_SMALL = 2.0**-500

# |z|**2 of the complex logarithm, |1 + z|**2 of log1p: between, the logarithm is that of one plus a difference without
# cancellation.
LOG_NEAR = (0.5, 2.0)
