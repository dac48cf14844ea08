"""Record of an import: one entry per op of the model, with its outcome; ``aotc lint`` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aotc.diagnostics import Finding, Loc
from aotc.frontend.mlir_types import dtype_text, inner_operations, leaf_types

IMPORTED, REFUSED, WAITS = "imported", "refused", "waits"


@dataclass(frozen=True, slots=True, eq=False)
class JournalEntry:
    """One op of a model in the journal of an import.

    ``name`` includes the target of custom calls and composites; ``dtypes`` are those of operands and results. The
    tensor ops created from this op have the location ``loc``. ``outcome`` is ``imported``, ``refused`` (``findings``
    has the reasons), or ``waits``: the op's types depend on the result of a refused op.
    """

    name: str
    dtypes: tuple[str, ...]
    loc: Loc
    outcome: str
    findings: tuple[Finding, ...] = ()


@dataclass(slots=True)
class Journal:
    """Journal of one import: its entries in the order of the model."""

    entries: list[JournalEntry] = field(default_factory=list)

    def add(self, op: Any, loc: Loc, outcome: str, findings: tuple[Finding, ...] = ()) -> None:
        """Add an entry for ``op``."""
        self.entries.append(JournalEntry(_journal_op_name(op), _operand_dtypes(op), loc, outcome, findings))

    def add_inner(self, op: Any, locate: Any) -> None:
        """Add entries for the ops in the regions of the failed ``op``, which the import did not reach."""
        for inner in _ops_in_regions(op):
            self.add(inner, locate(inner), WAITS)


def _ops_in_regions(op: Any) -> Iterator[Any]:
    """Yield the ops inside of ``op`` at all depths, without terminators."""
    stack = [iter(inner_operations(op))]
    while stack:
        inner = next(stack[-1], None)
        if inner is None:
            stack.pop()
            continue
        if inner.results or inner.regions:  # a terminator has neither
            yield inner
        stack.append(iter(inner_operations(inner)))


def _journal_op_name(op: Any) -> str:
    attribute = {"stablehlo.custom_call": "call_target_name", "stablehlo.composite": "name"}.get(op.name)
    return f"{op.name} @{op.attributes[attribute].value}" if attribute else op.name


def _operand_dtypes(op: Any) -> tuple[str, ...]:
    leaves = (leaf for v in (*op.operands, *op.results) for leaf in leaf_types(v.type))
    return tuple(dict.fromkeys(dtype_text(leaf) for leaf in leaves))
