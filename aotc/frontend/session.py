"""The state of an import: the session of a module, the state of a function being cloned, and the emission of ops.

The import *clones* a function of the model: it specializes a copy to the types and shape values of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Finding, Loc
from aotc.frontend import requirements, shape_values
from aotc.frontend.journal import Journal
from aotc.frontend.limits import MOST_NESTED, SHAPE_ELEMENTS
from aotc.frontend.mlir_types import DYNAMIC, check_size, dtype_and_sizes, integer_tuple, leaf_types, stablehlo_bounds
from aotc.frontend.quantized import types as quantization
from aotc.frontend.shape_values import Known
from aotc.ir.dims.algebra import Dim, Expr, Sym, lone_atom, sym
from aotc.ir.dims.compare import decide_relation
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.opset import COMPARISONS, OPS, SCALARS, RuleError
from aotc.ir.tensor.ir import Function, Op, Region, Requirement, TensorType, Value

PLACEHOLDER = "aotc.placeholder"  # the custom call that replaces a refused op

Leaves = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy of a called function, imported for given argument types.

    ``known`` has the shape value (:mod:`aotc.frontend.shape_values`) of each result, None if unknown.
    """

    name: str
    results: tuple[Value, ...]
    known: tuple[Known | None, ...]


@dataclass(slots=True)
class ImportSession:
    """State of one import that all clones of the module share.

    Attributes
    ----------
    symbols : mapping
        The functions of the model, by name.
    import_block, clone : callable
        Import the ops of a block, and a callee, for importers of ops with regions or calls.
    memo : dict
        The clone for each callee with argument types and shape values; ``open`` has the keys being cloned.
    dynamic : bool
        The module has dynamic shapes.
    known : dict
        The shape value of each value in all clones; ``called`` lists callees with the shape values of their arguments.
    tests : dict
        For a value that compares dims with an unknown result: the relation and both sides.
    positive : dict
        For the name of a symbol that an assertion has proven positive: the symbol with that bound.
    generators : int
        Number of ops that draw random numbers without a state.
    sizes : dict
        For the name of a symbol that is the value of an integer argument: numbers of the argument and the element.
    requirements : list
        Relations of dims that must hold before any work is done; ``assertions`` are those that the model itself
        asserts, and
        ``met`` those that are proven or required already.
    bound : list
        The symbols of computed sizes.
    fitting : set
        The types whose sizes have been checked.
    depth : int
        Number of nested regions around an op, through calls.
    callbacks : sequence
        The records of callbacks to Python, by number (:mod:`aotc.frontend.host_callbacks`); ``drop_callbacks`` drops
        those
        with unused results.
    devices, default_device
        From the options.
    journal : Journal, optional
        Records every op, and distinguishes ops by their locations; without it, ops with equal locations share an entry
        of
        ``places``.
    ranks : int
        Number of ranks that run the program, which is one rank's; 0 if it is for one device.
    quantized : bool
        A quantized type has occurred.
    quantized_as : str
        The current substitute for quantized types: their ``storage`` type, their ``expressed`` type, or a dtype.
    """

    symbols: Mapping[str, Any]
    import_block: Callable[[ImportState, Any], list[Value]]
    clone: Callable[[ImportState, str, Sequence[Value]], Clone]
    path: str = ""
    dynamic: bool = False
    functions: dict[str, Function] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)
    open: set[Any] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    types: dict[ir.Type, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    places: dict[ir.Attribute, Loc] | None = None
    ranks: int = 0
    quantized_as: str = "storage"
    quantized: bool = False
    names: dict[str, int] = field(default_factory=dict)
    known: dict[Value, Known] = field(default_factory=dict)
    called: list[tuple[str, tuple[Known | None, ...]]] = field(default_factory=list)
    tests: dict[Value, tuple[str, Known, Known]] = field(default_factory=dict)
    positive: dict[str, Dim] = field(default_factory=dict)
    fresh: int = 0
    generators: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    requirements: list[Requirement] = field(default_factory=list)
    met: set[tuple[str, Dim, Dim]] = field(default_factory=set)
    assertions: dict[tuple, Requirement] = field(default_factory=dict)
    bound: list[str] = field(default_factory=list)
    journal: Journal | None = None
    fitting: set[TensorType] = field(default_factory=set)
    depth: int = 0
    callbacks: Sequence[Mapping[str, Any]] = ()
    drop_callbacks: bool = False
    devices: Collection[str] = ()
    default_device: str = ""

    def fresh_name(self, name: str) -> str:
        """Return ``name``, or ``name.N`` if it is used."""
        fresh = name
        while fresh in self.names:
            fresh = f"{name}.{self.names[name]}"
            self.names[name] += 1
        self.names[fresh] = 1
        return fresh

    def fresh_symbol(self) -> Dim:
        """Return a new dim symbol ``d0``, ``d1``..."""
        self.fresh += 1
        return sym(f"d{self.fresh - 1}")

    def parts(self, t: ir.Type) -> tuple[str, tuple[int, ...]]:
        """Return the dtype name and the sizes (``DYNAMIC`` where unknown) of a tensor type."""
        pair = self.types.get(t)
        if pair is None:
            q = quantization.quantization_of(t)
            if q is not None:
                self.quantized = True
                dtypes = {"storage": q.storage, "expressed": q.expressed}
                pair = dtypes.get(self.quantized_as, self.quantized_as), tuple(t.shape)
            self.types[t] = pair = pair or dtype_and_sizes(t, self.path)
        return pair


# Lower bound of the value of an integer argument, the lowest i64: shape arithmetic must also be correct for values that
# are not sizes.
LOWEST_VALUE = -(1 << 63)


class ImportState:
    """One function being cloned: its values, known shape values, and open regions."""

    def __init__(self, session: ImportSession) -> None:
        """Start a function of ``session``, with an open block and without values."""
        self.session = session
        self.values: dict[Any, Leaves | None] = {}
        self.known = session.known
        self.blocks: list[list[Op]] = [[]]
        self.is_entry = False  # only an entry can compute sizes at run time
        self.loc = Loc(session.path)
        self.op = ""  # name of the current op, for messages
        self.count = 0
        self.on_host: set[Any] = set()  # results of host ops
        self.hosted = False  # inside the regions of a host op
        self.by_element = 0  # number of open elementwise computations, whose branches become selects

    def value(self, v: ir.Value) -> Value:
        """Return the tensor IR value that clones the MLIR value ``v``, one tensor."""
        (leaf,) = self.leaves(v)
        return leaf

    def leaves(self, v: ir.Value) -> Leaves:
        """Return the tensor IR values of the MLIR value ``v``: one, or several for a tuple."""
        tensors = self.values[v]
        if tensors is None:
            raise Poisoned
        return tensors

    def operands(self, op: ir.Operation) -> list[Value]:
        """Return the tensors of an op's operands; a tuple has several, a token none."""
        return [leaf for v in op.operands for leaf in self.leaves(v)]

    def data_operands(self, op: ir.Operation) -> list[Value]:
        """Return the operands of a custom call without those that only state the shapes of its results."""
        operands = self.operands(op)
        if "indices_of_shape_operands" not in op.attributes:
            return operands
        shapes = integer_tuple(op.attributes["indices_of_shape_operands"])
        return [v for n, v in enumerate(operands) if n not in shapes]

    def bind(self, op: ir.Operation, results: Sequence[Value]) -> None:
        """Bind the results of ``op`` to tensors, and require the sizes that the op's types state."""
        self.bind_values(op.results, results)
        if self.session.dynamic:
            leaves = [leaf for v in op.results for leaf in leaf_types(v.type)]
            requirements.require_stated_sizes(self, results, [self.session.parts(leaf)[1] for leaf in leaves])
            requirements.require_bounds(self, results, [stablehlo_bounds(leaf) for leaf in leaves])

    def bind_values(self, values: Sequence[Any], tensors: Sequence[Value]) -> None:
        """Distribute ``tensors`` to MLIR ``values`` by their types."""
        if len(values) == len(tensors) == 1:
            self.values[values[0]] = tuple(tensors)
            return
        rest = list(tensors)
        for v in values:
            count = len(leaf_types(v.type))
            self.values[v] = tuple(rest[:count])
            del rest[:count]

    def new_value(self, t: TensorType, name: str = "") -> Value:
        """Return a fresh value of type ``t``."""
        if not name:
            name, self.count = str(self.count), self.count + 1
        return Value(name, t)

    def dtype(self, t: ir.Type) -> str:
        """Return the dtype name of an MLIR tensor type."""
        return self.session.parts(t)[0]

    def static_type(self, t: ir.Type) -> TensorType:
        """Return the tensor IR type of ``t``; an error if a size is unknown."""
        dtype, shape = self.session.parts(t)
        if DYNAMIC in shape:
            message = f"the size of {t} is not known here"
            named = f"{self.op}: {message}" if self.op else message
            self.fail(named, "the op's dynamic form, which has the shape for an operand")
        return TensorType(dtype, shape)

    def type_with(self, t: ir.Type, dims: Sequence[Dim]) -> TensorType:
        """Return the tensor IR type of ``t``; ``dims`` replace its unknown sizes."""
        dtype, shape = self.session.parts(t)
        return TensorType(dtype, tuple(d if n == DYNAMIC else n for n, d in zip(shape, dims)))

    def emit(
        self,
        name: str,
        operands: Sequence[Value] = (),
        attrs: Mapping[str, Any] | None = None,
        declared: Sequence[TensorType] = (),
        regions: Sequence[Region] = (),
    ) -> tuple[Value, ...]:
        """Append op ``name`` and return its results; the op's size constraints become requirements."""
        attrs = attrs or {}
        if self.by_element and name in SCALARS:
            operands = self._broadcast_scalar_operands(operands)
        operands = requirements.require_constraints(self, name, operands, attrs, declared)
        results = self.append(name, operands, attrs, declared, regions)
        for d in [d for v in results for d in v.type.shape if not isinstance(d, int)]:
            self.require("le", 0, d, "a size of {1} in its result")
        return results

    def append(
        self,
        name: str,
        operands: Sequence[Value],
        attrs: Mapping[str, Any],
        declared: Sequence[TensorType] = (),
        regions: Sequence[Region] = (),
    ) -> tuple[Value, ...]:
        """Append an op whose size constraints hold already, and return its results; see :meth:`emit`."""
        types = tuple(v.type for v in operands)
        try:
            result_types = OPS[name].infer(types, attrs, tuple(regions), tuple(declared))
        except RuleError as error:
            message, hint = requirements.broken_type_rule(self.op, error)
            raise CompileError.at(self.loc, message, hint=hint) from None
        for t in result_types:
            if t not in self.session.fitting:
                check_size(t.dtype, t.shape, self.loc)
                self.session.fitting.add(t)
        results = tuple(self.new_value(t) for t in result_types)
        self.blocks[-1].append(Op(name, tuple(operands), results, attrs, tuple(regions), self.loc))
        if result_types and shape_values.has_shape_value(result_types[0]):
            self._track_shape_value(name, operands, types, attrs, results[0])
        return results

    def _track_shape_value(
        self, name: str, operands: Sequence[Value], types: Sequence[TensorType], attrs: Mapping, result: Value
    ) -> None:
        """Compute the shape value of a new result from those of the operands, and record comparisons of dims."""
        values = [self.known[v] for v in operands if v in self.known]
        decided = shape_values.fold_boolean_by_one_operand(name, values) if result.type.dtype == "i1" else None
        if decided is not None:
            self.known[result] = decided
        if len(values) == len(operands):
            folded = shape_values.fold_shape_value(name, values, types, attrs, result.type, self.session.positive)
            if folded is not None and self.session.sizes:
                folded = self._if_negatives_agree(folded, name, values, types, attrs, result)
            if folded is not None:
                self.known[result] = folded
            if name in COMPARISONS and (folded is None or any(isinstance(v, Expr) for v in folded)):
                self.session.tests[result] = (name, values[0], values[1])

    def _if_negatives_agree(
        self,
        folded: Known,
        name: str,
        operand_values: Sequence[Known],
        types: Sequence[TensorType],
        attrs: Mapping,
        result: Value,
    ) -> Known | None:
        """Return ``folded``, or None if folding relied on an integer argument that may be negative.

        The symbol for the value of an argument has the bounds of a size: not negative. But a value that is not used as
        a size may be negative. So the op is folded again with wider bounds, and both results must agree.
        """
        names = {s.name for values in operand_values for d in values for s in symbols(d)} & self.session.sizes.keys()
        signed = {n: sym(n, lo=LOWEST_VALUE) for n in names - self.session.positive.keys()}
        if not signed:
            return folded
        wider = [tuple(substitute(d, signed) for d in values) for values in operand_values]
        again = shape_values.fold_shape_value(name, wider, types, attrs, result.type, self.session.positive)
        return folded if again is not None and [*map(str, again)] == [*map(str, folded)] else None

    def _broadcast_scalar_operands(self, operands: Sequence[Value]) -> list[Value]:
        """Return the operands with scalars broadcast to the others' shape, for computations mapped over tensors."""
        shape = max((v.type.shape for v in operands), key=len, default=())
        return [v if v.type.rank else self.broadcast_scalar(v, shape) for v in operands]

    def one(
        self,
        name: str,
        operands: Sequence[Value] = (),
        attrs: Mapping | None = None,
        declared: Sequence[TensorType] = (),
    ) -> Value:
        """Emit an op with a single result and return that result."""
        return self.emit(name, operands, attrs, declared)[0]

    def convert(self, v: Value, dtype: str) -> Value:
        """Return ``v`` as ``dtype``."""
        return v if v.type.dtype == dtype else self.one("convert", [v], {}, [TensorType(dtype, v.type.shape)])

    def promoted(self, operands: Sequence[Value], dtypes: Sequence[str]) -> list[Value]:
        """Convert ``operands`` to ``dtypes``, the parameter types of a combiner."""
        return [self.convert(v, dtype) for v, dtype in zip(operands, dtypes, strict=True)]

    def broadcast_scalar(self, v: Value, shape: Sequence[Dim]) -> Value:
        """Return scalar ``v`` broadcast to ``shape``."""
        if v.type.shape == tuple(shape):
            return v
        return self.one("broadcast", [v], {"dims": ()}, [TensorType(v.type.dtype, tuple(shape))])

    def dims_of(self, v: Value, what: str) -> tuple[Dim, ...]:
        """Return the elements of ``v``, a shape operand, as dims; ``what`` names it in errors."""
        elements = self.known.get(v)
        return self._bind_elements(v, what) if elements is None else elements

    def _bind_elements(self, v: Value, what: str) -> Known:
        """Return new symbols for the elements of ``v``, bound to them at run time (``bind_dim``) for later kernels."""
        if not self.is_entry or len(self.blocks) > 2:
            self.fail(
                f"{what} depends on data inside a loop, a branch or a callee",
                hint="compute the size in the entry function, outside of loops, and hand it on",
            )
        if not shape_values.has_shape_value(v.type):
            self.fail(f"{what} is {v.type}", hint=f"at most {SHAPE_ELEMENTS} sizes can be read")
        names = []
        for n in range(shape_values.static_element_count(v.type)):
            scalar = v
            if v.type.rank:
                one = self.one("slice", [v], {"start": (n,), "limit": (n + 1,), "stride": (1,)})
                scalar = self.one("reshape", [one], {}, [TensorType(v.type.dtype)])
            name = f"value_{len(self.session.bound)}"
            self.session.bound.append(name)
            self.emit("bind_dim", [scalar], {"dim": sym(name)})
            names.append(sym(name))
        self.known[v] = tuple(names)
        return self.known[v]

    def require(self, relation: str, left: Dim, right: Dim, message: str, values: Sequence[Dim] = ()) -> None:
        """Require ``left == right`` (``eq``) or ``left <= right`` (``le``) at every call, unless it is proven.

        The fields ``{0}`` and ``{1}`` of the message stand for ``values``, by default the two sides. A requirement
        inside a loop or branch must hold even if that does not run: sizes must fit the whole program.
        """
        key = (relation, left, right)
        if key in self.session.met:
            return
        proven = decide_relation(relation, left, right)
        if proven is False:
            text = message.format(*(values or (left, right)))
            named = not self.op or self.op in text
            self.fail(text if named else f"{self.op}: {text}", "operands whose sizes fit")
        self.session.met.add(key)
        if not proven:
            text = f"{self.op or 'the program'} at {self.loc}: {message}"
            self.session.requirements.append((*key, text, tuple(values) or (left, right)))

    def assert_dims(self, test: Value, numbers: Sequence[Value], message: str) -> bool:
        """Turn an assertion about dims into a requirement; return False if ``test`` is not about dims."""
        elements = self.known.get(test, ())
        relation, left, right = self.session.tests.get(test) or ("eq", elements, (1,) * len(elements))
        values = [self.known.get(v, ()) for v in numbers]
        if not left or len(left) != len(right) or any(len(v) != 1 for v in values):
            return False
        shown = tuple(v[0] for v in values)
        for a, b in zip(left, right):
            row = (relation, a, b, message, shown)
            self.session.assertions.setdefault(row, row)
        return True

    def assume(self, test: Value) -> None:
        """Use an asserted comparison as a fact: after ``b >= 1``, the symbol ``b`` is positive."""
        match self.session.tests.get(test):
            case ("ge", (left,), (1,)) if isinstance(atom := lone_atom(left), Sym):
                self.session.positive[atom.name] = sym(atom.name, lo=1)

    def placeholder(self, op: ir.Operation) -> None:
        """Bind results of the refused ``op`` to placeholders, so that the import also checks ops that read them.

        Results that may be shapes, or whose type has unknown sizes, have no placeholder.
        """
        for v in op.results:
            try:
                types = [self.static_type(leaf) for leaf in leaf_types(v.type)]
            except CompileError:
                types = None
            if types is None or any(shape_values.has_shape_value(t) for t in types):
                self.values[v] = None
            else:
                attrs = {"target": PLACEHOLDER, "config": {}, "api_version": 1, "has_side_effect": False, "aliases": ()}
                self.values[v] = tuple(self.one("custom_call", (), attrs, [t]) for t in types)

    def constant(self, array: Any, t: TensorType) -> Value:
        """Emit a constant of type ``t`` with the elements of ``array``."""
        return self.one("constant", (), {"value": array}, [t])

    def fail(self, message: str, hint: str = "") -> NoReturn:
        """Raise a CompileError at the current op."""
        raise CompileError.at(self.loc, message, hint=hint)

    def region(self, block: Any, params: Sequence[Value], declared: Sequence[TensorType] = ()) -> Region:
        """Import an MLIR block as a region with ``params`` for its arguments; its results have ``declared`` types."""
        self.bind_values(block.arguments, params)
        return self._region_of_emitted_ops(
            params, lambda: requirements.require_types(self, self.session.import_block(self, block), declared)
        )

    def region_of_emitter(
        self,
        types: Sequence[TensorType],
        make: Callable[[list[Value]], Sequence[Value]],
        declared: Sequence[TensorType] = (),
    ) -> Region:
        """Return a region over new parameters of ``types``, with the ops and results that ``make`` emits.

        If ``declared`` has types, the results are required to have their shapes.
        """
        params = [self.new_value(t) for t in types]
        return self._region_of_emitted_ops(params, lambda: requirements.require_types(self, make(params), declared))

    def _region_of_emitted_ops(self, params: Sequence[Value], make: Callable[[], Sequence[Value]]) -> Region:
        """Return a region with parameters ``params`` and the ops and results that ``make`` emits."""
        nested = len(self.blocks) > 1  # a function's body is not a region of an op
        if nested and self.session.depth >= MOST_NESTED:
            self.fail(f"regions are nested more than {MOST_NESTED} deep", hint="select between values")
        self.blocks.append([])
        self.session.depth += nested
        try:
            results = make()
        finally:
            self.session.depth -= nested
            ops = self.blocks.pop()
        return Region(tuple(params), tuple(ops), tuple(results))

    def scalar_region(self, block: Any) -> Region:
        """Import a block over scalars, such as a combiner or a comparator, as a region."""
        params = [self.new_value(self.static_type(a.type), f"s{i}") for i, a in enumerate(block.arguments)]
        self.by_element += 1
        try:
            return self.region(block, params)
        finally:
            self.by_element -= 1


class Poisoned(Exception):
    """Signals that an operand comes from a refused op, whose error is recorded already."""


Importer = Callable[[ImportState, Any], None]
