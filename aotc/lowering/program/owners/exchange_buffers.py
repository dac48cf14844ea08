"""For loop states that a branch swaps, exchange the roles of their buffers instead of copying the arrays.

Before::

    while c { p = f(a, b); a, b = p ? (b, a) : (a, g(b)) }      // a swap copies three arrays
After::

    while c { r, x, y = r ? (p = f(y, x); p ? (0, x, y) : (1, g(x), y))     // a is y, and b is x
                          : (p = f(x, y); p ? (1, x, y) : (0, x, g(y))) }   // a is x, and b is y
    a, b = r ? (y, x) : (x, y)

The new state ``r``, the *role*, records which buffer has which state, as that depends on data. The code that depends on
the states exists twice, once for each value of ``r``, so that pointers in the body are constant. Ops after the branch
move into its sides. Several pairs of states may swap together. Loops whose states swap in every iteration are unrolled
instead (:mod:`aotc.lowering.program.owners.alternate_buffers`), which needs no branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from aotc.ir.loop.ir import Kernel
from aotc.ir.opset.control import JUDGED, VIEWS
from aotc.ir.tensor.copies import Names, copy_ops
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, use_counts, values_captured_by_op, walk
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.memory_limit.order_ops import has_effects
from aotc.lowering.program.owners.alternate_buffers import nesting_depth, with_ops_replaced
from aotc.lowering.program.owners.owners import owners_of
from aotc.lowering.program.owners.ties import UNROLLED
from aotc.lowering.threshold import Limit
from aotc.vmfb.abi import MAX_NESTING

ROLE = TensorType("i32")
Pairs = tuple[tuple[int, int], ...]
"""The numbers of states that swap with each other."""


def exchange_buffers(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], memories: Memories
) -> Function:
    """Rewrite loops that swap large states so that buffers swap roles instead of being copied.

    Parameters
    ----------
    function : Function
        A fused function.
    functions : mapping
        The functions of its module.
    kernels : mapping
        The kernels of the module's regions.
    memories : Memories
    """
    names = function.body.names
    if "while" not in names or "case" not in names or "devices" in function.attrs:
        return function
    return _BufferExchanger(functions, kernels, memories, Names(function.body)).function_with_exchanged_buffers(
        function
    )


# Loops of a function that are tried. For each of them the function's buffer owners are computed twice.
EXCHANGED_LOOPS = 8
# Ops of the sides of the new branch together. Each is a command of the bundle.
EXCHANGED_OPS = 256
EXCHANGED_BYTES = Limit(
    1 << 12,
    "bytes of a state that a branch swaps, up to which it is copied",
    "a copy of 4 KiB takes less time than the command that makes it",
)
EXCHANGED_BYTES_CUDA = Limit(
    1 << 23,
    "the same on a GPU",
    "a conditional node takes some microseconds, as long as copying 8 MiB at 3 TB/s",
)


@dataclass(frozen=True)
class _Swap:
    """A branch in the body of a loop that swaps states.

    Attributes
    ----------
    branch : Op
    pairs : tuple of tuple of int
        The numbers of the states that swap with each other.
    sides : list of bool
        For each side of the branch, whether it swaps them.
    others : list of Op
        The ops of the body that do not depend on these states.
    before, after : list of Op
        The ops before and after the branch that depend on these states.
    results : list of int
        The numbers of the loop's results that depend on these states.
    """

    branch: Op
    pairs: Pairs
    sides: list[bool]
    others: list[Op]
    before: list[Op]
    after: list[Op]
    results: list[int]


@dataclass
class _BufferExchanger:
    """Rewrite loops with states that a branch swaps, so that the buffers swap roles."""

    functions: Mapping[str, Function]
    kernels: Mapping[str, Kernel]
    memories: Memories
    names: Names

    def function_with_exchanged_buffers(self, function: Function) -> Function:
        """Return ``function`` with buffers that swap roles in its loops, inner loops first."""
        done: set[Value] = set()
        while len(done) < EXCHANGED_LOOPS:
            loops = [op for op in walk(function.body) if op.name == "while" and op.results]
            candidates = [
                (loop, self._swapping_branch(loop)) for loop in loops if loop.regions[1].params[0] not in done
            ]
            loop, swap = next(((loop, swap) for loop, swap in reversed(candidates) if swap), (None, None))
            if loop is None or swap is None:
                break
            done.add(loop.regions[1].params[0])
            form, exchanged = self._loop_with_exchanged_buffers(function, loop, swap)
            ops = sum(1 for _ in walk(exchanged.regions[1]))
            if ops > EXCHANGED_OPS or nesting_depth(form.body) > MAX_NESTING:
                continue
            if self._bytes_copied_per_iteration(form, exchanged) < self._bytes_copied_per_iteration(function, loop):
                function = form
        return function

    def _bytes_copied_per_iteration(self, function: Function, loop: Op) -> int:
        """Return the bytes copied in an iteration of ``loop``."""
        owners = owners_of(function, self.functions, self.kernels, self.memories.space_finder(function))
        return sum(estimated_bytes(tie.new) for tie in owners.copies_in_loop(loop))

    # --- analysis ---

    def _swapping_branch(self, loop: Op) -> _Swap | None:
        """Return the branch that swaps states of ``loop`` if the rewrite is possible, else None."""
        branches = [op for op in loop.regions[1].ops if op.name == "case"]
        if not branches or UNROLLED in loop.attrs:
            return None
        on_gpu = any(target.kind == "cuda" for target in self.memories.targets_in(loop))
        limit = EXCHANGED_BYTES_CUDA if on_gpu else EXCHANGED_BYTES
        large = [n for n, v in enumerate(loop.results) if not limit.holds(estimated_bytes(v))]
        for branch in branches:
            sides = [self._swapped_state_pairs(loop.regions[1], branch, n, large) for n in range(len(branch.regions))]
            pairs = next(filter(None, sides), ())
            alike = all(set(pairs) <= set(side) or set(pairs).isdisjoint(side) for side in sides)
            if pairs and alike and not all(sides):
                swap = self._split_body_at_branch(loop, branch, pairs, [set(pairs) <= set(side) for side in sides])
                if swap:
                    return swap
        return None

    def _swapped_state_pairs(self, body: Region, branch: Op, side: int, large: Sequence[int]) -> Pairs:
        """Return the pairs of states whose next values are each other's, updated or not, if ``side`` runs."""
        makers = {v: op for op in (*body.ops, *branch.regions[side].ops) for v in op.results}
        roots: dict[int, Value] = {}
        for n in large:
            value = body.results[n]
            while op := makers.get(value):
                if op is branch:
                    value = branch.regions[side].results[op.results.index(value)]
                elif op.name in VIEWS:
                    value = op.operands[0]
                elif op.name == "dispatch" and op.results.index(value) < count_overwritten_parameters(
                    self._called_function(op)
                ):
                    value = op.operands[op.results.index(value)]
                else:
                    break
            roots[n] = value
        params = body.params
        pairs = [(s, t) for s, t in combinations(large, 2) if roots[s] is params[t] and roots[t] is params[s]]
        return tuple((s, t) for s, t in pairs if params[s].type == params[t].type)

    def _called_function(self, op: Op) -> Function:
        return self.functions[op.attrs["callee"]]

    def _split_body_at_branch(self, loop: Op, branch: Op, pairs: Pairs, sides: list[bool]) -> _Swap | None:
        """Return the body around ``branch`` in parts; None if the condition reads the states, or an op has effects."""
        condition, body = loop.regions
        states = [n for pair in pairs for n in pair]
        dependent = {body.params[n] for n in states}
        others, before, after = list[Op](), list[Op](), list[Op]()
        part = before
        for op in body.ops:
            if op is branch:
                part = after
            if op is branch or not dependent.isdisjoint((*op.operands, *values_captured_by_op(op))):
                dependent.update(op.results)
                if op is not branch:
                    part.append(op)
            else:
                others.append(op)
        moved = [*before, branch, *after]
        reads = use_counts(condition)
        if any(condition.params[n] in reads for n in states):
            return None
        if any(op.name in JUDGED or has_effects(op, self.functions) for m in moved for op in (m, *_inner_loops(m))):
            return None
        results = [n for n, v in enumerate(body.results) if v in dependent or n in states]
        return _Swap(branch, pairs, sides, others, before, after, results)

    # --- rewriting ---

    def _loop_with_exchanged_buffers(self, function: Function, loop: Op, swap: _Swap) -> tuple[Function, Op]:
        """Return ``function`` with buffers that swap roles in ``loop``, and the new loop.

        The results are right for any roles after an iteration; ``swap.sides`` only decides which copies remain.
        """
        condition, body = loop.regions
        roles = [self._new_value("role", ROLE) for _ in range(2)]
        constants = [Op("constant", (), (v,), {"value": np.array(n, np.int32)}) for n, v in enumerate(roles)]
        role, at_condition, last = (self._new_value("role", ROLE) for _ in range(3))
        outputs = (*(self._new_value(body.results[n].name, body.results[n].type) for n in swap.results), role)
        mine = self._new_value("role", ROLE)
        regions = tuple([self._ops_for_buffer_role(body, swap, roles, n) for n in range(2)])
        choice = Op("case", (mine,), outputs, {}, regions, swap.branch.loc)
        results = list(body.results)
        for n, v in zip(swap.results, outputs):
            results[n] = v
        inner = Region((*body.params, mine), (*swap.others, choice), (*results, role))
        outer = Region((*condition.params, at_condition), condition.ops, condition.results)
        states = {n for pair in swap.pairs for n in pair}
        ends = [self._new_value(v.name, v.type) if n in states else v for n, v in enumerate(loop.results)]
        new = Op(loop.name, (*loop.operands, roles[0]), (*ends, last), loop.attrs, (outer, inner), loop.loc)
        numbers = sorted(states)
        exchange = _partner_states(swap.pairs)
        orders = (numbers, [exchange[n] for n in numbers])
        after = Op(
            "case", (last,), tuple(loop.results[n] for n in numbers), {},
            tuple(Region((), (), tuple(ends[n] for n in order)) for order in orders), loop.loc,
        )  # fmt: skip
        return function.with_body(with_ops_replaced(function.body, loop, [*constants, new, after])), new

    def _ops_for_buffer_role(self, body: Region, swap: _Swap, roles: Sequence[Value], role: int) -> Region:
        """Return a side of the new branch: the ops that depend on the states, for one role of their buffers."""
        exchange = _partner_states(swap.pairs)
        sides = []
        for region, swaps in zip(swap.branch.regions, swap.sides):
            tail = Region(swap.branch.results, tuple(swap.after), tuple(body.results[n] for n in swap.results))
            ops, values = copy_ops(tail, region.results, self.names)
            after = role ^ swaps
            state = dict(zip(swap.results, values))
            placed = [state[exchange.get(n, n) if after else n] for n in swap.results]
            sides.append(Region((), (*region.ops, *ops), (*placed, roles[after])))
        outputs = tuple(self._new_value(v.name, v.type) for v in sides[0].results)
        branch = Op("case", swap.branch.operands, outputs, swap.branch.attrs, tuple(sides), swap.branch.loc)
        whole = Region(body.params, (*swap.before, branch), outputs)
        buffers = [body.params[exchange.get(n, n) if role else n] for n in range(len(body.params))]
        ops, results = copy_ops(whole, buffers, self.names)
        return Region((), tuple(ops), results)

    def _new_value(self, hint: str, type_: TensorType) -> Value:
        return Value(self.names.fresh(hint), type_)


def _partner_states(pairs: Pairs) -> dict[int, int]:
    """Map each state of a pair to the other state."""
    return {**dict(pairs), **{t: s for s, t in pairs}}


def _inner_loops(op: Op) -> list[Op]:
    return [o for r in op.regions for o in walk(r)]
