"""Upper bounds of the bytes of each array that a kernel accesses, computed from its text in loop IR.

For example, of an array that is updated in one row only that row counts. Each load and store counts once for each
iteration of the enclosing loops. The bound is the whole array if that is less, if the trip count depends on data, or if
the kernel passes the array on as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product as product_of
from math import inf, prod

from aotc.vmfb.dtypes import size_of
from aotc.vmfb.profile.trace import evaluate_dim, read_kernel_header

_Range = tuple[int, int]  # minimum and maximum of a loop variable


@cache
def touched_bytes(text: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return an upper bound of the accessed bytes for each array of a kernel, in order.

    Raises
    ------
    KeyError
        If a dim of an array is not among ``sizes``.
    """
    header = read_kernel_header(text)
    known = dict(zip(header.dims, sizes))
    whole = [prod(evaluate_dim(d, known) for d in p.dims) * size_of(p.dtype) for p in header.parameters]
    counter = TouchCounter({p.name for p in header.parameters}, known)
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    counter.count_statements(function.body, 1, {})
    times = [counter.times.get(p.name, 0) * size_of(p.dtype) for p in header.parameters]
    return tuple([int(min(a, b)) for a, b in zip(whole, times)])


class TouchCounter:
    """Counts the accesses to elements of each array in a kernel's text."""

    def __init__(self, names: set[str], dims: Mapping[str, int]) -> None:
        self._names, self._known = {name: {name} for name in names}, dims  # the arrays that a name may refer to
        self.times: dict[str, float] = {}  # by array name

    def count_statements(self, body: Sequence[ast.stmt], times: float, ranges: Mapping[str, _Range]) -> None:
        """Count the accesses of statements that run ``times`` times, inside loops whose variables have these ranges."""
        for stmt in body:
            match stmt:
                case ast.For(target=ast.Name(id=name), iter=ast.Call(args=bounds), body=inner):
                    self._count_expression(stmt.iter, times)
                    iterations, found = self._maximum_iterations(bounds, ranges)
                    around = {k: v for k, v in ranges.items() if k != name} | ({} if found is None else {name: found})
                    self.count_statements(inner, times * iterations if times and iterations else 0, around)
                case ast.If(test=test, body=then, orelse=other):
                    self._count_expression(test, times)
                    self.count_statements(then, times, ranges)
                    self.count_statements(other, times, ranges)
                case ast.While(test=test, body=inner):
                    self._count_expression(test, inf)
                    self.count_statements(inner, inf, ranges)
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(
                        func=ast.Name(id="either"),
                        args=[cond, ast.Subscript(value=ast.Name(id=one)), ast.Subscript(value=ast.Name(id=other)), *_],
                    ),
                ):
                    self._count_expression(cond, times)
                    self._names[name] = self._names.get(one, set()) | self._names.get(other, set())
                case _:
                    self._count_expression(stmt, times)

    def _maximum_iterations(
        self, bounds: Sequence[ast.expr], ranges: Mapping[str, _Range]
    ) -> tuple[float, _Range | None]:
        """Return the maximum trip count of a loop, and the range of its variable.

        Infinity and None if they depend on data.
        """
        begin, end = bounds[:2]
        names = {n.id for bound in bounds for n in ast.walk(bound) if isinstance(n, ast.Name)} & ranges.keys()
        most, low, high = 0, [], []
        try:
            for corner in product_of(*([(name, value) for value in ranges[name]] for name in sorted(names))):
                values = {**self._known, **dict(corner)}
                first, last = evaluate_dim(begin, values), evaluate_dim(end, values)
                step = max(evaluate_dim(bounds[2], values), 1) if len(bounds) > 2 else 1
                most = max(most, -(-(last - first) // step))
                low.append(first)
                high.append(last - 1)
        except (KeyError, ValueError):  # it depends on data
            return inf, None
        return most, (min(low), max(high))

    def _count_expression(self, node: ast.AST, times: float) -> None:
        """Count the accesses of an expression that runs ``times`` times, or of a statement without nested ones."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name in self._names:
                for array in self._names[name]:
                    self.times[array] = self.times.get(array, 0) + times
                self._count_expression(index, times)
                return
            case ast.Name(id=name) if name in self._names:
                self.times.update(dict.fromkeys(self._names[name], inf))
        for child in ast.iter_child_nodes(node):
            self._count_expression(child, times)
