"""Tuned decisions: the thresholds of lowering that answer differently for one program, and their record.

Each decision of lowering by size is :meth:`Limit.holds` of a threshold, each block size the ``value`` of one. A choice
replaces one such answer: the decision of a limit for one size, or the amount of a block. ``aotc tune`` searches choices
that make a program faster, and writes them to a record; ``aotc compile --tuning`` compiles with a record. The same
record and model give the same bytes.

The search is a greedy descent over single choices, as in coordinate-wise autotuners (Ansel et al., "OpenTuner", PACT
2014); :mod:`aotc.tools.tune` has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from aotc.diagnostics import warn_user
from aotc.ir.dims.algebra import Dim, Expr
from aotc.lowering.threshold import BlockSize, CostRow, Limit, decided_by
from aotc.vmfb.profile.cost_record import parse_record, record_text
from aotc.vmfb.verify.schema import problems

FORMAT = 1

SCHEMA: dict[Any, Any] = {
    "format": int,
    "producer": str,
    "program": str,
    "target": str,
    "function": str,
    "sizes": {str: int},
    "machine": {str: (str, int)},
    "seconds": {"before": float, "after": float},
    "choices": [{"threshold": str, "size?": (int, str), "value": (bool, int)}],
}

SYMBOLIC = "symbolic"
"""The size in a choice that stands for every symbolic size."""

Asked: TypeAlias = tuple[str, int | str | None]
"""A threshold and the size that it decides about, or None for the amount of a block."""

Answers: TypeAlias = Mapping[Asked, bool | int]


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """An answer of a threshold that replaces its own.

    Attributes
    ----------
    threshold : str
        Module and name of the threshold: ``plans.matmul.THIN_ROWS``.
    size : int or str or None
        The size that a limit decides about, or :data:`SYMBOLIC`; None for the amount of a block.
    value : bool or int
        The decision of a limit, or the amount of a block.
    """

    threshold: str
    size: int | str | None
    value: bool | int

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.threshold} = {self.value}"
        return f"{self.threshold} {'holds' if self.value else 'does not hold'} for {self.size}"


def choices_of(record: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Return the choices of a record."""
    return tuple(Choice(row["threshold"], row.get("size"), row["value"]) for row in record.get("choices", ()))


def choice_rows(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Return choices as rows of a record."""
    return [
        {"threshold": c.threshold, **({} if c.size is None else {"size": c.size}), "value": c.value} for c in choices
    ]


def record_problem(record: object) -> str:
    """Describe the first place where a tuning record is invalid; an empty string if it is valid."""
    if not isinstance(record, Mapping):
        return f"it is {type(record).__name__}, not a mapping"
    if record.get("format") not in (None, FORMAT):
        return f"its format is {record['format']!r}, expected {FORMAT}"
    if wrong := next(problems(record, SCHEMA, "record"), ""):
        return wrong
    for row in record["choices"]:
        decides = isinstance(row["value"], bool)
        if ("size" in row) is not decides or (not decides and row["value"] < 1):
            return f"the value of {row['threshold']} is {row['value']!r}"
    return ""


def read_tuning_record(text: str | bytes) -> dict[str, Any]:
    """Parse a tuning record from JSON.

    Raises
    ------
    ValueError
        If the text is not a tuning record; the message has the reason.
    """
    return parse_record(text, record_problem)


def tuning_record_text(record: Mapping[str, Any]) -> str:
    """Return a tuning record as JSON, one choice a line."""
    return record_text(record, "choices")


def thresholds_by_name() -> dict[str, CostRow]:
    """Return the limits and block sizes of the imported modules of lowering, by module and name."""
    root = __name__.rpartition(".")[0] + "."
    rows: dict[str, CostRow] = {}
    for path, module in list(sys.modules.items()):
        if path.startswith(root) and module is not None:
            own = {name: row for name, row in vars(module).items() if isinstance(row, Limit | BlockSize)}
            rows |= {f"{path.removeprefix(root)}.{name}": row for name, row in own.items()}
    return dict(sorted(rows.items()))


@dataclass
class Decisions:
    """The decider of one compilation: replaces answers by choices, and records all answers.

    Attributes
    ----------
    choices : tuple of Choice
    answers : dict
        The answers so far, in order: a decision by threshold and size, an amount by threshold and None.
    """

    choices: tuple[Choice, ...] = ()
    answers: dict[Asked, bool | int] = field(default_factory=dict)

    @cached_property
    def _names(self) -> dict[int, str]:
        """The name of each threshold by its ``id``; a threshold that several modules import has its shortest name."""
        by_length = sorted(thresholds_by_name().items(), key=lambda pair: (-len(pair[0]), pair[0]))
        return {id(row): name for name, row in by_length}

    @cached_property
    def _chosen(self) -> dict[Asked, bool | int]:
        """Return the answers of the tuning record by threshold and size; warn of unknown thresholds."""
        names = set(self._names.values())
        if missing := sorted({c.threshold for c in self.choices} - names):
            warn_user(f"this version of aotc has no threshold {', '.join(missing)}: the tuning record is for another")
        return {(c.threshold, c.size): c.value for c in self.choices}

    def _answer(self, row: CostRow, size: int | str | None, own: bool | int) -> bool | int:
        """Return the chosen answer of a threshold for ``size``, else its ``own``; record the answer."""
        name = self._names.get(id(row))
        if name is None:  # a threshold that a test has replaced
            return own
        answer = self._chosen.get((name, size), own)
        self.answers[name, size] = answer
        return answer

    def holds(self, limit: Limit, size: Dim, own: bool) -> bool:
        """Return the decision of ``limit`` for ``size``: the chosen one, or its own."""
        return bool(self._answer(limit, SYMBOLIC if isinstance(size, Expr) else int(size), own))

    def amount(self, block: BlockSize) -> int:
        """Return the amount to use for ``block``: the chosen one, or its own."""
        return int(self._answer(block, None, block.default))


def tuned_by(record: Mapping[str, Any], target: str) -> AbstractContextManager[None]:
    """Return a context in which lowering for ``target`` makes the choices of ``record``.

    A record for another target has no effect: sizes of blocks depend on registers and caches.
    """
    if not record or record["target"] != target:
        return nullcontext()
    return decided_by(Decisions(choices_of(record)))
