"""Invariants that passes establish: facts about a module that hold after a pass and after every later one.

A predicate returns the violations in a module, one finding for each op. ``--verify-each`` checks the predicates of all
passes that have run. :data:`aotc.pipeline.PASSES` lists which pass establishes which invariant. The docstrings below
state the invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from aotc.diagnostics import Finding
from aotc.ir.opset import CONTROL_FLOW, FREE, OPS
from aotc.ir.opset.control import DEVICE_OPS, HOST, JUDGED
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured_values, walk
from aotc.lowering.passes.dce import has_effect

Predicate = Callable[[Module], list[Finding]]


def no_ops_left_of_pass(run: Callable[..., Module]) -> Predicate:
    """Return the predicate that no op is left that pass ``run`` must remove."""
    return lambda module: _ops_left_by_pass(module, run.__name__)


def assertions_are_outside_loops(module: Module) -> list[Finding]:
    """Check that no assertion is in a loop or a branch, and that only assertions can fail."""
    inner = [op for f in module.functions.values() for outer in f.body.ops for r in outer.regions for op in walk(r)]
    loose = [Finding(f"{op.name} is in a loop or a branch", op.loc) for op in inner if op.name == "assert"]
    return loose + _ops_left_by_pass(module, "hoist_checks")


def specialized_copies_are_complete(module: Module) -> list[Finding]:
    """Check that a function with specialized copies has one for each combination of sizes."""
    copies: dict[str, list[Function]] = {}
    for f in module.functions.values():
        if "specializes" in f.attrs:
            copies.setdefault(f.attrs["specializes"], []).append(f)
    return [finding for name, own in copies.items() for finding in _missing_specialized_copies(module, name, own)]


def operands_are_on_their_devices(module: Module) -> list[Finding]:
    """Check that ops read values on their own device only; transfers move values."""
    return [
        f
        for function in module.functions.values()
        if "devices" in function.attrs
        for f in _operands_on_other_devices(function)
    ]


def transfers_are_outside_regions(module: Module) -> list[Finding]:
    """Check that no transfer is in the region of a device."""
    regions = [op.regions[0] for f in module.functions.values() for op in walk(f.body) if op.name == "on"]
    inner = [op for region in regions for op in walk(region)]
    return [Finding(f"{op.name} is in the region of a device", op.loc) for op in inner if op.name in DEVICE_OPS]


def merged_runs_are_sorted(module: Module) -> list[Finding]:
    """Check that merges of sorted runs merge whole runs and keep at most one merged run."""
    runs = [op for f in module.functions.values() for op in walk(f.body) if op.name == "sort_runs"]
    wrong = [op for op in runs if op.attrs["width"] % op.attrs["done"] or op.attrs["keep"] > op.attrs["width"]]
    return [Finding(f"runs of {op.attrs['width']} are not runs of {op.attrs['done']}", op.loc) for op in wrong]


def weights_are_in_prepare_functions(module: Module) -> list[Finding]:
    """Check that bound weights are only used in prepare functions, which depend on nothing else."""
    whole = [f for f in module.functions.values() if "weights" in f.attrs and "prepares" not in f.attrs]
    return [Finding(f"@{f.name} computes with weights what each call would", f.loc) for f in whole]


def assertions_come_first(module: Module) -> list[Finding]:
    """Check that ops not needed by assertions come after the last op at which the host waits."""
    return [finding for f in module.functions.values() for finding in _ops_before_last_assertion(f)]


def kernel_ops_are_in_regions(module: Module) -> list[Finding]:
    """Check that public functions contain only host ops: control flow and dispatches of regions."""
    public = {name: f for name, f in module.functions.items() if f.public}
    loose = _ops_with_property(Module(public), lambda op: op.name not in HOST, "is in no region")
    regions = {op.attrs["callee"] for f in public.values() for op in walk(f.body) if op.name == "dispatch"}
    loose += [Finding(f"region @{name} does not exist") for name in sorted(regions - set(module.functions))]
    private = (f for f in module.functions.values() if not f.public)
    kindless = [f for f in private if "kind" not in f.attrs]
    return loose + [Finding(f"@{f.name} is not a region: it has no kind", f.loc) for f in kindless]


def _operands_on_other_devices(function: Function) -> Iterator[Finding]:
    """Yield a finding for each op that reads a value on another device; values from constants alone have no device."""
    home: dict[Value, str] = dict(zip(function.body.params, function.attrs["devices"]["arguments"]))
    yield from _region_operands_on_other_devices(function.body, "", home)
    for v, device in zip(function.body.results, function.attrs["devices"]["results"]):
        if home.get(v, device) != device:
            yield Finding(f"result {v} of @{function.name} is on {home[v]}, not on {device}", function.loc)


def _region_operands_on_other_devices(region: Region, around: str, home: dict[Value, str]) -> Iterator[Finding]:
    """Yield the findings of ``region`` in an op on the device ``around``; ``home`` collects the devices of values."""
    for op in region.ops:
        device = around or str(op.attrs.get("device", ""))
        if op.name == "transfer":
            source = op.attrs["source"]
            if home.get(op.operands[0], source) != source:
                yield Finding(f"transfer of {op.operands[0]} from {source}: it is on {home[op.operands[0]]}", op.loc)
        elif device:
            reads = (*op.operands, *(v for r in op.regions for v in captured_values(r)))
            yield from (
                Finding(f"{op.name} on {device} reads {v}, which is on {home[v]}", op.loc)
                for v in reads
                if home.get(v, device) != device
            )
        elif op.name == "while":
            for v, result, *params in zip(op.operands, op.results, *(r.params for r in op.regions)):
                home.update((w, home[v]) for w in (result, *params) if v in home)
        if op.name in CONTROL_FLOW:
            for inner in op.regions:
                yield from _region_operands_on_other_devices(inner, device, home)
                yield from _loop_results_on_other_devices(op, inner, home)
        if device:
            home.update((v, device) for v in op.results)


def _loop_results_on_other_devices(op: Op, region: Region, home: dict[Value, str]) -> Iterator[Finding]:
    """Yield a finding for each result of a loop body or branch that is on another device than the op's result."""
    if op.name == "on" or (op.name == "while" and region is op.regions[0]):
        return
    for v, result in zip(region.results, op.results, strict=True):
        if v in home and home.setdefault(result, home[v]) != home[v]:
            yield Finding(f"{op.name}: {result} is on {home[result]}, {v} on {home[v]}", op.loc)


def _ops_left_by_pass(module: Module, name: str) -> list[Finding]:
    """Return a finding for each op that pass ``name`` should have removed, by the op table."""
    removed = frozenset(op for op, spec in OPS.items() if spec.removed_by == name)
    return _ops_with_property(module, lambda op: op.name in removed, "is still there")


def _ops_before_last_assertion(function: Function) -> Iterator[Finding]:
    """Yield a finding for each op before the last check that neither a check nor an op with effects needs."""
    ops = function.body.ops
    last = max((n for n, op in enumerate(ops) if op.name in JUDGED), default=-1)
    needed: set[Value] = set()
    for op in reversed(ops[: last + 1]):
        if op.name in JUDGED or has_effect(op) or needed & set(op.results):
            needed |= {*op.operands, *(v for r in op.regions for v in captured_values(r))}
        elif op.name not in FREE:
            yield Finding(f"{op.name} in @{function.name} is before a check that does not need it", op.loc)


def _ops_with_property(module: Module, breaks: Callable[[Op], bool], what: str) -> list[Finding]:
    ops = ((f.name, op) for f in module.functions.values() for op in walk(f.body) if breaks(op))
    return [Finding(f"{op.name} in @{name} {what}", op.loc) for name, op in ops]


def _missing_specialized_copies(module: Module, name: str, copies: list[Function]) -> Iterator[Finding]:
    """Yield a finding for each combination of sizes for which a function does not have exactly one copy."""
    if name not in module.functions:
        yield Finding(f"@{copies[0].name} is a copy of @{name}, which does not exist", copies[0].loc)
    dims: list[Mapping[str, int]] = [f.attrs["dims"] for f in copies]
    sizes = {key: sorted({d[key] for d in dims if key in d}) for one in dims for key in one}
    combinations = [dict(zip(sizes, combination)) for combination in product(*sizes.values())]
    for one in combinations:
        if dims.count(one) != 1:
            shown = ", ".join(f"{key}={size}" for key, size in one.items())
            yield Finding(f"@{name} has {dims.count(one)} copies for {shown}, expected 1", copies[0].loc)
