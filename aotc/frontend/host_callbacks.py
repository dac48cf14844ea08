"""Records of JAX's callbacks to Python: a record describes the Python function that a program calls.

aotc lowers a function with its own rules for primitives that call back: each becomes a custom call ``TARGET`` with its
record as JSON. A ``jax.stages.Lowered`` contains functions that JAX wrapped; their closures contain the same
information.

A record has a ``kind``:

``raise``       the call fails; its operand selects one of ``messages``: ``equinox.error_if``
``pass``        returns its first operands: equinox adds it after ``raise`` for devices that cannot raise
``check``       fails if one of ``checks`` (:mod:`aotc.frontend.checked_errors`) does: ``jax.experimental.checkify``
anything else   the name of JAX's function, such as ``pure_callback``; ``name`` is the name of the Python function,
                ``ordered`` is true if such calls must run in program order
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import callback as jax_callback
from jax._src import checkify, debugging

from aotc.frontend.calls.callbacks import TARGET
from aotc.frontend.checked_errors import checkify_checks

Record = Mapping[str, Any]
_KINDS = {
    "pure_callback_lowering": "jax.pure_callback",
    "io_callback_lowering": "jax.experimental.io_callback",
    "debug_callback_lowering": "jax.debug.callback",
}


def recording_rules() -> tuple[tuple[Any, Callable[..., Any]], ...]:
    """Return lowering rules, for primitives that call back, that emit records in place of functions."""
    rules: list[tuple[Any, Callable[..., Any]]] = [
        (jax_callback.pure_callback_p, _lower_pure_callback),
        (jax_callback.io_callback_p, _lower_io_callback),
        (debugging.debug_callback_p, _lower_debug_callback),
        (checkify.check_p, _lower_checkify_check),
    ]
    if hasattr(debugging, "debug_print_p"):
        rules.append((debugging.debug_print_p, _lower_debug_print))
    return tuple(rules)


def records_of(callbacks: Sequence[Any]) -> list[Record]:
    """Return a record for each Python callback of a program that JAX itself lowered.

    ``callbacks`` are the functions that JAX wrapped.
    """
    return [_record_of_wrapped(function) for function in callbacks]


def _emit_callback_record(ctx: Any, args: Sequence[Any], record: Record) -> Sequence[Any]:
    """Emit a callback as an FFI call whose configuration is its ``record``."""
    if record.get("ordered"):
        ctx.set_tokens_out(ctx.tokens_in)  # the importer rejects ordered calls
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    return rule(ctx, *args, record=json.dumps(record))


def _lower_pure_callback(ctx: Any, *args: Any, callback: Any, **_: Any) -> Sequence[Any]:
    return _emit_callback_record(ctx, args, _record_of_function("jax.pure_callback", callback))


def _lower_io_callback(ctx: Any, *args: Any, callback: Any, ordered: bool = False, **_: Any) -> Sequence[Any]:
    return _emit_callback_record(ctx, args, _record_of_function("jax.experimental.io_callback", callback, ordered))


def _lower_debug_callback(ctx: Any, *args: Any, callback: Any, effect: Any, **_: Any) -> Sequence[Any]:
    ordered = effect is debugging.ordered_debug_effect
    return _emit_callback_record(ctx, args, _record_of_function("jax.debug.callback", callback, ordered))


def _lower_debug_print(ctx: Any, *args: Any, ordered: bool = False, **_: Any) -> Sequence[Any]:
    return _emit_callback_record(ctx, args, {"kind": "jax.debug.print", "name": "debug_print", "ordered": ordered})


def _lower_checkify_check(ctx: Any, *args: Any, err_tree: Any, debug: bool, **_: Any) -> Sequence[Any]:
    if debug:  # of checkify.debug_check, which only checkify.checkify enables
        return []
    return _emit_callback_record(ctx, args, {"kind": "check", "checks": checkify_checks(err_tree, ctx.avals_in)})


def _record_of_function(kind: str, callback: Any, ordered: bool = False) -> Record:
    """Return the record of a Python callback, from the user's function inside of JAX's wrappers."""
    function = getattr(callback, "callback_func", callback)
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif getattr(function, "__module__", "").startswith("jax._src.") and "callback" in (
            closure := _closure_values(function)
        ):
            function = closure["callback"]
        else:
            break
    name = getattr(function, "__name__", type(function).__name__)
    if getattr(function, "__module__", "") == "equinox._errors":
        messages = _closure_values(function).get("msgs")
        if name == "raises" and messages is not None:
            return {"kind": "raise", "messages": [str(m) for m in messages]}
        if name == "tpu_msg":
            return {"kind": "pass"}
    if name == "_format_print_callback":
        kind, name = "jax.debug.print", "debug_print"
    return {"kind": kind, "name": name, "ordered": ordered}


def _record_of_wrapped(wrapped: Any) -> Record:
    """Return the record of a callback from the closure variables of JAX's wrapper."""
    ordered = "callback_without_token" in (cells := _closure_values(wrapped))
    outer = _closure_values(cells["callback_without_token"]) if ordered else cells
    function = outer["callback"] if ordered else outer.get("callback", wrapped)
    if isinstance(function, functools.partial) and function.func is checkify.python_err:
        return {"kind": "check", "checks": checkify_checks(function.args[0], None)}
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    return _record_of_function(
        _KINDS.get(maker, "a callback"), _closure_values(function).get("callback", function), ordered
    )


def _closure_values(function: Any) -> Mapping[str, Any]:
    """Return the closure variables of a function, by name."""
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
