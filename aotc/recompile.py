"""Bundles compiled again from the source that they hold: ``aotc upgrade``, and the loading of what is not trusted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotc.bundle import Bundle
from aotc.diagnostics import AotcWarning, CompileError, InternalError
from aotc.frontend.artifact import text_of
from aotc.frontend.mlir import Raw, survived
from aotc.lowering.cost_model.model import StaleCosts
from aotc.options import Options
from aotc.pipeline import checked_options, compile_raw
from aotc.source import reader_process
from aotc.source.record import Embedded
from aotc.source.reproducer import Reproducer
from aotc.source.restore import restore
from aotc.targets import Target, combine, host, resolve
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.device import choose
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.stored_records import COSTS, stored
from aotc.vmfb.weights.own import carried

STALE = "the costs that the bundle was compiled with do not count: this aotc reads another program in its source"
"""What is said of costs of a bundle that are of another program."""

COMPILED_HERE = b"compiled here"
"""Stands for a signer: bundles that were recompiled share executors with each other only."""


def upgrade(
    bundle: str | os.PathLike[str] | bytes | bytearray | memoryview, *, target: str | None = None,
    weights: str | os.PathLike[str] | None = None, **flags: Any,
) -> Bundle:  # fmt: skip
    """Compile the source of a bundle again, with the compiler that is installed, and return the new bundle.

    For the same targets with the same options: the bytes are those that compiling the model itself gives. Nothing of
    the old bundle is run.

    Parameters
    ----------
    bundle : str, path, bytes or buffer
        Compiled without ``--no-source``.
    target : str, optional
        Other targets, as :func:`aotc.compile` takes them.
    weights : str, optional
        ``inline``, or the file for the weights; must be given if those of the bundle are in a file.
    **flags
        Fields of :class:`aotc.options.Options`, in place of what the model was compiled with.

    Raises
    ------
    BundleError
        If it is no bundle, has no source, or the source or a weight is damaged.
    CompileError
        If this compiler refuses what an older one took, or an option names nothing.

    Warns
    -----
    AotcWarning
        If the bundle was signed: the new one is not.
    """
    opened = open_bundle(bundle)
    source = restore(opened)
    own = stored(opened, COSTS)
    flags.setdefault("costs", own)
    if weights is None:
        weights = "inline"
        if file := weights_file(opened):
            hint = f"weights='inline', or a new file: the old bundle needs {file!r}"
            raise BundleError(opened.where, "it does not say where its new weights go", file, "weights", hint)
    targets = _offered(source)
    if target is not None:
        targets = resolve(target)
        flags.setdefault("devices", dict.fromkeys(source.options.get("devices", ()), target))
    chosen = _options(opened.where, source, {"weights": weights, **flags})
    targets = combine(targets, chosen.devices, source.targets)
    if opened.signature is not None:
        warnings.warn(AotcWarning("the bundle was signed, the new one is not: aotc sign --key"), stacklevel=2)
    try:
        return Bundle(carried(opened, compile_raw(_model(opened.where, source), targets, chosen)))
    except StaleCosts:
        if flags["costs"] is not own:
            raise
        warnings.warn(AotcWarning(STALE), stacklevel=2)
        uncosted = replace(chosen, costs={})
        return Bundle(carried(opened, compile_raw(_model(opened.where, source), targets, uncosted)))


def restored(kept: Reproducer, flags: Mapping[str, Any]) -> tuple[Raw, Options]:
    """Return the model of a reproducer, which :func:`aotc.compile` takes, and its options but for ``flags``.

    Raises
    ------
    CompileError
        If this compiler has no such option, or a child process that reads the model does not survive.
    """
    chosen = checked_options(checked_options(None, kept.options), flags, whole=not flags.get("stop_after"))
    return survived(Raw(kept.data, kept.path, kept.metadata)), chosen


def _is_mix(source: Embedded) -> bool:
    """Is the bundle for devices of several targets? Then the first are those of devices which nobody named."""
    return bool(source.options.get("devices")) and len(source.targets) > 1


def _offered(source: Embedded) -> tuple[Target, ...]:
    return source.targets[: source.variants]


def weights_file(opened: OpenedBundle) -> str:
    """Return the name of the file with the weights of a bundle, or nothing."""
    entries = [v.get("constants") or {} for v in opened.manifest["variants"]]
    return next((entry["external"]["file"] for entry in entries if entry.get("external")), "")


def source_text(opened: OpenedBundle, locations: bool = False) -> str:
    """Return the text of a bundle's source, its large constants left out, with ``locations`` if they are asked for.

    Raises
    ------
    BundleError
        If it has none, or that is damaged.
    """
    return text_of(_model(opened.where, restore(opened)), locations)


def model_of(
    bundle: str | os.PathLike[str] | bytes, **flags: Any
) -> tuple[Raw, tuple[Target, ...], Options]:
    """Return the model in a bundle, and what it was compiled for and with, its costs included, but for ``flags``.

    Raises
    ------
    BundleError
        If it is no bundle, has no source, or that is damaged.
    """
    opened = open_bundle(bundle)
    source = restore(opened)
    chosen = _options(opened.where, source, {"costs": stored(opened, COSTS), **flags})
    return _model(opened.where, source), source.targets, chosen


def recompiled(opened: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None) -> OpenedBundle:
    """Return what stands for a bundle that is not trusted: its source, compiled for the device that it would run on.

    No code of the bundle is run, and its functions have the signatures that it says.

    Raises
    ------
    BundleError
        If it has no source, that cannot be compiled, or is of another program.
    """
    source = restore(opened)
    variant, _, _ = choose(opened, devices)
    try:
        chosen = _options(opened.where, source, {"weights": "inline", "source": False})
        own = _offered(source) if _is_mix(source) else resolve(variant["target"].partition("+")[0])
        known = tuple(map(_of_this_machine, source.targets))
        targets = combine(tuple(map(_of_this_machine, own)), chosen.devices, known)
        model = _model(opened.where, source, rewrite=True)
        made = open_bundle(carried(opened, compile_raw(model, targets, chosen)))
    except (CompileError, InternalError) as error:
        raise BundleError(opened.where, f"the source of the bundle cannot be compiled: {error}") from error
    for name, entry in opened.manifest["functions"].items():
        if _interface(entry) != _interface(made.manifest["functions"].get(name, {})):
            raise BundleError(opened.where, f"the source of the bundle has another function {name!r} than it says")
    if more := made.manifest["functions"].keys() - opened.manifest["functions"].keys():
        raise BundleError(opened.where, "the source of the bundle has functions that it does not name", ", ".join(more))
    made.where, made.path, made.signer = opened.where, opened.path, COMPILED_HERE
    return made


def _interface(entry: Mapping[str, Any]) -> list[Any]:
    """Return what a call must know about a function, but for the names of arguments: older bundles had others."""
    known = ("dtype", "dims", "device")
    values = [[[v.get(key) for key in known] for v in entry.get(k, ())] for k in ("arguments", "results")]
    return [values, entry.get("in_tree"), entry.get("out_tree")]


def _of_this_machine(target: Target) -> Target:
    own = host() if target.kind == "cpu" else target
    return own if own.name == target.name else target


def _options(where: str, source: Embedded, flags: Mapping[str, Any]) -> Options:
    try:
        known = checked_options(None, source.options)
    except CompileError as error:
        raise BundleError(where, f"this aotc does not take the options of the bundle: {error}") from None
    return checked_options(known, flags)


# Seconds after which reading an untrusted source is aborted. The largest models take a few seconds.
UNTRUSTED_SECONDS = 60


def _model(where: str, source: Embedded, rewrite: bool = False) -> Raw:
    """Return the source as a model, which a child process has read; ``rewrite`` it for bytecode of MLIR's own writer.

    Raises
    ------
    BundleError
        If it would crash MLIR's reader, or takes too much memory or time.
    """
    memory = reader_process.memory_for(source.code)
    read = reader_process.read(source.code, source.path, source.metadata, memory, rewrite, UNTRUSTED_SECONDS)
    if problem := read.problem or read.error:
        raise BundleError(where, "the source of the bundle cannot be read", problem)
    return Raw(read.module or source.code, source.path, source.metadata)
