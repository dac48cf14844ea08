"""Lower a fused module to kernels, command buffers and host programs for one target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aotc.diagnostics import CompileError, Finding
from aotc.guard import guard
from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.opset import FREE
from aotc.ir.program.ir import (
    Bind,
    Buffered,
    Constants,
    Launch,
    Pieces,
    block_bytes,
    split_at_host_reads,
    step_memory_space,
)
from aotc.ir.program.ir import walk as walk_steps
from aotc.ir.program.text import print_program
from aotc.ir.tensor.ir import Function, Module, walk
from aotc.ir.tensor.substitute_dims import free_loop_names
from aotc.lowering import verify
from aotc.lowering.analysis.thresholds import REGION_FRAMES
from aotc.lowering.cost_model.model import Costs, location_name
from aotc.lowering.cost_model.work import typical_sizes
from aotc.lowering.passes.cse import structural_key
from aotc.lowering.placement.host_only import IMPLIED
from aotc.lowering.placement.memory_spaces import SPILLED, Space, regions_by_target, spaces_of, with_host_space
from aotc.lowering.program.bufferize import bufferize
from aotc.lowering.program.emit_program import Block, Stage, emit_program, join_programs
from aotc.lowering.program.graphs import shared_graphs
from aotc.lowering.program.memories import Memories, tensor_bytes
from aotc.lowering.program.memory_limit.fit_memory import arena_values_by_memory, fit_memory, scratch_bytes_by_memory
from aotc.lowering.program.memory_report import (
    FunctionMemory,
    function_memory,
    largest_specialisation_memory,
    total_arena_bytes,
)
from aotc.lowering.program.merge_by_offsets import merge_by_offsets
from aotc.lowering.program.merge_by_sizes import MergedBySizes, merge_by_sizes
from aotc.lowering.program.owners.alternate_buffers import alternate_buffers
from aotc.lowering.program.owners.exchange_buffers import exchange_buffers
from aotc.lowering.program.owners.read_first import move_reads_before_updates
from aotc.lowering.program.plan_memory import plan_stages
from aotc.lowering.program.schedule import CommandBufferEncoder
from aotc.lowering.program.stack_to_scratch import stack_to_scratch
from aotc.lowering.regions.custom_call import CustomCall, custom_call_of
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import DEVICE, HOST, Options
from aotc.support.recursion_limit import deeper_recursion
from aotc.targets import MIX, Target
from aotc.vmfb.abi import Slots
from aotc.vmfb.custom_calls import registered_call
from aotc.vmfb.ranks.layout import RANK_CALL


@dataclass
class Variant:
    """A module lowered for one target, or for a mix of several, with kernels in the loop IR.

    In a mix, ``parts`` lists each target with its number of kernels, and ``kernels`` are in this order. The kernels
    that run on CPUs are one part, whose target stands for all CPU ``targets``. Each GPU memory in ``spaces`` has the
    constants listed in ``pieces``; the memory of the process has all. ``halves`` are functions of ``programs`` that
    ``split_weights`` derived from another function, and that are not called by name.
    """

    target: Target
    kernels: list[Kernel]
    command_buffers: list[Any]
    programs: dict[str, Any]
    constants: Constants
    arena: int | None
    locs: dict[str, str]
    costs: Costs
    custom: dict[str, CustomCall]
    steps: dict[str, Buffered] = field(default_factory=dict)
    specialized: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    devices: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    devices_of: dict[str, Target] = field(default_factory=dict)  # the targets of these devices
    implied: bool = False  # did the compiler add the host as a device, for ops without a GPU kernel?
    on_host: list[dict[str, Any]] = field(default_factory=list)  # the ops that then run on the host
    transfers: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, FunctionMemory] = field(default_factory=dict)
    op_counts: dict[str, int] = field(default_factory=dict)  # the ops of each kernel, without movement ops
    taken: dict[str, set[int]] = field(default_factory=dict)  # donated arguments whose memory results reuse
    spaces: tuple[Space, ...] = ()
    pieces: list[Pieces] = field(default_factory=list)
    parts: list[tuple[Target, int]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)  # the target of each kernel
    halves: list[Function] = field(default_factory=list)
    arenas: list[int | None] = field(default_factory=list)  # the bytes of the arena in each space, None if symbolic
    sizes: dict[str, list[list[int]]] = field(default_factory=dict)  # the sizes that merged kernels are called with

    @property
    def text(self) -> str:
        """Return the text of kernels and their plans, and of each function's steps with the reason for each copy."""
        programs = [
            "".join([*(f"# copy: {line}\n" for line in steps.copies), print_program(steps, name)])
            for name, steps in self.steps.items()
        ]
        plans = (f"# plan: {k.plan}\n" if k.plan else "" for k in self.kernels)
        return "\n".join([*map(str.__add__, plans, map(print_kernel, self.kernels)), *programs])


def ignore_variant(variant: Variant) -> None:
    """Do nothing: the default callback ``known`` of :func:`lower`."""


def lower(
    module: Module, target: Target, options: Options, on_kernels: Callable[[Variant], object] = ignore_variant
) -> Variant:
    """Lower a fused module to kernels, command buffers and programs for one target.

    ``on_kernels`` is called as soon as the kernels of the variant are final, before memory and schedules are planned.

    Raises
    ------
    CompileError
        If ``target`` has no lowering for some ops; the error names all of them.
    """
    with guard("while lowering", options, module), typical_sizes(options.typical):
        limited = target.with_limits(options.stack_limit, options.shared_memory_limit)
        return _lower_fused(free_loop_names(module), limited, options, on_kernels)


# The order of the steps matters. Storage is assigned before kernels are merged, since loops become kernels with it. The
# kernels are final (``known``) before memory and schedules are planned, which refer to kernels by number.
def _lower_fused(module: Module, target: Target, options: Options, on_kernels: Callable[[Variant], object]) -> Variant:
    """Lower a module with unique loop names; call ``on_kernels`` with the variant once its kernels are final."""
    def stage_guard(what: str) -> AbstractContextManager[None]:
        return guard(f"while {what}", options, module)

    for_targets = regions_by_target(module, target)
    kernels, custom = _lower_regions(module, target, for_targets, options)
    public = {n: f for n, f in module.functions.items() if f.public}
    build = partial(Memories, target=target, lower_region=lower_region, for_targets=for_targets)
    offered = build(_allowed_memory_spaces(module, target, options), constants=Constants(guard_gaps=options.guard))
    for name, function in public.items():
        with stage_guard(f"ordering the ops of @{name}"):
            public[name], module = _fit_function_memory(function, module, kernels, offered, options)
    spaces, constants = spaces_of(module.with_functions(public), target), Constants(guard_gaps=options.guard)
    memories = build(spaces, constants=constants)
    steps: dict[str, Buffered] = {}
    every: dict[str, Kernel] = {}
    for name, function in public.items():
        with stage_guard(f"assigning storage of @{name}"):
            steps[name] = bufferize(function, module=module, kernels={**kernels, **every}, memories=memories)
            every |= steps[name].kernels  # so that kernels of loops in the next function get different names
            if options.verify_each:
                verify.verify_after_bufferize(steps[name], function, module.functions)
    with stage_guard("sharing kernels"):
        every, steps = _merge_kernels_by_offsets(every, steps, memories, module.with_functions(public), options)
    names, unique, targets, parts, shared = _deduplicate_kernels(every, memories, steps)
    unique = [stack_to_scratch(k, one) for k, one in zip(unique, targets, strict=True)]
    implied = any(IMPLIED in f.attrs for f in public.values())
    target = replace(_target_of_spaces(spaces), name=target.name) if implied else _target_of_spaces(spaces)
    costs = Costs(target, options.costs, for_targets, shared)
    regions = [f for f in module.functions.values() if not f.public]
    locs = {f.name: location_name(f.loc) for f in regions}
    counts = {f.name: sum(op.name not in FREE for op in f.body.ops) for f in regions}
    variant = Variant(target, unique, [], {}, constants, 0, locs, costs, custom, steps, op_counts=counts)
    variant.spaces, variant.pieces, variant.parts, variant.targets = spaces, memories.pieces, parts, targets
    on_kernels(variant)
    variant.sizes, sizes = _sizes_by_kernel(shared), _sizes_of_kernel_calls(shared)
    _record_devices(variant, public, memories.target, implied)
    numbers = {k.name: n for n, k in enumerate(unique)}
    places = {kernel: numbers[first] for kernel, first in names.items()}
    for name, function in public.items():
        slots = Slots(len(function.body.params), len(function.body.results), len(spaces))
        with stage_guard(f"planning memory and schedule of @{name}"):
            stages = _encode_function_stages(steps[name], variant, slots, places, shared, options.memory_limit)
            if options.verify_each:
                verify.verify_after_schedule(steps[name], function, module.functions, stages, slots, places, sizes)
        variant.memory[name] = function_memory(steps[name], stages[-1].arenas, spaces)
        donated = steps[name].taken
        variant.taken.setdefault(function.attrs.get("specializes", name), set()).update(donated.values())
        with stage_guard(f"emitting the program of @{name}"):
            variant.programs[name] = emit_program(function, slots, stages, donated)
        variant.arena = _largest_arena(variant.arena, total_arena_bytes(stages[-1].arenas))
        variant.arenas = [*map(_largest_arena, variant.arenas or [0] * len(spaces), stages[-1].arenas)]
    with stage_guard("joining the programs of specialized functions"):
        _join_specialized(variant, public)
        if options.verify_each:
            for name, program in variant.programs.items():
                verify.verify_after_emit(program, public[name], variant.command_buffers, len(spaces))
    return variant


def _sizes_of_kernel_calls(shared: Mapping[str, MergedBySizes]) -> dict[str, tuple[int, ...]]:
    return {name: sized.sizes for name, sized in shared.items()}


def _sizes_by_kernel(shared: Mapping[str, MergedBySizes]) -> dict[str, list[list[int]]]:
    """Return the sizes with which each merged kernel is called, by its name: a row for each set of sizes."""
    rows = dict.fromkeys((sized.kernel.name, sized.sizes) for sized in shared.values())
    return {name: [[*sizes] for own, sizes in rows if own == name] for name, _ in rows}


def check_same_devices_in_variants(variants: Sequence[Variant], signatures: Module) -> None:
    """Check that all variants have arguments and results on the same devices, as they share one signature.

    Raises
    ------
    CompileError
        If devices differ; the error names both.
    """
    first = variants[0]
    for other in variants[1:]:
        for name, homes in first.devices.items():
            pairs = [pair for key in ("arguments", "results") for pair in zip(homes[key], other.devices[name][key])]
            for mine, its in pairs:
                if mine != its and name in signatures.functions:
                    difference = f"{mine} for {first.target.name}, and on {its} for {other.target.name}"
                    message = f"an argument or result of @{name} is on {difference}"
                    hint = "give arguments and results affinities, or compile a bundle for each --target"
                    raise CompileError.at(signatures.functions[name].loc, message, hint=hint)


def _fit_function_memory(
    function: Function, module: Module, kernels: dict[str, Kernel], memories: Memories, options: Options
) -> tuple[Function, Module]:
    """Return ``function`` with fewer copies and within the memory limit, and the module with its regions."""
    costs = Costs(_target_of_spaces(memories.spaces), options.costs, memories.for_targets)
    function = move_reads_before_updates(function, module.functions, kernels)
    function = exchange_buffers(function, module.functions, kernels, memories)
    function, functions = alternate_buffers(function, module.functions, kernels, memories)
    module = module.with_functions(functions)
    make = partial(bufferize, module=module, kernels=kernels)
    return fit_memory(function, functions, kernels, memories, make, costs, options.memory_limit), module


def _allowed_memory_spaces(module: Module, target: Target, options: Options) -> tuple[Space, ...]:
    """Return the memory spaces that a module may use.

    With a memory limit and named devices, they include the memory of the process, for spilled values.
    """
    spaces = spaces_of(module, target)
    named = all("devices" in f.attrs for f in module.functions.values() if f.public)
    return with_host_space(spaces) if options.memory_limit and named else spaces


def _target_of_spaces(spaces: tuple[Space, ...]) -> Target:
    """Return the target of a variant with the given memory spaces: a mix if there are several."""
    if len(spaces) == 1:
        return spaces[0].target
    targets = [space.target for space in spaces]
    features = tuple(dict.fromkeys(name for t in targets for name in t.features))
    return Target("+".join(dict.fromkeys(t.name for t in targets)), MIX, "", features)


def _largest_arena(largest: int | None, arena: Dim) -> int | None:
    """Return the larger of two arena sizes, or None if one is symbolic."""
    return None if largest is None or not isinstance(arena, int) else max(largest, arena)


def _record_devices(variant: Variant, public: Mapping[str, Function], target: Target, implied: bool) -> None:
    """Record in ``variant`` the functions split off for weights, the devices, the host ops and the transfers."""
    named = {name: f.attrs["devices"] for name, f in public.items() if "devices" in f.attrs}
    devices = [name for row in named.values() for key in row for name in row[key]]
    variant.halves = [f for f in public.values() if "prepares" in f.attrs or "binds" in f.attrs]
    if implied:
        variant.implied = True
        variant.on_host = [{"function": f.name, **row} for f in public.values() for row in f.attrs["on_host"]]
        devices = [HOST, DEVICE] if len(variant.spaces) > 1 else []
    else:
        variant.devices = named
    variant.devices_of = {name: target.for_device(name) for name in devices}
    variant.transfers = [row for f in public.values() for row in _transfer_descriptions(f)]


def _transfer_descriptions(function: Function) -> Iterator[dict[str, Any]]:
    """Yield a description of each transfer for the bundle, except of constants, which exist in every memory."""
    constants = {op.result for op in walk(function.body) if op.name == "constant"}
    for op in walk(function.body):
        if op.name == "transfer" and op.operands[0] not in constants:
            yield {
                "function": function.name,
                "from": op.attrs["source"],
                "to": op.attrs["device"],
                "type": str(op.result.type),
                "bytes": size if isinstance(size := tensor_bytes(op.result.type), int) else str(size),
                "reason": op.attrs["reason"],
                **({"spilled": True} if SPILLED in (op.attrs["source"], op.attrs["device"]) else {}),
                "loc": op.loc.traced_by or str(op.loc),
            }


def _lower_regions(
    module: Module, target: Target, targets: Mapping[str, Target], options: Options
) -> tuple[dict[str, Kernel], dict[str, CustomCall]]:
    """Return the kernel of each region by name, and the custom calls by symbol.

    Raises
    ------
    CompileError
        With a finding for each op that cannot be lowered.
    """
    kernels: dict[str, Kernel] = {}
    custom: dict[str, CustomCall] = {}
    refused: list[Finding] = []
    lowered: dict[tuple, Kernel] = {}  # equal layers of a model are lowered once
    for function in module.functions.values():
        if function.public:
            continue
        try:
            own = targets.get(function.name, target)
            key = (own.name, *structural_key(function))
            if key not in lowered:
                lowered[key] = _lower_region(function, own, module, options)
                if options.verify_each:
                    verify.verify_after_region(lowered[key])
            kernels[function.name] = replace(lowered[key], name=function.name)
            call = custom_call_of(function)
            if call is not None:
                custom[_check_custom_call_registered(call).symbol] = call
        except CompileError as error:
            refused += error.findings
    if refused:
        raise CompileError(refused)
    return kernels, custom


def _encode_function_stages(
    b: Buffered, variant: Variant, slots: Slots, places: Mapping[str, int], shared: Mapping[str, MergedBySizes],
    limit: int,
) -> list[Stage]:  # fmt: skip
    """Plan the memory of one function, and encode a command buffer for each stretch of steps.

    A stretch ends where the host reads values from memory: conditions of checks, and sizes that a call computes.
    """
    parts = split_at_host_reads(b.steps)
    stage_of = {str(j.dim): n for n, (_, judged) in enumerate(parts, start=1) for j in judged if isinstance(j, Bind)}

    def stage_of_size(size: Dim) -> int:
        return max((stage_of.get(s.name, 0) for s in symbols(size)), default=0)

    constants = variant.constants
    spread = shared_graphs(b.steps, variant.costs)
    arenas = arena_values_by_memory(b, len(variant.spaces))
    most = [limit - own if limit else None for own in scratch_bytes_by_memory(b, variant.spaces)]
    plans = [plan_stages(a, stage_of_size, len(parts), constants.guard_gaps, spread, m) for a, m in zip(arenas, most)]
    mapped = variant.spaces[0].target.kind == "cpu" or len(arenas) == 1  # constants are not copied to GPUs in pieces
    fixed: list[Block] = [(slots.constants, at, block_bytes(x.nbytes)) for _, x, at in constants.arrays if mapped]
    stages: list[Stage] = []
    for sizes, (steps, judged) in zip(zip(*plans), parts, strict=True):
        buffer = CommandBufferEncoder(slots, places.__getitem__, variant.costs, _sizes_of_kernel_calls(shared)).encode(
            steps
        )
        known_by_now = [s for s in b.arena if stage_of_size(s.size) <= len(stages)]
        blocks = [*fixed, *((slots.arena_slot(s.space), s.offset, block_bytes(s.size)) for s in known_by_now)]
        guarded = blocks if constants.guard_gaps else ()
        stages.append(Stage(buffer, len(variant.command_buffers), sizes, judged, guarded))
        variant.command_buffers.append(buffer)
    return stages


def _lower_region(function: Function, target: Target, module: Module, options: Options) -> Kernel:
    """Lower one region under a guard that names it in errors."""
    with guard(f"while lowering region {function.name}", options, module), deeper_recursion(REGION_FRAMES):
        return lower_region(function, target)


def _join_specialized(variant: Variant, public: Mapping[str, Function]) -> None:
    """Join the program of each general function with those of its copies for given sizes."""
    for name, general in public.items():
        copies = [f for f in public.values() if f.attrs.get("specializes") == name]
        if copies:
            programs = [(f, variant.programs.pop(f.name)) for f in copies]
            variant.programs[name] = join_programs((general, variant.programs[name]), programs)
            variant.memory[name] = largest_specialisation_memory([variant.memory[f.name] for f in (general, *copies)])
            variant.specialized[name] = [dict(f.attrs["dims"]) for f in copies]


def _check_custom_call_registered(call: CustomCall) -> CustomCall:
    """Return ``call``; raise a CompileError with a hint if its function is not registered."""
    if registered_call(call.name) is None and not call.name.startswith(RANK_CALL):
        raise CompileError.at(
            call.loc,
            f"custom call @{call.name} has no registered function",
            hint=f"before compiling, call aotc.register_custom_call({call.name!r}, function)",
        )
    return call


def _merge_kernels_by_offsets(
    kernels: dict[str, Kernel], programs: dict[str, Buffered], memories: Memories, module: Module, options: Options
) -> tuple[dict[str, Kernel], dict[str, Buffered]]:
    """Merge CPU kernels that differ only in the offsets at which they read parts of arrays."""
    if any(space.target.kind != "cpu" for space in memories.spaces):
        return kernels, programs
    kernels, programs = merge_by_offsets(kernels, programs)
    if options.verify_each:
        verify.verify_after_merging(programs, module.functions)
    return kernels, programs


def _deduplicate_kernels(
    kernels: Mapping[str, Kernel], memories: Memories, steps: Mapping[str, Buffered]
) -> tuple[dict[str, str], list[Kernel], list[Target], list[tuple[Target, int]], dict[str, MergedBySizes]]:
    """Merge equal kernels, and on CPUs also kernels that differ only in sizes.

    Return the name of the kernel that replaces each kernel; the distinct kernels and their targets, in the order of the
    parts; the target and the number of kernels of each part; and the merged kernels with their sizes, by the names of
    the kernels that they replace.
    """
    launches = (step for b in steps.values() for step in walk_steps(b.steps) if isinstance(step, Launch))
    homes = {step.kernel.name: max(step_memory_space(step), 0) for step in launches}
    chosen: dict[tuple[Target, Kernel], str] = {}
    names: dict[str, str] = {}
    for name, kernel in kernels.items():
        target = memories.target_of(name, homes.get(name, 0))
        # The key leaves out the name: the first of several equal kernels replaces the others.
        names[name] = chosen.setdefault((target, replace(kernel, name="")), name)
    alike: dict[Target, list[Kernel]] = {}
    for (target, _), name in chosen.items():
        alike.setdefault(target, []).append(kernels[name])
    sized: dict[str, MergedBySizes] = {}
    for target, some in alike.items():
        sized |= merge_by_sizes(some, target.matrices) if target.kind == "cpu" else {}
    host = [space.target for space in memories.spaces if space.target.kind == "cpu"]
    parts: dict[Target, list[tuple[Kernel, Target]]] = {space.target: [] for space in memories.spaces}
    for (target, _), name in chosen.items():
        kernel = sized[name].kernel if name in sized else kernels[name]
        if kernel.name == name:
            parts[host[0] if target.kind == "cpu" else target].append((kernel, target))
    rows = [row for part in parts.values() for row in part]
    counts = [(target, len(part)) for target, part in parts.items()]
    shared = {name: sized[first] for name, first in names.items() if first in sized}
    names = {name: shared[name].kernel.name if name in shared else first for name, first in names.items()}
    return names, [kernel for kernel, _ in rows], [target for _, target in rows], counts, shared
