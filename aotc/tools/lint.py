"""Report the treatment of each op of a model, from the decisions of the compiler itself.

The model is imported with a journal, runs through all passes and is lowered for each target; every refusal is
collected. Only the machine code of kernels is not generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotc.diagnostics import CompileError, Finding, InternalError, Loc
from aotc.display.document import Block, Column, Document, Line, Preformatted, table
from aotc.display.shown import DisplayedResult
from aotc.driver.assemble import native_calls
from aotc.frontend.importer import import_raw
from aotc.frontend.journal import IMPORTED, REFUSED, WAITS, Journal, JournalEntry
from aotc.frontend.platforms import is_multi_platform
from aotc.frontend.session import PLACEHOLDER
from aotc.frontend.several_models import fetch_any
from aotc.guard import guard, reraise_user_errors
from aotc.ir.loop.access import imported_functions
from aotc.ir.tensor.ir import Function, Module
from aotc.kernels.cpu.build import check_native_function_compiles
from aotc.lowering.lower import lower
from aotc.lowering.placement.host_only import IMPLIED, imply_host
from aotc.lowering.placement.memory_spaces import regions_by_target
from aotc.lowering.regions.custom_call import custom_call_of
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import checked_options, run_passes
from aotc.targets import Target, resolve_targets, variant_targets
from aotc.vmfb.custom_calls import registered_call

NATIVE, LIBRARY = "native", "library"


@dataclass(frozen=True, slots=True)
class LintRow:
    """One op of the model, with its status: ``native``, ``library`` (named by ``through``), ``refused`` or ``waits``.

    An op ``waits`` if its types depend on a refused op, so that its own status is unknown.
    """

    name: str
    dtypes: tuple[str, ...]
    loc: Loc
    status: str
    through: str = ""


# Source locations of an op that a row of the table lists; the others are counted. A row should stay one line.
SHOWN_LINES = 3
_STATUS = {"native": "native", "library": "through a library", "refused": "refused", "waits": "waiting for those"}


@dataclass(frozen=True, slots=True, repr=False)
class LintReport(DisplayedResult):
    """Treatment of a model for one target: a row per op in model order, and all refusals."""

    target: str
    rows: tuple[LintRow, ...]
    refusals: tuple[tuple[str, Finding], ...]  # op name (empty for the whole model), error

    @property
    def compiles(self) -> bool:
        """Return True if no op is refused."""
        return not self.refusals

    def document(self) -> Document:
        """Return the lint report: the treatment of each kind of op, and the refusals."""
        groups: dict[tuple[str, ...], list[LintRow]] = {}
        for row in self.rows:
            key = (row.name.removeprefix("stablehlo."), " ".join(row.dtypes), row.status, row.through)
            groups.setdefault(key, []).append(row)
        files = len({row.loc.path for row in self.rows if row.loc.line}) > 1
        columns = [Column("op"), Column("dtypes"), Column("count", right=True), Column("becomes"),
                   Column("lines", priority=1)]  # fmt: skip
        rows = [
            (name, dtypes, str(len(same)), f"{status} ({through})" if through else status, _model_lines(same, files))
            for (name, dtypes, status, through), same in sorted(groups.items())
        ]
        blocks: list[Block] = [table(columns, rows)] if rows else []
        for _, finding in self.refusals:
            blocks.append(Preformatted(finding.render().replace(": error: ", ": refused: ", 1) + "\n"))
        return Document(f"{self.target}: {self._summary()}", tuple(blocks))

    def _summary(self) -> str:
        """Return a sentence with the number of ops by status."""
        count = Counter(r.status for r in self.rows)
        parts = [f"{count[s]} {text}" for s, text in _STATUS.items() if count[s]]
        verdict = "it compiles" if self.compiles else "it does not compile"
        return f"{len(self.rows)} ops, {', '.join(parts) or 'nothing to do'}; {verdict}"


@dataclass(frozen=True, slots=True, repr=False)
class LintResult(DisplayedResult):
    """Treatment of a model for each target; iteration yields the reports."""

    reports: tuple[LintReport, ...]

    @property
    def compiles(self) -> bool:
        """Return True if no op is refused for any target."""
        return all(report.compiles for report in self.reports)

    def __iter__(self) -> Iterator[LintReport]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, number: int) -> LintReport:
        return self.reports[number]

    def document(self) -> Document:
        """Return the reports one after the other."""
        blocks: list[Block] = []
        for report in self.reports:
            one = report.document()
            blocks += [Line(one.title), *one.blocks]
        return Document("", tuple(blocks))


def _model_lines(rows: Sequence[LintRow], files: bool) -> str:
    """Format the locations of ops: lines of the model (after file names if ``files``), or else user's source files."""
    found = (_model_line(r.loc, files) if r.loc.line else Path(r.loc.source).name for r in rows)
    places = [p for p in dict.fromkeys(found) if p]
    shown = ", ".join(places[:SHOWN_LINES])
    return f"{shown} and {len(places) - SHOWN_LINES} more" if len(places) > SHOWN_LINES else shown


def _model_line(loc: Loc, files: bool) -> str:
    return f"{Path(loc.path).name}:{loc.line}" if files else str(loc.line)


@reraise_user_errors()
def lint(
    model: Any,
    *example_args: Any,
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    args: Mapping[str, Sequence[Any]] | None = None,
    **flags: Any,
) -> LintResult:
    """Report for each target the treatment of the ops of ``model``; the arguments are those of ``aotc.compile``.

    Returns
    -------
    LintResult
        A report for each target; ``print`` displays it as ``aotc lint`` does.

    Raises
    ------
    CompileError
        If the model cannot be read at all.
    """
    chosen = checked_options(options, flags)
    targets = variant_targets(resolve_targets(chosen.target), chosen.devices)
    raw = fetch_any(model, example_args, args, kwargs)
    several = is_multi_platform(raw.data, raw.metadata)
    imported: dict[str, tuple[Module, Journal]] = {}
    reports = []
    for target in targets:
        kind = target.for_device("").kind if several else "cpu"
        if kind not in imported:
            journal = Journal()
            imported[kind] = import_raw(raw, journal, chosen, kind), journal
        module, journal = imported[kind]
        with guard("while reporting what becomes of the ops", chosen, module):
            reports.append(_lint_report(module, journal.entries, target, targets, chosen))
    return LintResult(tuple(reports))


def _lint_report(
    module: Module, entries: Sequence[JournalEntry], target: Target, targets: Sequence[Target], options: Options
) -> LintReport:
    """Run the passes and the lowering for one target, and combine refusals with the journal of the import."""
    places = {id(e.loc): e for e in entries}
    early = [(e, f) for e in entries for f in e.findings]
    own = imply_host(module, target, targets, replace(options, target=target.for_device("").name))
    late, libraries = _lowering_refusals(*own, bool(early))
    known = {e for e, _ in early}
    found = [(_journal_entry_at(f.loc, places, entries), f) for f in late]
    new = [(e, f) for e, f in found if e is None or e not in known]
    refused = known | {e for e, _ in new if e is not None}
    through = {e: text for loc, text in libraries if (e := _journal_entry_at(loc, places, entries)) is not None}
    rows = tuple(_lint_row(e, refused, through) for e in entries)
    return LintReport(
        target.name, rows, tuple(_distinct_refusals([(e.name if e else "", f) for e, f in (*early, *new)]))
    )


def _journal_entry_at(
    loc: Loc, places: Mapping[int, JournalEntry], entries: Sequence[JournalEntry]
) -> JournalEntry | None:
    """Return the journal entry of the tensor op at ``loc``: with the same location object, else an equal location."""
    loc = loc.inlined or loc
    if id(loc) in places:
        return places[id(loc)]
    same = [e for e in entries if e.loc == loc]
    return same[0] if len(same) == 1 else None


def _lint_row(e: JournalEntry, refused: set[JournalEntry], through: Mapping[JournalEntry, str]) -> LintRow:
    """Return the row of a journal entry; ``through`` maps entries to the libraries that they call."""
    if e in refused:
        return LintRow(e.name, e.dtypes, e.loc, REFUSED)
    if e.outcome != IMPORTED:
        return LintRow(e.name, e.dtypes, e.loc, WAITS)
    return LintRow(e.name, e.dtypes, e.loc, LIBRARY if e in through else NATIVE, through.get(e, ""))


def _distinct_refusals(refusals: list[tuple[str, Finding]]) -> list[tuple[str, Finding]]:
    """Drop duplicate refusals: a function that is called with several types is imported for each of them."""
    return list({(name, f.loc, f.message): (name, f) for name, f in refusals}.values())


def _lowering_refusals(
    module: Module, target: Target, options: Options, incomplete: bool
) -> tuple[list[Finding], list[tuple[Loc, str]]]:
    """Return the refusals of passes, lowering and native functions, and the ops that call libraries."""
    libraries: list[tuple[Loc, str]] = []
    findings: list[Finding] = []
    try:
        fused = run_passes(module, options)
        targets = regions_by_target(fused, target)
        regions = (f for f in fused.functions.values() if not f.public)
        where = ", on the host" if any(IMPLIED in f.attrs for f in fused.functions.values()) else ""
        rows = (row for f in regions for row in _library_of_region(f, targets.get(f.name, target)))
        libraries = [(loc, through + where) for loc, through in rows]
        lowered = lower(fused, target, options)
        host = next((t for t, _ in lowered.parts if t.kind == "cpu"), lowered.target)
        for native in native_calls(lowered):
            try:
                check_native_function_compiles(native, host, options)
            except CompileError as error:
                findings += error.findings
    except CompileError as error:
        findings = [f for f in error.findings if PLACEHOLDER not in f.message]
    except InternalError:
        if not incomplete:  # the model lacks the refused ops, which may cause this error
            raise
    return findings, libraries


def _library_of_region(function: Function, target: Target) -> list[tuple[Loc, str]]:
    """Return the location of the op in a region that calls a library, with its name; empty if there is none."""
    if function.attrs.get("kind") != "single":
        return []
    try:
        names = imported_functions(lower_region(function, target))
    except Exception:  # lower() reports the error
        return []
    call = custom_call_of(function)
    if call is None:
        return [(function.body.ops[-1].loc, f"LAPACK: {', '.join(names)}")] if names else []
    known = registered_call(call.name)
    if known is None:
        return []
    where = "compiled into the bundle" if known.native or target.kind == "cuda" else "bound when the bundle loads"
    return [(call.loc, f"your function, {where}")]


__all__ = ["LIBRARY", "NATIVE", "REFUSED", "WAITS", "LintReport", "LintResult", "LintRow", "lint"]
