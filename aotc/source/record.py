"""What a bundle's source is made of, as data: the form of what is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from aotc.options import OF_THE_RUN, Options
from aotc.targets import Mix, Target
from aotc.vmfb.calls.result_names import pairs_of
from aotc.vmfb.manifest import ANY, NONE

VERSION = 1
_ELSEWHERE = {"target", "weights", "source", "costs"}  # targets are of the record; the others can be seen in the bundle

_ARRAY = {"variant": int, "offset": int, "size": int, "dtype": str, "shape": [int], "way": [[ANY]]}

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
    "targets": [{"name": str, "l2": int}],
    "variants": int,
    "code": bytes,
    "holes": [{"at": int, "size": int, "sha256": bytes, "array?": _ARRAY, "kept?": int}],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Embedded:
    """A source: bytecode, and what its compilation took besides.

    ``metadata`` is what JAX knows of the model (:class:`aotc.frontend.mlir.Source`), ``path`` its file, for messages.
    The first of ``targets`` are those of the ``variants``, then come those of devices that are named.
    """

    code: bytes
    path: str
    metadata: Mapping[str, Any]
    options: Mapping[str, Any]
    targets: tuple[Target, ...]
    variants: int


def recorded(options: Options, targets: tuple[Target, ...]) -> dict[str, Any]:
    """Return the options that decide about the bytes of a bundle, as data."""
    names = [f.name for f in fields(Options) if f.name not in OF_THE_RUN | _ELSEWHERE]
    found = {name: getattr(options, name) for name in names}
    found["specialize"] = {name: [int(n) for n in sizes] for name, sizes in options.specialize.items()}
    found["bind"] = list(options.bind)
    found["state"] = pairs_of(options.state)
    found["devices"] = {name: targets[0].of(name).name for name in options.devices}
    return found


def recorded_targets(targets: tuple[Target, ...]) -> list[dict[str, Any]]:
    """Return the names of targets, and what was measured on the machine that compiled; of mixes, all that they are of.

    The first are those of the variants, for devices that nobody named.
    """
    every = [t.of("") for t in targets]
    every += [one for t in targets if isinstance(t, Mix) for _, one in t.devices]
    return [{"name": t.name, "l2": t.l2} for t in dict.fromkeys(every)]
