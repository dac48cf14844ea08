"""Recompile bundles from their embedded source: ``aotc upgrade``, and the loading of untrusted bundles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotc.bundle import Bundle
from aotc.diagnostics import CompileError, InternalError, warn_user
from aotc.frontend.artifact import shortened_mlir_text
from aotc.frontend.mlir import RawModel, try_in_child
from aotc.lowering.cost_model.model import StaleCosts
from aotc.options import Options
from aotc.pipeline import checked_options, compile_raw
from aotc.source import reader_process
from aotc.source.record import EmbeddedSource
from aotc.source.reproducer import Reproducer
from aotc.source.restore import restore_source
from aotc.targets import Target, host_target, resolve_targets, variant_targets
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.device import choose_variant
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.stored_records import COSTS, stored_record
from aotc.vmfb.weights.own import copy_own_weights

STALE = "the costs that the bundle was compiled with do not count: this aotc reads another program in its source"
"""The warning for costs of a bundle that were measured for another program."""

COMPILED_HERE = b"compiled here"
"""Takes the place of a signer: recompiled bundles share executors only with each other."""


def upgrade(
    bundle: str | os.PathLike[str] | bytes | bytearray | memoryview, *, target: str | None = None,
    weights: str | os.PathLike[str] | None = None, **flags: Any,
) -> Bundle:  # fmt: skip
    """Recompile the source of a bundle with the installed compiler, and return the new bundle.

    Without arguments the targets and options stay the same, and the bytes equal those of compiling the model itself.
    Code of the old bundle is never run.

    Parameters
    ----------
    bundle : str, path, bytes or buffer
        A bundle compiled without ``--no-source``.
    target : str, optional
        Other targets, in the form of :func:`aotc.compile`.
    weights : str, optional
        ``inline``, or the file for the weights; required if the weights of the bundle are in a file.
    **flags
        Fields of :class:`aotc.options.Options` that override the recorded options.

    Raises
    ------
    BundleError
        If ``bundle`` is not a bundle, has no source, or the source or a weight is damaged.
    CompileError
        If this compiler refuses the recorded options or model, or an option is unknown.

    Warns
    -----
    AotcWarning
        If the bundle was signed: the new one is not.
    """
    opened = open_bundle(bundle)
    source = restore_source(opened)
    own = stored_record(opened, COSTS)
    flags.setdefault("costs", own)
    if weights is None:
        weights = "inline"
        if file := weights_file(opened):
            hint = f"weights='inline', or a new file: the old bundle needs {file!r}"
            raise BundleError(opened.where, "it does not say where its new weights go", file, "weights", hint)
    targets = _offered_target(source)
    if target is not None:
        targets = resolve_targets(target)
        flags.setdefault("devices", dict.fromkeys(source.options.get("devices", ()), target))
    chosen = _recorded_options_with_flags(opened.where, source, {"weights": weights, **flags})
    targets = variant_targets(targets, chosen.devices, source.targets)
    if opened.signature is not None:
        warn_user("the bundle was signed, the new one is not; sign it with aotc sign --key")
    try:
        return Bundle(copy_own_weights(opened, compile_raw(_read_source(opened.where, source), targets, chosen)))
    except StaleCosts:
        if flags["costs"] is not own:
            raise
        warn_user(STALE)
        uncosted = replace(chosen, costs={})
        return Bundle(copy_own_weights(opened, compile_raw(_read_source(opened.where, source), targets, uncosted)))


def model_of_reproducer(
    kept: Reproducer, flags: Mapping[str, Any]
) -> tuple[RawModel, tuple[Target, ...], Options]:
    """Return the model in a reproducer file, its targets, and the recorded options overridden by ``flags``.

    Targets have the measurements of the machine that wrote the file, unless ``flags`` contain other targets.

    Raises
    ------
    CompileError
        If this compiler has no such option, or the model crashes the child process that reads it.
    """
    chosen = checked_options(checked_options(None, kept.options), flags, whole=not flags.get("stop_after"))
    targets = resolve_targets(chosen.target)
    if "target" not in flags:
        measured = {t.name: t for t in kept.targets}
        targets = tuple(measured.get(t.name, t) for t in targets)
    targets = variant_targets(targets, chosen.devices, kept.targets)
    return try_in_child(RawModel(kept.data, kept.path, kept.metadata)), targets, chosen


def _is_mix(source: EmbeddedSource) -> bool:
    """Return True if ``source`` is for devices of several targets.

    The variants' targets then apply to unnamed devices.
    """
    return bool(source.options.get("devices")) and len(source.targets) > 1


def _offered_target(source: EmbeddedSource) -> tuple[Target, ...]:
    return source.targets[: source.variants]


def weights_file(opened: OpenedBundle) -> str:
    """Return the name of the weights file of a bundle, or an empty string."""
    entries = [v.get("constants") or {} for v in opened.manifest["variants"]]
    return next((entry["external"]["file"] for entry in entries if entry.get("external")), "")


def source_text(opened: OpenedBundle) -> str:
    """Return the source of a bundle as text without large constants.

    Raises
    ------
    BundleError
        If the bundle has no source, or the source is damaged.
    """
    return shortened_mlir_text(_read_source(opened.where, restore_source(opened)))


def model_of(
    bundle: str | os.PathLike[str] | bytes, **flags: Any
) -> tuple[RawModel, tuple[Target, ...], Options]:
    """Return the model of a bundle, its targets, and its recorded options and costs, overridden by ``flags``.

    Raises
    ------
    BundleError
        If ``bundle`` is not a bundle, has no source, or the source is damaged.
    """
    opened = open_bundle(bundle)
    source = restore_source(opened)
    chosen = _recorded_options_with_flags(opened.where, source, {"costs": stored_record(opened, COSTS), **flags})
    return _read_source(opened.where, source), source.targets, chosen


def recompile_untrusted(opened: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None) -> OpenedBundle:
    """Recompile the source of an untrusted bundle for the device that it would run on, and return the new bundle.

    No code of the bundle is run. Its functions must have the signatures that the bundle declares.

    Raises
    ------
    BundleError
        If the bundle has no source, or the source cannot be compiled or belongs to another program.
    """
    source = restore_source(opened)
    variant, _, _ = choose_variant(opened, devices)
    try:
        flags = {"weights": "inline", "source": False, "tuning": {}}  # a tuning record could choose wrong code
        chosen = _recorded_options_with_flags(opened.where, source, flags)
        own = _offered_target(source) if _is_mix(source) else resolve_targets(variant["target"].partition("+")[0])
        known = tuple(map(_target_of_this_machine, source.targets))
        targets = variant_targets(tuple(map(_target_of_this_machine, own)), chosen.devices, known)
        model = _read_source(opened.where, source, rewrite=True)
        made = open_bundle(copy_own_weights(opened, compile_raw(model, targets, chosen)))
    except (CompileError, InternalError) as error:
        raise BundleError(opened.where, f"the source of the bundle cannot be compiled: {error}") from error
    for name, entry in opened.manifest["functions"].items():
        if _caller_interface(entry) != _caller_interface(made.manifest["functions"].get(name, {})):
            raise BundleError(opened.where, f"the source of the bundle has another function {name!r} than it says")
    if more := made.manifest["functions"].keys() - opened.manifest["functions"].keys():
        raise BundleError(opened.where, "the source of the bundle has functions that it does not name", ", ".join(more))
    made.where, made.path, made.signer = opened.where, opened.path, COMPILED_HERE
    return made


def _caller_interface(entry: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a signature that callers depend on.

    Argument names are excluded: older bundles had other names.
    """
    known = ("dtype", "dims", "device")
    values = [[[v.get(key) for key in known] for v in entry.get(k, ())] for k in ("arguments", "results")]
    return [values, entry.get("in_tree"), entry.get("out_tree")]


def _target_of_this_machine(target: Target) -> Target:
    own = host_target() if target.kind == "cpu" else target
    return own if own.name == target.name else target


def _recorded_options_with_flags(where: str, source: EmbeddedSource, flags: Mapping[str, Any]) -> Options:
    """Return the recorded options overridden by ``flags``."""
    try:
        known = checked_options(None, source.options)
    except CompileError as error:
        raise BundleError(where, f"this aotc does not take the options of the bundle: {error}") from None
    return checked_options(known, flags)


# Seconds after which reading an untrusted source is aborted. The largest models take a few seconds.
UNTRUSTED_SECONDS = 60


def _read_source(where: str, source: EmbeddedSource, rewrite: bool = False) -> RawModel:
    """Read a source in a child process first; return it as a model if that does not crash.

    ``rewrite`` re-encodes the source with MLIR.

    Raises
    ------
    BundleError
        If the child process crashed, or exceeded its memory or time limit.
    """
    memory = reader_process.reader_memory_limit(source.code)
    read = reader_process.read_in_child(source.code, source.path, source.metadata, memory, rewrite, UNTRUSTED_SECONDS)
    if problem := read.problem or read.error:
        raise BundleError(where, "the source of the bundle cannot be read", problem)
    return RawModel(read.module or source.code, source.path, source.metadata)
