"""``aotc.check``: a model for one device op by op, a sharded model with all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from aotc.diagnostics import UNKNOWN, CompileError, Loc
from aotc.frontend.mlir import RawModel, fetch_whole, is_for_several_devices
from aotc.frontend.partition.meshes import function_on_mesh
from aotc.options import Options
from aotc.pipeline import checked_options
from aotc.tools.agreement import Tolerance
from aotc.tools.check import ORACLES, Checker, CheckReport, check_call, has_values
from aotc.tools.check_ranks import example_values, rank_checker
from aotc.tools.fetch_model import is_bundle
from aotc.vmfb.errors import ArgumentValueError


def check(
    model: object,
    *example_args: Any,
    function: str = "",
    inputs: Sequence[Any] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
    seed: int = 0,
    oracle: str = "reference",
    bisect: bool = False,
    tolerance: Tolerance | None = None,
    **flags: Any,
) -> CheckReport:
    """Compile a model, call it, and compare its results with the reference; find the first op that differs.

    All ranks of a sharded model run as threads. Their results are compared with one device's, and single ops are not.

    Parameters
    ----------
    model, *example_args
        As for :func:`aotc.compile`. Example arguments with values are the arguments of the call.
    function : str
        By default the only function, or ``main``.
    inputs : sequence of arrays
        The first arguments of the call, flat; the others are random values.
    sizes : mapping of str to int
        Sizes of symbolic dims; others get the first sizes that fit.
    seed : int
        For the random values.
    oracle : str
        ``reference``: the IR interpreted by NumPy; ``jax``: XLA on the CPU.
    bisect : bool
        Name the pass after which the result changes.
    tolerance : Tolerance, optional
        In place of the bounds by op and dtype.
    **flags
        Options of :func:`aotc.compile` for one CPU target; ``mesh``, ``in_shardings``, ``out_shardings``; ``ranks``.

    Returns
    -------
    CheckReport

    Raises
    ------
    CompileError
        If the model cannot be compiled.
    CallError
        If the arguments do not fit the model.
    """
    if oracle not in ORACLES:
        raise ArgumentValueError("", "unknown oracle", repr(oracle), " or ".join(ORACLES))
    ranks = flags.pop("ranks", None)
    raw, options = _fetched_for_check(model, example_args, ranks, flags)
    if is_for_several_devices(raw) or ranks is not None:
        refuse_unsupported_rank_check(bisect, raw)
        sharded = rank_checker(raw, options, function, tolerance)
        return sharded.check(list(inputs) or example_values(sharded), sizes, seed, oracle, ranks)
    checker = Checker(raw, options, function, tolerance)
    examples = raw.values.get(checker.name, ())
    given = list(inputs) or ([np.asarray(x) for x in examples] if all(map(has_values, examples)) else [])
    return check_call(checker, given, sizes, seed, oracle=oracle, bisect=bisect)


def _fetched_for_check(
    model: object, example_args: Sequence[Any], ranks: int | None, flags: dict[str, Any]
) -> tuple[RawModel, Options]:
    """Fetch a model for the mesh and shardings in ``flags``; return it with the options in the other flags."""
    shardings = [flags.pop(key, None) for key in ("mesh", "in_shardings", "out_shardings")]
    if any(x is not None for x in shardings):
        model = function_on_mesh(model, *shardings)
    return fetch_for_check(model, example_args, ranks), checked_options(None, flags)


def fetch_for_check(model: object, example_args: Sequence[Any], ranks: int | None) -> RawModel:
    """Fetch a model, without partitioning a program for several devices.

    Raises
    ------
    CompileError
        If the model cannot be read; also for a bundle.
    """
    if ranks is not None and is_bundle(model):
        message = "a sharded bundle holds the program of one rank, and not the whole program to compare with"
        raise CompileError.at(UNKNOWN, message, hint="aotc check MODEL, the export or text that it was compiled from")
    return fetch_whole(model, example_args)


def refuse_unsupported_rank_check(bisect: bool, raw: RawModel) -> None:
    """Refuse options and models that a check of all ranks does not support.

    Raises
    ------
    CompileError
        If the model is for one device, or a pass is to be searched.
    """
    if not is_for_several_devices(raw):
        hint = "leave --ranks out, or give a model with shardings over a mesh"
        raise CompileError.at(Loc(raw.path), "the model is for one device and has no ranks", hint=hint)
    if bisect:
        message = "the pass that changes a result is not searched in a sharded model"
        raise CompileError.at(Loc(raw.path), message, hint="leave --bisect out")
