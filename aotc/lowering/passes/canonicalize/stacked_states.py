"""Let the stacked results of a loop use the memory of the stacked inputs that the same iterations read.

Before, a scan over the caches of layers, which returns the updated ones::

    while i < n, ys = zeros { x = dynamic_slice xs, i; ...; ys = dynamic_update_slice ys, y, i }
After::

    while i < n, ys = xs { x = dynamic_slice ys, i; ...; ys = dynamic_update_slice ys, y, i }

Each iteration reads its slice before it writes it, and all slices are written, so results are the same. This is done if
nothing else reads ``xs``, and ``xs`` is computed in the function or an argument that the caller donates to this result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import Function, Op, Region, Value, replaced_values, use_counts, walk
from aotc.lowering.analysis.in_place import donated_argument_pairs
from aotc.lowering.analysis.trip_counts import counters, trip_count
from aotc.lowering.passes.canonicalize.slice_updates import same_slice_position, updates_written_back


def stack_in_place(function: Function) -> Function:
    """Return ``function`` with stacked results of loops computed in the memory of stacked inputs."""
    if "while" not in function.body.names or "dynamic_update_slice" not in function.body.names:
        return function
    return function.with_body(_StackRewriter(function).region_with_stacks_in_place(function.body, outermost=True))


class _StackRewriter:
    """Make loops compute stacked results in the memory of stacked inputs."""

    def __init__(self, function: Function) -> None:
        """Index the definitions, constants and use counts of ``function``, and its donated arguments."""
        self.function = function
        self.makers = {v: op for op in walk(function.body) for v in op.results}
        self.constants = {v: op for v, op in self.makers.items() if op.name == "constant"}
        self.counts = use_counts(function.body)
        body = function.body
        self.donated = {body.params[a]: body.results[n] for a, n in donated_argument_pairs(function)}

    def region_with_stacks_in_place(self, region: Region, outermost: bool = False) -> Region:
        """Return ``region`` with its loops rewritten, inner ones first."""
        own = {v for op in region.ops if op.name != "constant" for v in op.results}
        own.update(self.donated if outermost else region.params)
        ops = []
        for op in region.ops:
            if op.regions:
                op = op.on(op.operands, tuple([self.region_with_stacks_in_place(r) for r in op.regions]))
            ops.append(self._loop_with_stacks_in_place(op, own) if op.name == "while" else op)
        return region.with_ops(ops, region.results)

    def _loop_with_stacks_in_place(self, op: Op, own: Collection[Value]) -> Op:
        """Return the loop ``op`` with stacked inputs as initial values of its stacked results.

        ``own`` are the values whose memory the loop may overwrite.
        """
        condition, body = op.regions
        iterations = trip_count(op, self.constants, {})
        if iterations is None:
            return op
        by_place = counters(op, self.constants, {})
        makers = {**self.makers, **{v: o for o in body.ops for v in o.results}}
        tested = {v for o in walk(condition) for v in o.operands} | set(condition.results)
        operands, replaced = list(op.operands), dict[Value, Value]()
        for n, param in enumerate(body.params):
            write = makers.get(body.results[n])
            if (
                write is None
                or condition.params[n] in tested
                or not self._writes_all_slices(write, param, iterations, by_place)
            ):
                continue
            xs = self._stacked_input_to_reuse(op, n, write, makers, own, replaced)
            if xs is not None:
                operands[n], replaced[xs] = xs, param
        if not replaced:
            return op
        ops = [o.on(replaced_values(o.operands, replaced), o.regions) for o in body.ops]
        return op.on(tuple(operands), (condition, body.with_ops(ops, body.results)))

    def _writes_all_slices(
        self, write: Op, param: Value, iterations: int, by_place: Mapping[Value, tuple[int, int]]
    ) -> bool:
        """Return True if the loop writes all slices of ``param`` along the first dim and does not read it otherwise."""
        if write.name != "dynamic_update_slice" or write.operands[0] is not param or self.counts[param] != 1:
            return False
        shape: tuple[Dim, ...] = param.type.shape
        part = write.operands[1].type.shape
        place = by_place.get(write.operands[2])
        return bool(shape) and part == (1, *shape[1:]) and shape[0] == iterations and place == (0, 1)

    def _stacked_input_to_reuse(
        self, op: Op, n: int, write: Op, makers: Mapping[Value, Op], own: Collection[Value],
        replaced: Mapping[Value, Value],
    ) -> Value | None:  # fmt: skip
        """Return the stacked input that the loop reads only at the position it writes, or None."""
        reads: dict[Value, list[Op]] = {}
        for o in op.regions[1].ops:
            if o.name == "dynamic_slice" and same_slice_position(o, write, makers):
                reads.setdefault(o.operands[0], []).append(o)
        result = op.results[n]
        candidates = [
            xs for xs, ops in reads.items()
            if xs in own and xs not in replaced
            and self.counts[xs] == len(ops) and self.donated.get(xs, result) is result
        ]  # fmt: skip
        _, slice_ = updates_written_back(write, makers)
        updated = slice_.operands[0] if slice_ is not None else None
        return updated if updated in candidates else next(iter(candidates), None)
