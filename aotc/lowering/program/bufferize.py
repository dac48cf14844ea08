"""Values to memory: which slot and bytes each value of a fused module lives in.

The result is a tree of steps over :class:`Storage`: launches, copies, loops and
branches. In-place updates share memory where the old value dies; a value that is
only reshaped is a view; a result is written where the caller wants it, which may
be the memory of an argument that the caller has given away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.diagnostics import CompileError
from aotc.ir.dims import Dim, product
from aotc.ir.loop_ir import Kernel
from aotc.ir.opset.control import JUDGED, VIEWS
from aotc.ir.program_ir import Bind, Branch, Buffered, Check, Copy, Launch, Loop, Step, Storage
from aotc.ir.tensor_ir import Function, Module, Op, Region, Value, captured, uses, walk
from aotc.lowering.analysis.cost import LOOP_VALUE
from aotc.lowering.analysis.in_place import donations, overwritten
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.program.early_results import made_early
from aotc.lowering.program.fills import Fills
from aotc.lowering.program.loops.bounded_loops import bounded_steps, kept_memory
from aotc.lowering.program.loops.carries import Carried, first_state, is_first_state, may_overwrite, moves
from aotc.lowering.program.loops.small_loops import LoopKernel, loop_name, made_in
from aotc.lowering.program.loops.symbolic_loops import SizeBound, bounds_of, depth_of, judge, symbolic_kernel
from aotc.lowering.program.loops.whole_loops import one_kernel
from aotc.lowering.program.memories import Memories, bytes_of, launch
from aotc.vmfb.abi import MAX_NESTING


def bufferize(function: Function, module: Module, kernels: Mapping[str, Kernel], memories: Memories) -> Buffered:
    """Assign storage to every value of ``function`` and list its steps."""
    return _Bufferizer(module.functions, kernels, memories).function(function)


class _Bufferizer:
    def __init__(self, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], memories: Memories) -> None:
        self.functions, self.kernels, self.memories = functions, kernels, memories
        self.where: dict[Value, Storage] = {}
        self.constant_ops: dict[Value, Op] = {}
        self.arena: list[Storage] = []
        self.used: dict[str, Kernel] = {}
        self.fills = Fills(memories, self.used, self.arena)
        self.time = 0
        self.depth = 0
        self.wanted: dict[Value, Storage] = {}
        self.reserved: set[Storage] = set()  # loop state: only its next value may be written over it

    def function(self, function: Function) -> Buffered:
        body = function.body
        self.counts, self.space = uses(body), self.memories.finder(function)
        for n, v in enumerate(body.params):
            left = self.counts.get(v, 0)
            self.where[v] = Storage("argument", bytes_of(v.type), n, reads_left=left, space=self.space(v))
        results = [Storage("result", bytes_of(v.type), n, space=self.space(v)) for n, v in enumerate(body.results)]
        judged = max((n for n, op in enumerate(body.ops, start=1) if op.name in JUDGED), default=0)
        steps = self.region(Region(body.params, body.ops[:judged], ()))  # writes nothing of the caller's: it may fail
        self._take_donated(function, judged, results)
        for v, storage in zip(body.results, results, strict=True):
            self.wanted.setdefault(v, storage)
        for op in body.ops:
            if self._is_view(op) and op.result in self.wanted:
                self.wanted.setdefault(op.operands[0], self.wanted[op.result])
        self.wanted |= made_early(body.ops[judged:], self.wanted, self.counts, self.functions, self.kernels, self.space)
        steps += self.region(Region(body.params, body.ops[judged:], body.results))
        for v, storage in zip(body.results, results, strict=True):
            source = self.storage(v)
            if source is not storage and storage.size != 0:
                steps.append(self.copied(source, storage, storage.size))
        return Buffered(tuple(steps), self.arena, self.used)

    def _take_donated(self, function: Function, judged: int, results: list[Storage]) -> None:
        """Let results be made in the memory of donated arguments whose last reader makes them, in place.

        ``judged`` ops have run; what they made cannot be a result in such memory, for a check may fail after it.
        """
        body = function.body
        early = {v for op in body.ops[:judged] for v in op.results}
        pairs = [(body.params[a], body.results[n]) for a, n in donations(function)]
        rows = [(p, v, self.where[p]) for p, v in pairs if v not in early and self.space(p) == self.space(v)]
        for v, storage in self._wishes(body, rows, loops=True).items():
            storage.result = body.results.index(v)
            results[storage.result] = self.wanted[v] = storage
            self.reserved.add(storage)

    # --- storage ---

    def storage(self, value: Value) -> Storage:
        """Return where ``value`` lives; constants are added to the blob on first use."""
        found = self.where.get(value)
        if found is None:
            found = self.where[value] = self.fills.constant(self.constant_ops[value], self.space(value))
        if found.kind == "arena":
            found.touch(self.time)
        return found

    def readable(self, value: Value) -> Storage:
        """Return memory that holds ``value``, for a kernel that reads it."""
        storage = self.storage(value)
        return self.fills.array(storage) if storage.kind == "fill" else storage

    def fresh(self, value: Value) -> Storage:
        """Return new arena memory for a tensor like ``value``."""
        made = Storage("arena", bytes_of(value.type), depth=self.depth, space=self.space(value))
        made.touch(self.time)
        self.arena.append(made)
        return made

    def target(self, value: Value) -> Storage:
        """Return memory for ``value`` to be written: what somebody wants it in, else fresh."""
        wanted = self.wanted.get(value)
        storage = wanted if wanted is not None else self.fresh(value)
        self.where[value] = storage
        storage.reads_left += self.counts.get(value, 0)
        if storage.kind == "arena":
            storage.touch(self.time)
        return storage

    def copied(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies the whole of ``source``; one of kind ``fill`` is written by a kernel."""
        self.touch(source, target)
        return self.fills.fill(source, target) if source.kind == "fill" else Copy(source, target, size)

    def touch(self, *storages: Storage) -> None:
        """Begin a step that reads or writes ``storages``."""
        self.time += 1
        for s in storages:
            if s.kind == "arena":
                s.touch(self.time)

    # --- steps ---

    def region(self, region: Region) -> list[Step]:
        """Return the steps of the ops of ``region``."""
        steps: list[Step] = []
        for op in region.ops:
            self.time += 1
            begin, done = self.time, len(steps)
            match op.name:
                case "constant":
                    self.constant_ops[op.result] = op
                case "reshape" | "transfer":
                    steps += self._view(op)
                case "dispatch":
                    steps += self._launch(op)
                case "while":
                    steps += self._while(op)
                case "case":
                    steps += self._case(op)
                case "bind_dim":
                    size = op.operands[0]
                    steps.append(Bind(op.attrs["dim"], self.storage(size), size.type.dtype))
                case "assert":
                    if self.depth:
                        message = f"an assertion on data stands inside a loop or a branch: {op.attrs['message']}"
                        raise CompileError.at(op.loc, message, hint="make it before or after the loop")
                    values = tuple((self.storage(v), v.type.dtype) for v in op.operands[1:])
                    check = Check(self.storage(op.operands[0]), op.attrs["message"], values)
                    steps.append(check)
            for v in op.operands:
                if v in self.where:
                    self.where[v].reads_left -= 1
            if not self.depth:
                steps[done:done] = self.fills.before(begin, self.time)
        return steps

    def _is_view(self, op: Op) -> bool:
        """Is the result the operand's memory?"""
        return op.name in VIEWS and self.space(op.result) == self.space(op.operands[0])

    def _view(self, op: Op) -> list[Step]:
        """Let the result be the operand's memory, or move it; a constant is in each memory that reads it."""
        source = op.operands[0]
        if source in self.constant_ops and not (source in self.where and self._is_view(op)):
            value = self.constant_ops[source].attrs["value"]
            shaped = value if value.shape == () else value.reshape(op.result.type.shape)
            self.constant_ops[op.result] = Op("constant", (), (op.result,), {"value": shaped})
            return []
        storage = self.storage(source)
        if not self._is_view(op):
            target = self.target(op.result)
            return [self.copied(storage, target, target.size)] if target.size != 0 else []
        storage.reads_left += self.counts.get(op.result, 0)
        self.where[op.result] = storage
        return []

    def _launch(self, op: Op) -> list[Step]:
        name = op.attrs["callee"]
        kernel = self.used[name] = self.kernels[name]
        shared = overwritten(self.functions[name])
        steps: list[Step] = []
        writes = []
        for n, v in enumerate(op.results):
            if n < shared:
                writes.append(self._in_place(op.operands[n], v, steps))
            else:
                writes.append(self._reuse(op, kernel, n, writes) or self.target(v))
        reads = tuple(map(self.readable, op.operands[shared:]))
        self.touch(*reads, *writes)
        return [*steps, launch(kernel, reads, tuple(writes), op)]

    def _in_place(self, old: Value, new: Value, steps: list[Step]) -> Storage:
        """Return memory for ``new`` that holds ``old``: its own if nobody reads it again, else a copy."""
        source = self.storage(old)
        wanted = self.wanted.get(new)
        dies = source.reads_left <= 1 and source.depth == self.depth
        free = wanted is None and source.kind == "arena" and source not in self.reserved
        if dies and (wanted is source or free):
            self.where[new] = source
            source.reads_left += self.counts.get(new, 0)
            return source
        target = self.target(new)
        if target is not source and target.size != 0:
            steps.append(self.copied(source, target, target.size))
        return target

    def _reuse(self, op: Op, kernel: Kernel, n: int, written: list[Storage]) -> Storage | None:
        """Write an elementwise result over an operand that dies here, unless another result is."""
        if op.results[n] in self.wanted:
            return None
        for out, number in kernel.aliases:
            source = self.where.get(op.operands[number])
            if out != n or source is None or source.kind != "arena" or source.depth != self.depth:
                continue
            if source in self.reserved or source in written:
                continue
            if source.reads_left == sum(v is op.operands[number] for v in op.operands):
                self.where[op.results[n]] = source
                source.reads_left += self.counts.get(op.results[n], 0)
                return source
        return None

    def _while(self, op: Op) -> list[Step]:
        in_place = any(self.wanted.get(v) is self.where.get(init, v) for init, v in zip(op.operands, op.results))
        if not in_place and (found := self._one_kernel(op)):
            return self._loop_kernel(op, found)
        bounds = self._bounds(op)
        made = first_state(self, op, bounds is not None)
        whole = () if bounds is None else self._whole(op, made)
        if bounds == []:
            return [*made.steps, *whole]
        begin, carries, (cond, body) = self.time, made.places, op.regions
        chosen = [self._judged(op, bounds)] if bounds else []
        turns = trip_count(op, self.constant_ops, self.functions)
        self._enter(op)
        self.depth += len(chosen)
        cond_steps = self._carried(cond, carries, {})
        predicate = self.storage(cond.results[0])
        rows = list(zip(body.params, body.results, carries, strict=True))
        body_steps = [*self._carried(body, carries, self._wishes(body, rows)), *moves(self, body, carries)]
        self.depth -= 1 + len(chosen)
        self.time += 1
        self.extend(begin, op, [*carries, predicate, *(one.writes[0] for one in chosen)])
        loop = Loop(predicate, tuple(cond_steps), tuple(body_steps), turns)
        if not chosen:
            return [*made.steps, *made.late, loop]
        return [*made.steps, *chosen, Branch(chosen[0].writes[0], (whole, (*made.late, loop)))]

    def _bounds(self, op: Op) -> list[SizeBound] | None:
        """Return what a call looks at before it runs a loop as one kernel that goes on from its state."""
        limit = self.memories.loop_flops(op, {self.space(v) for v in (*op.results, *made_in(op))})
        gpus = any(target.kind == "cuda" for target in self.memories.targets_in(op))
        if limit is None or gpus or not op.results or self.depth + 2 * depth_of(op) > MAX_NESTING:
            return None
        return bounds_of(op, self.functions, self.kernels, limit)

    def _whole(self, op: Op, made: Carried) -> tuple[Step, ...]:
        """Return the launch of a kernel that is a whole loop."""
        known = loop_name(op, self.kernels, self.used), self.functions, self.kernels, self.constant_ops
        return tuple(self._loop_kernel(op, symbolic_kernel(op, *known, made.held), made.places))

    def _judged(self, op: Op, bounds: list[SizeBound]) -> Launch:
        """Return the launch that tells whether a call keeps within bounds."""
        kernel = judge(f"fits_{loop_name(op, self.kernels, self.used)}", bounds)
        self._use(op, kernel)
        self.arena.append(index := Storage("arena", 4, depth=self.depth, space=self.space(op.results[0])))
        self.touch(index)
        return launch(kernel, (), (index,), op)

    def _one_kernel(self, op: Op) -> LoopKernel | None:
        """Return the kernel for a loop if it works on so little that one is better than many."""
        limit = self.memories.loop_flops(op, {self.space(v) for v in (*op.results, *made_in(op))})
        if limit is None:
            return None
        known = loop_name(op, self.kernels, self.used), self.functions, self.kernels, self.constant_ops
        filled = {n for n, v in enumerate(op.operands) if v in self.constant_ops and self.storage(v).kind == "fill"}
        return one_kernel(op, *known, limit, self.memories.targets_in(op), filled)

    def _enter(self, op: Op) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            message = f"loops and branches are nested more than {MAX_NESTING} deep"
            raise CompileError.at(op.loc, message, hint="select between values")

    def extend(self, begin: int, op: Op, kept: list[Storage]) -> None:
        """What lives across the loop must not be overwritten by what is made inside."""
        outer = [self.where[v] for r in op.regions for v in captured(r) if v in self.where]
        for s in (*kept, *outer):
            if s.kind == "arena":
                s.first = min(s.first, begin)
                s.touch(self.time)

    def _carried(self, region: Region, carries: list[Storage], wishes: Mapping[Value, Storage]) -> list[Step]:
        saved, reserved = dict(self.wanted), set(self.reserved)
        self.wanted.update(wishes)
        self.reserved.update(carries)
        for p, carry in zip(region.params, carries, strict=True):
            self.where[p] = carry
        depths = [c.depth for c in carries]
        counts = [c.reads_left for c in carries]
        for p, carry in zip(region.params, carries, strict=True):
            carry.depth, carry.reads_left = self.depth, self.counts.get(p, 0)
        steps = self.region(region)
        for carry, depth, count in zip(carries, depths, counts, strict=True):
            carry.depth, carry.reads_left = depth, count
        self.wanted, self.reserved = saved, reserved
        return steps

    def _wishes(
        self, region: Region, rows: Sequence[tuple[Value, Value, Storage]], loops: bool = False
    ) -> dict[Value, Storage]:
        """Let the maker of the next state write over the old one where nothing reads that later.

        ``rows`` are parameters, the results that follow them, and where the former are. With ``loops`` a loop that
        carries the state, and no more than that, is a maker too.
        """
        wishes: dict[Value, Storage] = {}
        position = {v: n for n, op in enumerate(region.ops) for v in op.results}
        roots = {p: p for p in region.params}
        last: dict[Value, int] = {}
        for n, op in enumerate(region.ops):
            if self._is_view(op) and op.operands[0] in roots:
                roots[op.result] = roots[op.operands[0]]
            for v in (*op.operands, *(v for r in op.regions for v in captured(r))):
                if v in roots and not self._is_view(op):
                    last[roots[v]] = n
        held = {roots[v] for v in region.results if v in roots}
        for p, v, carry in rows:
            made = position.get(v)
            if made is None or p in held or region.results.count(v) > 1:
                continue
            op = region.ops[made]
            if loops and op.name == "while" and last.get(p) == made and self._carries_only(op, v, p, roots):
                wishes[v] = carry
            if op.name != "dispatch":
                continue
            updates = overwritten(self.functions[op.attrs["callee"]])
            read_last = last.get(p, -1)
            aliases = self.kernels[op.attrs["callee"]].aliases
            here = read_last == made and may_overwrite(op, v, p, roots, updates, aliases)
            if read_last < made or here:
                wishes[v] = carry
        return wishes

    def _carries_only(self, op: Op, new: Value, old: Value, roots: Mapping[Value, Value]) -> bool:
        """Does a loop read ``old`` only as the first state of what becomes ``new``, and is it to be several kernels?

        A loop that could be one kernel copies its state, which is worth it while that is small.
        """
        copied = LOOP_VALUE.holds(product(new.type.shape)) and self._one_kernel(op) is not None
        return is_first_state(op, new, old, roots) and not copied

    def _use(self, op: Op, kernel: Kernel) -> None:
        """Have ``kernel``, which is for a loop, in the bundle."""
        self.used[kernel.name] = kernel
        self.memories.made_for.update((kernel.name, target) for target in self.memories.targets_in(op))  # the only one

    def _loop_kernel(self, op: Op, found: LoopKernel, places: Sequence[Storage] = ()) -> list[Step]:
        """Return the steps of a loop that is one kernel; ``places`` are where its state is to be, if that is known."""
        self.constant_ops.update((one.result, one) for r in op.regions for one in walk(r) if one.name == "constant")
        self._use(op, found.kernel)
        begin, kept = kept_memory(self, found, self.space(op.results[0]), self.depth)
        if found.bounded:
            turns = trip_count(op, self.constant_ops, self.functions)
            return [*begin, *bounded_steps(self, op, found, kept, turns)]
        sources, writes = tuple(map(self.readable, found.reads)), (*(places or map(self.target, op.results)), *kept)
        if not places:
            begin += [self.copied(self.storage(op.operands[n]), writes[n], writes[n].size) for n in found.held]
        self.touch(*sources, *writes)
        return [*begin, launch(found.kernel, sources, writes, op)]

    def _case(self, op: Op) -> list[Step]:
        index = self.storage(op.operands[0])
        begin = self.time
        results = [self.target(v) for v in op.results]
        branches = []
        self._enter(op)
        for region in op.regions:
            steps = self.region(region)
            for v, target in zip(region.results, results, strict=True):
                source = self.storage(v)
                if source is not target and target.size != 0:
                    steps.append(self.copied(source, target, target.size))
            branches.append(tuple(steps))
        self.depth -= 1
        self.time += 1
        self.extend(begin, op, [*results, index])
        return [Branch(index, tuple(branches))]
