"""Where a model says that its values are: affinities, and JAX's kinds of memory and shardings of one device."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxlib.mlir import ir

_AFFINITIES = ("aotc.affinity", "iree.abi.affinity")
_KIND_OF_MEMORY = "mhlo.memory_kind"
_PLACEMENT = "_xla_buffer_placement"
_SHARDING = "mhlo.sharding"
_ONE_DEVICE = re.compile(r"\{maximal device=(\d+)\}")

MEMORIES = {"device": "device", "pinned_host": "host", "unpinned_host": "host"}
"""The device that stands for each of JAX's kinds of memory, in compilations that name ``host``."""


def affinity_of(attributes: Mapping[str, Any], devices: Collection[str]) -> str:
    """Return the device of an argument or a result, or an empty string; ``devices`` are those that the options name.

    A kind of memory says it where ``devices`` has ``host``, a sharding ``{maximal device=1}`` where they have ``d1``.
    """
    for name in _AFFINITIES:
        if name in attributes:
            return _text(attributes[name])
    return _memory(attributes.get(_KIND_OF_MEMORY), devices) or _sharded(attributes.get(_SHARDING), devices)


def placement_of(op: Any, devices: Collection[str]) -> str:
    """Return where a call of ``annotate_device_placement`` or ``Sharding`` moves its operand; empty if it does not."""
    return _memory(frontend_attribute(op, _PLACEMENT), devices) or _sharded(op.attributes.get(_SHARDING), devices)


def frontend_attribute(op: Any, name: str) -> str:
    """Return what the frontend says of an op under ``name``, or an empty string."""
    said = op.attributes.get("mhlo.frontend_attributes")
    return _text(said[name]) if isinstance(said, ir.DictAttr) and name in said else ""


def _memory(kind: Any, devices: Collection[str]) -> str:
    return MEMORIES.get(_text(kind), "") if kind and "host" in devices else ""


def _sharded(sharding: Any, devices: Collection[str]) -> str:
    found = _ONE_DEVICE.fullmatch(_text(sharding)) if sharding is not None else None
    name = f"d{found[1]}" if found else ""
    return name if name in devices else ""


def _text(attribute: Any) -> str:
    return attribute.value if isinstance(attribute, ir.StringAttr) else str(attribute)
