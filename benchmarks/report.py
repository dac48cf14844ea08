"""Results of a suite: tables on the terminal (80 columns), as markdown or as JSON lines, and the record of a run."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks import machine, timing
from benchmarks.timing import Ratio

RESULTS = Path(__file__).parent / "results"
WIDTH = 80
PATH = re.compile(r"(^|=)(?:~|\.{1,2})?/(?:\S*/)?([^/\s]+)$")  # of a command, of which records keep the name alone


class Format(StrEnum):
    """Formats of a table on standard output."""

    table = "table"
    markdown = "markdown"
    json = "json"


@dataclass(frozen=True, slots=True)
class Column:
    """Column of numbers or text.

    Attributes
    ----------
    title : str
        Heading of the column.
    scale : float
        Factor of the displayed values: 1e6 for seconds in a column of microseconds.
    width : int
        Minimum number of characters.
    shown : bool
        False for data in records and JSON lines only.
    """

    title: str
    scale: float = 1.0
    width: int = 8
    shown: bool = True

    def text(self, cell: Any) -> str:
        """Format a cell for display."""
        match cell:
            case None:
                return ""
            case bool() | str():
                return str(cell)
            case Ratio():
                return str(cell)
            case int() if self.scale == 1.0:
                return f"{cell:,}"
            case _:
                return number(float(cell) * self.scale)

    def data(self, cell: Any) -> Any:
        """Return a cell for a record: numbers in the column's unit, ratios with their quartiles."""
        match cell:
            case None | bool() | str():
                return cell
            case Ratio():
                return [round(x, 4) for x in (cell.median, cell.low, cell.high)]
            case int() if self.scale == 1.0:
                return cell
            case _:
                return float(f"{float(cell) * self.scale:.5g}")


def us(name: str) -> Column:
    """Return a column in microseconds, whose cells are seconds."""
    return Column(f"{name} us", 1e6)


def ms(name: str) -> Column:
    """Return a column in milliseconds, whose cells are seconds."""
    return Column(f"{name} ms", 1e3)


def ratio(name: str) -> Column:
    """Return a column of ratios."""
    return Column(name, width=11)


def number(value: float) -> str:
    """Format a number with three significant digits, with an exponent only below 0.001."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 1e-3 or not size else f"{value:.1e}"


@dataclass(slots=True)
class Run:
    """Tables and notes that one run of a suite has reported so far."""

    form: Format = Format.table
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load: float = 0.0
    peers: set[str] = field(default_factory=set)


RUN = Run()


def begin(form: Format) -> None:
    """Start a run without tables and notes, and measure the load of the machine."""
    RUN.form, RUN.load = form, machine.load_by_other_processes(0.1 if timing.SMOKE else 0.5)
    RUN.tables.clear()
    RUN.notes.clear()


class Table:
    """A table that prints its rows as they are added: the first cell of a row is its name, others are in columns."""

    def __init__(self, name: str, *columns: Column | str, title: str = "") -> None:
        self.title, self.name = title, name
        self.columns = [Column(c) if isinstance(c, str) else c for c in columns]
        self.rows: list[tuple[str, tuple[Any, ...]]] = []
        self._shown = [c for c in self.columns if c.shown]
        self._widths = [max(len(c.title), c.width) for c in self._shown]
        self._left = WIDTH - sum(self._widths) - 2 * len(self._widths)
        RUN.tables.append(self)

    def add(self, name: str, *cells: Any) -> None:
        """Add a row and print it."""
        if len(cells) != len(self.columns):
            raise ValueError(f"row {name!r}: found {len(cells)} cells, expected {len(self.columns)}")
        if not self.rows:
            self._head()
        self.rows.append((name, cells))
        texts = [c.text(cell) for c, cell in zip(self.columns, cells) if c.shown]
        match RUN.form:
            case Format.json:
                print(json.dumps({self.name: name, **self._data(cells)}), flush=True)
            case Format.markdown:
                print(f"| {' | '.join([name, *texts])} |", flush=True)
            case _:
                print("\n".join(self._lines(name, texts)), flush=True)

    def failed(self, name: str, error: object) -> None:
        """Report that a case could not be measured; other cases continue."""
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
        note(f"{name}: not measured: {' '.join(text.split())[:300]}")

    def mean(self, title: str) -> float:
        """Report and return the geometric mean of a column of ratios."""
        at = [c.title for c in self.columns].index(title)
        found = [cells[at] for _, cells in self.rows if cells[at] is not None]
        values = [x.median if isinstance(x, Ratio) else float(x) for x in found]
        if not values:
            return math.nan
        mean = math.exp(statistics.fmean(map(math.log, values)))
        note(f"{title}: geometric mean {mean:.2f} of {len(values)} rows")
        return mean

    def _head(self) -> None:
        if RUN.form is Format.json:
            return
        titles = [c.title for c in self._shown]
        if self.title:
            print(f"\n{self.title}" + ("\n" if RUN.form is Format.markdown else ""))
        if RUN.form is Format.markdown:
            print(f"| {' | '.join([self.name, *titles])} |\n|{'---|' * (len(titles) + 1)}")
        elif self._left >= 16:
            cells = "".join(f"  {t:>{w}}" for t, w in zip(titles, self._widths))
            print(f"{self.name:<{self._left}}{cells}")

    def _lines(self, name: str, texts: list[str]) -> list[str]:
        """Return the lines of a row: one, or a name and the cells below it if they do not fit."""
        if self._left < 16:
            pairs = [f"{c.title} {t}" for c, t in zip(self._shown, texts) if t]
            return [name[:WIDTH], *textwrap.wrap("; ".join(pairs), WIDTH, initial_indent="  ", subsequent_indent="  ")]
        cells = "".join(f"  {t:>{w}}" for t, w in zip(texts, self._widths))
        if len(name) > self._left:
            return [name[:WIDTH], f"{'':<{self._left}}{cells}".rstrip()]
        return [f"{name:<{self._left}}{cells}".rstrip()]

    def _data(self, cells: tuple[Any, ...]) -> dict[str, Any]:
        return {c.title: c.data(cell) for c, cell in zip(self.columns, cells) if cell is not None}

    def record(self) -> dict[str, Any]:
        """Return the table as data."""
        rows = [{self.name: name, **self._data(cells)} for name, cells in self.rows]
        return {"title": self.title, "columns": [self.name, *(c.title for c in self.columns)], "rows": rows}


def note(text: str) -> None:
    """Add a sentence outside of tables to the report."""
    RUN.notes.append(text)
    shown = json.dumps({"note": text}) if RUN.form is Format.json else text
    print(shown if RUN.form is not Format.table else textwrap.fill(shown, WIDTH), flush=True)


def write(name: str) -> Path:
    """Write the record of this run: command, date, machine, load by others, tables and notes."""
    if timing.SMOKE:
        raise SystemExit("--record: a smoke run measures nothing; leave out --smoke")
    words = [w for w in sys.argv[1:] if w not in (f"--record={name}", "--record", name)]
    load = max(RUN.load, machine.load_by_other_processes())
    record = {
        "command": shlex.join(["python", "-m", "benchmarks", *(PATH.sub(r"\1\2", word) for word in words)]),
        "date": time.strftime("%F"),
        "machine": machine.describe(RUN.peers),
        "load": round(load, 2),
        "quiet": load < machine.QUIET,
        "tables": [table.record() for table in RUN.tables if table.rows],
        "notes": list(RUN.notes),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path
