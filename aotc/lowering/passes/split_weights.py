"""Split functions with bound arguments (weights) in two: a part that runs once, and a part that runs in each call.

Before::

    main_bound(%x, %w) {binds = "main", weights = (1,)}:
        %p = ... pad, reshape, transpose of %w
        %y = packed_matmul %x, %p
After::

    main_prepare(%w) {prepares = "main", weights = (1,), sources = ((1,),), values = (0,)}:
        %p = ... pad, reshape, transpose of %w; return %p
    main_bound(%x, %prepared0) {binds = "main", takes = (0, 2)}:
        %y = packed_matmul %x, %prepared0

The first part, ``main_prepare``, computes values that depend on weights alone. ``takes`` lists the source of each
argument of ``main_bound``: the number of an argument of ``main`` or, numbered after those, of a result of
``main_prepare``. ``sources`` lists, for each result of ``main_prepare``, the arguments that it depends on. ``values``
numbers these results in the module: equal results of two functions, from arguments of the same names, share a number.

Specialized copies have the same arguments. Values too large to be folded, if they were constant, are computed in each
call; so are conversions to wider elements that readers compute (:mod:`aotc.lowering.plans.wider_weights`). If nothing
can be computed before a call, the bound copy of the function is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, values_captured_by_op
from aotc.ir.tensor.substitute_dims import with_dims, with_dims_in
from aotc.lowering.analysis.constant_values import is_computable_from_weights, weights_of
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.passes.cse import cse, structural_key
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.thresholds import FOLDED_BROADCAST, FOLDED_BYTES, FOLDED_GROWTH
from aotc.lowering.plans.wider_weights import WiderWeights
from aotc.options import Options


def split_weights(module: Module, options: Options) -> Module:
    """Split each function with bound weights into two: prepare (run once) and call (run per request)."""
    functions = dict(module.functions)
    home, _ = op_targets(module, options)
    values: dict[Any, int] = {}
    for general in [f for f in module.functions.values() if "weights" in f.attrs and "binds" in f.attrs]:
        group = [general, *(f for f in module.functions.values() if f.attrs.get("specializes") == general.name)]
        for f in group:
            del functions[f.name]
        cut = [_WeightSplit(f, WiderWeights(f, home)) for f in group]
        prepare = _prepare_function(cut, functions, options)
        if prepare is not None:
            function, results = prepare
            numbers = tuple(values.setdefault(key, len(values)) for key in _prepared_value_keys(function))
            function = replace(function, attrs={**function.attrs, "values": numbers})
            functions[function.name] = function
            functions.update((c.function.name, _call_function(c, cut, function, results)) for c in cut)
    return replace(module, functions=functions)


@dataclass
class _WeightSplit:
    """How a function is split: the ops that run once, and the values that each call reads.

    Attributes
    ----------
    function : Function
    wider : WiderWeights
        Decides which values readers compute.
    known : dict of Op to None
        The ops that depend on weights alone, in order, in any region; and the constants of the function.
    roots : dict of Value to frozenset of Value
        The weights that each value depends on.
    kept : dict of Value to None
        Weights that each call reads unchanged.
    prepared : dict of Value to None
        Values computed from weights that each call reads.
    staying : set of Op
        Ops that depend on weights alone, but run in each call.
    """

    function: Function
    wider: WiderWeights
    known: dict[Op, None] = field(default_factory=dict)
    roots: dict[Value, frozenset[Value]] = field(default_factory=dict)
    kept: dict[Value, None] = field(default_factory=dict)
    prepared: dict[Value, None] = field(default_factory=dict)
    staying: set[Op] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find the ops that depend on weights alone, and the values of these that each call reads."""
        self.roots.update((v, frozenset([v])) for v in weights_of(self.function))
        self._made: dict[Value, Op] = {}
        self._find_ops_of_weights(self.function.body)
        for number, _ in self.function.attrs.get("sizes", {}).values():  # the host reads them in each call
            self._add_values_read_per_call([v for v in [self.function.body.params[number]] if v in self.roots])
        self._record_reads(self.function.body)

    def _find_ops_of_weights(self, region: Region) -> None:
        """Record the ops in ``region`` that depend on weights alone, with the weights behind their results."""
        for op in region.ops:
            self._made.update((v, op) for v in op.results)
            if is_computable_from_weights(op, self.roots, self._made):
                reads = [self.roots.get(v, frozenset()) for v in (*op.operands, *values_captured_by_op(op))]
                self.roots.update((v, frozenset().union(*reads)) for v in op.results)
                self.known[op] = None
                continue
            if not op.operands and not op.regions:
                self.known[op] = None  # a constant, which both may read
            for inner in op.regions:
                self._find_ops_of_weights(inner)

    def depends_on_weights_alone(self, op: Op) -> bool:
        return op in self.known and op.results[0] in self.roots

    def _record_reads(self, region: Region) -> None:
        """Record the values that the remaining ops of ``region`` and its results read."""
        for op in region.ops:
            if not self.depends_on_weights_alone(op):
                self._add_values_read_per_call(op.operands)
                for inner in op.regions:
                    self._record_reads(inner)
        self._add_values_read_per_call(region.results)

    def _add_values_read_per_call(self, values: Iterable[Value]) -> None:
        """Add ``values`` to those that each call reads: prepared once, or recomputed from prepared ones."""
        stack = [v for v in values if v in self.roots]
        while stack:
            v = stack.pop()
            op = self._made.get(v)
            if op is None:
                self.kept[v] = None
            elif self._is_small_enough_to_store(v, op):
                self.prepared[v] = None
            elif op not in self.staying:
                self.staying.add(op)
                stack += [r for r in (*op.operands, *values_captured_by_op(op)) if r in self.roots]

    def _is_small_enough_to_store(self, v: Value, op: Op) -> bool:
        """Return True if a value is small enough to be stored, by the rules for folding constants."""
        size = estimated_bytes(v)
        if op.name == "broadcast":
            return FOLDED_BROADCAST.holds(size) or size <= estimated_bytes(op.operands[0])
        if not FOLDED_BYTES.holds(size) and self.wider.is_computed_by_readers(v, self.roots[v]):
            return False
        growth = -(-size // max(sum(map(estimated_bytes, self.roots[v])), 1))
        return FOLDED_BYTES.holds(size) or FOLDED_GROWTH.holds(growth)

    def needed(self) -> list[Op]:
        """Return the ops of the prepare function, in order."""
        live, ops = set(self.prepared), []
        for op in reversed(self.known):
            if any(v in live for v in op.results):
                ops.append(op)
                live.update((*op.operands, *values_captured_by_op(op)))
        return ops[::-1]


def _prepare_function(
    cut: Sequence[_WeightSplit], taken: Mapping[str, Function], options: Options
) -> tuple[Function, dict[Value, int]] | None:
    """Return the prepare function, and the result number of each prepared value."""
    general = cut[0].function
    original, numbers = general.attrs["binds"], general.attrs["weights"]
    params = weights_of(general)
    ops: list[Op] = []
    for c in cut:
        mapped = dict(zip(weights_of(c.function), params, strict=True))
        ops += _ops_with_mapped_values(c.needed(), mapped)
    prepared = [v for c in cut for v in c.prepared]
    if not prepared:
        return None
    name = f"{original}_prepare"
    while name in taken:
        name += "_"
    region = Region(params, tuple(ops), tuple(prepared))
    # Specialized copies may prepare equal values: CSE merges them, so that each is one result.
    whole = cse(Module({name: Function(name, region, True)}), options).functions[name]
    distinct = list(dict.fromkeys(whole.body.results))
    places = {v: distinct.index(r) for v, r in zip(prepared, whole.body.results, strict=True)}
    names = general.attrs.get("arg_names") or [v.name for v in general.body.params]
    roots = [_numbers_of_source_weights(c, v) for c in cut for v in c.prepared]
    attrs = {
        "prepares": original,
        "weights": tuple(numbers),
        "sources": tuple(roots[list(places.values()).index(n)] for n in range(len(distinct))),
        "arg_names": [names[n] for n in numbers],
        "result_names": [f"prepared{n}" for n in range(len(distinct))],
    }
    body = Region(whole.body.params, whole.body.ops, tuple(distinct))
    return with_dims(Function(name, body, True, attrs, general.loc), {}), places


def _prepared_value_keys(prepare: Function) -> Iterator[Any]:
    """Yield a key per prepared value; values computed alike from equally named weights share it."""
    names = dict(zip(prepare.body.params, prepare.attrs["arg_names"], strict=True))
    for result in prepare.body.results:
        live, ops = {result}, []
        for op in reversed(prepare.body.ops):
            if any(v in live for v in op.results):
                ops.append(op)
                live.update((*op.operands, *values_captured_by_op(op)))
        params = tuple(sorted((v for v in prepare.body.params if v in live), key=names.__getitem__))
        body = Region(params, tuple(ops[::-1]), (result,))
        yield tuple(names[v] for v in params), structural_key(Function("", body, False))


def _numbers_of_source_weights(c: _WeightSplit, v: Value) -> tuple[int, ...]:
    """Return the numbers of the weights on which ``v`` depends."""
    params = c.function.body.params
    return tuple(sorted(params.index(root) for root in c.roots[v]))


def _call_function(
    c: _WeightSplit, cut: Sequence[_WeightSplit], prepare: Function, places: Mapping[Value, int]
) -> Function:
    """Return the call function: it takes the unbound arguments, the weights it still reads and prepared values."""
    f, results = c.function, prepare.body.results
    weights, params = set(f.attrs["weights"]), f.body.params
    read_weights = sorted({other.function.body.params.index(v) for other in cut for v in other.kept})
    numbers = [n for n in range(len(params)) if n not in weights] + read_weights
    prepared = [Value(f"prepared{n}", v.type) for n, v in enumerate(results)]
    mapped = {v: prepared[places[v]] for v in c.prepared}
    gone = {op for op in c.known if c.depends_on_weights_alone(op) and op not in c.staying}
    body = Region((*(params[n] for n in numbers), *prepared), *_region_without_ops(f.body, gone, mapped))
    takes = (*numbers, *range(len(params), len(params) + len(prepared)))
    return replace(f, body=body, attrs=_split_function_attributes(f, numbers, prepared, takes))


def _split_function_attributes(
    f: Function, numbers: Sequence[int], prepared: Sequence[Value], takes: tuple[int, ...]
) -> dict[str, Any]:
    """Return function attributes for the arguments ``numbers`` of ``f`` followed by ``prepared`` values."""
    names = f.attrs.get("arg_names") or [v.name for v in f.body.params]
    places = {n: place for place, n in enumerate(numbers)}
    sizes: dict[str, Dim] = {
        f"size_{n}_{axis}": sym(f"size_{places[n]}_{axis}") if n in places else size
        for n, v in enumerate(f.body.params)
        for axis, size in enumerate(v.type.shape)
    }
    attrs = {key: value for key, value in f.attrs.items() if key not in ("weights", "affinity")}
    changed: dict[str, Any] = {
        "arg_names": [*(names[n] for n in numbers), *(v.name for v in prepared)],
        "donated": [places[n] for n in f.attrs.get("donated", ())],
        "donated_into": {str(places[int(n)]): to for n, to in f.attrs.get("donated_into", {}).items()},
        "sizes": {name: (places[n], element) for name, (n, element) in f.attrs.get("sizes", {}).items()},
        "requirements": with_dims_in(f.attrs.get("requirements", ()), sizes),
    }
    return {**attrs, **{key: value for key, value in changed.items() if key in f.attrs}, "takes": takes,
            "arg_names": changed["arg_names"]}  # fmt: skip


def _region_without_ops(
    region: Region, gone: set[Op], mapped: Mapping[Value, Value]
) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """Return the ops of a region without those in ``gone``, and its results, with values replaced by ``mapped``."""
    ops = tuple(_ops_with_mapped_values((op for op in region.ops if op not in gone), mapped, gone))
    return ops, tuple(mapped.get(v, v) for v in region.results)


def _ops_with_mapped_values(
    ops: Iterable[Op],
    mapped: Mapping[Value, Value],
    gone: set[Op] = frozenset(),  # type: ignore[assignment]
) -> Iterator[Op]:
    """Yield ``ops`` with operands replaced by ``mapped``, without the ops ``gone`` in their regions."""
    for op in ops:
        regions = tuple(Region(r.params, *_region_without_ops(r, gone, mapped)) for r in op.regions)
        yield replace(op, operands=tuple(mapped.get(v, v) for v in op.operands), regions=regions)
