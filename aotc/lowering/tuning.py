"""Tuned decisions: replacements for the results of lowering's thresholds, and the records that store them.

Lowering decides by size with :meth:`Limit.holds` of a threshold, and reads block sizes from the ``value`` of a
threshold. A :class:`Choice` replaces one such result: the decision of a limit for one size, or a block size. ``aotc
tune`` searches choices that make a program faster, and writes them to a record. ``aotc compile --tuning`` compiles with
a record. The same record and model give the same bytes.

The search, in :mod:`aotc.tools.tune`, is a greedy coordinate descent as in autotuners (Ansel et al., "OpenTuner", PACT
2014).
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
"""Name of a threshold and the size for which it decides; the size is None for a block size."""

Answers: TypeAlias = Mapping[Asked, bool | int]


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """Replacement of one result of a threshold.

    Attributes
    ----------
    threshold : str
        Module and name of the threshold: ``plans.matmul.THIN_ROWS``.
    size : int or str or None
        The size for which a limit decides, or :data:`SYMBOLIC`; None for a block size.
    value : bool or int
        The decision of a limit, or the block size.
    """

    threshold: str
    size: int | str | None
    value: bool | int

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.threshold} = {self.value}"
        return f"{self.threshold} {'includes' if self.value else 'excludes'} {self.size}"


def choices_of(record: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Parse the choices of a tuning record."""
    return tuple(Choice(row["threshold"], row.get("size"), row["value"]) for row in record.get("choices", ()))


def choice_rows(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Convert choices to JSON rows of a tuning record."""
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
    """Return all limits and block sizes of lowering's imported modules, keyed by ``module.NAME``."""
    root = __name__.rpartition(".")[0] + "."
    rows: dict[str, CostRow] = {}
    for path, module in list(sys.modules.items()):
        if path.startswith(root) and module is not None:
            own = {name: row for name, row in vars(module).items() if isinstance(row, Limit | BlockSize)}
            rows |= {f"{path.removeprefix(root)}.{name}": row for name, row in own.items()}
    return dict(sorted(rows.items()))


@dataclass
class Decisions:
    """Decider of one lowering: replaces results of thresholds by choices, and records all results.

    Attributes
    ----------
    choices : tuple of Choice
    answers : dict
        The results so far, in order: decisions keyed by (threshold, size), block sizes by (threshold, None).
    """

    choices: tuple[Choice, ...] = ()
    answers: dict[Asked, bool | int] = field(default_factory=dict)

    @cached_property
    def _names(self) -> dict[int, str]:
        """Map ``id(threshold)`` to its name; the shortest name if several modules import the threshold."""
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
        """Return the tuned decision of ``limit`` for ``size``, or ``own``, its default decision, if there is none."""
        return bool(self._answer(limit, SYMBOLIC if isinstance(size, Expr) else int(size), own))

    def amount(self, block: BlockSize) -> int:
        """Return the tuned value of ``block``, or its default if there is none."""
        return int(self._answer(block, None, block.default))


def tuned_by(record: Mapping[str, Any], target: str) -> AbstractContextManager[None]:
    """Return a context manager in which lowering for ``target`` uses the choices of ``record``.

    A record for another target has no effect, because block sizes depend on registers and caches.
    """
    if not record or record["target"] != target:
        return nullcontext()
    return decided_by(Decisions(choices_of(record)))
