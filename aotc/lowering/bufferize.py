"""Values to memory: which slot and bytes each value of a fused module lives in.

The result is a tree of steps over :class:`Storage`: launches, copies, loops and
branches. In-place updates share memory where the old value dies; a value that is
only reshaped is a view; a result is written where the caller wants it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from aotc.diagnostics import Loc
from aotc.frontend.dims import Dim, product, static
from aotc.frontend.tensor_ir import Function, Module, Op, Region, TensorType, Value, captured, uses
from aotc.lowering.in_place import overwritten
from aotc.lowering.loop_ir import Kernel
from aotc.lowering.small_loops import SMALL_FLOPS, is_small, loop_kernel
from aotc.vmfb.dtypes import size_of, to_numpy


@dataclass(eq=False)
class Storage:
    """Memory of one or more values.

    ``kind`` is ``argument``, ``result``, ``arena`` or ``constant``; ``number``
    is that of the argument or result, or the byte offset of the constant; an
    arena storage gets its ``offset`` from ``plan_memory`` and is live from step
    ``first`` to step ``last``.
    """

    kind: str
    size: Dim
    number: int = 0
    offset: Dim = 0
    first: int = -1
    last: int = -1
    reads_left: int = 0
    depth: int = 0

    def touch(self, time: int) -> None:
        """Extend the life of the storage to step ``time``."""
        self.first = time if self.first < 0 else self.first
        self.last = max(self.last, time)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Run a kernel; ``reads`` and ``writes`` are in the order of its buffers."""

    kernel: Kernel
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    loc: Loc


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copy ``size`` bytes."""

    source: Storage
    target: Storage
    size: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """Run ``cond``, and while the byte in ``predicate`` is not 0 run ``body`` and ``cond`` again."""

    predicate: Storage
    cond: tuple[Step, ...]
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Run the branch whose number is the i32 in ``index``; the last one if it is out of range."""

    index: Storage
    branches: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """After all work: fail with ``message`` if the byte in ``predicate`` is 0."""

    predicate: Storage
    message: str
    values: tuple[tuple[Storage, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bind:
    """Let ``dim``, a symbol, be the integer in ``value`` from here on; sizes of later steps may depend on it."""

    dim: Dim
    value: Storage
    dtype: str


Step: TypeAlias = Launch | Copy | Loop | Branch | Check | Bind


@dataclass
class Constants:
    """The blob of constants: unique arrays at 64-byte aligned offsets."""

    arrays: list[tuple[str, np.ndarray, int]] = field(default_factory=list)
    size: int = 0
    _known: dict[tuple, int] = field(default_factory=dict)

    def add(self, array: np.ndarray, name: str) -> int:
        """Return the offset of ``array`` in the blob."""
        array = np.ascontiguousarray(array)
        key: tuple = (array.dtype.name, array.shape, id(array))
        if array.nbytes <= 1 << 16:
            key = (array.dtype.name, array.shape, array.tobytes())
        offset = self._known.get(key)
        if offset is None:
            offset = self._known[key] = self.size
            self.arrays.append((name, array, offset))
            self.size += -(-array.nbytes // 64) * 64
        return offset


@dataclass
class Buffered:
    """One function, bufferized: its steps and every arena storage."""

    steps: tuple[Step, ...]
    arena: list[Storage]
    kernels: dict[str, Kernel]


def bytes_of(type_: TensorType) -> Dim:
    """Return the bytes of a tensor."""
    return product(type_.shape) * size_of(type_.dtype)


def bufferize(
    function: Function,
    module: Module,
    kernels: Mapping[str, Kernel],
    constants: Constants,
    loop_flops: int = SMALL_FLOPS,
) -> Buffered:
    """Assign storage to every value of ``function`` and list its steps.

    A loop of at most ``loop_flops`` operations an iteration becomes one kernel.
    """
    b = _Bufferizer(module.functions, kernels, constants)
    b.loop_flops = loop_flops
    return b.function(function)


class _Bufferizer:
    def __init__(self, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], constants: Constants) -> None:
        self.functions, self.kernels, self.constants = functions, kernels, constants
        self.where: dict[Value, Storage] = {}
        self.constant_ops: dict[Value, Op] = {}
        self.arena: list[Storage] = []
        self.used: dict[str, Kernel] = {}
        self.loop_flops = SMALL_FLOPS
        self.time = 0
        self.depth = 0
        self.wanted: dict[Value, Storage] = {}
        self.reserved: set[Storage] = set()  # loop state: only its next value may be written over it

    def function(self, function: Function) -> Buffered:
        body = function.body
        for n, v in enumerate(body.params):
            self.where[v] = Storage("argument", bytes_of(v.type), n)
        self.counts = uses(body)
        results = [Storage("result", bytes_of(v.type), n) for n, v in enumerate(body.results)]
        for v, storage in zip(body.results, results, strict=True):
            self.wanted.setdefault(v, storage)
        for op in body.ops:
            if op.name == "reshape" and op.result in self.wanted:
                self.wanted.setdefault(op.operands[0], self.wanted[op.result])
        steps = self.region(body)
        for v, storage in zip(body.results, results, strict=True):
            source = self.storage(v)
            if source is not storage and storage.size != 0:
                steps.append(self._copy(source, storage, storage.size))
        return Buffered(tuple(steps), self.arena, self.used)

    # --- storage ---

    def storage(self, value: Value) -> Storage:
        """Return where ``value`` lives; constants are added to the blob on first use."""
        found = self.where.get(value)
        if found is None:
            op = self.constant_ops[value]
            shape = [static(d) for d in value.type.shape]
            array = np.broadcast_to(op.attrs["value"], shape).astype(to_numpy(value.type.dtype), copy=False)
            found = self.where[value] = Storage("constant", array.nbytes, self.constants.add(array, value.name))
        if found.kind == "arena":
            found.touch(self.time)
        return found

    def fresh(self, type_: TensorType) -> Storage:
        """Return new arena memory for a tensor."""
        made = Storage("arena", bytes_of(type_), depth=self.depth)
        made.touch(self.time)
        self.arena.append(made)
        return made

    def target(self, value: Value) -> Storage:
        """Return memory for ``value`` to be written: what somebody wants it in, else fresh."""
        wanted = self.wanted.get(value)
        storage = wanted if wanted is not None else self.fresh(value.type)
        self.where[value] = storage
        storage.reads_left += self.counts.get(value, 0)
        if storage.kind == "arena":
            storage.touch(self.time)
        return storage

    def _copy(self, source: Storage, target: Storage, size: Dim) -> Copy:
        self.time += 1
        for s in (source, target):
            if s.kind == "arena":
                s.touch(self.time)
        return Copy(source, target, size)

    # --- steps ---

    def region(self, region: Region) -> list[Step]:
        """Return the steps of the ops of ``region``."""
        steps: list[Step] = []
        for op in region.ops:
            self.time += 1
            match op.name:
                case "constant":
                    self.constant_ops[op.result] = op
                case "reshape":
                    self._view(op)
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
                    values = tuple((self.storage(v), v.type.dtype) for v in op.operands[1:])
                    check = Check(self.storage(op.operands[0]), op.attrs["message"], values)
                    for s in (check.predicate, *(s for s, _ in values)):
                        s.last = 1 << 30
                    steps.append(check)
            for v in op.operands:
                if v in self.where:
                    self.where[v].reads_left -= 1
        return steps

    def _view(self, op: Op) -> None:
        source = op.operands[0]
        if source not in self.where and source in self.constant_ops:
            made = self.constant_ops[source]
            value = made.attrs["value"]
            shaped = value if value.shape == () else value.reshape(op.result.type.shape)
            self.constant_ops[op.result] = Op("constant", (), (op.result,), {"value": shaped})
            return
        storage = self.storage(source)
        storage.reads_left += self.counts.get(op.result, 0)
        self.where[op.result] = storage

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
                writes.append(self._reuse(op, kernel, n) or self.target(v))
        reads = tuple(self.storage(v) for v in op.operands[shared:])
        self.time += 1
        for s in (*reads, *writes):
            if s.kind == "arena":
                s.touch(self.time)
        return [*steps, Launch(kernel, reads, tuple(writes), op.loc)]

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
            steps.append(self._copy(source, target, target.size))
        return target

    def _reuse(self, op: Op, kernel: Kernel, n: int) -> Storage | None:
        """Write an elementwise result over an operand that dies here."""
        if op.results[n] in self.wanted:
            return None
        for out, number in kernel.aliases:
            source = self.where.get(op.operands[number])
            if out != n or source is None or source.kind != "arena" or source.depth != self.depth:
                continue
            if source in self.reserved:
                continue
            if source.reads_left == sum(v is op.operands[number] for v in op.operands):
                self.where[op.results[n]] = source
                source.reads_left += self.counts.get(op.results[n], 0)
                return source
        return None

    def _while(self, op: Op) -> list[Step]:
        if is_small(op, self.functions, self.kernels, self.loop_flops):
            return [self._loop_kernel(op)]
        steps: list[Step] = []
        carries = []
        for init, v in zip(op.operands, op.results, strict=True):
            source = self.storage(init)
            mine = source.kind == "arena" and source.reads_left == 1 and source.depth == self.depth
            if mine and v not in self.wanted and source not in carries:
                self.where[v] = source
                source.reads_left += self.counts.get(v, 0)
                carries.append(source)
                continue
            carry = self.target(v)
            carries.append(carry)
            if carry.size != 0:
                steps.append(self._copy(source, carry, carry.size))
        begin = self.time
        cond, body = op.regions
        self.depth += 1
        cond_steps = self._carried(cond, carries, {})
        predicate = self.storage(cond.results[0])
        body_steps = self._carried(body, carries, self._wishes(body, carries))
        body_steps += self._moves(body, carries)
        self.depth -= 1
        self.time += 1
        self._extend(begin, op, [*carries, predicate])
        return [*steps, Loop(predicate, tuple(cond_steps), tuple(body_steps))]

    def _extend(self, begin: int, op: Op, kept: list[Storage]) -> None:
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

    def _wishes(self, region: Region, carries: list[Storage]) -> dict[Value, Storage]:
        """Let the maker of the next state write over the old one where nothing reads that later."""
        wishes: dict[Value, Storage] = {}
        position = {v: n for n, op in enumerate(region.ops) for v in op.results}
        roots = {p: p for p in region.params}
        last: dict[Value, int] = {}
        for n, op in enumerate(region.ops):
            if op.name == "reshape" and op.operands[0] in roots:
                roots[op.result] = roots[op.operands[0]]
            for v in (*op.operands, *(v for r in op.regions for v in captured(r))):
                if v in roots and op.name != "reshape":
                    last[roots[v]] = n
        held = {roots[v] for v in region.results if v in roots}
        for p, v, carry in zip(region.params, region.results, carries, strict=True):
            made = position.get(v)
            if made is None or p in held or region.results.count(v) > 1:
                continue
            op = region.ops[made]
            if op.name != "dispatch":
                continue
            updates = overwritten(self.functions[op.attrs["callee"]])
            read_last = last.get(p, -1)
            here = read_last == made and self._may_overwrite(op, v, p, roots, updates)
            if read_last < made or here:
                wishes[v] = carry
        return wishes

    def _may_overwrite(self, op: Op, new: Value, old: Value, roots: Mapping[Value, Value], updates: int) -> bool:
        n = op.results.index(new)
        readers = [k for k, v in enumerate(op.operands) if roots.get(v) is old]
        if updates:
            return readers == [n] and n < updates
        aliases = set(self.kernels[op.attrs["callee"]].aliases)
        return all((n, k) in aliases for k in readers)

    def _moves(self, body: Region, carries: list[Storage]) -> list[Step]:
        """Copy the next state over the old one; values that sit in another carry are saved first."""
        steps: list[Step] = []
        moves = []
        for v, carry in zip(body.results, carries, strict=True):
            source = self.storage(v)
            if source is carry or carry.size == 0:
                continue
            if source in carries:
                held = self.fresh(v.type)
                steps.append(self._copy(source, held, carry.size))
                source = held
            moves.append((source, carry))
        return steps + [self._copy(source, carry, carry.size) for source, carry in moves]

    def _loop_kernel(self, op: Op) -> Launch:
        name = f"k{len(self.kernels)}_loop_{op.results[0].name if op.results else len(self.used)}"
        name = "".join(c if c.isalnum() else "_" for c in name)
        kernel, reads = loop_kernel(op, name, self.functions, self.kernels)
        for r in op.regions:
            stack = [r]
            while stack:
                region = stack.pop()
                for inner in region.ops:
                    stack += inner.regions
                    if inner.name == "constant":
                        self.constant_ops[inner.result] = inner
        self.used[name] = kernel
        sources = tuple(self.storage(v) for v in reads)
        writes = tuple(self.target(v) for v in op.results)
        self.time += 1
        for s in (*sources, *writes):
            if s.kind == "arena":
                s.touch(self.time)
        return Launch(kernel, sources, writes, op.loc)

    def _case(self, op: Op) -> list[Step]:
        index = self.storage(op.operands[0])
        begin = self.time
        results = [self.target(v) for v in op.results]
        branches = []
        self.depth += 1
        for region in op.regions:
            steps = self.region(region)
            for v, target in zip(region.results, results, strict=True):
                source = self.storage(v)
                if source is not target and target.size != 0:
                    steps.append(self._copy(source, target, target.size))
            branches.append(tuple(steps))
        self.depth -= 1
        self.time += 1
        self._extend(begin, op, [*results, index])
        return [Branch(index, tuple(branches))]
