"""Round short floats where they are stored, converted or read more than once, not after each operation.

bf16 and f16 are f32 in registers, and rounding one takes as long as several operations. Before::

    o[i] = a[i] * b[i] + c[i]                                             # all of bf16, rounded twice

After::

    o[i] = convert(convert(a[i], "f32") * convert(b[i], "f32") + convert(c[i], "f32"), "bf16")

XLA does so too (``xla_allow_excess_precision``). XLA also drops the model's own conversions; these are preserved here.
Functions with a jump or a domain limit (comparisons, ``floor``, ``sqrt``) get rounded operands: equal numbers stay
equal, and 0 does not become negative. A GPU has instructions for some expensive functions that are precise enough for
bf16 (``short_tanh``); the other expensive functions keep their rounding on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.loop.access import with_scalars
from aotc.ir.loop.ir import Apply, Const, Kernel, Scalar
from aotc.ir.opset import APPROXIMATIONS, SCALARS
from aotc.targets import Target

_SHORT = frozenset({"bf16", "f16"})


def fuse_rounding(kernel: Kernel, target: Target) -> Kernel:
    """Remove the roundings of values that one smooth function passes to another."""
    return replace(kernel, body=with_scalars(kernel.body, _RoundingFusion(dear=target.kind == "cpu").rewrite_scalar))


class _RoundingFusion:
    """Rewrite the scalars of a kernel without inner roundings; shared scalars are rewritten once.

    Parameters
    ----------
    dear : bool
        Are expensive functions of short floats computed in f32? If not, only those of bf16 that the target
        approximates.
    """

    def __init__(self, dear: bool) -> None:
        self._is_expensive = dear
        self._rounded: dict[int, Scalar] = {}
        self._wide: dict[int, Scalar] = {}

    def rewrite_scalar(self, x: Scalar) -> Scalar:
        """Return ``x`` rewritten, in the same dtype: only the outermost function is rounded."""
        if not isinstance(x, Apply):
            return x
        if id(x) not in self._rounded:
            self._rounded[id(x)] = self._without_inner_rounding(x)
        return self._rounded[id(x)]

    def _without_inner_rounding(self, x: Apply) -> Scalar:
        """Return ``x`` computed in f32 and rounded once if its arguments are rounded functions, too."""
        if self._is_rounded_function(x) and SCALARS[x.fn].smooth and any(map(self._is_rounded_function, x.args)):
            return Apply("convert", (self.rewrite_in_f32(x),), x.dtype)
        args = tuple(map(self.rewrite_scalar, x.args))
        return x if all(a is b for a, b in zip(args, x.args)) else replace(x, args=args)

    def _is_rounded_function(self, x: Scalar) -> bool:
        """Return True for a function of short floats that is computed in f32 and rounded."""
        if not isinstance(x, Apply) or x.dtype not in _SHORT or x.fn not in SCALARS:
            return False
        row = SCALARS[x.fn]
        widens = row.widens and (self._is_expensive or row.work == 1 or (x.dtype == "bf16" and x.fn in APPROXIMATIONS))
        return widens and all(a.dtype in (x.dtype, "i1") for a in x.args)

    def rewrite_in_f32(self, x: Scalar) -> Scalar:
        """Return the f32 value of a short float, without the rounding of a function that computes it."""
        if isinstance(x, Const):
            return Const(x.value, "f32")
        if id(x) not in self._wide:
            self._wide[id(x)] = (
                self._function_in_f32(x)
                if isinstance(x, Apply) and self._is_rounded_function(x)
                else self._convert_to_f32(x)
            )
        return self._wide[id(x)]

    def _function_in_f32(self, x: Apply) -> Scalar:
        rewrites = [self.rewrite_in_f32 if SCALARS[x.fn].smooth else self._convert_to_f32, self.rewrite_scalar]
        fn = x.fn if self._is_expensive else APPROXIMATIONS.get(x.fn, x.fn)
        return Apply(fn, tuple(rewrites[a.dtype == "i1"](a) for a in x.args), "f32")

    def _convert_to_f32(self, x: Scalar) -> Scalar:
        return Apply("convert", (self.rewrite_scalar(x),), "f32")
