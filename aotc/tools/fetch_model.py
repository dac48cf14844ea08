"""Fetch the model for a developer tool: a source, or a bundle with its recorded targets and options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotc.diagnostics import warn_user
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.frontend.platforms import is_multi_platform
from aotc.ir.tensor.ir import Module
from aotc.lowering.cost_model.model import StaleCosts, check_cost_record_program
from aotc.lowering.placement.host_only import imply_host
from aotc.options import Options
from aotc.pipeline import checked_options
from aotc.recompile import STALE, model_of
from aotc.targets import Target, resolve_targets, variant_targets
from aotc.vmfb.api.choose_function import choose_function
from aotc.vmfb.bundle import MAGIC


def fetch_model(
    model: Any, example_args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Options | None,
    flags: Mapping[str, Any],
) -> tuple[Module, Target, Options]:  # fmt: skip
    """Import a model as tensor IR; return it with its target (the first of several) and the options.

    ``flags`` override ``options``, and the recorded options of a bundle. ``model`` may be the tuple that
    :func:`aotc.recompile.model_of` returns.

    Raises
    ------
    CompileError
        If the model cannot be read, or the costs belong to another model.
    BundleError
        If a bundle is damaged, or has no source.

    Warns
    -----
    AotcWarning
        If the recorded costs of a bundle belong to another program than this aotc imports from its source.
    """
    known: tuple[Target, ...] = ()
    if is_bundle(model):
        raw, known, chosen = model_of(model, **flags)
    elif isinstance(model, tuple):
        raw, known, chosen = model
    else:
        chosen = checked_options(options, flags, whole=False)
        raw = fetch(model, example_args, kwargs or {})
    every = known if known and "target" not in flags else resolve_targets(chosen.target)
    own = every[0]
    (target,) = variant_targets((own,), chosen.devices, known)
    chosen = checked_options(chosen, {"target": own.name}, whole=False)
    several = is_multi_platform(raw.data, raw.metadata)
    module = import_raw(raw, options=chosen, platform=own.kind if several else "cpu")
    try:
        check_cost_record_program(chosen.costs, module)
    except StaleCosts:
        if not known or "costs" in flags:
            raise
        warn_user(STALE)
        chosen = replace(chosen, costs={})
    return imply_host(module, target, every, chosen)


def is_bundle(model: Any) -> bool:
    """Return True if ``model`` is a bundle, or the path of one."""
    if isinstance(model, bytes):
        return model.startswith(MAGIC)
    if not isinstance(model, str | os.PathLike) or "\n" in str(model) or not Path(model).is_file():
        return False
    with open(model, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_function(function: str, module: Module) -> None:
    """Refuse the name of a function that ``module`` lacks; an empty name means all functions.

    Raises
    ------
    ArgumentValueError
        If there is no such function; the message lists the public ones.
    """
    if function:
        choose_function(public_names(module), function, "")


def public_names(module: Module) -> list[str]:
    """Return the names of the public functions of ``module``."""
    return [name for name, function in module.functions.items() if function.public]
