"""Public functions of jax, each called once with arguments made from a row of a table.

A row is a pattern of argument kinds (:data:`KINDS`) with the functions that take them; what needs more than plain
arrays is a function of its own in :data:`CALLS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.calls import CALLS
from conformance.case import Case

KINDS: dict[str, Callable[[np.random.Generator], Any]] = {
    "f": lambda r: r.normal(size=(3, 5)).astype("float32"),
    "g": lambda r: r.normal(size=(3, 5)).astype("float32") * 2,
    "p": lambda r: r.uniform(0.2, 3, (3, 5)).astype("float32"),
    "u": lambda r: r.uniform(0.05, 0.95, (3, 5)).astype("float32"),
    "i": lambda r: r.integers(-9, 10, (3, 5)).astype("int32"),
    "j": lambda r: r.integers(1, 7, (3, 5)).astype("int32"),
    "o": lambda r: r.integers(0, 2, (3, 5)).astype(bool),
    "z": lambda r: (r.normal(size=(3, 5)) + 1j * r.normal(size=(3, 5))).astype("complex64"),
    "v": lambda r: r.normal(size=7).astype("float32"),
    "w": lambda r: r.normal(size=7).astype("float32"),
    "n": lambda r: r.integers(0, 6, 7).astype("int32"),
    "m": lambda r: r.normal(size=(4, 4)).astype("float32"),
    "l": lambda r: r.normal(size=(4, 4)).astype("float32") + 4 * np.eye(4, dtype="float32"),
    "s": lambda r: _positive_definite(r.normal(size=(4, 4))),
    "3": lambda r: r.normal(size=(2, 3, 4)).astype("float32"),
    "k": lambda r: jax.random.PRNGKey(int(r.integers(0, 99))),
}


def _positive_definite(a: np.ndarray) -> np.ndarray:
    return (a @ a.T + 4 * np.eye(len(a))).astype("float32")


TABLE: dict[str, dict[str, str]] = {
    "jax.lax": {
        "f": "abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite logistic "
        "neg reciprocal round sign sin sinh square tan tanh stop_gradient conj",
        "u": "acos asin atanh erf_inv",
        "p": "acosh digamma lgamma log log1p rsqrt sqrt",
        "ff": "add atan2 complex div eq ge gt le lt max min mul ne nextafter rem sub",
        "pp": "pow igamma igammac igamma_grad_a random_gamma_grad",
        "uu": "zeta",
        "i": "bitwise_not clz population_count sign",
        "ij": "bitwise_and bitwise_or bitwise_xor div rem mulhi shift_left shift_right_arithmetic shift_right_logical",
        "ppu": "betainc", "fpp": "clamp", "off": "select", "mm": "dot batch_matmul",
    },
    "jax.numpy": {
        "f": "abs absolute all amax amin angle any arcsinh arctan argmax argmin argsort around "
        "average cbrt ceil conj conjugate corrcoef cos cosh count_nonzero cov cumprod cumsum "
        "deg2rad degrees diagonal diff ediff1d exp exp2 expm1 fabs flip fliplr "
        "flipud floor frexp imag iscomplex isfinite isinf isnan isneginf isposinf isreal max mean median min modf "
        "nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum "
        "nanvar negative ones_like positive prod ptp rad2deg radians ravel real rint round sign signbit sin sinc sinh "
        "size sort square squeeze std sum tan tanh trace transpose tril triu trunc unwrap var zeros_like i0 "
        "sort_complex matrix_transpose rot90 spacing trapezoid gradient",
        "u": "arccos arcsin arctanh acos asin atanh",
        "p": "acosh arccosh log log10 log1p log2 reciprocal sqrt",
        "ff": "add arctan2 atan2 copysign divide divmod equal float_power floor_divide fmax fmin fmod greater "
        "greater_equal heaviside hypot isclose less less_equal logaddexp logaddexp2 maximum minimum mod multiply "
        "nextafter not_equal remainder subtract true_divide vdot vecdot allclose array_equal array_equiv append",
        "pp": "power pow",
        "i": "bitwise_not bitwise_invert invert bitwise_count abs sign cumsum sum prod logical_not",
        "ij": "bitwise_and bitwise_or bitwise_xor floor_divide gcd lcm left_shift right_shift mod remainder divmod "
        "bitwise_left_shift bitwise_right_shift logical_and logical_or logical_xor power",
        "oo": "logical_and logical_or logical_xor", "off": "where", "fi": "ldexp",
        "v": "diag diagflat vander",
        "vw": "convolve correlate inner outer kron dot polyadd polymul polysub isin",
        "mm": "matmul dot inner tensordot kron", "z": "abs angle conj exp imag real sqrt log sin",
        "zz": "add multiply divide", "3": "atleast_3d",
    },
    "jax.numpy.linalg": {
        "l": "cond det inv pinv slogdet matrix_rank", "s": "cholesky eigh eigvalsh",
        "f": "matrix_norm norm pinv qr svdvals vector_norm matrix_transpose", "m": "diagonal trace qr",
        "ll": "matmul solve tensordot vecdot", "vw": "outer vecdot",
    },
    "jax.numpy.fft": {
        "f": "fft fft2 fftn fftshift ifft ifft2 ifftn ifftshift ihfft rfft rfft2 rfftn",
        "z": "fft fft2 fftn ifft ifft2 ifftn hfft irfft irfft2 irfftn",
    },
    "jax.nn": {
        "f": "celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax "
        "logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus "
        "standardize swish tanh logmeanexp",
        "p": "log1mexp",
    },
    "jax.random": {
        "k": "bernoulli cauchy exponential gumbel laplace logistic maxwell normal "
        "rademacher uniform split lognormal",
        "kp": "chisquare gamma loggamma pareto poisson rayleigh wald",
        "kf": "categorical permutation",
    },
    "jax.scipy.special": {
        "f": "erf erfc erfcx expit i0 i0e i1 i1e log_ndtr log_softmax logsumexp ndtr softmax dawsn expi fresnel",
        "u": "logit erfinv ndtri entr spence",
        "p": "digamma gamma gammaln gammasgn exp1 factorial loggamma",
        "pp": "beta betaln gammainc gammaincc kl_div rel_entr xlog1py xlogy poch boxcox",
        "ppu": "betainc hyp1f1",
    },
    "jax.scipy.linalg": {
        "l": "det expm inv lu lu_factor polar qr schur hessenberg sqrtm", "s": "cho_factor cholesky eigh",
        "m": "block_diag", "ll": "solve block_diag", "v": "toeplitz "
        "circulant hankel fiedler",
    },
    "jax.scipy.signal": {
        "vw": "convolve correlate fftconvolve", "ff": "convolve2d correlate2d", "f": "detrend",
    },
    "jax.scipy.fft": {"f": "dct dctn idct idctn"},
    "jax.scipy.stats.norm": {"f": "cdf logcdf logpdf logsf pdf sf", "u": "ppf isf"},
    "jax.scipy.stats.expon": {"p": "logpdf pdf cdf logcdf sf logsf", "u": "ppf"},
    "jax.scipy.stats.gamma": {"pp": "logpdf pdf cdf logcdf sf logsf"},
    "jax.scipy.stats.beta": {"upp": "logpdf pdf cdf logcdf sf logsf"},
    "jax.scipy.stats.cauchy": {"f": "logpdf pdf cdf logcdf sf logsf", "u": "ppf isf"},
    "jax.scipy.stats.laplace": {"f": "logpdf pdf cdf"},
    "jax.scipy.stats.logistic": {"f": "logpdf pdf cdf sf", "u": "ppf"},
    "jax.scipy.stats.uniform": {"u": "logpdf pdf cdf ppf"}, "jax.scipy.stats.pareto": {"pp": "logpdf pdf"},
    "jax.scipy.stats.t": {"fp": "logpdf pdf"}, "jax.scipy.stats.chi2": {"pp": "logpdf pdf cdf logcdf sf logsf"},
    "jax.scipy.stats.poisson": {"jp": "logpmf pmf cdf"}, "jax.scipy.stats.geom": {"ju": "logpmf pmf"},
    "jax.scipy.stats.bernoulli": {"ou": "logpmf pmf"}, "jax.scipy.stats.gennorm": {"fp": "logpdf pdf cdf"},
    "jax.scipy.stats.gumbel_l": {"f": "logpdf pdf cdf sf"}, "jax.scipy.stats.gumbel_r": {"f": "logpdf pdf cdf sf"},
    "jax.scipy.stats.vonmises": {"fp": "logpdf pdf"}, "jax.scipy.stats.wrapcauchy": {"pu": "logpdf pdf"},
    "jax.scipy.stats": {"v": "rankdata sem"},
}  # fmt: skip


def _make_args(pattern: str, seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [jnp.asarray(KINDS[kind](random)) for kind in pattern]


def _plain(module: str, pattern: str, name: str) -> Case | None:
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        return None
    return _case(f"{module}.{name}({pattern})", pattern, lambda *args: function(*args))


def _case(name: str, pattern: str, call: Callable[..., Any]) -> Case:
    group = name.partition("(")[0]
    return Case(group, name, call, lambda: _make_args(pattern, 7), label=_module(group))


def _module(group: str) -> str:
    """Return ``jax.scipy.stats`` for ``jax.scipy.stats.norm.pdf``: the row of a function in the report."""
    return ".".join(group.split(".")[:-1][:3]) or group


@cache
def cases() -> tuple[Case, ...]:
    """Return a case for each function of the table that the installed jax has, then those of :data:`CALLS`."""
    rows = [(m, p, n) for m, patterns in TABLE.items() for p, names in patterns.items() for n in names.split()]
    plain = [case for row in rows if (case := _plain(*row))]
    return (*plain, *(_case(name, pattern, call) for name, (pattern, call) in CALLS.items()))
