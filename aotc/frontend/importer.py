"""Import StableHLO as tensor IR: public functions, called functions, and the loop over their ops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import UNKNOWN, CompileError, Finding, Loc
from aotc.frontend.affinity import check_signatures, on_affinity_device, on_compute_side
from aotc.frontend.calls.callbacks import emit_check
from aotc.frontend.contexts import mlir_context_for
from aotc.frontend.entry_attrs import attribute_dictionaries, entry_attrs
from aotc.frontend.entry_dims import Shapes, solve_entry_dims, symbols_of_labels
from aotc.frontend.journal import IMPORTED, REFUSED, WAITS, Journal
from aotc.frontend.limits import MOST_NESTED, SIZE_ELEMENTS
from aotc.frontend.locations import loc_from_mlir, location_of_mlir_op
from aotc.frontend.mlir import RawModel, add_source_lines, fetch, read_source
from aotc.frontend.mlir_types import DYNAMIC, is_private, leaf_types, stablehlo_bounds
from aotc.frontend.op_importers import IMPORTERS
from aotc.frontend.platforms import LABEL
from aotc.frontend.quantized.importer import import_quantized, is_quantized
from aotc.frontend.requirements import with_argument_sizes
from aotc.frontend.session import Clone, ImportSession, ImportState, Poisoned
from aotc.guard import guard
from aotc.ir.dims.algebra import Dim, is_static, product, static, sym
from aotc.ir.dims.compare import decide_relation
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.tensor.ir import Function, Module, Region, Requirement, TensorType, Value
from aotc.options import DROP, Options
from aotc.support.recursion_limit import deeper_recursion
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.ranks.layout import mesh_of

_TERMINATORS = frozenset({
    "func.return", "stablehlo.return", "sdy.return", "scf.yield", "scf.condition", "shape.assuming_yield",
    "shape.yield", "tensor.yield",
})  # fmt: skip

_NOT_UTF8 = re.compile(r"nanobind::(detail::str_from_cstr_and_size|str)\(")  # jaxlib creates a Python string

_REFUSED = {
    "stablehlo.infeed": ("reads from a queue of the host", "an argument"),
    "stablehlo.outfeed": ("writes to a queue of the host", "a result"),
    "stablehlo.recv": ("receives from the host or another device", "an argument"),
    "stablehlo.send": ("sends to the host or another device", "a result"),
}
"""Ops that exchange data at run time: their purpose, and an alternative."""


def import_model(source: Any, *example_args: Any, **example_kwargs: Any) -> Module:
    """Import a StableHLO model or a JAX function as a tensor IR module.

    Parameters
    ----------
    source : str, bytes, path, jax.export.Exported or callable
        Text, bytecode, portable artifact, blob, a path to one, or a function.
    example_args, example_kwargs
        Arguments of a function: arrays, or ``jax.ShapeDtypeStruct`` (symbolic dims allowed).

    Raises
    ------
    CompileError
        If the model cannot be read or has unsupported ops; the error has up to ten findings.
    """
    return import_raw(fetch(source, example_args, example_kwargs))


def import_raw(
    raw: RawModel, journal: Journal | None = None, options: Options | None = None, platform: str = "cpu",
    parsed: Callable[[ir.Module], None] | None = None,
) -> Module:  # fmt: skip
    """Parse and import a fetched model as a tensor IR module; see :func:`import_module`.

    Only the options for devices and callbacks affect the result. ``platform`` selects the program of a model that was
    exported for several platforms. ``parsed`` is called with the MLIR module before the import modifies it.
    """
    with guard("while importing the model", options or Options(), raw.data, raw.path):
        try:
            with mlir_context_for(len(raw.data)) as context, context:
                read = read_source(raw, platform, parsed=parsed, context=context)
                return import_module(read.module, read.path, read.metadata, journal, options or Options())
        except CompileError as error:
            add_source_lines(error, raw)
            raise
        except RuntimeError as error:
            if not _NOT_UTF8.search(str(error)):
                raise
            message = "a name in the model is not UTF-8: the model is damaged"
            raise CompileError.at(Loc(raw.path), message, hint="export the model again") from None


def import_module(
    module: ir.Module,
    path: str = "",
    metadata: Mapping[str, Any] | None = None,
    journal: Journal | None = None,
    options: Options | None = None,
) -> Module:
    """Import a verified MLIR module as a tensor IR module.

    A ``journal`` records every op; with it, unsupported ops become calls of ``PLACEHOLDER`` instead of errors.
    """
    functions: dict[str, Any] = {}
    for op in module.body.operations:
        if op.operation.name == "func.func":
            functions[op.operation.attributes["sym_name"].value] = op
    public = [n for n, f in functions.items() if not is_private(f)]
    if len(public) > 1:
        computations = _called_computations(module)
        public = [n for n in public if n not in computations]
    if not public:
        raise CompileError.at(Loc(path), "the module has no public function")
    info, chosen = metadata or {}, options or Options()
    check_signatures(functions, chosen, path)

    def session_of() -> ImportSession:
        calls, drop = info.get("callbacks", ()), chosen.callbacks == DROP
        return ImportSession(
            functions, import_block, clone, path, journal=journal, callbacks=calls, drop_callbacks=drop,
            devices=chosen.devices, default_device=chosen.default_device, places={} if journal is None else None,
            ranks=_number_of_ranks(info, path),
        )  # fmt: skip

    first_session = session_of()
    dims = [_argument_dims(first_session, functions[name]) for name in public]
    session = _import_public_functions(session_of(), public, dims, info)
    if session.dynamic and any(not is_static(shape) for shapes in dims for shape in shapes):
        first = [session.functions[name].attrs for name in public]
        solved = [solve_entry_dims(a.get("requirements", ()), s) for a, s in zip(first, dims)]
        named = _rename_dim_symbols(dims, solved, session, functions)
        session = _import_public_functions(session_of(), public, named, info)
        for name, shapes, after, attrs in zip(public, dims, named, first):
            session.functions[name] = _with_requirements_of_first_import(session.functions[name], attrs, shapes, after)
    else:
        for name in public:
            entry = session.functions[name]
            session.functions[name] = _with_requirements_of_first_import(entry, entry.attrs, [], [])
    if session.findings and journal is None:
        raise CompileError(session.findings[: CompileError.LIMIT])
    return Module(dict(sorted(session.functions.items(), key=lambda f: not f[1].public)))


def _number_of_ranks(metadata: Mapping[str, Any], path: str) -> int:
    """Return the size of the mesh that the program is partitioned for; 0 without one."""
    meshes = [m["ranks"]["mesh"] for m in metadata.get("entries", {"": metadata}).values() if m.get("ranks")]
    if any(mesh != meshes[0] for mesh in meshes):
        names = " and ".join(str(mesh_of(mesh)) for mesh in meshes)
        raise CompileError.at(Loc(path), f"the functions are for different meshes: {names}", hint="one mesh for all")
    return mesh_of(meshes[0]).size if meshes else 0


def _with_requirements_of_first_import(
    function: Function, first: Mapping[str, Any], unknowns: Shapes, named: Shapes
) -> Function:
    """Return a public function (entry) that also checks the requirements of the first import.

    The first import has a plain unknown (``unknowns``) for each size, the second the solved dims (``named``).
    ``first`` are the entry's attributes after the first import. The types of the second import imply every solved
    requirement, but the message of the requirement is more informative than a type mismatch. The second import finds
    the unsolved requirements again.
    """
    places = {s.name: (n, k) for n, shape in enumerate(unknowns) for k, d in enumerate(shape) for s in symbols(d)}
    sizes = {name: sym(f"size_{n}_{k}") for name, (n, k) in places.items()}
    dims = {name: named[n][k] for name, (n, k) in places.items()}
    early: list[Requirement] = []
    for number, (relation, left, right, message, values) in enumerate(first.get("requirements", ())):
        solved = relation == "eq" and decide_relation("eq", substitute(left, dims), substitute(right, dims))
        if not unknowns or number < first.get("assertions", 0) or solved:
            sides = [substitute(e, sizes) for e in (left, right, *values)]
            early.append((relation, sides[0], sides[1], message, tuple(sides[2:])))
    own = () if function.attrs is first else function.attrs.get("requirements", ())
    late = own[function.attrs.get("assertions", 0) :]
    checks = {"requirements": (*early, *late)} if early or late else {}
    attrs = {k: v for k, v in function.attrs.items() if k not in ("requirements", "assertions")}
    return replace(function, attrs=attrs | checks)


def _rename_dim_symbols(
    unknown: list[Any], entries: list[Any], session: ImportSession, functions: Mapping[str, Any]
) -> list[Any]:
    """Rename the symbols in the argument dims of all public functions to the model's own dim names.

    ``entries`` are the solved dims, ``unknown`` the plain unknowns in their place before solving.
    """
    used = {s.name for shapes in entries for shape in shapes for d in shape for s in symbols(d)}
    names = {name: sym(name) for name in used}
    pairs = [p for old, new in zip(unknown, entries) for a, b in zip(old, new) for p in zip(a, b)]
    forced = {symbols(a).pop().name: substitute(b, names) for a, b in pairs if symbols(a)}
    attributes = [a for f in functions.values() for a in attribute_dictionaries(f, "arg_attrs", 0)]
    own = symbols_of_labels({a[LABEL].value for a in attributes if LABEL in a})
    labels: dict[str, Dim] = {}
    for callee, dims in session.called:
        for argument, value in zip(attribute_dictionaries(functions[callee], "arg_attrs", len(dims)), dims):
            label = argument.get(LABEL)
            if label is None or not label.value or value is None or len(value) != 1:
                continue
            size = substitute(value[0], forced)
            for symbol in sorted(s.name for s in symbols(size)):
                rest = size - sym(symbol)
                if not symbols(rest):  # size is symbol + rest, and label is its name
                    labels.setdefault(symbol, own[label.value] - rest)
    named = names | labels
    return [[tuple(substitute(d, named) for d in shape) for shape in shapes] for shapes in entries]


# Python stack frames for each function of the model: a call imports its callee recursively.
FRAMES_OF_A_CALL = 12
# Python stack frames for each level of nested regions: regions are imported recursively.
FRAMES_OF_A_REGION = 12


def _import_public_functions(
    session: ImportSession, public: Sequence[str], dims: Sequence[Any], metadata: Mapping[str, Any]
) -> ImportSession:
    """Import the ``public`` functions for their argument ``dims`` into ``session``, and return the session."""
    functions = session.symbols
    if session.journal is not None:
        session.journal.entries.clear()  # an earlier import of the same model, with other dims
    session.dynamic = any(not is_static(shape) for shapes in dims for shape in shapes) or _has_unknown_sizes(functions)
    for name in public:
        session.names[name] = 1
    with deeper_recursion(
        FRAMES_OF_A_CALL * len(functions) + FRAMES_OF_A_REGION * MOST_NESTED
    ):  # callees: by their calls
        for name, shapes in zip(public, dims):
            own = metadata.get("entries", {}).get(name, metadata)
            _import_entry_function(session, functions[name], name, shapes, own)
    return session


def _called_computations(module: ir.Module) -> set[str]:
    """Return the names of the scalar functions that custom calls refer to; such a function may be public."""
    names: set[str] = set()
    stack = list(module.body.operations)
    while stack:
        op = stack.pop().operation
        names |= {symbol.value for symbol in op.attributes.get("called_computations", ())}
        stack += [inner for region in op.regions for block in region.blocks for inner in block.operations]
    return names


def _argument_dims(session: ImportSession, function: Any) -> list[tuple[Dim, ...]]:
    """Return the dims of each argument of ``function``; every unknown size is a new symbol."""
    shapes = []
    for leaf in _argument_types(function, loc_from_mlir(function.operation.location, session.path)):
        _, sizes = session.parts(leaf)
        shapes.append(tuple(session.fresh_symbol() if n == DYNAMIC else n for n in sizes))
    return shapes


def _argument_types(function: Any, loc: Loc = UNKNOWN) -> list[ir.Type]:
    """Return the tensor types of a function's arguments: several for a tuple, none for a token.

    Errors have the location ``loc``.
    """
    return [leaf for a in function.regions[0].blocks[0].arguments for leaf in leaf_types(a.type, loc)]


def _import_entry_function(
    session: ImportSession, function: Any, name: str, shapes: Any, metadata: Mapping[str, Any]
) -> None:
    """Import one public function for arguments of the dims ``shapes``, with its requirements as attributes."""
    block = function.regions[0].blocks[0]
    state = ImportState(session)
    params = []
    for i, (leaf, shape) in enumerate(zip(_argument_types(function), shapes)):
        params.append(Value(f"arg{i}", TensorType(session.parts(leaf)[0], shape)))
    state.is_entry = True
    session.sizes.clear()
    session.requirements.clear()
    session.met.clear()
    session.assertions.clear()
    session.positive.clear()
    if session.dynamic:
        session.memo.clear()  # requirements and assumptions of a clone belong to its entry
        _name_values(session, params)
        _require_bounds(state, _argument_types(function), shapes)
    try:
        body = _with_checkify_assertions(state, state.region(block, params), metadata.get("checks", ()))
    except Poisoned:
        body = Region(tuple(params), (), ())
    loc = loc_from_mlir(function.operation.location, session.path)
    attrs = entry_attrs(function, block, metadata, session.devices, loc)
    if session.sizes:
        attrs |= {"sizes": dict(session.sizes)}
    if session.requirements or session.assertions:
        with_sizes = with_argument_sizes(session.requirements, params, session.sizes, attrs["arg_names"])
        asserted = tuple(session.assertions.values())
        attrs |= {"requirements": (*asserted, *with_sizes), "assertions": len(asserted)}
    session.functions[name] = Function(name, body, True, attrs, loc)


def _require_bounds(state: ImportState, types: Sequence[ir.Type], shapes: Sequence[Sequence[Dim]]) -> None:
    """Require at every call that sizes of arguments do not exceed the bounds in their MLIR ``types``."""
    for t, shape in zip(types, shapes, strict=True):
        for size, bound in zip(shape, stablehlo_bounds(t)):
            if bound != DYNAMIC:
                state.require("le", size, bound, "a size of {0} of an argument, of which the type allows {1}")


def _with_checkify_assertions(state: ImportState, body: Region, checks: Sequence[Mapping[str, Any]]) -> Region:
    """Return ``body`` with an assertion for each check of the checkify errors among its results."""
    if not checks:
        return body

    def make(_: Sequence[Value]) -> Sequence[Value]:
        for check in checks:
            emit_check(state, body.results, check)
        return ()

    added = state.region_of_emitter((), make)
    return replace(body, ops=body.ops + added.ops)


def _name_values(session: ImportSession, params: Sequence[Value]) -> None:
    """Create a symbol for each element of small integer arguments, as the model may use these as sizes."""
    for n, p in enumerate(params):
        if kind_of(p.type.dtype) in "iu" and p.type.rank <= 1 and is_static(p.type.shape):
            count = static(product(p.type.shape))
            if count <= SIZE_ELEMENTS:
                names = [f"arg{n}" if p.type.rank == 0 else f"arg{n}_{k}" for k in range(count)]
                session.sizes.update((name, (n, k)) for k, name in enumerate(names))
                session.known[p] = tuple(sym(name) for name in names)


def _has_unknown_sizes(functions: Mapping[str, Any]) -> bool:
    """Return True if an op of ``functions`` has a result with an unknown size."""
    stack = [block for f in functions.values() for region in f.regions for block in region.blocks]
    while stack:
        for op in stack.pop().operations:
            for v in op.operation.results:
                if isinstance(v.type, ir.RankedTensorType) and not v.type.has_static_shape:
                    return True
            stack += [block for region in op.operation.regions for block in region.blocks]
    return False


def import_block(state: ImportState, block: Any) -> list[Value]:
    """Import the ops of a block and return the values of its terminator.

    An unsupported op is recorded and the import continues, so that one run finds all of them.
    """
    outer, session = (state.loc, state.op), state.session
    for view in block.operations:
        op = view.operation
        state.loc, state.op = location_of_mlir_op(op, session.path, session.places), op.name.replace("aotc.", "chlo.")
        if op.name in _TERMINATORS:
            with on_compute_side(state, op):
                results = state.operands(op)
            state.loc, state.op = outer
            return results
        _import_op(state, op)
        state.loc, state.op = outer
    return []


def _import_op(state: ImportState, op: Any) -> None:
    """Import one op on its device; record an unsupported op as a finding and replace its results by placeholders."""
    session, journal, loc = state.session, state.session.journal, state.loc
    seen = len(journal.entries) if journal else 0
    findings: tuple[Finding, ...] = ()
    outcome = IMPORTED
    try:
        with on_compute_side(state, op), on_affinity_device(state, op):
            _run_importer(state, op)
    except Poisoned:
        outcome = WAITS
        state.values.update((r, None) for r in op.results)
    except CompileError as error:
        outcome = REFUSED
        findings = tuple(_with_snippet(f, state, op) for f in error.findings)
        session.findings += findings
        state.placeholder(op)
    if journal:
        if outcome != IMPORTED and len(journal.entries) == seen:
            journal.add_inner(op, lambda inner: location_of_mlir_op(inner, session.path, session.places))
        journal.add(op, loc, outcome, findings)


def _run_importer(state: ImportState, op: Any) -> None:
    """Call the importer of one op; ops with quantized types pass through the quantized importer."""
    importer, session = IMPORTERS.get(op.name, _refuse_op), state.session
    quantized_before = session.quantized
    if not quantized_before or not is_quantized(op):
        importer(state, op)
    if session.quantized and is_quantized(op):
        import_quantized(importer, state, op)


def _refuse_op(state: ImportState, op: Any) -> None:
    """Report an op that no importer supports."""
    types = ", ".join(str(v.type) for v in op.operands)
    if op.name in _REFUSED:
        what, instead = _REFUSED[op.name]
        message = f"{op.name} on ({types}) {what} while the program runs: a bundle runs alone"
        state.fail(message, hint=f"make the value {instead} of the function")
    hint = "express it with other ops; `aotc lint` checks a model without compiling it"
    state.fail(f"{op.name} on ({types}) is not supported", hint)


def _with_snippet(finding: Finding, state: ImportState, op: Any) -> Finding:
    loc = finding.loc if finding.loc.line or finding.loc.name else state.loc
    text = finding.snippet or op.get_asm(large_elements_limit=8).splitlines()[0]
    return Finding(finding.message, loc, text, finding.hint)


def clone(state: ImportState, callee: str, operands: Sequence[Value]) -> Clone:
    """Import function ``callee`` for these operands; calls with equal types and shape values share the result."""
    session = state.session
    values = tuple(state.known.get(v) if session.dynamic else None for v in operands)
    key = (callee, tuple(v.type for v in operands), values, bool(state.by_element))
    if callee not in session.symbols:
        state.fail(f"call of {callee}, which the module does not define")
    if key in session.memo:
        return _is_usable_clone(session.memo[key])
    if key in session.open:
        state.fail(f"{callee} calls itself")
    session.memo[key] = _import_clone(state, callee, operands, values, key)
    return _is_usable_clone(session.memo[key])


def _is_usable_clone(clone: Clone | None) -> Clone:
    if clone is None:
        raise Poisoned
    return clone


def _import_clone(state: ImportState, callee: str, operands: Sequence[Value], values: Any, key: Any) -> Clone | None:
    """Import a copy of ``callee`` for operands with these shape values (``values``); see :class:`Clone`.

    ``key`` identifies the clone. None means that the results depend on an unsupported op.
    """
    session = state.session
    function = session.symbols[callee]
    block = function.regions[0].blocks[0]
    inner = ImportState(session)
    inner.by_element = state.by_element
    params = [Value(f"arg{i}", v.type) for i, v in enumerate(operands)]
    inner.known.update((p, k) for p, k in zip(params, values) if k is not None)
    inner.loc, inner.op = state.loc, state.op
    session.open.add(key)
    try:
        body = inner.region(block, params)
    except Poisoned:
        return None
    finally:
        session.open.discard(key)
    name = session.fresh_name(callee)
    session.functions[name] = Function(name, body, False, {}, loc_from_mlir(function.operation.location, session.path))
    session.called.append((callee, values))
    return Clone(name, body.results, tuple(inner.known.get(v) for v in body.results))
