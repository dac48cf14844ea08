"""Find the ranks on which a value is equal, so that no rank waits for a rank that takes another branch.

A value of one rank's program has a class for each rank: ranks of one class have equal values, whatever the arguments
are. An argument that is whole on every rank has one class; a part of an array has as many as parts; ``partition_id``
as many as ranks. A collective gives equal results to groups whose operands have equal classes.

A collective in a loop or branch is safe if the ranks of each of its groups have one class in every condition around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aotc.diagnostics import CompileError
from aotc.ir.opset.collective import COLLECTIVES, SAME_ON_ALL
from aotc.ir.opset.spec import Attrs
from aotc.ir.tensor.ir import Function, Op, Region, Value, captured_values
from aotc.vmfb.ranks.layout import Layout, Mesh, mesh_of, part_of_rank

Classes = np.ndarray
"""The number of the class of each rank."""


def check_groups_agree(function: Function) -> None:
    """Check that the ranks of each group take the same branches, and as many iterations, around each collective.

    ``function.attrs["ranks"]`` has the mesh and the layout of each argument.

    Raises
    ------
    CompileError
        At the first collective around which they may not.
    """
    ranks = function.attrs["ranks"]
    mesh = mesh_of(ranks["mesh"])
    layouts = {layout: _rank_classes_of_layout(mesh, layout) for layout in {*ranks["arguments"]}}
    same = np.zeros(mesh.size, np.int64)
    analysis = _RankClassAnalysis(same)
    for value, layout in zip(function.body.params, ranks["arguments"], strict=True):
        analysis.classes[value] = layouts[layout]
    analysis.analyse_region(function.body, same)
    if analysis.unsafe:
        op = analysis.unsafe[0]
        what = f"{op.name} is in a loop or branch whose condition may differ between the ranks that it connects"
        hint = "compute the condition from values that these ranks share: jax.lax.psum of it, or a replicated argument"
        raise CompileError.at(op.loc, what, hint=hint)


def _rank_classes_of_layout(mesh: Mesh, layout: Layout) -> Classes:
    parts = [part_of_rank(mesh, layout, rank) for rank in range(mesh.size)]
    return np.unique(np.array(parts).reshape(mesh.size, -1), axis=0, return_inverse=True)[1].reshape(-1)


def _rank_classes_of_columns(columns: Sequence[Classes]) -> Classes:
    """Return the classes of ranks that agree in all columns."""
    return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)


@dataclass(slots=True)
class _RankClassAnalysis:
    """Classes of all values found so far, and the collectives that are not safe."""

    same: Classes
    classes: dict[Value, Classes] = field(default_factory=dict)
    unsafe: list[Op] = field(default_factory=list)

    def classes_of_values(self, values: Sequence[Value]) -> Classes:
        """Return the classes of ranks that agree in all values; a value without an entry is the same on all."""
        columns = {id(c): c for v in values if (c := self.classes.get(v)) is not None and c.any()}
        return _rank_classes_of_columns(list(columns.values())) if columns else self.same

    def analyse_region(self, region: Region, around: Classes) -> None:
        """Find the classes of the values of a region that runs under conditions with the classes ``around``."""
        for op in region.ops:
            if op.name in COLLECTIVES:
                self._check_collective_groups(op, around)
            elif op.name == "while":
                self._classes_of_loop(op, around)
            elif op.name == "case":
                self._classes_of_branch(op, around)
            else:
                read = self.classes_of_values([*op.operands, *(v for r in op.regions for v in captured_values(r))])
                self.classes.update((v, read) for v in op.results if read.any())

    def _classes_of_loop(self, op: Op, around: Classes) -> None:
        """Find the classes of a loop's state by iteration until they no longer change."""
        condition, body = op.regions
        carried = [self.classes_of_values([v]) for v in op.operands]
        safe = len(self.unsafe)
        while True:
            del self.unsafe[safe:]
            for params in (condition.params, body.params):
                self.classes.update(zip(params, carried, strict=True))
            self.analyse_region(condition, around)
            iteration = _rank_classes_of_columns([around, self.classes_of_values(condition.results)])
            self.analyse_region(condition, iteration)  # it runs again after each iteration
            self.analyse_region(body, iteration)
            after = [
                _rank_classes_of_columns([c, self.classes_of_values([v])])
                for c, v in zip(carried, body.results, strict=True)
            ]
            if all(map(_are_equal_rank_classes, after, carried)):
                break
            carried = after
        self.classes.update(
            (v, _rank_classes_of_columns([c, iteration])) for v, c in zip(op.results, carried, strict=True)
        )

    def _classes_of_branch(self, op: Op, around: Classes) -> None:
        """Find the classes of a branch's results: by the branch taken and by the values it returns."""
        chosen = _rank_classes_of_columns([around, self.classes_of_values(op.operands[:1])])
        for region in op.regions:
            self.analyse_region(region, chosen)
        for number, value in enumerate(op.results):
            self.classes[value] = _rank_classes_of_columns(
                [chosen, self.classes_of_values([r.results[number] for r in op.regions])]
            )

    def _check_collective_groups(self, op: Op, around: Classes) -> None:
        """Find the classes of a collective's results; record the collective if ranks of a group may differ."""
        if op.name == "partition_id":
            self.classes[op.result] = np.arange(len(self.same))
        if not op.operands:
            return
        groups = [*op.attrs.get("groups", ()), *op.attrs.get("pairs", ())]
        if any(len({*around[[i for i in group if i >= 0]].tolist()}) > 1 for group in groups):
            self.unsafe.append(op)
        read = self.classes_of_values(op.operands)
        self.classes.update((v, _collective_result_classes(op.name, op.attrs, read)) for v in op.results)


def _are_equal_rank_classes(a: Classes, b: Classes) -> bool:
    return bool(np.array_equal(_rank_classes_of_columns([a]), _rank_classes_of_columns([b])))


def _collective_result_classes(name: str, attrs: Attrs, read: Classes) -> Classes:
    """Return the classes of a collective's result for an operand with the classes ``read``."""
    numbers: dict[tuple, int] = {}
    result = np.full(len(read), -1, np.int64)

    def class_of_facts(facts: tuple) -> int:
        return numbers.setdefault(facts, len(numbers))

    for source, target in attrs.get("pairs", ()):
        result[target] = class_of_facts((int(read[source]),))
    for group in attrs.get("groups", ()):
        ranks = [i for i in group if i >= 0]
        inputs = tuple(read[ranks].tolist())
        for place, rank in enumerate(ranks):
            own = () if name in SAME_ON_ALL else (place,)
            result[rank] = class_of_facts((inputs[:1] if name == "collective_broadcast" else inputs, own))
    return _rank_classes_of_columns([result])
