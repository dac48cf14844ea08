"""Turn an array combined with an update of neutral values into an update of that array.

Before::

    %1 = scatter %zeros, %i, %g (add)                   %3 = dynamic_update_slice %zeros, %g, %i
    %2 = add %ct, %1                                    %4 = add %ct, %3
After::

    %2 = scatter %ct, %i, %g (add)                      %5 = dynamic_slice %ct, %i
                                                        %6 = add %5, %g
                                                        %4 = dynamic_update_slice %ct, %6, %i

So the gradient of a lookup in a loop writes only the rows that were read, in the memory of the accumulated array,
instead of three whole arrays in each iteration. Multiplications with updates of ones (the gradient of
``c.at[i].mul``), minima, maxima, ``and`` and ``or`` are rewritten likewise.

The pass also calls further rewrites. Updates of a slice that is written back become updates of the array
(:mod:`aotc.lowering.passes.canonicalize.slice_updates`), and stacked results use the memory of stacked inputs
(:mod:`aotc.lowering.passes.canonicalize.stacked_states`). Additions move into branches of which one adds nothing
(:mod:`aotc.lowering.passes.canonicalize.branch_sums`), and arrays of inner loops are added only where these loops wrote
(:mod:`aotc.lowering.passes.canonicalize.inner_sums`). Selects between whole loop states become branches
(:mod:`aotc.lowering.passes.canonicalize.state_branches`).

Elements without an update have the same bits as before: the neutral value does not change them, NaN included, except
that ``-0.0 + 0.0`` is 0.0. So sums of floats are rewritten only if the array is known to have no -0.0
(:mod:`aotc.lowering.analysis.signed_zeros`), as in a loop that starts from zeros, or if a flag of the loop is true
(:mod:`aotc.lowering.passes.canonicalize.negative_zeros`). Several updates of one element are combined in another order;
floats of less than 32 bits, which could lose much accuracy, are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from aotc.ir.opset import PARTIAL_WRITES
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Function, Module, Op, Value, use_counts, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.parallel_scatters import has_disjoint_updates, is_overwriting_scatter
from aotc.lowering.analysis.prefix_scans import combiner_op_name, neutral_value
from aotc.lowering.analysis.signed_zeros import values_without_negative_zeros
from aotc.lowering.passes.canonicalize.array_passes import is_small_part
from aotc.lowering.passes.canonicalize.branch_sums import COMBINERS, move_sums_into_branches
from aotc.lowering.passes.canonicalize.inner_sums import add_inner_sums
from aotc.lowering.passes.canonicalize.negative_zeros import combined_slice, padded_starts, track_negative_zeros
from aotc.lowering.passes.canonicalize.slice_updates import update_slices_in_place
from aotc.lowering.passes.canonicalize.stacked_states import stack_in_place
from aotc.lowering.passes.canonicalize.state_branches import branch_on_states
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.options import Options
from aotc.vmfb.dtypes import DTYPES, kind_of


def update_in_place(module: Module, options: Options) -> Module:
    """Rewrite a sum of an array and a scattered or padded update as an in-place update of the array."""
    functions = {}
    for name, function in module.functions.items():
        function = move_sums_into_branches(update_slices_in_place(stack_in_place(function)))
        function = _with_updates_in_place(track_negative_zeros(function, options))
        functions[name] = branch_on_states(add_inner_sums(function, options), options)
    return module.with_functions(functions)


def _with_updates_in_place(function: Function) -> Function:
    if function.body.names.isdisjoint(PARTIAL_WRITES | {"case"}):
        return function
    return rewrite_function(function, _UpdateRewriter(function).update_in_place_rule, COMBINERS)


@dataclass
class _UpdateRewriter:
    """Rewrite rule for sums with updates in one function, and the analyses of that function.

    Attributes
    ----------
    readers : dict of Value to int
        The number of uses of each value.
    state : set of Value
        The states of loops, and the results of updates of these.
    """

    function: Function
    readers: dict[Value, int] = field(init=False)
    state: set[Value] = field(init=False)

    def __post_init__(self) -> None:
        body = self.function.body
        self.readers = use_counts(body)
        self.state = {p for op in walk(body) if op.name == "while" for p in op.regions[1].params}

    @cached_property
    def unsigned(self) -> set[Value]:
        """Return the values that contain no -0.0."""
        return values_without_negative_zeros(self.function.body)

    def update_in_place_rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the update that replaces the result of ``op``, or None."""
        for x, part in (op.operands, op.operands[::-1]):
            if self._is_neutral_fill(op.name, part, x, b):
                return (x,)
            update = b.definitions.get(part)
            shape = x.type.shape
            if update is not None and update.name == "reshape" and self.readers.get(part) == 1:
                update = b.definitions.get(update.operands[0])
            if update is None or not self._is_neutral(op.name, update, x, b):
                continue
            updated = self._combining_update(op.name, update, x, b)
            if updated is None:
                continue
            result = b.reshape(updated, shape)
            self.readers[result] = self.readers.get(op.result, 0)
            for facts, old in ((self.unsigned, op.result), (self.state, x)):
                if old in facts:
                    facts.add(result)
            return (result,)
        return None

    def _is_neutral(self, name: str, update: Op, x: Value, b: Builder) -> bool:
        """Return True if op ``name``, the only reader of ``update``, does not change ``x`` elsewhere."""
        if update.name not in PARTIAL_WRITES or len(update.results) != 1 or self.readers.get(update.result) != 1:
            return False
        return self._is_neutral_fill(name, update.operands[1 if update.name == "pad" else 0], x, b)

    def _is_neutral_fill(self, name: str, part: Value, x: Value, b: Builder) -> bool:
        """Return True if all elements of ``part`` are one value that is neutral for op ``name`` on ``x``."""
        dtype = x.type.dtype
        fill, neutral = splat_of(part, b.definitions), neutral_value(name, dtype)
        if fill is None or neutral is None or fill != neutral or (kind_of(dtype) == "c" and name != "add"):
            return False
        is_exact = name != "add" or kind_of(dtype) not in "fc" or x in self.unsigned
        return is_exact or (kind_of(dtype) == "f" and bool(np.signbit(fill)))

    def _combining_update(self, name: str, update: Op, x: Value, b: Builder) -> Value | None:
        """Return ``update`` rewritten to combine its values into ``x`` by op ``name``, or None."""
        match update.name:
            case "scatter":
                return _combining_scatter(name, update, x, b)
            case "pad":
                return _combined_with_padded_part(name, update, x, b) if x in self.state else None
        _, part, *starts = update.operands
        return combined_slice(name, part, b.reshape(x, update.result.type.shape), starts, b)


def _combining_scatter(name: str, op: Op, x: Value, b: Builder) -> Value | None:
    """Return the scatter ``op`` into ``x`` with values combined by ``name``, or None if results could suffer."""
    region, dtype = copy_region(op.regions[0], b.names), x.type.dtype
    if is_overwriting_scatter(op) and has_disjoint_updates(op):
        region = b.combiner(name, dtype)
    elif combiner_op_name(op) != name or (
        kind_of(dtype) in "fc" and DTYPES[dtype].bits < 32 and not has_disjoint_updates(op)
    ):
        return None
    target = b.reshape(x, op.result.type.shape)
    return b.make("scatter", (target, *op.operands[1:]), op.attrs, target.type, regions=(region,))


def _combined_with_padded_part(name: str, op: Op, x: Value, b: Builder) -> Value | None:
    """Return ``x`` with a padded part combined into it, or None if the part is too large for that to pay."""
    if not is_small_part(op):
        return None
    return combined_slice(name, op.operands[0], b.reshape(x, op.result.type.shape), padded_starts(op, b), b)
