"""Record of a source in a bundle: bytecode, options, targets; its schema and validation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aotc.options import Options
from aotc.targets import OTHER_NAMES, TARGETS, Mix, Target
from aotc.vmfb.manifest import ANY, NONE
from aotc.vmfb.result_names import parse_state_pairs

VERSION = 1

# Bytes of a second-level cache, at least. Block sizes are computed from it, and the value in a file is not trusted.
LEAST_CACHE = 1 << 12
# Bytes of a second-level cache, at most: as LEAST_CACHE.
MOST_CACHE = 1 << 30

RECORDED = (
    "opt_level", "matmul_precision", "quantize_weights", "specialize", "typical", "bind", "state", "debug_info",
    "bisect", "devices", "default_device", "place", "max_transfers", "host_fallback", "host_target", "memory_limit",
    "stack_limit", "shared_memory_limit", "callbacks", "guard", "about", "tuning",
)  # fmt: skip
"""Options that a record may set: those that affect the code, and facts for users.

The list is closed, as records come from untrusted files:
an option that names a file, a folder or a process is never accepted."""

OUTSIDE_RECORD = frozenset({"target", "weights", "source", "costs", "kernel_compiler", "replace"})
"""Options that affect a bundle's bytes but are not in a record: the record's targets or the bundle itself have them, or
(how kernels are compiled) an upgrade uses the default."""

_ARRAY = {"variant": int, "offset": int, "size": int, "dtype": str, "shape": [int], "way": [[ANY]]}

MEASURED = {"name": str, "l2": int}

_HOLE = {"at": int, "size": int, "sha256": bytes}

_CHECK = {"failed": int, "code": int, "number": int, "message": str, "values": [[int]]}
_CALL = {"kind": str, "name?": str, "ordered?": bool, "checks?": [_CHECK], "messages?": [str]}

KNOWN: dict[str, Any] = {
    "in_tree?": (dict, NONE), "out_tree?": (dict, NONE), "arg_names?": [str], "kept?": [int], "platforms?": [str],
    "doc?": str, "callbacks?": [_CALL], "checks?": [_CHECK],
}  # fmt: skip

SCHEMA = {
    "version": int,
    "path": str,
    "metadata": {**KNOWN, "entries?": {str: KNOWN}},
    "options": {str: ANY},
    "targets": [MEASURED],
    "variants?": int,  # without it all targets are those of variants: older sources have no targets of devices
    "code": bytes,
    "holes": [{**_HOLE, "array?": _ARRAY, "kept?": int, "differences?": bytes, "word?": int}],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmbeddedSource:
    """The source of a bundle: bytecode, and the other inputs of its compilation.

    ``metadata`` is JAX's for the model (:class:`aotc.frontend.mlir.Source`), ``path`` its file, for messages.
    ``targets`` starts with the targets of the ``variants``, followed by those of named devices.
    """

    code: bytes
    path: str
    metadata: Mapping[str, Any]
    options: Mapping[str, Any]
    targets: tuple[Target, ...]
    variants: int


def recorded_options(options: Options, targets: tuple[Target, ...]) -> dict[str, Any]:
    """Return the options that a bundle records, as plain data."""
    found = {name: getattr(options, name) for name in RECORDED}
    found["specialize"] = {name: [int(n) for n in sizes] for name, sizes in options.specialize.items()}
    found["typical"] = {name: int(size) for name, size in options.typical.items()}
    for name in ("typical", "tuning"):
        if not getattr(options, name):
            del found[name]  # the bytes of other bundles stay as in earlier versions
    found["bind"] = list(options.bind)
    found["about"] = dict(options.about)
    found["state"] = parse_state_pairs(options.state)
    found["devices"] = {name: targets[0].for_device(name).name for name in options.devices}
    return found


def refused_option(options: Mapping[str, Any], more: Collection[str] = ()) -> str:
    """Return the first option that a recorded source must not set, or an empty string.

    The names in ``more`` are allowed, too.
    """
    return next((name for name in options if name not in RECORDED and name not in more), "")


def recorded_targets(targets: tuple[Target, ...]) -> list[dict[str, Any]]:
    """Return the names of ``targets`` with the measurements of the compiling machine.

    The targets of a mix replace the mix. The targets of the variants, which apply to unnamed devices, are first.
    """
    every = [t.for_device("") for t in targets]
    every += [one for t in targets if isinstance(t, Mix) for _, one in t.devices]
    return [{"name": t.name, "l2": t.l2} for t in dict.fromkeys(every)]


def measured_target(row: Mapping[str, Any]) -> Target:
    """Return the target of a row of :func:`recorded_targets`, with the measurements of the compiling machine.

    Raises
    ------
    ValueError
        If this aotc has no such target, or a measurement is impossible.
    """
    name = OTHER_NAMES.get(row["name"], row["name"])
    if name not in TARGETS:
        raise ValueError(f"this aotc has no target {name!r}")
    if not LEAST_CACHE <= row["l2"] <= MOST_CACHE:
        raise ValueError(f"a cache of {row['l2']} bytes")
    return replace(TARGETS[name], l2=row["l2"])
