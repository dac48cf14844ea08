"""``log |gamma(x)|`` of negative x, exact even next to its zeros: a slow path.

Between poles ``1 / |gamma(t - k)|`` is ``|t| (1 - t) (2 - t) ... (k - t) / gamma(1 + t)`` for ``|t| <= 1/2``. It is
computed in two words, so that its logarithm has all digits at the zeros, where the product is nearly 1.
"""

from __future__ import annotations

import math
from fractions import Fraction

from llvmlite import ir

from aotc.kernels.formulas import math as real
from aotc.kernels.formulas.forms import INF, polynomial
from aotc.kernels.formulas.limits import LOG_NEAR
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue, emit_value_loop
from aotc.kernels.formulas.trig import sine_and_cosine

_UNIT = Fraction(1, 2**120)
# Coefficients of the series of 1 / gamma(1 + t), in units of 2**-120, constant term first.
_SERIES = (
    1329227995784915872903807060280344576, 767251221392722134200546602105524939,
    -871811494486142777260760763142594845, -55831078384055701503317554322065483,
    221367784628486294621228519580483091, -56090410129930086522653966097500874,
    -12789793929499434355497158107057486, 9595621463447045385120746834475068,
    -1548773382880361978992988885009525, -286105259093206287642365759047785,
    170208020218448189123710180895964, -26763812665687482103937298201705,
    -1662190945010602604905039801372, 1506051516736760553242617278410,
    -273334259265467131356441722036, 8129684837759767990035385851,
    6648808596158653231055992808, -1570183229800149120948374754,
    138695199672960677912231580, 10344402434895242954453407,
    -4913897523274195124984291, 677955497495404835567238,
    -27359846148540832016725, -7108874204289392920982,
    1630668497284911790233, -157016293409760239271,
    1577384567396952520, 1877375907753773467,
    -305555711894125182, 22788368792564640,
    177764536038362, -273054474688894,
)  # fmt: skip
_IN_TWO_WORDS = 22  # terms; the sum of the others is less than 2**-67, so that one word is enough
Two = tuple[ScalarValue, ScalarValue]


# x of lgamma: above, a product in two words, as representable numbers come close to the zeros there; below, the
# reflection formula. Below -23 the zeros are within half a unit in the last place of the poles.
LOG_GAMMA_REFLECTED = -24.5


def emit_log_gamma_of_negative(function: ir.Function) -> None:
    """Emit ``f64 f(f64 x, f64 opposite)`` for ``x < 0``; ``opposite`` is ``log gamma(-x)``."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    m = Algebra(builder, 64)
    x, opposite = (ScalarValue(builder, a) for a in function.args)
    n = m.rint(x)
    t = x - n
    close = x > LOG_GAMMA_REFLECTED
    high, low = _times_distances(m, _reciprocal_gamma(m, t), t, m.select(close, -n, m.const(0.0)))
    high, low = m.abs(high * t), _product_second_word(m, high, low, t)
    near = (high > LOG_NEAR[0]) & (high < LOG_NEAR[1])
    exact = real.log1p(m, (high - 1.0) + low)
    y = -m.select(near, exact, real.log(m, high) + low / high)
    far = -real.log(m, m.abs(x) * _sine_of_half_period(m, t) * (1.0 / math.pi)) - opposite
    y = m.select(close, y, far)
    builder.ret(m.select((t == 0.0) | (opposite == INF), m.const(INF), m.select(x != x, x, y)).raw)


def _product_second_word(m: Algebra, high: ScalarValue, low: ScalarValue, t: ScalarValue) -> ScalarValue:
    """Return the second word of ``|(high + low) t|`` for positive ``high``; the first is ``high * |t|``."""
    size = m.abs(t)
    return m.fma(high, size, -(high * size)) + low * size


def _two_sum(a: ScalarValue, b: ScalarValue) -> Two:
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _renormalized_two_words(high: ScalarValue, low: ScalarValue) -> Two:
    total = high + low
    return total, low - (total - high)


def _reciprocal_gamma(m: Algebra, t: ScalarValue) -> Two:
    """Return ``1 / gamma(1 + t)`` by its series."""
    terms = [Fraction(c) * _UNIT for c in _SERIES]
    high = polynomial(m, t, tuple(float(c) for c in reversed(terms[_IN_TWO_WORDS:])))
    low = m.const(0.0)
    for term in reversed(terms[:_IN_TWO_WORDS]):
        first = float(term)
        product = high * t
        rest = m.fma(high, t, -product) + low * t
        total, lost = _two_sum(m.const(first), product)
        high, low = _renormalized_two_words(total, lost + (rest + float(term - Fraction(first))))
    return high, low


def _times_distances(m: Algebra, start: Two, t: ScalarValue, k: ScalarValue) -> Two:
    """Return ``start`` times ``(1 - t) (2 - t) ... (k - t)``."""

    def half_turn(i: ScalarValue, high: ScalarValue, low: ScalarValue) -> list[ScalarValue]:
        distance, lost = _two_sum(i, -t)
        product = high * distance
        rest = m.fma(high, distance, -product) + (high * lost + low * distance)
        return [i + 1.0, *_renormalized_two_words(product, rest)]

    _, high, low = emit_value_loop(m.builder, [m.const(1.0), *start], lambda i, high, low: i <= k, half_turn)
    return high, low


def _sine_of_half_period(m: Algebra, t: ScalarValue) -> ScalarValue:
    """Return ``|sin(pi t)|`` for ``|t| <= 1/2``."""
    size = m.abs(t)
    upper = size > 0.25
    sine, cosine = sine_and_cosine(m, m.select(upper, 0.5 - size, size) * math.pi)
    return m.select(upper, cosine, sine)
