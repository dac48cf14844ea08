"""Assign memory to the values of a fused module, and list its steps.

The result is a tree of steps over :class:`Storage`: launches, copies, loops and branches.
:mod:`aotc.lowering.program.owners.owners` decides which values share memory, and thus which copies are needed. This
module allocates one storage for each owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Bind, Branch, Buffered, Check, Copy, Launch, Loop, Step, Storage
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured_values, walk
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.program.fills import ConstantFills
from aotc.lowering.program.memories import Memories, launch_step, tensor_bytes
from aotc.lowering.program.owners.owners import BufferOwner, describe_needed_copy, owners_of
from aotc.lowering.program.while_kernels.bounded_loops import bounded_steps, persistent_memory
from aotc.lowering.program.while_kernels.carries import LoopStateMemory, initial_loop_state, ordered_copies
from aotc.lowering.program.while_kernels.small_loops import (
    CandidateLoop,
    LoopKernel,
    loop_name,
    values_computed_in_loop,
)
from aotc.lowering.program.while_kernels.symbolic_loops import (
    SizeBound,
    bounds_kernel,
    control_depth,
    loop_size_bounds,
    symbolic_kernel,
)
from aotc.lowering.program.while_kernels.whole_loops import one_kernel_for_loop
from aotc.vmfb.abi import MAX_NESTING


def bufferize(function: Function, module: Module, kernels: Mapping[str, Kernel], memories: Memories) -> Buffered:
    """Assign storage to every value of ``function`` and list its steps."""
    return _Bufferizer(module.functions, kernels, memories).bufferize_function(function)


class _Bufferizer:
    """Assign memory to the values of a function, and emit its steps in order."""

    def __init__(self, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], memories: Memories) -> None:
        """Start at time 0 without storages; ``kernels`` are those of the regions in ``functions``."""
        self.functions, self.kernels, self.memories = functions, kernels, memories
        self.places: dict[BufferOwner, Storage] = {}
        self.constants: dict[Value, Storage] = {}
        self.constant_ops: dict[Value, Op] = {}
        self.arena: list[Storage] = []
        self.used: dict[str, Kernel] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.fills = ConstantFills(memories, self.used, self.arena)
        self.time = 0
        self.depth = 0

    def bufferize_function(self, function: Function) -> Buffered:
        """Return the steps of ``function`` with their storages, kernels and remaining copies."""
        body = function.body
        self.space = self.memories.space_finder(function)
        self.owners = owners_of(function, self.functions, self.kernels, self.space)
        steps = self.steps_of_region(body)
        rows = [
            (self.storage_of_value(v), self.storage_of_owner(self.owners.result_owner(n)))
            for n, v in enumerate(body.results)
        ]
        taken = {s.result: s.number for _, s in rows if s.kind == "argument"}
        copies = tuple(map(describe_needed_copy, self.owners.refused))
        return Buffered(tuple(steps + self.parallel_copies(rows)), self.arena, self.used, self.held, taken, copies)

    # --- storage ---

    def storage_of_value(self, value: Value) -> Storage:
        """Return the memory of ``value``; constants are added to the blob on first use."""
        if value in self.constant_ops:
            if value not in self.constants:
                self.constants[value] = self.fills.constant_storage(self.constant_ops[value], self.space(value))
            return self.constants[value]
        return self.storage_of_owner(self.owners.owner_of(value))

    def storage_of_owner(self, owner: BufferOwner) -> Storage:
        """Return the memory of an owner, with its live range extended to the current step."""
        storage = self.places.get(owner)
        if storage is None:
            if owner.argument >= 0:
                storage = Storage("argument", owner.size, owner.argument, result=owner.result, space=owner.space)
            elif owner.result >= 0:
                storage = Storage("result", owner.size, owner.result, space=owner.space)
            else:
                storage = self._allocate_storage(owner.size, owner.space)
            self.places[owner] = storage
        if storage.kind == "arena":
            storage.touch(self.time)
        return storage

    def readable_storage(self, value: Value) -> Storage:
        """Return the memory of ``value`` as kernels read it; a splat constant is first written to the arena."""
        storage = self.storage_of_value(value)
        return self.fills.filled_array(storage) if storage.kind == "fill" else storage

    def _allocate_storage(self, size: Dim, space: int) -> Storage:
        """Return a new storage in the arena of memory ``space``, alive from the current step on."""
        storage = Storage("arena", size, space=space)
        storage.touch(self.time)
        self.arena.append(storage)
        return storage

    def allocate_like(self, value: Value) -> Storage:
        """Allocate arena memory for a tensor of the type of ``value``."""
        return self._allocate_storage(tensor_bytes(value.type), self.space(value))

    def copy_step(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies ``source`` to ``target``, or fills ``target`` with a splat constant."""
        self.begin_step(source, target)
        return self.fills.fill_launch(source, target) if source.kind == "fill" else Copy(source, target, size)

    def parallel_copies(self, rows: Sequence[tuple[Storage, Storage]]) -> list[Step]:
        """Return copies for a parallel assignment of sources to targets, in a safe order."""
        needed = [(source, target) for source, target in rows if source is not target and target.size != 0]
        ordered = ordered_copies(needed, lambda source: self._allocate_storage(source.size, source.space))
        return [self.copy_step(source, target, target.size) for source, target in ordered]

    def begin_step(self, *storages: Storage) -> None:
        """Begin a step, and extend the live ranges of the ``storages`` that it accesses."""
        self.time += 1
        for s in storages:
            if s.kind == "arena":
                s.touch(self.time)

    # --- steps ---

    def steps_of_region(self, region: Region) -> list[Step]:
        """Return the steps of the ops of ``region``."""
        steps: list[Step] = []
        for op in region.ops:
            self.time += 1
            begin, done = self.time, len(steps)
            match op.name:
                case "constant":
                    self.constant_ops[op.result] = op
                case "reshape" | "transfer":
                    steps += self._view_steps(op)
                case "dispatch":
                    steps += self._launch_steps(op)
                case "while":
                    steps += self._while_steps(op)
                case "case":
                    steps += self._branch_steps(op)
                case "bind_dim":
                    size = op.operands[0]
                    steps.append(Bind(op.attrs["dim"], self.storage_of_value(size), size.type.dtype))
                case "assert":
                    if self.depth:
                        message = f"an assertion on data is inside a loop or a branch: {op.attrs['message']}"
                        raise CompileError.at(op.loc, message, hint="move it before or after the loop")
                    values = tuple((self.storage_of_value(v), v.type.dtype) for v in op.operands[1:])
                    check = Check(self.storage_of_value(op.operands[0]), op.attrs["message"], values)
                    steps.append(check)
            # Fills of constants that nested steps read run once, before the outermost step.
            if not self.depth:
                steps[done:done] = self.fills.launches_before(begin, self.time)
        return steps

    def _view_steps(self, op: Op) -> list[Step]:
        """Return the steps of a view or a transfer: a copy if the value moves to another memory, else none.

        A constant is added to each memory that reads it.
        """
        source, is_view = op.operands[0], self.owners.ranges.is_view(op)
        if source in self.constant_ops and not (source in self.constants and is_view):
            value = self.constant_ops[source].attrs["value"]
            shaped = value if value.shape == () else value.reshape(op.result.type.shape)
            self.constant_ops[op.result] = Op("constant", (), (op.result,), {"value": shaped})
        elif source in self.constant_ops and is_view:
            self.constant_ops[op.result] = self.constant_ops[source]
            self.constants[op.result] = self.constants[source]
        elif not is_view:
            return self.parallel_copies([(self.storage_of_value(source), self.storage_of_value(op.result))])
        return []

    def _launch_steps(self, op: Op) -> list[Step]:
        """Return the launch of a dispatch, after the copies of operands that the kernel overwrites."""
        name = op.attrs["callee"]
        kernel = self.used[name] = self.kernels[name]
        shared = self.owners.ties.updates[op]
        writes = tuple(map(self.storage_of_value, op.results))
        old = map(self.storage_of_value, op.operands[:shared])
        steps = self.parallel_copies([*zip(old, writes)])
        reads = tuple(map(self.readable_storage, op.operands[shared:]))
        self.begin_step(*reads, *writes)
        return [*steps, launch_step(kernel, reads, writes, op)]

    def _while_steps(self, op: Op) -> list[Step]:
        """Return the steps of a loop: as one kernel, as a loop of steps, or as a branch between both."""
        if kernel := self._kernel_of_small_loop(op):
            return self._one_kernel_loop_steps(op, kernel)
        bounds = self._size_bounds_of_loop(op)
        state = initial_loop_state(self, op, bounds is not None)
        whole = () if bounds is None else self._launch_of_loop_kernel(op, state)
        if bounds == []:
            return [*state.steps, *whole]
        begin, carries, (cond, body) = self.time, state.places, op.regions
        chosen = [self._launch_of_bounds_kernel(op, bounds)] if bounds else []
        iterations = trip_count(op, self.constant_ops, self.functions)
        self._enter_loop(op)
        self.depth += len(chosen)
        cond_steps = self.steps_of_region(cond)
        predicate = self.storage_of_value(cond.results[0])
        body_steps = self.steps_of_region(body)
        body_steps += self.parallel_copies([*zip(map(self.storage_of_value, body.results), carries)])
        self.depth -= 1 + len(chosen)
        self.time += 1
        self.extend_live_ranges(begin, op, [*carries, predicate, *(one.writes[0] for one in chosen)])
        loop = Loop(predicate, tuple(cond_steps), tuple(body_steps), iterations)
        if not chosen:
            return [*state.steps, *state.late, loop]
        return [*state.steps, *chosen, Branch(chosen[0].writes[0], (whole, (*state.late, loop)))]

    def _size_bounds_of_loop(self, op: Op) -> list[SizeBound] | None:
        """Return the size bounds that a call checks before it runs a loop as one kernel, or None if it cannot."""
        limit = self.memories.loop_flops(op, {self.space(v) for v in (*op.results, *values_computed_in_loop(op))})
        gpus = any(target.kind == "cuda" for target in self.memories.targets_in(op))
        if limit is None or gpus or not op.results or self.depth + 2 * control_depth(op) > MAX_NESTING:
            return None
        return loop_size_bounds(op, self.functions, self.kernels, limit)

    def _launch_of_loop_kernel(self, op: Op, state: LoopStateMemory) -> tuple[Step, ...]:
        """Return the launch of a kernel that runs a whole loop."""
        return tuple(
            self._one_kernel_loop_steps(op, symbolic_kernel(self._one_kernel_candidate(op), state.held), begun=True)
        )

    def _one_kernel_candidate(self, op: Op) -> CandidateLoop:
        """Return the loop ``op`` with the context in which one kernel may replace it."""
        name = loop_name(op, self.kernels, self.used)
        return CandidateLoop(op, name, self.functions, self.kernels, self.constant_ops, self.owners)

    def _launch_of_bounds_kernel(self, op: Op, bounds: list[SizeBound]) -> Launch:
        """Return the launch of the kernel that tests whether sizes are within ``bounds``."""
        kernel = bounds_kernel(f"fits_{loop_name(op, self.kernels, self.used)}", bounds)
        self._register_loop_kernel(op, kernel)
        index = self._allocate_storage(4, self.space(op.results[0]))
        self.begin_step(index)
        return launch_step(kernel, (), (index,), op)

    def _kernel_of_small_loop(self, op: Op) -> LoopKernel | None:
        """Return the kernel for a loop, if it is so small that one kernel is faster than many."""
        limit = self.memories.loop_flops(op, {self.space(v) for v in (*op.results, *values_computed_in_loop(op))})
        if limit is None:
            return None
        filled = {
            n for n, v in enumerate(op.operands) if v in self.constant_ops and self.storage_of_value(v).kind == "fill"
        }
        return one_kernel_for_loop(self._one_kernel_candidate(op), limit, self.memories.targets_in(op), filled)

    def _enter_loop(self, op: Op) -> None:
        """Begin the steps of a loop or branch."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            message = f"loops and branches are nested more than {MAX_NESTING} deep"
            raise CompileError.at(op.loc, message, hint="use jnp.where in place of inner branches")

    def extend_live_ranges(self, begin: int, op: Op, storages: list[Storage]) -> None:
        """Extend live ranges over a loop or branch, so that outer values do not share memory with inner values."""
        outer = [self.storage_of_value(v) for r in op.regions for v in captured_values(r) if v not in self.constant_ops]
        for s in (*storages, *outer):
            if s.kind == "arena":
                s.first = min(s.first, begin)
                s.touch(self.time)

    def _register_loop_kernel(self, op: Op, kernel: Kernel) -> None:
        """Add ``kernel``, for the loop ``op``, to the program's kernels."""
        self.used[kernel.name] = kernel
        self.memories.for_targets.update((kernel.name, target) for target in self.memories.targets_in(op))  # only one

    def _one_kernel_loop_steps(self, op: Op, loop: LoopKernel, begun: bool = False) -> list[Step]:
        """Return the steps of a loop that is one kernel; ``begun`` is True if the initial state is already copied."""
        self.constant_ops.update((one.result, one) for r in op.regions for one in walk(r) if one.name == "constant")
        self._register_loop_kernel(op, loop.kernel)
        self.held[loop.kernel.name] = loop.held
        begin, persistent = persistent_memory(self, loop, self.space(op.results[0]))
        if loop.bounded:
            iterations = trip_count(op, self.constant_ops, self.functions)
            return [*begin, *bounded_steps(self, op, loop, persistent, iterations)]
        if not begun:
            begin += self.parallel_copies(
                [(self.storage_of_value(op.operands[n]), self.storage_of_value(op.results[n])) for n in loop.held]
            )
        sources, writes = (
            tuple(map(self.readable_storage, loop.reads)),
            (*map(self.storage_of_value, op.results), *persistent),
        )
        self.begin_step(*sources, *writes)
        return [*begin, launch_step(loop.kernel, sources, writes, op)]

    def _branch_steps(self, op: Op) -> list[Step]:
        """Return the branch of a ``case``; each side ends with the copies of its results."""
        index = self.storage_of_value(op.operands[0])
        begin = self.time
        results = [self.storage_of_value(v) for v in op.results]
        branches = []
        self._enter_loop(op)
        for region in op.regions:
            steps = self.steps_of_region(region)
            branches.append(
                (*steps, *self.parallel_copies([*zip(map(self.storage_of_value, region.results), results)]))
            )
        self.depth -= 1
        self.time += 1
        self.extend_live_ranges(begin, op, [*results, index])
        return [Branch(index, tuple(branches))]
