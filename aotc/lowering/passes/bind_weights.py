"""Add copies of functions for bound arguments (weights), which are passed once, before all calls.

Before: ``main(%x, %w)`` with ``bind=("w",)``. After: also ``main_bound(%x, %w)``. Its attribute ``binds`` names
``main``; ``weights`` are the arguments that are known before a call, which matmuls treat as constants.
:mod:`aotc.lowering.passes.split_weights` later moves values computed from weights alone out of the copy.

Specialized copies (``specialize``) get such copies too. A function on several devices has none: its bound arguments are
stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aotc.diagnostics import CompileError, warn_user
from aotc.ir.dims.algebra import is_static
from aotc.ir.tensor.ir import Function, Module
from aotc.ir.tensor.substitute_dims import with_dims
from aotc.options import Options

# Attributes of a function that describe its callers. They hold for the original, not for the copy.
_OF_THE_CALLER = ("in_tree", "out_tree", "kept", "parameters", "arg_places", "doc", "state", "bound")


def bind_weights(module: Module, options: Options) -> Module:
    """Return ``module`` with a copy of each public function that has arguments of ``options.bind``.

    Raises
    ------
    CompileError
        If no function has such an argument, or an argument is donated or of symbolic size.
    """
    if not options.bind:
        return module
    entries = [f for f in module.functions.values() if f.public and "specializes" not in f.attrs]
    chosen = {f.name: bound_arguments(f, options.bind) for f in entries}
    _check_bound_names(entries, chosen, options.bind)
    copies: dict[str, Function] = {}
    for f in entries:
        if not chosen[f.name]:
            continue
        if "devices" in f.attrs:
            warn_user(f"bind: @{f.name} is for several devices: nothing is precomputed from the weights")
            continue
        name = _unused_function_name(f"{f.name}_bound", {*module.functions, *copies})
        copies[name] = _copy_with_weights(f, name, {"binds": f.name}, chosen[f.name])
        for special in [g for g in module.functions.values() if g.attrs.get("specializes") == f.name]:
            own = _unused_function_name(f"{special.name}_bound", {*module.functions, *copies})
            copies[own] = _copy_with_weights(special, own, {"specializes": name}, chosen[f.name])
    return module.with_functions(copies)


def bound_arguments(function: Function, names: Sequence[str | int]) -> tuple[int, ...]:
    """Return the numbers of the arguments that ``names`` select; the name of a pytree selects all of its leaves."""
    return tuple(sorted({n for name in names for n in _arguments_named(function, name)}))


def arg_names(function: Function) -> list[str]:
    """Return the names of a function's arguments."""
    return list(function.attrs.get("arg_names") or [v.name for v in function.body.params])


def _arguments_named(function: Function, name: str | int) -> list[int]:
    """Return the numbers of the arguments called ``name``; without any, ``name`` is a position in a call."""
    own = arg_names(function)
    if not isinstance(name, str) or name.isdecimal():
        return [int(name)] if int(name) < len(own) else []
    for labels in (own, function.attrs.get("arg_places", ())):
        numbers = [n for n, one in enumerate(labels) if one == name or one.startswith((f"{name}[", f"{name}."))]
        if numbers:
            return numbers
    return []


def _check_bound_names(
    entries: Sequence[Function], chosen: Mapping[str, tuple[int, ...]], names: Sequence[str | int]
) -> None:
    """Raise an error for names without an argument, and for arguments that cannot be bound before a call."""
    for name in names:
        if not any(_arguments_named(f, name) for f in entries):
            labels = ", ".join(dict.fromkeys(own for f in entries for own in arg_names(f)))
            raise CompileError.at(entries[0].loc, f"bind: no argument is called {name}", hint=f"one of {labels}"[:400])
    for f in entries:
        for n in chosen[f.name]:
            v, label = f.body.params[n], f"argument {n} ({arg_names(f)[n]}) of @{f.name}"
            if n in f.attrs.get("donated", ()):
                raise CompileError.at(f.loc, f"bind: {label} is donated", hint="do not donate it, or do not bind it")
            if not is_static(v.type.shape):
                raise CompileError.at(f.loc, f"bind: {label} is {v.type}, expected fixed sizes")


def _copy_with_weights(function: Function, name: str, own: Mapping[str, str], weights: tuple[int, ...]) -> Function:
    copy = with_dims(function, {})
    attrs = {key: value for key, value in copy.attrs.items() if key not in _OF_THE_CALLER}
    return replace(copy, name=name, attrs={**attrs, **own, "weights": weights})


def _unused_function_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
