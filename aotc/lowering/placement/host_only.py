"""Find ops without a GPU kernel; they run on the host even if the program is for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from aotc.ir.opset.linalg_lapack import BLOCK_ROUTINES
from aotc.ir.tensor.ir import Function, Module, Op, walk
from aotc.lowering.placement.devices import named_devices
from aotc.lowering.plans.linalg.gpu_jacobi import fits_jacobi_block
from aotc.lowering.plans.thresholds import BLOCK_FACTOR
from aotc.options import DEVICE, HOST, Options
from aotc.targets import MIX, Mix, Target, host_target_of_gpu
from aotc.vmfb.ranks.layout import RANK_CALL


class HostOnly(NamedTuple):
    """Name of an op without a GPU kernel for messages, and a hint on how to avoid the op."""

    what: str
    hint: str


def host_only(op: Op) -> HostOnly | None:
    """Return the name and the hint of an op without a GPU kernel; None for all other ops."""
    rule = _RULES.get(op.name)
    return rule(op) if rule else None


def _host_only_lapack(op: Op) -> HostOnly | None:
    """Return the name of a LAPACK routine and a hint; None if a GPU block can compute it."""
    if op.attrs["routine"] in BLOCK_ROUTINES:
        *_, columns, rows = op.operands[0].type.shape
        if BLOCK_FACTOR.holds(columns * rows):
            return None
    if fits_jacobi_block(op):
        return None
    hint = "use a CPU target or device, or run it on the host: --host-fallback"
    return HostOnly(f"LAPACK's {op.attrs['routine']}", hint)


def _host_only_custom_call(op: Op) -> HostOnly | None:
    """Return the name of a user's call and a hint; None for a collective and for one with a function for GPUs."""
    if "gpu" in op.attrs or op.attrs["target"].startswith(RANK_CALL):
        return None
    hint = "register a function for GPUs (gpu=), use a CPU target or device, or run it on the host: --host-fallback"
    return HostOnly(f"custom call @{op.attrs['target']}", hint)


def _host_only_tridiagonal_solve(op: Op) -> HostOnly | None:
    """Return a name and a hint for a system of symbolic size; None otherwise: the GPU kernel needs constant sizes."""
    *_, n, m = op.result.type.shape
    if n == 0 or m == 0 or (isinstance(n, int) and isinstance(m, int)):
        return None
    what = f"a tridiagonal system of {n} rows and {m} right-hand sides"
    return HostOnly(what, "use fixed sizes, a CPU target or device, or run it on the host: --host-fallback")


_RULES: Mapping[str, Callable[[Op], HostOnly | None]] = {
    "custom_call": _host_only_custom_call,
    "lapack": _host_only_lapack,
    "tridiagonal_solve_perturbed": _host_only_tridiagonal_solve,
}


def imply_host(
    module: Module, target: Target, targets: Sequence[Target], options: Options
) -> tuple[Module, Target, Options]:
    """Add the host as a second device to a GPU program if some op has no GPU kernel.

    Return the module, the target and the options. If the host is added, the devices are ``device`` and ``host``, as if
    the model had named them; arguments and results are on ``device``. Nothing changes if the model or the options name
    devices, or if the options forbid the host fallback.

    Parameters
    ----------
    module : Module
    target : Target
        The GPU for which this variant is compiled.
    targets : sequence of Target
        The targets of all variants, among which the host may be.
    options : Options
    """
    named = options.devices or any(True for f in module.functions.values() for _ in named_devices(f))
    if target.kind != "cuda" or named or not options.host_fallback:
        return module, target, options
    if not any(host_only(op) for f in module.functions.values() for op in walk(f.body)):
        return module, target, options
    host = host_target_of_gpu(targets, options.host_target)
    functions = {n: _function_on_device(f) if f.public else f for n, f in module.functions.items()}
    mix = Mix(target.name, MIX, "", devices=(("", target), (DEVICE, target), (HOST, host)))
    return module.with_functions(functions), mix, replace(options, devices={DEVICE: target.name, HOST: host.name})


def _function_on_device(function: Function) -> Function:
    body = function.body
    affinity = {"arguments": [DEVICE] * len(body.params), "results": [DEVICE] * len(body.results)}
    return replace(function, attrs={**function.attrs, "affinity": affinity, IMPLIED: True})


IMPLIED = "implied_devices"
"""Attribute of functions whose devices were added by :func:`imply_host`; their signature does not mention devices."""
