"""Convert Python functions and ``jax.stages`` objects to the bytes of a program, with JAX's metadata."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import jax.export
from jax._src import core as jax_core
from jax._src.export import _export as jax_export
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Loc
from aotc.frontend import from_jax
from aotc.frontend.calls.expanded_functions import expansion_rules
from aotc.frontend.calls.ragged import ragged_rules
from aotc.frontend.checked_errors import checks_of_results
from aotc.frontend.example_shapes import require_sizes
from aotc.frontend.filtered import is_filtered, split_function, without_fixed_attributes
from aotc.frontend.hidden_ops import hide_ops
from aotc.frontend.host_callbacks import recording_rules, records_of

_SIZES_HINT = (
    "a more specific dim, jax.export.symbolic_shape('2*b, 3'), "
    "or a constraint, jax.export.symbolic_shape('b, 3', constraints=['b >= 4'])"
)
_NO_EXPORT = "jax.export cannot export the function"
_ANY_CALL = "ALL"  # the importer decides on custom calls without JAX's stability guarantee
_CHLO = b"chlo"  # bytecode has the names of its ops' dialects


class JaxProgram(NamedTuple):
    """Bytecode or a portable artifact, with JAX's metadata: see :class:`aotc.frontend.mlir.Source`."""

    data: bytes
    metadata: Mapping[str, Any]
    values: Sequence[Any] = ()  # the leaves of the examples


def is_program(model: Any) -> bool:
    """Return True if ``model`` is a function or a JAX stage of one."""
    return callable(model) or isinstance(
        model, jax.export.Exported | jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled
    )


def program_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JaxProgram:
    """Trace and lower a function, an export, or a ``jax.stages`` object to a program.

    Only shape and dtype of example arrays are used; ``jax.ShapeDtypeStruct`` may have symbolic dims.

    Raises
    ------
    CompileError
        If the function raises or JAX cannot export it (the location is the line in the user's source, the cause the
            exception).
    """
    match model:
        case jax.stages.Compiled():
            hint = "f.lower(*args), which jax.stages.Compiled was made of, or f itself with example arguments"
            message = "a jax.stages.Compiled is machine code of XLA without its StableHLO"
            raise CompileError.at(Loc(), message, hint=hint)
        case jax.export.Exported() | jax.stages.Traced() | jax.stages.Lowered() if args or kwargs:
            message = f"the {type(model).__name__} already contains its arguments; found {len(args) + len(kwargs)} more"
            raise CompileError.at(Loc(), message, hint="aotc.compile(model) without examples")
        case jax.export.Exported():
            return program_of_export(model)
        case jax.stages.Lowered():
            return _program_of_lowering(model)
    try:
        traced, values = (model, ()) if isinstance(model, jax.stages.Traced) else _trace_function(model, args, kwargs)
        program, doc = _program_of_trace(traced), _docstring_of_model(model)
        return JaxProgram(program.data, {**program.metadata, **({"doc": doc} if doc else {})}, values)
    except (CompileError, MemoryError):
        raise
    except Exception as error:
        # jaxlib's native code wraps an exception in a SystemError
        reported = error.__cause__ if isinstance(error, SystemError) and error.__cause__ else error
        reason = ": ".join([type(reported).__name__, *str(reported).strip().splitlines()[:1]])
        hint = _signature_hint(model, args, kwargs) if isinstance(reported, TypeError) else ""
        if type(reported).__name__ == "InconclusiveDimensionOperation":
            hint = _SIZES_HINT
        raise CompileError.at(_users_line_in_traceback(error), f"{_NO_EXPORT}: {reason}", hint=hint) from error


def program_of_export(exported: jax.export.Exported) -> JaxProgram:
    """Return the program of a ``jax.export.Exported``."""
    leaves, leaf_numbers = exported.in_tree.num_leaves, list(exported.module_kept_var_idx)
    if leaf_numbers != sorted({*leaf_numbers} & {*range(leaves)}) or len(exported.in_avals) != leaves:
        message = f"the export is of {leaves} arrays, and its module reads those numbered {leaf_numbers}"
        raise CompileError.at(Loc(), message, hint="export the function again: the file may be damaged")
    checks = checks_of_results(exported.out_tree, exported.out_avals)
    several = exported.nr_devices > 1 or b"sdy\0" in exported.mlir_module_serialized
    devices: dict[str, Any] = {"devices": exported.nr_devices} if several else {}
    shapes = [[n if isinstance(n, int) else str(n) for n in aval.shape] for aval in exported.in_avals]
    if several and any(isinstance(n, str) for shape in shapes for n in shape):
        devices["shapes"] = shapes
    metadata = {**from_jax.export_metadata(exported), "checks": checks, **devices}
    return JaxProgram(exported.mlir_module_serialized, metadata)


def _signature_hint(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a hint with the function's signature if the example arguments do not fit it, else an empty string."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return f"an example of each argument, aotc.compile(f, x, kwargs={{'name': y}}); the function takes {signature}"
    return ""


def _docstring_of_model(model: Any) -> str:
    """Return the docstring of a model's function, found through partial applications and decorators."""
    while isinstance(model, functools.partial) or hasattr(model, "__wrapped__"):
        model = model.func if isinstance(model, functools.partial) else model.__wrapped__
    return (inspect.getdoc(model) or "") if inspect.isroutine(model) else ""


def _trace_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """Trace a function for its example arguments; return the trace and the leaves of the examples."""
    if is_filtered(function):
        jitted, args, kwargs = split_function(function, args, kwargs)
    elif hasattr(function, "trace"):
        jitted = function
    else:
        jitted, args, kwargs = without_fixed_attributes(function, args, kwargs)
    info = getattr(jitted, "_jit_info", None)
    places, names = getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())
    places = {n % len(args) if args else n for n in places}
    specs = [a if n in places else jax.tree.map(from_jax.tracing_spec, a) for n, a in enumerate(args)]
    keywords = {k: v if k in names else jax.tree.map(from_jax.tracing_spec, v) for k, v in kwargs.items()}
    require_sizes(function, {n: a for n, a in enumerate(args) if n not in places}, kwargs)
    examples = [a for n, a in enumerate(args) if n not in places], {k: v for k, v in kwargs.items() if k not in names}
    return jitted.trace(*specs, **keywords), jax.tree.leaves(examples)


class _TracedFunction:
    """Adapter that passes an existing trace to ``jax.export`` as a jitted function, lowered with aotc's own rules."""

    def __init__(self, traced: Any) -> None:
        self.traced, self.jaxpr, self.fun_name = traced, traced.jaxpr, traced.fun_name

    def __call__(self) -> None:
        raise NotImplementedError

    def trace(self) -> Any:
        """Return this object: it has a trace already."""
        return self

    def lower(self, _private_parameters: Any, **options: Any) -> Any:
        """Lower the trace: callbacks become records, ragged matmuls become tiles; complex functions follow C99."""
        rules = (*recording_rules(), *ragged_rules(), *expansion_rules(_computes_complex_numbers(self.jaxpr.jaxpr)))
        parameters = replace(_private_parameters, override_lowering_rules=rules)
        return self.traced.lower(_private_parameters=parameters, **options)


class _ExportedFunction(_TracedFunction):
    """Adapter for ``jax.export`` like :class:`_TracedFunction`; custom calls preserve CHLO and complex functions."""

    def lower(self, _private_parameters: Any, **options: Any) -> Any:
        """Lower the trace with hidden ops, in a copy: JAX may cache its own lowering."""
        lowered = super().lower(_private_parameters, **options)
        code = jax_mlir.module_to_bytecode(lowered._lowering.stablehlo())
        is_complex = _computes_complex_numbers(self.jaxpr.jaxpr)
        if _CHLO not in code and not is_complex:
            return lowered
        context = jax_mlir.make_ir_context()
        with context, ir.Location.unknown(context):
            module = ir.Module.parse(code)
            hide_ops(module, is_complex)
        own = copy.copy(lowered)
        own._lowering = copy.copy(lowered._lowering)
        own._lowering._hlo = module
        return own


def _program_of_trace(traced: Any) -> JaxProgram:
    """Lower a trace for CPU to a program; unlike an export, it also has the unused arguments."""
    whole = copy.copy(traced)
    if hasattr(whole, "_params"):
        whole._params = {**whole._params, "keep_unused": True}
    if _is_plain_lowering_enough(traced.jaxpr):
        parameters = jax_mlir.LoweringParameters(for_export=True, hoist_constants_as_args=False)
        lowered = _TracedFunction(whole).lower(parameters, lowering_platforms=("cpu",))
        if _has_mesh(lowered):  # XLA partitions the ops of JAX's own rules
            lowered = whole.lower(_private_parameters=parameters, lowering_platforms=("cpu",))
        return _program_of_lowering(lowered)
    names = [_ANY_CALL]
    while True:
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
        try:
            export = jax.export.export(_ExportedFunction(whole), platforms=("cpu",), disabled_checks=checks)
            return program_of_export(export())
        except ValueError as error:  # of a JAX without a wildcard for calls
            more = set(re.findall(r'custom_call @"?([\w.$]+)', str(error))) - set(names)
            if "custom calls" not in str(error) or not more:
                raise
            names += sorted(more)


def _has_mesh(lowered: jax.stages.Lowered) -> bool:
    """Return True if a lowered program may be for several devices: it names a mesh."""
    return any(op.operation.name == "sdy.mesh" for op in lowered.compiler_ir("stablehlo").body.operations)


def _is_plain_lowering_enough(jaxpr: Any) -> bool:
    """Return True if JAX's lowering suffices, without ``jax.export``.

    An export adds arguments for symbolic sizes and for ordered effects; other programs do not need it. It also creates
    an MLIR context for each program, which takes longer than lowering a small program.
    """
    names = {f.name for f in fields(jax_mlir.LoweringParameters)}
    has_private_api = hasattr(jax_export, "_module_to_bytecode") and {"for_export", "hoist_constants_as_args"} <= names
    sizes = [size for aval in jaxpr.in_avals for size in getattr(aval, "shape", ())]
    return has_private_api and not jaxpr.effects and all(isinstance(size, int) for size in sizes)


def _computes_complex_numbers(jaxpr: Any) -> bool:
    """Return True if a program computes complex numbers."""
    values = (v.aval for v in (*jaxpr.invars, *(v for equation in jaxpr.eqns for v in equation.outvars)))
    is_complex = any(getattr(getattr(value, "dtype", None), "kind", "") == "c" for value in values)
    return is_complex or any(map(_computes_complex_numbers, jax_core.subjaxprs(jaxpr)))


def _program_of_lowering(lowered: Any) -> JaxProgram:
    """Return the program of a ``jax.stages.Lowered``, with metadata from its private attributes."""
    compile_args = lowered._lowering.compile_args
    dims = compile_args.get("shape_poly_state")
    if dims is not None and len(dims.dim_vars) > dims.has_platform_index_argument:
        hint = "f.trace(*args) in place of f.lower(*args), or f itself with example arguments"
        raise CompileError.at(Loc(), "a jax.stages.Lowered with symbolic dims does not say whose they are", hint=hint)
    leaves = lowered.in_tree.num_leaves
    metadata = {
        **from_jax.pytree_metadata(lowered.in_tree, lowered.out_tree, leaves),
        "kept": sorted(compile_args.get("kept_var_idx", range(leaves))),
        "platforms": list(getattr(lowered._lowering, "_platforms", None) or ("cpu",)),
        "callbacks": records_of(compile_args.get("host_callbacks", ())),
        "checks": checks_of_results(lowered.out_tree, compile_args.get("global_out_avals")),
        **({"devices": compile_args.get("num_devices", 1)} if _has_mesh(lowered) else {}),
    }
    return JaxProgram(jax_mlir.module_to_bytecode(lowered.compiler_ir("stablehlo")), metadata)


def _users_line_in_traceback(error: Exception) -> Loc:
    """Return the last line of the user's own code in the traceback of ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.lineno and not f.filename.startswith(from_jax.NOT_THE_USERS)]
    return Loc(own[-1].filename, own[-1].lineno or 0) if own else Loc()
