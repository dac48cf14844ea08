"""One case: a function and its arguments, run by XLA and by aotc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import aotc
from aotc.diagnostics import CompileError
from conformance.agreement import Verdict, compare
from conformance.exact import run_exact
from conformance.wide import run_wide


@dataclass(frozen=True, slots=True)
class Case:
    """A function with a maker of its arguments.

    ``group`` chooses the bound and ``label`` the row of the report; ``x64`` turns on jax's wide types.
    """

    group: str
    name: str
    function: Callable[..., Any]
    make_args: Callable[[], Sequence[Any]]
    x64: bool = False
    skip: str = ""
    label: str = ""


def leaves(tree: Any) -> list[np.ndarray]:
    """Return a tree's leaves as arrays; random keys as their bits."""
    flat = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in flat]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def run(case: Case, target: str = "cpu", **options: Any) -> Verdict:
    """Run ``case`` on both sides, aotc's on ``target`` with ``options``, and compare.

    Raises
    ------
    Exception
        What jax raises if XLA cannot run the case, wrapped in :class:`NotRun`; what aotc raises, as it is.
    """
    with jax.enable_x64(case.x64):
        jitted, args, want = by_xla(case)
        got = run_compiled(compiled(jitted, args, target, **options), args)
        return compare(case.group, args, got, want, lambda: reference(case, jitted, args, want))


def by_xla(case: Case) -> tuple[Any, list[Any], list[np.ndarray]]:
    """Return a case's function, jitted, its arguments, and what XLA makes of them; NotRun as :func:`run` raises it."""
    try:
        args = list(case.make_args())
        jitted = jax.jit(case.function)
        return jitted, args, leaves(jitted(*args))
    except Exception as problem:
        raise NotRun(f"XLA: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}") from problem


def run_compiled(bundle: bytes, args: Sequence[Any]) -> list[np.ndarray]:
    """Return the results of a bundle for a case's arguments."""
    flat = [np.asarray(a) for a in _canonical(args)]
    return [np.asarray(out) for out in aotc.load(bundle).invoke("main", *flat)]


def compiled(jitted: Any, args: Sequence[Any], target: str, level: int = 2, **options: Any) -> bytes:
    """Return the bundle of a jitted function; NotRun if the target has no such op.

    On a GPU f32 is multiplied without rounding it to TF32, which is what XLA on a CPU does.
    """
    exact = "highest" if target.startswith("cuda") else jax.config.jax_default_matmul_precision
    try:
        with jax.default_matmul_precision(exact):
            return aotc.compile(jitted, *args, target=target, opt_level=level, **options)
    except CompileError as problem:
        message = problem.findings[0].message
        if target != "cpu" and "is not supported on target" in message:
            raise NotRun(message) from problem
        raise


def reference(case: Case, jitted: Any, args: Sequence[Any], want: list[np.ndarray]) -> list[np.ndarray] | None:
    """Return the results with more digits: the program in float64, for float64 a function by mpmath, or None.

    A program that looks at the bits of its floats is traced again for arguments of float64.
    """
    used = _used(jitted, args)
    wider = run_wide(jitted.lower(*args).as_text(), used)
    if wider is None and len(want) == 1:
        wider = run_exact(case.group, used, want[0])
    return _traced_wide(case.function, args, want) if wider is None else wider


def _traced_wide(
    function: Callable[..., Any], args: Sequence[Any], want: list[np.ndarray]
) -> list[np.ndarray] | None:
    """Return the results of a function for its arguments in float64; None for random keys, whose draws would differ."""
    if any(_is_key(a) or np.asarray(a).dtype != np.float32 for a in jax.tree.leaves(args)):
        return None
    with jax.enable_x64(True):
        found = leaves(jax.jit(function)(*(np.asarray(a, np.float64) for a in args)))
    kinds = [(a.dtype.kind, a.shape) for a in found], [(b.dtype.kind, b.shape) for b in want]
    return found if kinds[0] == kinds[1] and all(a.dtype.itemsize == 8 for a in found) else None


class NotRun(Exception):
    """XLA on the CPU does not run this case either, or the target has no such op."""


def _canonical(args: Sequence[Any]) -> list[Any]:
    return [jax.random.key_data(x) if _is_key(x) else jax.numpy.asarray(x) for x in jax.tree.leaves(args)]


def _used(jitted: Any, args: Sequence[Any]) -> list[np.ndarray]:
    """Return the arguments that the lowered text keeps."""
    kept = jitted.lower(*args)._lowering.compile_args["kept_var_idx"]
    return [np.asarray(a) for n, a in enumerate(_canonical(args)) if n in kept]
