"""Lowering rules for functions that JAX would expand: ``lgamma`` stays one op; complex sin and cos follow C99 annex G.

From JAX 0.12 on, JAX lowers ``lgamma`` to 200 ops that round differently near its zeros; aotc has its own formula for
``chlo.lgamma``.

JAX lowers complex sine and cosine to real functions of the parts ``a + ib``::

    sin z = sin a cosh b + i cos a sinh b          cos z = cos a cosh b - i sin a sinh b

For an ``a`` that is infinite or NaN, these formulas make both parts NaN. By annex G the result is still infinite where
``cosh b`` is infinite, and a part with ``sinh b = 0`` is 0. The selects for these cases cost less than the second
``expm1`` of JAX's lowering, which a division replaces here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lax import lax, special
from jaxlib.mlir.dialects import chlo


def expansion_rules(is_complex: bool) -> tuple[tuple[Any, Callable[..., Any]], ...]:
    """Return the lowering rules for primitives that JAX would expand, with ``is_complex`` also for complex ones."""
    rules: tuple[tuple[Any, Callable[..., Any]], ...] = ((special.lgamma_p, _lower_lgamma),)
    if not is_complex:
        return rules
    registered = getattr(mlir, "_lowerings", {})
    functions = {lax.sin_p: _expand_complex_sine, lax.cos_p: _expand_complex_cosine}
    return (
        *rules,
        *((p, partial(_lower_complex_function, f, registered[p])) for p, f in functions.items() if p in registered),
    )


def _lower_lgamma(ctx: Any, x: Any) -> Any:
    return [chlo.lgamma(x)]


def _lower_complex_function(function: Callable[..., Any], registered: Any, ctx: Any, x: Any, **params: Any) -> Any:
    """Lower ``function`` for complex numbers, and by JAX's ``registered`` rule for real ones."""
    if ctx.avals_in[0].dtype.kind == "c":
        return mlir.lower_fun(function, multiple_results=False)(ctx, x)
    return getattr(registered, "rule", registered)(ctx, x, **params)


def _expand_complex_sine(z: Any) -> Any:
    """Return the sine of complex ``z``, with the special values of C99 annex G."""
    a, b = lax.real(z), lax.imag(z)
    sine, cosine = lax.sin(a), lax.cos(a)
    sinh, cosh = _sinh_and_cosh(b)
    is_endless = lax.eq(b + b, b)  # 0 or infinite
    imag = lax.select(lax.ne(cosine, cosine) & is_endless, sinh, cosine * sinh)
    return lax.complex(
        lax.select(lax.eq(a, _constant_like(a, 0)), a, sine * cosh), imag
    )  # 0 times an infinite cosh is 0


def _expand_complex_cosine(z: Any) -> Any:
    """Return the cosine of complex ``z``, with the special values of C99 annex G."""
    a, b = lax.real(z), lax.imag(z)
    sine, cosine = lax.sin(a), lax.cos(a)
    sinh, cosh = _sinh_and_cosh(b)
    is_infinite = lax.eq(lax.abs(b), _constant_like(b, np.inf))
    real = lax.select(lax.ne(cosine, cosine) & is_infinite, cosh, cosine * cosh)
    imag, on_real_axis, on_imaginary_axis = (
        -sine * sinh,
        lax.eq(b, _constant_like(b, 0)),
        lax.eq(a, _constant_like(a, 0)),
    )
    zero = lax.select(on_real_axis, b, lax.select(lax.lt(b, _constant_like(b, 0)), a, -a))
    return lax.complex(real, lax.select(lax.ne(imag, imag) & (on_real_axis | on_imaginary_axis), zero, imag))


def _sinh_and_cosh(x: Any) -> tuple[Any, Any]:
    """Return ``(sinh x, cosh x)``, computed from ``expm1``: without cancellation near 0."""
    less = lax.expm1(lax.abs(x))
    e = less + _constant_like(x, 1)
    inverse, half = _constant_like(x, 1) / e, _constant_like(x, 0.5)
    sinh = lax.select(lax.lt(e, _constant_like(x, np.inf)), (less + less * inverse) * half, e)
    return sinh * lax.sign(x), (e + inverse) * half


def _constant_like(x: Any, value: float) -> Any:
    return lax.full_like(x, value)
