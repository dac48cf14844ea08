"""Thresholds of ``x`` at which several formulas switch from one form to another.

A pair is (in 32 bits, in 64 bits). On both sides of every point the error is that of ``MAX_ULP``, which tests check on
the whole range. ``x`` is the function's argument.
"""

from __future__ import annotations

# x of exp: below, the result is 0, and the scale 2**n would leave its range. The logarithm of the smallest subnormal,
# rounded down.
EXP_LOW = (-104.0, -746.0)

# x of exp: above, the result is infinite, and the scale 2**n would leave its range. The logarithm of the largest
# number, rounded up.
EXP_HIGH = (88.9, 709.9)

# |x| of log1p: below, three terms of the series are used; Kahan's formula may divide 0 by 0 there. The fourth term is
# less than 2**-50 of the first.
LOG1P_SERIES = 1e-5

# |x| of complex functions that grow as e**|x|: above, e**x is computed as two factors. e**x overflows there, although
# its product with a sine may not. The logarithm of the largest number, rounded down.
EXP_SPLIT = 700.0

# The second of these two factors: e**EXP_SPLIT.
EXP_OF_SPLIT = 1.0142320547350045e304

# The larger of |re z| and |im z| in the complex logarithm: below, squares may lose digits, and both parts are scaled by
# 2**600. Half of the exponent range, rounded.
SQUARE_SMALL = 2.0**-500

# |z|**2 of the complex logarithm, |1 + z|**2 of log1p: between the two, the logarithm is computed as log1p of a
# difference without cancellation.
LOG_NEAR = (0.5, 2.0)
