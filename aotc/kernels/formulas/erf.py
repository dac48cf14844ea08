"""The error function in 64 bits (fdlibm's rational functions, without branches), and erfc in 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotc.kernels.formulas.exponential import decay
from aotc.kernels.formulas.forms import polynomial
from aotc.kernels.formulas.limits import ERF_NEAR, ERF_ONE, ERFC_ZERO

_PP = (-2.37630166566501626084e-05, -5.77027029648944159157e-03, -2.84817495755985104766e-02,
       -3.25042107247001499370e-01, 1.28379167095512558561e-01)  # fmt: skip
_QQ = (-3.96022827877536812320e-06, 1.32494738004321644526e-04, 5.08130628187576562776e-03,
       6.50222499887672944485e-02, 3.97917223959155352819e-01, 1.0)  # fmt: skip
_PA = (-2.16637559486879084300e-03, 3.54783043256182359371e-02, -1.10894694282396677476e-01,
       3.18346619901161753674e-01, -3.72207876035701323847e-01, 4.14856118683748331666e-01,
       -2.36211856075265944077e-03)  # fmt: skip
_QA = (1.19844998467991074170e-02, 1.36370839120290507362e-02, 1.26171219808761642112e-01,
       7.18286544141962662868e-02, 5.40397917702171048937e-01, 1.06420880400844228286e-01, 1.0)  # fmt: skip
_RA = (-9.81432934416914548592e+00, -8.12874355063065934246e+01, -1.84605092906711035994e+02,
       -1.62396669462573470355e+02, -6.23753324503260060396e+01, -1.05586262253232909814e+01,
       -6.93858572707181764372e-01, -9.86494403484714822705e-03)  # fmt: skip
_SA = (-6.04244152148580987438e-02, 6.57024977031928170135e+00, 1.08635005541779435134e+02,
       4.29008140027567833386e+02, 6.45387271733267880336e+02, 4.34565877475229228821e+02,
       1.37657754143519042600e+02, 1.96512716674392571292e+01, 1.0)  # fmt: skip
_RB = (-4.83519191608651397019e+02, -1.02509513161107724954e+03, -6.37566443368389627722e+02,
       -1.60636384855821916062e+02, -1.77579549177547519889e+01, -7.99283237680523006574e-01,
       -9.86494292470009928597e-03)  # fmt: skip
_SB = (-2.24409524465858183362e+01, 4.74528541206955367215e+02, 2.55305040643316442583e+03,
       3.19985821950859553908e+03, 1.53672958608443695994e+03, 3.25792512996573918826e+02,
       3.03380607434824582924e+01, 1.0)  # fmt: skip
_P32 = (3.279844085167479e-02, 2.292279732684094e-01, 7.316233837471930e-01, 1.238428791974819e+00, 1.0)
_Q32 = (5.813302406541341e-02, 4.063224031278450e-01, 1.325404511206379e+00, 2.402271484559909e+00,
        2.366808537780483e+00, 1.0)  # fmt: skip
"""Coefficients of ``exp(a * a) * erfc(a)`` for ``0 <= a <= 10.1``: a least-squares fit weighted by the error, off by
6e-9."""
_ERX = 8.45062911510467529297e-01
_HIGH_WORD = -(1 << 32)


def _ratio(m: Any, x: Any, p: tuple[float, ...], q: tuple[float, ...]) -> Any:
    return polynomial(m, x, p) / polynomial(m, x, q)


# |x| of erfc in 64 bits: below, a rational function around 1; above, an exponential times a rational function of 1 /
# x**2. fdlibm, s_erf.c.
ERF_MIDDLE = 1.25
# |x| of erfc in 64 bits at which one rational function of 1 / x**2 replaces the other. fdlibm, s_erf.c.
ERF_FAR = 1.0 / 0.35


def erf_tail(m: Any, a: Any, exp: Callable[..., Any]) -> Any:
    """Return ``erfc(a)`` for ``a >= 0.84375``."""
    a = m.select(a > ERFC_ZERO[1], m.const(ERFC_ZERO[1]), a)
    middle = (1.0 - _ERX) - _ratio(m, a - 1.0, _PA, _QA)
    s = m.const(1.0) / (a * a)
    r = m.select(a < ERF_FAR, _ratio(m, s, _RA, _SA), _ratio(m, s, _RB, _SB))
    z = m.from_bits(m.to_bits(a) & _HIGH_WORD)
    far = exp(m, -(z * z) - 0.5625) * exp(m, (z - a) * (z + a) + r) / a
    return m.select(a < ERF_MIDDLE, middle, far)


def erf64(m: Any, x: Any, exp: Callable[..., Any]) -> Any:
    """Return ``erf(x)`` in 64 bits; ``exp`` is the exponential of the same algebra."""
    a = m.abs(x)
    near = x + x * _ratio(m, x * x, _PP, _QQ)
    y = m.select(a < ERF_NEAR, near, m.copysign(1.0 - erf_tail(m, a, exp), x))
    y = m.select(a > ERF_ONE, m.copysign(m.const(1.0), x), y)
    return m.select(x != x, x, y)


def erfc32(m: Any, x: Any) -> Any:
    """Return ``erfc(x)`` in 32 bits: an exponential of the square, corrected for its rounding, times a ratio."""
    a, end = m.abs(x), m.const(ERFC_ZERO[0])
    a = m.select(a > end, end, a)
    square = a * a
    lost = m.fma(a, a, -square)
    y = decay(m, -square) * _ratio(m, a, _P32, _Q32)
    y = m.multiply_add(y, -lost, y)
    return m.select(x < 0.0, 2.0 - y, y)
