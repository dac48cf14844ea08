"""Unroll loops whose states would be copied between buffers in each iteration.

Before::

    while i < 50 { i, a, b = i + 1, b, f(a, b) }              // copies both arrays in each iteration
After::

    while i < 50 { a1 = f(a, b); b1 = f(b, a1); i, a, b = i + 2, a1, b1 }

States that swap or rotate are in their first buffers again after one period of the permutation. A state whose kernel
cannot overwrite its operand, such as ``x = x @ w``, alternates between two buffers. If the trip count is known, the
remaining iterations run before the loop. Otherwise a branch in the unrolled body evaluates the condition again; the
branch that ends the loop copies the states, once per run of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aotc.ir.dims.algebra import static
from aotc.ir.loop.ir import Kernel
from aotc.ir.opset.control import JUDGED, RUNS_ONCE
from aotc.ir.tensor.copies import Names, copy_ops
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, values_captured_by_op, walk
from aotc.lowering.analysis.trip_counts import state_after, trip_count
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.memory_limit.order_ops import has_effects
from aotc.lowering.program.owners.owners import Owners, owners_of
from aotc.lowering.program.owners.ties import NEXT_STATE, UNROLLED, original_iterations_per_iteration
from aotc.lowering.threshold import Limit
from aotc.vmfb.abi import MAX_NESTING
from aotc.vmfb.dtypes import to_numpy

BRANCH_INDEX = "loop_condition_as_index"


def alternate_buffers(
    function: Function, functions: Mapping[str, Function], kernels: dict[str, Kernel], memories: Memories
) -> tuple[Function, Mapping[str, Function]]:
    """Unroll the loops of ``function`` that would copy their states in each iteration.

    Parameters
    ----------
    function : Function
        A fused function.
    functions : mapping
        The functions of its module.
    kernels : dict
        The kernels of the module's regions. A kernel for branches on a loop's condition is added if it is needed.
    memories : Memories

    Returns
    -------
    function : Function
    functions : mapping
        The functions of the module, with the region of the added kernel.
    """
    if "while" not in function.body.names:
        return function, functions
    unroller = _AlternatingUnroller(dict(functions), kernels, memories, Names(function.body))
    return unroller.function_with_unrolled_loops(function), unroller.functions


# Iterations after which states that rotate through the same number of buffers are in the first one again. A longer
# period needs more commands. Two states swap in 2; a stencil with three older states rotates in 4.
ALTERNATION_PERIOD = 4
# Ops of all copies of a loop's body together. Each is a command of the bundle.
ALTERNATED_OPS = 256
# Loops of a function that are unrolled. For each of them the function's buffer owners are computed up to four times.
ALTERNATED_LOOPS = 16
ALTERNATED_BYTES = Limit(
    1 << 12,
    "bytes of state copied per iteration, up to which a loop is not unrolled",
    "a copy of 4 KiB takes less time than the command that makes it",
)
ALTERNATED_BYTES_CUDA = Limit(
    1 << 23,
    "the same on a GPU, where the trip count is not known",
    "a conditional node takes some microseconds, as long as copying 8 MiB at 3 TB/s",
)


@dataclass
class _AlternatingUnroller:
    """Unroll loops by the number of iterations after which their states are in the same buffers again."""

    functions: dict[str, Function]
    kernels: dict[str, Kernel]
    memories: Memories
    names: Names
    constants: dict[Value, Op] = field(default_factory=dict)

    def function_with_unrolled_loops(self, function: Function) -> Function:
        """Return ``function`` with loops unrolled, inner loops first."""
        done: set[Value] = set()
        for _ in range(ALTERNATED_LOOPS):
            copied, depths = _copied_states(self._owners_of_function(function))
            left = [loop for loop in copied if loop.results[0] not in done]
            if not left:
                break
            loop = max(left, key=lambda loop: (depths[loop], copied[loop]))
            done.add(loop.results[0])
            self.constants = {op.result: op for op in walk(function.body) if op.name == "constant"}
            function = self._unrolling_with_least_copies(function, loop, copied[loop])
        return function

    def _owners_of_function(self, function: Function) -> Owners:
        return owners_of(function, self.functions, self.kernels, self.memories.space_finder(function))

    def _unrolling_with_least_copies(self, function: Function, loop: Op, copied: int) -> Function:
        """Return the unrolled function with least copies per iteration; ``function`` if none halves them."""
        iterations = trip_count(loop, self.constants, self.functions)
        on_gpu = any(target.kind == "cuda" for target in self.memories.targets_in(loop))
        limit = ALTERNATED_BYTES_CUDA if on_gpu and iterations is None else ALTERNATED_BYTES
        if limit.holds(copied):
            return function
        best, least = function, copied // 2
        for period in range(2, ALTERNATION_PERIOD + 1):
            form = self._function_with_unrolled_loop(function, loop, period, iterations)
            if form is None:
                break
            after, _ = _copied_states(self._owners_of_function(form))
            left = sum(n for op, n in after.items() if op.results[0] is loop.results[0]) // period
            if left < least:
                best, least = form, left
            if left == 0:
                break
        return best

    # --- unrolling ---

    def _function_with_unrolled_loop(
        self, function: Function, loop: Op, period: int, iterations: int | None
    ) -> Function | None:
        """Return ``function`` with ``period`` iterations of ``loop`` as one; None if that is not possible."""
        ops, (condition, body) = sum(1 for _ in walk(loop.regions[1])), loop.regions
        if iterations is not None:
            rest = iterations % period
            if iterations < 2 * period or ops * (period - 1 + rest) > ALTERNATED_OPS or self._has_effects(condition):
                return None
            before, state = self._peel_iterations(loop, rest)
            inner, results = list(body.ops), body.results
            for _ in range(period - 1):
                copies, results = copy_ops(body, results, self.names)
                inner += copies
        else:
            too_deep = nesting_depth(function.body) + period - 1 > MAX_NESTING
            if "devices" in function.attrs or too_deep or ops * period > ALTERNATED_OPS or self._has_effects(condition):
                return None
            before, state = [], loop.operands
            inner, results = list(body.ops), body.results
            more, results = self._guarded_iterations(loop, results, period - 1)
            inner += more
        attrs = {**loop.attrs, UNROLLED: period * original_iterations_per_iteration(loop)}
        regions = condition, Region(body.params, tuple(inner), results)
        unrolled = Op(loop.name, state, loop.results, attrs, regions, loop.loc)
        return function.with_body(with_ops_replaced(function.body, loop, [*before, unrolled]))

    def _has_effects(self, region: Region) -> bool:
        return any(has_effects(op, self.functions) for op in region.ops)

    def _peel_iterations(self, loop: Op, count: int) -> tuple[list[Op], tuple[Value, ...]]:
        """Return the ops of the first ``count`` iterations of a loop, and the state after them."""
        ops: list[Op] = []
        state = loop.operands
        for _ in range(count):
            copies, state = copy_ops(loop.regions[1], state, self.names)
            ops += copies
        if count:  # counters stay constants, so that the trip count stays known
            counters = state_after(loop, self.constants, self.functions, count)
            rows = enumerate(state)
            state = tuple([self._counter_constant(counters[n], v, ops) if n in counters else v for n, v in rows])
        return self._ops_needed_for(ops, state), state

    def _counter_constant(self, number: int, like: Value, ops: list[Op]) -> Value:
        """Append a constant of the type of ``like``, filled with ``number``; return it."""
        constant = Value(self.names.fresh(like.name), like.type)
        array = np.full([static(d) for d in like.type.shape], number, to_numpy(like.type.dtype))
        ops.append(Op("constant", (), (constant,), {"value": array}))
        return constant

    def _ops_needed_for(self, ops: Sequence[Op], results: Sequence[Value]) -> list[Op]:
        """Return the ops that compute ``results``, and those with effects."""
        needed, needed_ops = set(results), list[Op]()
        for op in reversed(ops):
            if not needed.isdisjoint(op.results) or op.name in JUDGED or has_effects(op, self.functions):
                needed.update((*op.operands, *values_captured_by_op(op)))
                needed_ops.append(op)
        return needed_ops[::-1]

    def _guarded_iterations(self, loop: Op, state: Sequence[Value], count: int) -> tuple[list[Op], tuple[Value, ...]]:
        """Return up to ``count`` further iterations, each under a branch on the loop's condition."""
        condition, body = loop.regions
        ops, (holds,) = copy_ops(condition, state, self.names)
        index = Value(self.names.fresh("index"), TensorType("i32"))
        ops.append(Op("dispatch", (holds,), (index,), {"callee": self._condition_to_branch_region()}, loc=loop.loc))
        inner, results = copy_ops(body, state, self.names)
        if count > 1:
            more, results = self._guarded_iterations(loop, results, count - 1)
            inner += more
        regions = Region((), (), tuple(state)), Region((), tuple(inner), results)
        next_state = tuple([Value(self.names.fresh(v.name), v.type) for v in loop.results])
        ops.append(Op("case", (index,), next_state, {RUNS_ONCE: 0}, regions, loop.loc))
        return ops, next_state

    def _condition_to_branch_region(self) -> str:
        """Return the name of the region that converts a condition to the index of a branch."""
        if BRANCH_INDEX not in self.functions:
            holds, index = Value("holds", TensorType("i1")), Value("index", TensorType("i32"))
            body = Region((holds,), (Op("convert", (holds,), (index,)),), (index,))
            region = Function(BRANCH_INDEX, body, attrs={"kind": "loop", "root": index.name})
            target = self.memories.spaces[0].target
            self.functions[BRANCH_INDEX] = region
            self.kernels[BRANCH_INDEX] = self.memories.lower_region(region, target)
            self.memories.for_targets[BRANCH_INDEX] = target
        return BRANCH_INDEX


def _copied_states(owners: Owners) -> tuple[dict[Op, int], dict[Op, int]]:
    """Return, for each loop that copies its next state, the bytes copied per iteration and the nesting depth."""
    copied: dict[Op, int] = {}
    depths: dict[Op, int] = {}
    states: set[Op] = set()
    for tie in (one.tie for one in owners.refused):
        if tie.loops:
            loop = tie.loops[-1]
            copied[loop] = copied.get(loop, 0) + estimated_bytes(tie.new)
            depths[loop] = len(tie.loops)
            if tie.kind == NEXT_STATE:
                states.add(loop)
    return {loop: n for loop, n in copied.items() if loop in states}, depths


def with_ops_replaced(region: Region, old: Op, new: Sequence[Op]) -> Region:
    """Return ``region`` with the ops ``new`` instead of ``old``, in nested regions too."""
    ops: list[Op] = []
    for op in region.ops:
        if op is old:
            ops += new
        else:
            regions = tuple([with_ops_replaced(r, old, new) for r in op.regions])
            ops.append(op.on(op.operands, regions) if regions else op)
    return region.with_ops(ops, region.results)


def nesting_depth(region: Region) -> int:
    """Return the number of loops and branches around the innermost op."""
    return max((1 + max(map(nesting_depth, op.regions)) for op in region.ops if op.regions), default=0)

