"""Order a function's dispatches so that peak memory is least.

Before::

    a = f(x); b = g(x); c = sum(a); d = sum(b)      // a and b are alive together

After::

    a = f(x); c = sum(a); b = g(x); d = sum(b)

Dependences do not change, and threads run any ready command, so the order costs no time. Two orders are tried: depth
first, with the operand that needs most memory first (R. Sethi and J. D. Ullman, "The generation of optimal code for
arithmetic expressions", 1970), and greedily the op that frees most memory. The memory model is rough; the caller
compares the resulting plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Kernel
from aotc.ir.opset import EFFECTS
from aotc.ir.opset.control import JUDGED, VIEWS
from aotc.ir.tensor.ir import Function, Op, Region, Value, captured_values, post_order, walk
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.cost_model.work import estimated_dim
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import size_of

Functions = Mapping[str, Function]
Kernels = Mapping[str, Kernel]
SpaceOf = Callable[[Value], int]


@dataclass(eq=False)
class LiveMemoryModel:
    """Estimate of a region's live memory: sizes, readers, and results that may overwrite operands.

    Attributes
    ----------
    roots : dict of Value to Value
        The value whose memory each value is a view of.
    sizes : dict of Value to int
        Bytes of the values that the region creates in the arena.
    reads : dict of Op to list of Value
        The roots that each op reads, once each.
    over : dict of Op to list of (Value, Value)
        Pairs of result and operand whose memory the result may reuse.
    inner : dict of Op to (int, int)
        Peak bytes inside the regions of each op, and the number of ops at that peak.
    only : int
        The number of the memory to model; -1 for all memories together.
    """

    region: Region
    functions: Functions
    kernels: Kernels
    space: SpaceOf
    roots: dict[Value, Value] = field(default_factory=dict)
    sizes: dict[Value, int] = field(default_factory=dict)
    reads: dict[Op, list[Value]] = field(default_factory=dict)
    over: dict[Op, list[tuple[Value, Value]]] = field(default_factory=dict)
    inner: dict[Op, tuple[int, int]] = field(default_factory=dict)
    only: int = -1

    def __post_init__(self) -> None:
        """Record for each op the values that it reads, the operands that it may overwrite, and the peak of its regions.

        Sizes are in bytes. A result of the region counts as 0, as its memory belongs to the caller.
        """
        handed_on = set(self.region.results)
        for op in reversed(self.region.ops):
            if self.is_view(op) and op.result in handed_on:
                handed_on.add(op.operands[0])
        for op in self.region.ops:
            values = [*op.operands, *(v for r in op.regions for v in captured_values(r))]
            self.reads[op] = list(dict.fromkeys(self.roots.get(v, v) for v in values))
            if self.is_view(op):
                self.roots[op.result] = self.roots.get(op.operands[0], op.operands[0])
            elif op.name != "constant":
                sizes = ((v, product(v.type.shape) * size_of(v.type.dtype)) for v in op.results)
                for v, size in sizes:
                    counts = v not in handed_on and not self._is_in_other_memory(v)
                    self.sizes[v] = estimated_dim(size) if counts else 0
            self.over[op] = self._overwritten_operands(op)
            strains = [self.model_of_inner_region(r).peak_bytes_and_count(r.ops) for r in op.regions]
            most = max((bytes_ for bytes_, _ in strains), default=0)
            self.inner[op] = most, sum(count for bytes_, count in strains if bytes_ == most)

    def _is_in_other_memory(self, v: Value) -> bool:
        return self.only >= 0 and self.space(v) != self.only

    def model_of_inner_region(self, region: Region) -> LiveMemoryModel:
        """Return the live-range model of a nested region."""
        return LiveMemoryModel(region, self.functions, self.kernels, self.space, only=self.only)

    def is_view(self, op: Op) -> bool:
        """Return True if the result is the operand's memory, not a copy in another memory."""
        return op.name in VIEWS and self.space(op.result) == self.space(op.operands[0])

    def _overwritten_operands(self, op: Op) -> list[tuple[Value, Value]]:
        """Return the pairs of a result of ``op`` and the operand whose memory the result may reuse."""
        if op.name == "while":
            return [(v, self.roots.get(x, x)) for v, x in zip(op.results, op.operands, strict=True)]
        if op.name != "dispatch":
            return []
        callee = op.attrs["callee"]
        pairs = [(n, n) for n in range(count_overwritten_parameters(self.functions[callee]))]
        pairs += self.kernels[callee].aliases
        return [(op.results[n], self.roots.get(op.operands[k], op.operands[k])) for n, k in pairs]

    def peak_bytes(self, ops: Sequence[Op]) -> int:
        """Return the peak bytes if the ops run in this order."""
        return max(self._live_bytes_at_ops(ops), default=0)

    def peak_bytes_and_count(self, ops: Sequence[Op]) -> tuple[int, int]:
        """Return the peak bytes, and the number of ops at which they occur, including ops in regions."""
        alive = list(self._live_bytes_at_ops(ops))
        most = max(alive, default=0)
        return most, sum(max(self.inner[op][1], 1) for op, now in zip(ops, alive, strict=True) if now == most)

    def peak_position(self, ops: Sequence[Op]) -> int:
        """Return the position of the op at which most memory is alive."""
        alive = list(self._live_bytes_at_ops(ops))
        return alive.index(max(alive))

    def _live_bytes_at_ops(self, ops: Sequence[Op]) -> Iterator[int]:
        """Yield the bytes alive while each op runs, if the ops run in this order."""
        left: dict[Value, int] = {}
        for op in ops:
            for v in self.reads[op]:
                left[v] = left.get(v, 0) + 1
        alive = 0
        for op in ops:
            dying = {v for v in self.reads[op] if left[v] == 1 and self.sizes.get(v)}
            for v in self.reads[op]:
                left[v] -= 1
            taken: dict[Value, Value] = {}
            for new, old in self.over[op]:
                if old in dying and old not in taken.values() and new not in taken and self.sizes[new]:
                    taken[new] = old
            alive += sum(self.sizes.get(v, 0) for v in op.results if v not in taken)
            yield alive + self.inner[op][0]
            alive -= sum(self.sizes[v] for v in dying if v not in taken.values())
            alive -= sum(self.sizes[v] for v in op.results if v not in left and v in self.sizes)


def order_ops(function: Function, functions: Functions, kernels: Kernels, space: SpaceOf) -> Function:
    """Return ``function`` with its ops, and those of its loops and branches, in an order that uses less memory.

    ``space`` returns the memory of a value.
    """
    return replace(function, body=_region_in_best_order(function.body, functions, kernels, space))


REORDERED_PERCENT = Limit(
    90,
    "percent of a function's peak memory that another order of its ops needs, at most, to be used",
    "the memory model is rough, and the order of the model is easier to follow",
)


def _region_in_best_order(region: Region, functions: Functions, kernels: Kernels, space: SpaceOf) -> Region:
    """Return ``region`` with its ops in the order of least peak memory, if that order saves enough."""
    inner = {
        op: tuple(_region_in_best_order(r, functions, kernels, space) for r in op.regions)
        for op in region.ops
        if op.regions
    }
    if any(new is not old for op, rs in inner.items() for new, old in zip(rs, op.regions)):
        ops = tuple(replace(op, regions=inner[op]) if op in inner else op for op in region.ops)
        region = replace(region, ops=ops)
    model = LiveMemoryModel(region, functions, kernels, space)
    before = model.peak_bytes(region.ops)
    if not before:
        return region
    needs = _required_predecessors(region, model)
    orders = _depth_first_order(region, model, needs), _least_memory_first_order(region, model, needs)
    peaks = list(map(model.peak_bytes, orders))
    best = orders[peaks.index(min(peaks))]
    if not REORDERED_PERCENT.holds(100 * min(peaks) // before):
        return region
    return replace(region, ops=tuple(best))


def _required_predecessors(region: Region, model: LiveMemoryModel) -> dict[Op, list[Op]]:
    """Return, for each op, the ops that must run before it: producers, and other order constraints.

    Ops at which the host reads memory are barriers. Ops with effects keep their order. Readers of an operand precede
    the op that overwrites it.
    """
    makers = {v: op for op in region.ops for v in op.results}
    needs: dict[Op, list[Op]] = {}
    readers: dict[Value, list[Op]] = {}
    wall: Op | None = None
    since: list[Op] = []  # ops since the barrier
    acted: Op | None = None
    for op in region.ops:
        values = [*op.operands, *(v for r in op.regions for v in captured_values(r))]
        before = [makers[v] for v in values if v in makers]
        if wall is not None:
            before.append(wall)
        if op.name in JUDGED:
            before += since
            wall, since = op, []
        else:
            since.append(op)
        if has_effects(op, model.functions):
            before += [acted] if acted else []
            acted = op
        for _, old in model.over[op] if op.name == "while" or updates_in_place(op, model.functions) else ():
            before += readers.get(old, [])
        for v in model.reads[op]:
            readers.setdefault(v, []).append(op)
        needs[op] = list(dict.fromkeys(b for b in before if b is not op))
    return needs


def updates_in_place(op: Op, functions: Functions) -> bool:
    """Return True if ``op`` writes results over operands."""
    return op.name == "dispatch" and count_overwritten_parameters(functions[op.attrs["callee"]]) > 0


def has_effects(op: Op, functions: Functions) -> bool:
    """Return True if ``op`` has effects, so that it runs even if its results are not read."""
    if op.name == "dispatch":
        callee = functions[op.attrs["callee"]]  # an op with effects is alone in its region
        return callee.attrs["kind"] == "single" and any(has_effects(o, functions) for o in walk(callee.body))
    inner = (o for r in op.regions for o in r.ops)
    return op.name in EFFECTS or bool(op.attrs.get("has_side_effect")) or any(has_effects(o, functions) for o in inner)


def _depth_first_order(region: Region, model: LiveMemoryModel, needs: Mapping[Op, list[Op]]) -> list[Op]:
    """Return a post-order from the results back, with the dependences that need most memory first."""
    own = {op: sum(model.sizes.get(v, 0) for v in op.results) for op in region.ops}
    most: dict[Op, int] = {}
    for op in region.ops:
        alive = 0
        worst = own[op] + model.inner[op][0]
        for need in sorted(needs[op], key=lambda o: own[o] - most[o]):
            worst = max(worst, alive + most[need])
            alive += own[need]
        most[op] = max(worst, alive + own[op])

    def largest_first(op: Op) -> list[Op]:
        return sorted(needs[op], key=lambda o: most[o] - own[o])[::-1]

    handed_on = [op for op in region.ops if any(v in model.sizes and not model.sizes[v] for v in op.results)]
    return post_order([*(op for op in handed_on if op.name != "constant"), *region.ops], largest_first)


def _least_memory_first_order(region: Region, model: LiveMemoryModel, needs: Mapping[Op, list[Op]]) -> list[Op]:
    """Return the greedy order: of the ready ops, the one that leaves least memory alive is next."""
    waiting = {op: len(before) for op, before in needs.items()}
    after: dict[Op, list[Op]] = {}
    for op, before in needs.items():
        for b in before:
            after.setdefault(b, []).append(op)
    left: dict[Value, set[Op]] = {}
    for op in region.ops:
        for v in model.reads[op]:
            left.setdefault(v, set()).add(op)

    def memory_growth(op: Op) -> int:
        allocated = sum(model.sizes.get(v, 0) for v in op.results)
        return allocated - sum(model.sizes.get(v, 0) for v in model.reads[op] if len(left[v]) == 1)

    position = {op: n for n, op in enumerate(region.ops)}
    heap: list[tuple[int, int]] = []

    def push_ready_op(op: Op) -> None:
        if not waiting[op]:
            heappush(heap, (memory_growth(op), position[op]))

    for op in region.ops:
        push_ready_op(op)
    done: dict[Op, None] = {}
    while heap:
        op = region.ops[heappop(heap)[1]]
        if op in done:
            continue
        done[op] = None
        for v in model.reads[op]:
            left[v].discard(op)
            if len(left[v]) == 1:  # the last reader frees it: running that one leaves less now
                push_ready_op(*left[v])
        for later in after.get(op, ()):
            waiting[later] -= 1
            push_ready_op(later)
    return list(done)
