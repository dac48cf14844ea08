"""The formulas of scalar_math on NumPy: accuracy against long double, and special values."""

import math

import numpy as np
import pytest
from support.scalar_kernels import log_gamma

from aotc.kernels.formulas import limits
from aotc.kernels.formulas.erf import ERF_NEAR, ERFC_ZERO
from aotc.kernels.formulas.exponential import DECAY_HIGH, EXPM1_LOW, TANH_ONE, decay
from aotc.kernels.formulas.math import ERF_CLAMP, FUNCTIONS, MAX_ULP, reduce_precision
from aotc.kernels.formulas.trig import LARGE_ANGLE

pytestmark = pytest.mark.ir

LONG = np.longdouble


class Algebra:
    """The scalar algebra on arrays of one float type."""

    def __init__(self, bits):
        self.bits = bits
        self.kind, self.integer = (np.float32, np.int32) if bits == 32 else (np.float64, np.int64)

    def const(self, value):
        return self.kind(value)

    def fma(self, a, b, c):
        if self.bits == 32:
            return self.kind(np.float64(a) * np.float64(b) + np.float64(c))
        return fma64(*np.broadcast_arrays(np.float64(a), np.float64(b), np.float64(c)))

    multiply_add = fma

    def rint(self, x):
        return np.rint(x)

    def floor(self, x):
        return np.floor(x)

    def trunc(self, x):
        return np.trunc(x)

    def abs(self, x):
        return np.abs(x)

    def sqrt(self, x):
        return np.sqrt(x)

    def copysign(self, x, sign):
        return np.copysign(x, sign)

    def select(self, condition, yes, no):
        kind = next((v.dtype for v in (yes, no) if isinstance(v, np.ndarray | np.generic)), self.kind)
        return np.where(condition, np.asarray(yes, kind), np.asarray(no, kind))

    def to_bits(self, x):
        return np.asarray(x, self.kind).view(self.integer)

    def from_bits(self, i):
        return np.asarray(i).astype(self.integer).view(self.kind)

    def ratio(self, a, b):
        return a / b

    def inverse_root(self, x):
        return self.kind(1) / np.sqrt(x)

    def to_int(self, x):
        limits = np.iinfo(self.integer)
        inside = np.clip(np.nan_to_num(x, nan=0.0), -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) * (1 - 2.0**-30))
        return np.where(x >= 2.0 ** (self.bits - 1), limits.max, inside.astype(self.integer))

    def to_float(self, i):
        return np.asarray(i).astype(self.kind)

    def shift_right_logical(self, i, by):
        return (np.asarray(i).view(f"u{self.bits // 8}") >> np.uint64(by).astype(f"u{self.bits // 8}")).view(
            self.integer
        )

    def rarely(self, condition, name, args, usual):
        with np.errstate(all="ignore"):
            return np.where(condition, RARE[name](*args), usual)

    @property
    def wide(self):
        return Algebra(64)

    def widen(self, x):
        return np.asarray(x, np.float64)

    def narrow(self, x):
        return np.asarray(x).astype(self.kind)


class NoFma(Algebra):
    """The same for a machine whose products and sums are rounded apart."""

    def multiply_add(self, a, b, c):
        return self.kind(self.kind(a) * self.kind(b)) + self.kind(c)

    @property
    def wide(self):
        return NoFma(64)


RARE = {
    "sine_of_large": lambda x, iterations: (np.sin, np.cos)[iterations](x),
    "remainder": np.fmod,
    "power": np.float_power,
    "log_gamma_of_negative": lambda x, opposite: log_gamma(x).astype(np.float64),
}


def two_products(a, b):
    """Return ``a * b`` as a sum of two f64 (Dekker)."""
    p = a * b

    def split(x):
        c = 134217729.0 * x
        high = c - (c - x)
        return high, x - high

    (ah, al), (bh, bl) = split(a), split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def fma64(a, b, c):
    """One rounding, but for the last bit of ties, where no intermediate leaves the range."""
    p, rest = two_products(a, b)
    total = p + c
    back = total - p
    lost = (p - (total - back)) + (c - back)
    value = total + (lost + rest)
    return np.where(
        np.isfinite(value) & (np.abs(a) < 1e290) & (np.abs(b) < 1e290), value, np.asarray(LONG(a) * b + c, np.float64)
    )


def by(function):
    """Return ``function`` of Python floats for arrays."""
    return lambda *args: np.array([LONG(function(*map(float, row))) for row in zip(*args)], LONG)


REFERENCE = {
    "exp": np.exp, "decay": np.exp,
    "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "cbrt": np.cbrt,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "pow": np.power, "atan2": np.arctan2, "rem": np.fmod,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": by(math.erf), "erfc": by(math.erfc), "lgamma": log_gamma,
}  # fmt: skip

RANGES = {
    "exp": (-103.0, 88.0), "decay": (-103.0, 60.0),
    "expm1": (-60.0, 88.0), "tanh": (-12.0, 12.0), "logistic": (-80.0, 80.0),
    "erf": (-6.0, 6.0), "erfc": (-6.0, 10.2), "sin": (-1000.0, 1000.0), "cos": (-1000.0, 1000.0), "tan": (-1000.0, 1000.0),  # noqa: E501
}  # fmt: skip


def evaluate(name, bits, *args, algebra=Algebra):
    m = algebra(bits)
    with np.errstate(all="ignore"):
        return np.asarray(FUNCTIONS[name](m, *[np.asarray(a, m.kind) for a in args]))


def samples(name, bits, seed=0):
    """Return arguments over the function's whole range: even over values and even over exponents."""
    r = np.random.default_rng(seed)
    kind = Algebra(bits).kind
    count = 4000 if name in REFERENCE else 400
    if name in RANGES:
        even = r.uniform(*RANGES[name], count)
        tiny = np.exp2(r.uniform(-30, 2, count)) * r.choice([-1, 1], count)
        return (np.concatenate([even, tiny]).astype(kind),)
    wide = np.exp2(r.uniform(-120, 120, count))
    near = np.abs(r.uniform(0.3, 3.0, count))
    positive = np.concatenate([wide, near]).astype(kind)
    signed = (positive * r.choice([-1, 1], positive.size)).astype(kind)
    match name:
        case "lgamma":
            moderate = r.uniform(0.001, 20, count)
            return (np.concatenate([positive[positive < 1e30], moderate, -moderate])[::8].astype(kind),)
        case "log" | "rsqrt":
            return (positive,)
        case "log1p":
            return (np.concatenate([positive, r.uniform(-0.99, 1, count).astype(kind)]),)
        case "pow":
            base = np.exp2(r.uniform(-10, 10, count)).astype(kind)
            return base, r.uniform(-11, 11, count).astype(kind)
        case "rem":
            return np.exp2(r.uniform(-20, 40, count)).astype(kind) * r.choice([-1, 1], count).astype(kind), r.uniform(
                0.1, 9, count
            ).astype(kind)
        case "atan2":
            return signed, r.permutation(signed)
    return (signed,)


def ulps(got, want):
    """Return the errors in units in the last place of ``got``'s type."""
    spacing = np.spacing(np.maximum(np.abs(want).astype(got.dtype), np.finfo(got.dtype).tiny))
    return np.abs(LONG(got) - want) / LONG(spacing)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", sorted(REFERENCE))
@pytest.mark.parametrize("algebra", [Algebra, NoFma])
def test_accuracy(name, bits, algebra):
    args = samples(name, bits)
    got = evaluate(name, bits, *args, algebra=algebra)
    with np.errstate(all="ignore"):
        want = REFERENCE[name](*[LONG(a) for a in args])
    usual = np.isfinite(want.astype(got.dtype)) & (np.abs(want) > np.finfo(got.dtype).tiny)
    error = ulps(got, want)[usual]
    worst = int(np.argmax(error))
    # math.erf and math.erfc are themselves only good to an ulp of f64
    slack = 1 if name in ("erf", "erfc") and bits == 64 else 0
    assert error.max() <= MAX_ULP[name][bits == 64] + slack, [a[usual][worst] for a in args]


# Of each function the arguments where its form changes.
CUTS = {
    "exp": (*limits.EXP_LOW, *limits.EXP_HIGH),
    "expm1": (*EXPM1_LOW, *limits.EXP_HIGH),
    "log1p": (limits.LOG1P_SERIES,),
    "tanh": TANH_ONE,
    "erf": (ERF_CLAMP, ERF_NEAR, *ERFC_ZERO),
    "erfc": ERFC_ZERO,
    "sin": (LARGE_ANGLE,),
    "cos": (LARGE_ANGLE,),
}  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", CUTS)
def test_a_formula_is_exact_where_its_form_changes(name, bits):
    kind = Algebra(bits).kind
    at = np.array([sign * cut for cut in CUTS[name] for sign in (1, -1)], kind)
    x = np.unique(np.concatenate([at, np.nextafter(at, kind(np.inf)), np.nextafter(at, kind(-np.inf))]))
    got = evaluate(name, bits, x)
    with np.errstate(all="ignore"):
        want = REFERENCE[name](LONG(x))
        rounded = want.astype(kind)
        usual = np.isfinite(rounded) & (np.abs(want) > np.finfo(kind).tiny)
        assert ulps(got, want)[usual].max(initial=0) <= MAX_ULP[name][bits == 64] + 1
    assert (got[np.isposinf(rounded)] == np.inf).all()
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algebra", [Algebra, NoFma])
def test_decay_has_the_bits_of_exp_up_to_its_end(bits, algebra):
    m, wide = algebra(bits), bits == 64
    low, high = 1.05 * limits.EXP_LOW[wide], DECAY_HIGH[wide]
    ends = [0.0, -0.0, -np.inf, -np.finfo(m.kind).max, -np.finfo(m.kind).tiny, limits.EXP_LOW[wide], high]
    x = np.concatenate([np.linspace(low, high, 200_001), ends]).astype(m.kind)
    with np.errstate(all="ignore"):
        assert decay(m, x).tobytes() == FUNCTIONS["exp"](m, x).tobytes()


@pytest.mark.parametrize("bits", [32, 64])
def test_what_is_no_number_stays_so_whatever_its_bits(bits):
    m = Algebra(bits)
    positive = (0x7FC00000 if bits == 32 else 0x7FF8 << 48) + np.arange(4096)
    nans = m.from_bits(np.concatenate([positive, positive + np.iinfo(m.integer).min]))
    assert np.isnan(nans).all()
    with np.errstate(all="ignore"):
        assert np.isnan(decay(m, nans)).all()
        names = ("exp", "expm1", "logistic", "erf", "erfc", "tanh")
        assert all(np.isnan(FUNCTIONS[name](m, nans)).all() for name in names)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algebra", [Algebra, NoFma])
def test_erf_inv_undoes_erf(bits, algebra):
    x = np.concatenate([np.linspace(-0.999, 0.999, 801), [1e-5, -1e-12]]).astype(Algebra(bits).kind)
    got = evaluate("erf_inv", bits, x, algebra=algebra)
    exact = LONG(got.astype("f8"))
    for _ in range(2):
        residual = by(math.erf)(exact) - LONG(x)
        exact = exact - residual / (LONG(2) / np.sqrt(LONG(math.pi)) * np.exp(-exact * exact))
    assert ulps(got, exact).max() <= MAX_ULP["erf_inv"][bits == 64]
    assert [evaluate("erf_inv", bits, v).item() for v in (1.0, -1.0)] == [math.inf, -math.inf]
    assert math.isnan(evaluate("erf_inv", bits, 1.5).item())


INF, NAN = math.inf, math.nan
SPECIAL = {
    "exp": [(INF, INF), (-INF, 0.0), (NAN, NAN), (0.0, 1.0), (-0.0, 1.0), (1000.0, INF), (-1000.0, 0.0)],
    "expm1": [(INF, INF), (-INF, -1.0), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (-100.0, -1.0)],
    "log": [(INF, INF), (-INF, NAN), (NAN, NAN), (0.0, -INF), (-0.0, -INF), (-1.0, NAN), (1.0, 0.0)],
    "log1p": [(INF, INF), (-INF, NAN), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (-1.0, -INF), (-2.0, NAN)],
    "tanh": [(INF, 1.0), (-INF, -1.0), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (40.0, 1.0)],
    "logistic": [(INF, 1.0), (-INF, 0.0), (NAN, NAN), (0.0, 0.5)],
    "erf": [(INF, 1.0), (-INF, -1.0), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (9.0, 1.0)],
    "erfc": [(INF, 0.0), (-INF, 2.0), (NAN, NAN), (0.0, 1.0), (-9.0, 2.0)],
    "sin": [(INF, NAN), (-INF, NAN), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0)],
    "cos": [(INF, NAN), (-INF, NAN), (NAN, NAN), (0.0, 1.0)],
    "tan": [(INF, NAN), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0)],
    "cbrt": [(INF, INF), (-INF, -INF), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (27.0, 3.0), (-8.0, -2.0)],
    "digamma": [(INF, INF), (-INF, NAN), (NAN, NAN), (0.0, NAN), (-3.0, NAN)],
    "rsqrt": [(INF, 0.0), (NAN, NAN), (0.0, INF), (-0.0, -INF), (-1.0, NAN), (4.0, 0.5)],
}  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name, bits):
    for x, want in SPECIAL[name]:
        got = evaluate(name, bits, np.array([x]))[0]
        assert same(got, want), (x, got, want)


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, -3.0, 2.5, INF, -INF, NAN]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["pow", "atan2", "rem"])
def test_special_pairs(name, bits):
    reference = REFERENCE[name]
    x, y = (g.reshape(-1) for g in np.meshgrid(VALUES, VALUES))
    with np.errstate(all="ignore"):
        want = reference(x, y)
    got = evaluate(name, bits, x, y)
    for a, b, g, w in zip(x, y, got, want, strict=True):
        assert same(g, w) or (np.isfinite(w) and abs(g - w) <= 1e-6 * abs(w)), (name, a, b, g, w)


@pytest.mark.parametrize("bits", [32, 64])
def test_powers_beyond_the_widest_float(bits):
    x, y = np.array([0.01171875, 2.0, -2.0, 0.01171875]), np.array([-160.0, 1026.0, 1027.0, 180.0])
    with np.errstate(all="ignore"):
        want = np.power(x, y)
    np.testing.assert_array_equal(evaluate("pow", bits, x, y), want if bits == 64 else want.astype(np.float32))


@pytest.mark.parametrize("bits", [32, 64])
def test_subnormals(bits):
    kind = Algebra(bits).kind
    small = np.array([np.finfo(kind).smallest_subnormal * 3, np.finfo(kind).tiny / 4], kind)
    with np.errstate(all="ignore"):
        assert ulps(evaluate("log", bits, small), np.log(LONG(small))).max() <= 1.5
    for name in ("sin", "tanh", "expm1", "log1p", "tan"):
        np.testing.assert_array_equal(evaluate(name, bits, small), small, err_msg=name)
    low = np.array([-87.5, -95.0, -103.0] if bits == 32 else [-708.5, -720.0, -744.0], kind)
    error = np.abs(LONG(evaluate("exp", bits, low)) - np.exp(LONG(low)))
    assert (error <= LONG(np.finfo(kind).smallest_subnormal) * 1.01).all()


def test_reduce_precision_to_the_short_floats():
    import ml_dtypes

    x = np.concatenate(
        [np.random.default_rng(0).standard_normal(500) * 10.0 ** np.arange(-20, 30, 0.1), [INF, -INF, 0.0, -0.0]]
    )
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        got = reduce_precision(Algebra(32), x, 8, 7, 8)
        np.testing.assert_array_equal(got, x.astype(ml_dtypes.bfloat16).astype(np.float32))
        half = x.astype(np.float16).astype(np.float32)
        got = reduce_precision(Algebra(32), x, 5, 10, 8)
    normal = (np.abs(half) >= 2.0**-14) | (half == 0) & (np.abs(x) < 2.0**-26)
    np.testing.assert_array_equal(got[normal], half[normal])
    assert np.isnan(reduce_precision(Algebra(32), np.array([NAN], np.float32), 5, 10, 8)).all()


def test_a_ratio_is_rounded_as_a_division_is():
    """Whatever the last bit of the reciprocal that a GPU approximates: the steps of ``Algebra.ratio`` in NumPy."""
    random = np.random.default_rng(0)
    a, b = (np.float32(random.uniform(0.5, 2, 200_000) * s * 2.0 ** random.integers(-20, 20, 200_000))
            for s in (random.choice((-1, 1), 200_000), 1))  # fmt: skip

    def fma(x, y, z):
        return np.float32(np.longdouble(x) * np.longdouble(y) + np.longdouble(z))

    one = np.float32(1)
    for units in (-1, 0, 1):
        near = (one / b).view(np.int32) + np.int32(units)
        near = near.view(np.float32)
        near = fma(near, fma(-b, near, one), near)
        found = a * near
        for _ in range(2):
            found = fma(fma(-b, found, a), near, found)
        np.testing.assert_array_equal(found, a / b)


def test_an_inverse_root_is_near_whatever_the_instruction_gives():
    """Four units off and more: the steps of ``Algebra.inverse_root`` in NumPy; what is no number stays as it is."""
    random = np.random.default_rng(0)
    x = np.float32(random.uniform(0.25, 4, 200_000) * 2.0 ** random.integers(-120, 120, 200_000))
    x = np.concatenate([x, np.float32([0, -0.0, INF, NAN, -1, 1e-44, 3e38])])

    def fma(a, b, c):
        return np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))

    with np.errstate(all="ignore"):
        want = 1 / np.sqrt(x.astype("float64"))
        for units in (-5, 0, 5):
            near = np.float32(want)
            usual = np.isfinite(near) & (near > 0)
            near[usual] = (near[usual].view(np.int32) + np.int32(units)).view(np.float32)
            rest = fma(-(x * near), near, np.float32(1))
            found = np.where(np.abs(rest) < 1, fma(near * np.float32(0.5), rest, near), near)
            np.testing.assert_array_equal(found[-7:-2], want[-7:-2])
            off = np.abs(found[usual] - want[usual]) / np.spacing(np.float32(want[usual]))
            assert off.max() <= 1.5
