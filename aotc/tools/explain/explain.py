"""Entry point of all explanations, by subject, for a model or a bundle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

from aotc.pipeline import compile
from aotc.tools.explain.affinity import AffinityReport, explain_affinity
from aotc.tools.explain.collectives import CollectivesReport, explain_collectives
from aotc.tools.explain.fusion import FusionReport, explain_fusion
from aotc.tools.explain.memory import MemoryReport, explain_memory
from aotc.tools.explain.schedule import ScheduleReport, explain_schedule
from aotc.tools.explain.step import StepReport, explain_step
from aotc.tools.fetch_model import is_bundle
from aotc.tools.simulate.cluster import DEFAULT_BETWEEN, RANKS_PER_HOST, cluster_of
from aotc.tools.simulate.links import DEFAULT_LINK
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import ArgumentValueError

SUBJECTS = ("affinity", "fusion", "schedule", "memory", "collectives", "step")


@overload
def explain(subject: Literal["affinity"], model: object, *example_args: Any, **flags: Any) -> AffinityReport: ...
@overload
def explain(subject: Literal["fusion"], model: object, *example_args: Any, **flags: Any) -> FusionReport: ...
@overload
def explain(
    subject: Literal["schedule"], model: object, *example_args: Any, sizes: Mapping[str, int] | None = ..., **flags: Any
) -> ScheduleReport: ...
@overload
def explain(
    subject: Literal["memory"], model: object, *example_args: Any, sizes: Mapping[str, int] | None = ..., **flags: Any
) -> MemoryReport: ...
@overload
def explain(
    subject: Literal["collectives"], model: object, *example_args: Any, link: str = ..., **flags: Any
) -> CollectivesReport: ...
@overload
def explain(
    subject: Literal["step"], model: object, *example_args: Any, link: str = ..., between: str = ...,
    ranks_per_host: int = ..., **flags: Any,
) -> StepReport: ...  # fmt: skip
def explain(
    subject: str, model: object, *example_args: Any, function: str = "", sizes: Mapping[str, int] | None = None,
    link: str = DEFAULT_LINK, between: str = DEFAULT_BETWEEN, ranks_per_host: int = RANKS_PER_HOST, **flags: Any,
) -> AffinityReport | FusionReport | ScheduleReport | MemoryReport | CollectivesReport | StepReport:
    """Explain why a model runs as it does: in which kernels, where, when, in which memory, between which ranks.

    Parameters
    ----------
    subject : str
        ``affinity``: on which device each op runs, and what is moved. ``fusion``: which ops are one kernel.
        ``schedule``: the time and the dependencies of each command. ``memory``: the values in the arena.
        ``collectives``: what the ranks of a sharded model send to each other, over which axes of the mesh.
        ``step``: a simulated call of a sharded model on a cluster.
    model, *example_args
        As for :func:`aotc.compile`, or a bundle: its path or its bytes.
    function : str
        Of a schedule, memory, collectives or a step the only function or ``main`` by default, otherwise all.
    sizes : mapping of str to int
        Of a schedule or memory: sizes of symbolic dims; others have their typical size, or 16.
    link : str
        Of collectives: ``nvlink``, ``pcie``, ``ib``, ``ethernet`` or ``loopback``. Of a step: the link inside a host.
    between, ranks_per_host
        Of a step: the link between hosts, ``ib`` or ``ethernet``; rank ``r`` is in host ``r // ranks_per_host``.
    **flags
        Options of :func:`aotc.compile`; ``target`` selects one of a bundle's targets.

    Returns
    -------
    AffinityReport, FusionReport, ScheduleReport, MemoryReport, CollectivesReport or StepReport
        ``print`` displays it as ``aotc explain`` does.

    Raises
    ------
    CompileError, BundleError
        If the model cannot be compiled, or the bundle cannot be read.
    ArgumentValueError
        If the subject is unknown, or a bundle is given with options of its compilation.
    """
    match subject:
        case "affinity":
            return explain_affinity(model, *example_args, function=function, **flags)
        case "fusion":
            return explain_fusion(model, *example_args, function=function, **flags)
        case "schedule":
            opened, target = bundle_of(model, *example_args, **flags)
            return explain_schedule(opened, function, sizes, target)
        case "memory":
            opened, target = bundle_of(model, *example_args, **flags)
            return explain_memory(opened, function, sizes, target)
        case "collectives":
            opened, target = bundle_of(model, *example_args, **flags)
            return explain_collectives(opened, function, target, link)
        case "step":
            cluster = cluster_of(link, between, ranks_per_host)
            opened, target = bundle_of(model, *example_args, **flags)
            return explain_step(opened, cluster, function, target)
    raise ArgumentValueError("", "unknown subject", repr(subject), " or ".join(SUBJECTS))


def bundle_of(model: object, *example_args: Any, **flags: Any) -> tuple[OpenedBundle, str]:
    """Return a bundle and the target to explain; a model is compiled to a bundle first.

    Raises
    ------
    ArgumentValueError
        If a bundle is given with other options than ``target``.
    """
    if not is_bundle(model):
        made = open_bundle(compile(model, *example_args, **flags))
        made.where = os.fspath(model) if isinstance(model, Path) else "<model>"
        return made, ""
    target = flags.pop("target", "")
    if flags:
        expected = "its model, with these options"
        raise ArgumentValueError("", "the bundle is compiled already", ", ".join(flags), expected)
    return open_bundle(str(model) if isinstance(model, Path) else model), target
