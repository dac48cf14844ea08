"""The tensor IR: immutable SSA over tensors whose dims may be symbolic.

A :class:`Module` is a set of :class:`Function`; a function is a :class:`Region` with a name; a region has parameters,
ops in SSA order, and results. Values are compared by identity. The opset (``ir/opset``) defines the op names with their
attributes, type rules and NumPy meanings; ``text`` prints and parses the IR; ``verify`` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aotc.diagnostics import UNKNOWN, Loc
from aotc.ir.dims.algebra import Dim

Requirement = tuple[str, Dim, Dim, str, tuple[Dim, ...]]  # comparison, both sides, message, values of its {0}, {1}...


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type name and dims, e.g. ``f32[b, 64]``; a scalar has no dims."""

    dtype: str
    shape: tuple[Dim, ...] = ()

    @property
    def rank(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA value, compared by identity; ``name`` is for readers."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """``results = name(operands) {attrs} (regions)``.

    ``attrs`` maps names to plain Python data: int, float, str, bool, dims, NumPy arrays (constants), and tuples or
    dicts of those.
    """

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    loc: Loc = UNKNOWN

    @property
    def result(self) -> Value:
        """Return the only result."""
        (value,) = self.results
        return value

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Return the arrays of a variadic op (``reduce``, ``sort``, ``scatter``...), one for each result."""
        return self.operands[: len(self.results)]

    @property
    def inits(self) -> tuple[Value, ...]:
        """Return the initial values of a ``reduce`` or ``reduce_window``, one for each input."""
        return self.operands[len(self.results) :]

    def on(self, operands: tuple[Value, ...], regions: tuple[Region, ...]) -> Op:
        """Return a copy of the op with other ``operands`` and ``regions``; the same object if nothing changes."""
        if operands == self.operands and regions == self.regions:
            return self
        return Op(self.name, operands, self.results, self.attrs, regions, self.loc)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Parameters, ops in SSA order, results. May use values of outer regions."""

    params: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]
    _names: frozenset[str] | None = field(default=None, init=False, repr=False)
    _captured: tuple[Value, ...] | None = field(default=None, init=False, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all ops in the region, including nested regions; cached."""
        names = self._names
        if names is None:
            inner = [r.names for op in self.ops for r in op.regions]
            names = frozenset({op.name for op in self.ops}.union(*inner))
            object.__setattr__(self, "_names", names)
        return names

    def with_ops(self, ops: Sequence[Op], results: tuple[Value, ...]) -> Region:
        """Return a copy of the region with other ``ops`` and ``results``; the same object if nothing changes."""
        new_ops = tuple(ops)
        return self if new_ops == self.ops and results == self.results else Region(self.params, new_ops, results)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A named region.

    ``attrs`` of a public function: ``arg_names``, ``result_names``, ``in_tree``, ``out_tree`` (pytrees as nested JSON
    data), ``donated`` (argument numbers). ``attrs`` of a private function made by fusion: ``kind`` (the region kind).
    """

    name: str
    body: Region
    public: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    loc: Loc = UNKNOWN

    def with_body(self, body: Region) -> Function:
        """Return a copy of the function with another ``body``; the same object if nothing changes."""
        return self if body is self.body else replace(self, body=body)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """Functions by name, in the order of definition."""

    functions: Mapping[str, Function]
    name: str = "main"

    def with_functions(self, changed: Mapping[str, Function]) -> Module:
        """Return the module with the functions ``changed`` replaced or added; the same object if they are equal."""
        if all(self.functions.get(name) is function for name, function in changed.items()):
            return self
        return replace(self, functions={**self.functions, **changed})

    def has(self, *names: str) -> bool:
        """Return True if the module contains an op of one of these names."""
        return any(not f.body.names.isdisjoint(names) for f in self.functions.values())


def walk(region: Region) -> Iterator[Op]:
    """Yield every op of ``region``, nested regions included, in order."""
    stack = [iter(region.ops)]
    while stack:
        for op in stack[-1]:
            yield op
            if op.regions:
                stack += [iter(r.ops) for r in reversed(op.regions)]
                break
        else:
            stack.pop()


def replaced_values(values: tuple[Value, ...], mapped: Mapping[Value, Value]) -> tuple[Value, ...]:
    """Return ``values`` with those in ``mapped`` replaced; the same tuple if there are none."""
    if not mapped or mapped.keys().isdisjoint(values):
        return values
    return tuple([mapped.get(v, v) for v in values])


def reads_no_values_of(region: Region, mapped: Mapping[Value, Value]) -> bool:
    """Return True if ``region`` does not use any outer value that ``mapped`` replaces."""
    return not mapped or mapped.keys().isdisjoint(captured_values(region))


def use_counts(region: Region) -> dict[Value, int]:
    """Return the number of uses of every value in ``region``, nested regions and results included."""
    ops = list(walk(region))
    counts = Counter([v for op in ops for v in op.operands])
    counts.update([v for r in (region, *(r for op in ops for r in op.regions)) for v in r.results])
    return dict(counts)


def captured_values(region: Region) -> tuple[Value, ...]:
    """Return the outer values that ``region`` uses, in order of first use; cached."""
    captured = region._captured
    if captured is None:
        captured = tuple(_captured(region))
        object.__setattr__(region, "_captured", captured)
    return captured


def _captured(region: Region) -> dict[Value, None]:
    """Return the outer values that ``region`` and its nested regions use, as keys of a dict."""
    defined = set(region.params)
    captured: dict[Value, None] = {}
    inner = [region]
    for op in walk(region):
        defined.update(op.results)
        inner += op.regions
        for r in op.regions:
            defined.update(r.params)
    for op in walk(region):
        captured.update((v, None) for v in op.operands if v not in defined)
    for r in inner:
        captured.update((v, None) for v in r.results if v not in defined)
    return captured


def values_captured_by_op(op: Op) -> list[Value]:
    """Return the outer values that the regions of ``op`` use."""
    return [v for r in op.regions for v in captured_values(r)] if op.regions else []


def post_order(roots: Iterable[Op], needs: Callable[[Op], Iterable[Op]]) -> list[Op]:
    """Return ``roots`` and the ops that they transitively need, in an order in which each op follows those it needs.

    The traversal has an explicit stack, as programs are deeper than Python's recursion limit.
    """
    done: dict[Op, None] = {}
    opened: set[Op] = set()
    for root in roots:
        stack = [root]
        while stack:
            op = stack[-1]
            if op in opened or op in done:
                done[stack.pop()] = None
            else:
                opened.add(op)
                stack += [need for need in reversed(list(needs(op))) if need not in done]
    return list(done)
