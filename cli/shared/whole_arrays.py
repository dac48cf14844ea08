"""Open a bundle for calls with whole arrays: on one device, on a gang, or on the ranks of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import aotc
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import BundleError, bundle_errors


@dataclass(frozen=True, slots=True)
class Runnable:
    """A loaded module or gang whose functions accept and return whole arrays.

    Attributes
    ----------
    module : LoadedModule or Gang
        The module.
    functions : mapping
        Objects with a ``signature``, by name.
    invoke : callable
        Runs a function, by name, on flat arrays.
    shows : bool
        False on all ranks but the first.
    """

    module: Any
    functions: Mapping[str, Any]
    invoke: Callable[..., list[Any]]
    shows: bool = True

    @property
    def name(self) -> str:
        """Return the name of the model."""
        found: str = self.module.name
        return found


def open_bundle_or_gang(
    path: Path, ranks: int | None, devices: str | Sequence[str] | Mapping[str, str] | None, alone: Sequence[str],
    threads: int | None, trust: Mapping[str, Any],
) -> Runnable:  # fmt: skip
    """Open a bundle.

    Parameters
    ----------
    path : Path
        The bundle.
    ranks : int or None
        Number of processes to start.
    devices : object
        As for :func:`aotc.load`.
    alone : sequence of str
        The options of the command line that are for one device.
    threads, trust
        Keywords of :func:`aotc.load`.

    Raises
    ------
    BundleError, CallError
        As for :func:`aotc.load` and :func:`aotc.gang`; also for a sharded bundle without ranks.
    """
    with bundle_errors(path):
        bundle = open_bundle(path)
    entry = bundle.manifest.get("mesh")
    if entry is None and ranks is None:
        module = aotc.load(bundle, devices=devices, threads=threads, **trust)
        return Runnable(module, module.functions, module.invoke)
    if alone:
        raise typer.BadParameter("it is for a bundle of one device", param_hint=alone[0])
    if ranks is not None:
        _refuse_launcher(ranks)
        gang = aotc.gang(os.fspath(path), ranks=ranks, threads=threads, **trust)
        return Runnable(gang, gang.functions, gang.invoke)
    return _module_of_launcher(bundle, threads, trust)


def _refuse_launcher(ranks: int) -> None:
    """Refuse ``--ranks`` in a process that a launcher started: each of its ranks would start a gang."""
    from aotc.vmfb.ranks.ranks import ranks_from_environment

    found = ranks_from_environment()
    if found is not None and found.size > 1:
        message = f"{ranks}: a launcher has started this process as rank {found.rank} of {found.size}"
        raise typer.BadParameter(f"{message}; leave the option out", param_hint="--ranks")


def _module_of_launcher(bundle: OpenedBundle, threads: int | None, trust: Mapping[str, Any]) -> Runnable:
    """Load the part of a sharded bundle for this rank of a launcher (torchrun, mpirun)."""
    from aotc.vmfb.api.module_ranks import WholeFunction
    from aotc.vmfb.ranks.layout import mesh_of
    from aotc.vmfb.ranks.ranks import ranks_from_environment

    if ranks_from_environment() is None:
        mesh = mesh_of(bundle.manifest["mesh"])
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and this is one process"
        hint = f"--ranks={mesh.size}; torchrun --nproc-per-node {mesh.size} -m aotc ..., mpirun -n {mesh.size} aotc ..."
        raise BundleError(bundle.where, message, hint=hint)
    module = aotc.load(bundle, threads=threads, **trust)
    functions = {name: WholeFunction(module, name) for name in module.functions}
    return Runnable(module, functions, lambda name, *arrays: functions[name].call(arrays), module.rank == 0)
