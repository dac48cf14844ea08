"""Fusion report: the ops of each kernel, its resources, and the reason for each fused or refused neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import first_location_text, targets_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text
from aotc.guard import guard
from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.forms.attention import attention_shared_bytes_of_kernel
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, thread_count, walk
from aotc.ir.loop.scratch import shared_bytes
from aotc.ir.opset import FREE
from aotc.ir.tensor.ir import Function, Module, Op, Region
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.lowering.passes.fuse.fuse import fuse, fuse_recorded
from aotc.lowering.passes.fuse.record import FusionRecord, Verdict
from aotc.lowering.passes.split_rows import long_row_splits_of, split_rows
from aotc.lowering.plans.gpu_registers import estimate_registers
from aotc.lowering.plans.resources import memory_limits
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import Target
from aotc.tools.fetch_model import check_function, fetch_model
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class FusionNeighbour:
    """Neighbour of a region: ops that fusion included or refused, the reason, and their source lines."""

    taken: bool
    ops: tuple[str, ...]
    reason: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FusionRegion:
    """A region: the ops that fusion combined into one kernel.

    Attributes
    ----------
    function, name, kind : str
        The first function that runs it, its name, and its kind.
    device, target : str
        The model's name of its device, if any, and the target that it is compiled for.
    ops, lines : tuple of str
        Its ops, and their source lines.
    text_lines : tuple of int
        Lines of the model's text with its ops, if the model is text.
    bytes_in, bytes_out, work : str
        Bytes of its operands and results, and scalar operations; expressions where sizes are symbolic.
    memory : mapping of str to (int, int)
        For each memory space with arrays of the kernel: their bytes, and the limit of the target in bytes.
    neighbours : tuple of FusionNeighbour
        Decisions about the ops next to it.
    threads, registers, occupancy : int
        On a GPU: threads of a block, estimated registers of a thread, and the percentage of a multiprocessor's threads
        that such blocks fill; else 0.
    plan : str
        The region's plan: every decision of its lowering, as text that the compiler can parse.
    """

    function: str
    name: str
    kind: str
    device: str
    target: str
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    bytes_in: str
    bytes_out: str
    work: str
    memory: Mapping[str, tuple[int, int]]
    neighbours: tuple[FusionNeighbour, ...]
    threads: int = 0
    registers: int = 0
    occupancy: int = 0
    plan: str = ""
    text_lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FusionRow:
    """Decision about two dependent reductions over rows too long for one worker (maximum and sum of softmax).

    Attributes
    ----------
    function : str
        The function.
    taken : bool
        True if both are computed in one pass over the row, in parts (online softmax).
    reason : str
        The reason for the decision.
    lines : tuple of str
        Source lines of the reductions.
    """

    function: str
    taken: bool
    reason: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class FusionReport(DisplayedResult):
    """Regions of a model for one target, or a mix of several.

    ``devices`` maps devices to targets; ``rows`` has the decisions about long rows.
    """

    target: str
    regions: tuple[FusionRegion, ...]
    devices: Mapping[str, str]
    rows: tuple[FusionRow, ...] = ()

    def document(self) -> Document:
        """Return the fusion report: kernels, their ops, and the reasons for refused neighbours."""
        columns = [
            Column("kernel"), Column("device"), Column("kind", priority=3), Column("bytes in", True),
            Column("bytes out", True), Column("work", True), Column("memory", priority=4),
            Column("occupancy", priority=5),
            Column("from", priority=1),
        ]  # fmt: skip
        table_rows = [
            (r.name, r.device, r.kind, r.bytes_in, r.bytes_out, r.work, _memory_text(r.memory) or "none",
             f"{r.occupancy} %, {r.threads} threads" if r.threads else "", first_location_text(r.lines))
            for r in self.regions
        ]  # fmt: skip
        blocks: list[Block] = [table(columns, table_rows)]
        for region in self.regions:
            blocks.append(Line(f"{region.name}: {', '.join(region.ops)}"))
            blocks += [Line(f"plan: {region.plan}", 2)] if region.plan else []
            for n in region.neighbours:
                verdict = "took" if n.taken else "refused"
                blocks.append(Line(f"{verdict} {', '.join(n.ops)} ({first_location_text(n.lines)}): {n.reason}", 2))
            blocks.append(Line(""))
        for row in self.rows:
            form = "read once, in parts" if row.taken else "not read in parts"
            blocks += [Line(f"rows of {first_location_text(row.lines)}, {form}: {row.reason}"), Line("")]
        regions = count_text(len(self.regions), "region")
        summary = f"{regions} for {self.target}{targets_text(self.devices)}; equal regions share a kernel"
        return Document("", (*blocks, Line(summary)))


def _memory_text(memory: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{used:,} of {limit:,} B of {name}" for name, (used, limit) in memory.items())


def explain_fusion(
    model: Any, *example_args: Any, kwargs: Mapping[str, Any] | None = None, options: Options | None = None,
    function: str = "", **flags: Any,
) -> FusionReport:  # fmt: skip
    """Return the fusion report of ``model``. The arguments are those of ``aotc.compile``, or a bundle.

    ``function`` selects one public function; by default all are included.

    Raises
    ------
    CompileError
        If the model cannot be read.
    ArgumentValueError
        If the model has no such function.
    BundleError
        If a bundle is damaged, or has no source.
    """
    before, target, chosen = fetch_model(model, example_args, kwargs, options, flags)
    check_function(function, before)
    stages = {"": before}
    run_passes(before, chosen, lambda _, step, after: stages.update({step.run.__name__: after}))
    names = list(stages)
    whole, uncut = (stages[names[names.index(step.__name__) - 1]] for step in (fuse, split_rows))
    with guard("while explaining fusion", chosen, whole):
        record = FusionRecord()
        module = fuse_recorded(whole, chosen, record)
        target = target.with_limits(chosen.stack_limit, chosen.shared_memory_limit)
        regions = tuple(_regions_in_order(module, function, record, target))
        devices = {r.device: r.target for r in regions if r.device}
        return FusionReport(target.name, regions, devices, tuple(_long_row_rows(uncut, function, chosen)))


def _long_row_rows(module: Module, only: str, options: Options) -> Iterator[FusionRow]:
    """Yield the lowering decisions for long rows of all public functions, or of function ``only``."""
    for function in module.functions.values():
        if function.public and only in ("", function.name):
            for form in long_row_splits_of(function.body, options):
                ops = (form.row.first, form.row.second)
                yield FusionRow(function.name, bool(form.part), form.reason, _lines_of_ops(ops))


def _regions_in_order(module: Module, only: str, record: FusionRecord, target: Target) -> Iterator[FusionRegion]:
    """Yield the regions in execution order, for all public functions or for ``only``."""
    callers: dict[str, tuple[str, str]] = {}
    for function in module.functions.values():
        if function.public and only in ("", function.name):
            for callee, device in _dispatched_callees(function.body):
                callers.setdefault(callee, (function.name, device))
    for name, (caller, device) in callers.items():
        own = target.for_device(device)
        yield _fusion_region(
            module.functions[name], caller, device, record, lower_region(module.functions[name], own), own
        )


def _dispatched_callees(region: Region, device: str = "") -> Iterator[tuple[str, str]]:
    """Yield the callee and device of each dispatch; ``device`` is that of the enclosing op."""
    for op in region.ops:
        if op.name == "dispatch":
            yield op.attrs["callee"], device
        for inner in op.regions:
            yield from _dispatched_callees(inner, op.attrs.get("device", device))


def _fusion_region(
    function: Function, caller: str, device: str, record: FusionRecord, kernel: Kernel, target: Target
) -> FusionRegion:
    """Return the facts of a region: ops, bytes, work, memory, neighbours, occupancy, plan."""
    ops = [op for op in function.body.ops if op.name not in FREE] or list(function.body.ops)
    return FusionRegion(
        caller,
        function.name,
        function.attrs["kind"],
        device,
        target.name,
        tuple(op.name for op in ops),
        _lines_of_ops(ops),
        str(_buffer_bytes_text(kernel.inputs)),
        str(_buffer_bytes_text(kernel.outputs)),
        str(kernel.flops),
        _kernel_memory(kernel, target),
        tuple(_neighbour_text(v) for v in record.verdicts_about(record.groups[function.name])),
        *_region_occupancy(function, kernel, target),
        kernel.plan,
        tuple(sorted({op.loc.line for op in function.body.ops if op.loc.line})),
    )


def _region_occupancy(function: Function, kernel: Kernel, target: Target) -> tuple[int, int, int]:
    """Return the threads of a block, the estimated registers of a thread, and the occupancy in percent."""
    if target.kind != "cuda":
        return 0, 0, 0
    ops = {v: op for op in function.body.ops for v in op.results}
    registers = estimate_registers(ops, function.body.results)
    threads = thread_count(kernel) or block_threads_of_flat_kernel(kernel)
    shared = sum(used for name, (used, _) in _kernel_memory(kernel, target).items() if name == "shared memory")
    return threads, registers, target.multiprocessor.occupancy(threads, registers, shared)


def _neighbour_text(verdict: Verdict) -> FusionNeighbour:
    names = tuple(op.name for op in verdict.ops)
    return FusionNeighbour(verdict.taken, names, verdict.reason, _lines_of_ops(verdict.ops))


def _lines_of_ops(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return the locations of ops: lines of Python if JAX recorded them, else lines of the model."""
    return tuple(dict.fromkeys(op.loc.source or op.loc.traced_by or str(op.loc) for op in ops))


def _buffer_bytes_text(buffers: tuple[Buffer, ...]) -> Dim:
    return sum((product(b.shape) * size_of(b.dtype) for b in buffers), 0)


def _kernel_memory(kernel: Kernel, target: Target) -> dict[str, tuple[int, int]]:
    """Return for each memory space the bytes of a kernel's own arrays in it, and the target's limit."""
    arrays = (s.buffer for s in walk(kernel.body) if isinstance(s, Alloc))
    made = {b for b in arrays if b.shape and b.space != "shared"}
    threads, loops = thread_count(kernel), [s for s in walk(kernel.body) if isinstance(s, For) and s.kind == "thread"]
    inside = {s.buffer for loop in loops for s in walk(loop.body) if isinstance(s, Alloc)}
    each = {b for b in made - inside if b.space == "private" and b.shape[0] == threads}  # one per thread, or more
    found: dict[str, tuple[int, int]] = {}
    for space, (name, limit) in memory_limits(target).items():
        used = [(_buffer_bytes_text((b,)), b) for b in made if b.space == space]
        if used:
            found[name] = sum(n // threads if b in each else n for n, b in used if isinstance(n, int)), limit
    shared = attention_shared_bytes_of_kernel(kernel) if kernel.tiling is not None else shared_bytes(kernel.body)
    if shared:
        name, limit = memory_limits(target)["shared"]
        found[name] = shared, limit
    return found
