"""JAX's ``compute_on("device_host")``: its ops use values on ``host``, all others values on ``device``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jaxlib.mlir import ir

from aotc.frontend.affinity import ANYWHERE, MEMORIES, frontend_attribute
from aotc.frontend.session import State
from aotc.options import DEVICE, HOST

_COMPUTE_TYPE = "_xla_compute_type"
SIDES = frozenset(MEMORIES.values())
_CALLS = frozenset({"func.call", "stablehlo.composite"})  # results of a function are on ``device``


def on_its_side(state: State, op: Any) -> AbstractContextManager[None]:
    """Import ``op`` within this block: its operands are moved to its side, and its results are there.

    Nothing is moved if the options do not name both devices, inside the regions of a host op, or for values that both
    sides have: constants, and known sizes.
    """
    return ANYWHERE if state.hosted or not SIDES.issubset(state.session.devices) else _moving(state, op)


@contextmanager
def _moving(state: State, op: Any) -> Iterator[None]:
    marked = frontend_attribute(op, _COMPUTE_TYPE) == HOST
    kept = {v: state.values[v] for v in op.operands if (v in state.on_host) != marked and _may_move(state, v)}
    for v, leaves in kept.items():
        moved = (state.one("transfer", [leaf], {"device": HOST if marked else DEVICE}) for leaf in leaves or ())
        state.values[v] = tuple(moved)
    state.hosted = marked
    try:
        yield
    finally:
        state.hosted = False
        state.values.update(kept)
        if marked and op.name not in _CALLS:
            state.on_host.update(op.results)


def _may_move(state: State, v: Any) -> bool:
    leaves = state.values[v]
    made_by = v.owner.name if isinstance(v, ir.OpResult) else ""
    return leaves is not None and made_by != "stablehlo.constant" and not any(x in state.known for x in leaves)
