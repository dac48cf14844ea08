"""Callbacks to Python: checks of equinox and checkify fail in the bundle; functions of the user replace others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aotc.diagnostics import warn_user
from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.mlir_types import config_of, dictionary_entries, leaf_types
from aotc.frontend.session import ImportState
from aotc.ir.dims.algebra import product
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.custom_calls import registered_call
from aotc.vmfb.dtypes import DTYPES, kind_of, real_of, to_numpy
from aotc.vmfb.messages import displayed_dtype

TARGET = "aotc.host_callback"
"""The custom call that replaces a callback in a program that aotc has lowered."""

CALLBACKS = frozenset({
    TARGET, "xla_ffi_python_cpu_callback", "xla_ffi_partitioned_python_cpu_callback", "xla_ffi_python_gpu_callback",
    "xla_python_cpu_callback", "xla_python_gpu_callback",
})  # fmt: skip
_PROCESS = "the Python process that traced the model, which a file cannot contain"
_DROP = "callbacks='drop' (--callbacks=drop) leaves out those whose results are unused"


def import_callback(state: ImportState, op: Any, types: Sequence[TensorType]) -> None:
    """Import a custom call that calls back to Python; its results have the types ``types``."""
    target = op.attributes["call_target_name"].value
    record = _callback_record(state, op, target)
    operands = state.data_operands(op)
    match record["kind"]:
        case "raise":
            state.bind(op, state.emit("fail", operands, {"messages": tuple(record["messages"])}, types))
        case "pass":
            state.bind(op, operands[: len(types)])
        case "check":
            for check in record["checks"]:
                emit_check(state, operands, check)
            state.bind(op, [])
        case _:
            _call_users_callback(state, op, operands, record, types)


def emit_check(state: ImportState, values: Sequence[Value], check: Mapping[str, Any]) -> None:
    """Emit the assertion of a check (:mod:`aotc.frontend.checked_errors`) over ``values``."""
    failed, code = values[check["failed"]], values[check["code"]]
    number = state.constant(np.asarray(check["number"], to_numpy(code.type.dtype)), code.type)
    wrong = state.one("and", [failed, state.one("eq", [code, number])])
    if wrong.type.rank:
        wrong = sum_over(state, wrong, tuple(range(wrong.type.rank)))
    shown = [word for place in check["values"] for word in _bits_as_words(state, values[place[0]], *place[1:])]
    state.emit("assert", [state.one("not", [wrong]), *shown], {"message": check["message"]})


def _bits_as_words(state: ImportState, x: Value, start: int, count: int) -> list[Value]:
    """Return the bits of ``count`` elements of ``x``, from flat index ``start`` on, as integer scalars."""
    words = []
    dtype = displayed_dtype(x.type.dtype)
    flat = state.one("reshape", [x], {}, [TensorType(x.type.dtype, (product(x.type.shape),))])
    for n in range(start, start + count):
        one = state.one("slice", [flat], {"start": (n,), "limit": (n + 1,), "stride": (1,)})
        scalar = state.one("reshape", [one], {}, [TensorType(x.type.dtype)])
        if kind_of(dtype) == "c":
            parts = state.one("real", [scalar]), state.one("imag", [scalar])
            words += [_bits_as_dtype(state, part, real_of(dtype)) for part in parts]
        else:
            words.append(_bits_as_dtype(state, scalar, dtype))
    return words


def _bits_as_dtype(state: ImportState, x: Value, dtype: str) -> Value:
    """Return ``x`` converted to ``dtype``, as unsigned bits if it is a float."""
    if kind_of(dtype) == "b":
        return state.convert(x, "u8")
    x = state.convert(x, dtype)
    return x if kind_of(dtype) in "iu" else state.one("bitcast", [x], {}, [TensorType(f"u{DTYPES[dtype].bits}")])


def _callback_record(state: ImportState, op: Any, target: str) -> Mapping[str, Any]:
    """Return the record of a callback's Python function: from the op, or from the session by number."""
    entries = dictionary_entries(config_of(op))
    if target == TARGET:
        record: Mapping[str, Any] = json.loads(entries["record"].value)
        return record
    number = entries["index"].value if "index" in entries else -1
    if 0 <= number < len(state.session.callbacks):
        return state.session.callbacks[number]
    return {"kind": "a callback", "name": target, "ordered": False}


def _call_users_callback(
    state: ImportState, op: Any, operands: Sequence[Value], record: Mapping[str, Any], declared: Sequence[TensorType]
) -> None:
    """Call the function that the user registered under the callback's name.

    A callback without a registered function is dropped if the options allow that, and otherwise an error.
    """
    name, what = record["name"], f"{record['kind']} of {record['name']!r}"
    if registered_call(name) is not None:
        if record.get("ordered"):
            hint = "ordered=False, and results that the next call takes, if the order matters"
            state.fail(f"{what} is ordered, and a bundle orders calls by their data only", hint)
        attrs = {"target": name, "config": {}, "api_version": 4, "has_side_effect": True, "aliases": ()}
        state.bind(op, state.emit("custom_call", operands, attrs, declared))
        return
    tensors = {result: leaf_types(result.type) for result in op.results}  # a token has none
    unread = not any(True for result, types in tensors.items() if types for _ in result.uses)
    if state.session.drop_callbacks and unread:
        state.values.update((result, None if types else ()) for result, types in tensors.items())
        warn_user(f"{state.loc.traced_by or state.loc}: {what} is left out")
        return
    hint = f"register a function of that name: aotc.register_custom_call({name!r}, function)"
    state.fail(f"{what} calls back into {_PROCESS}", f"{hint}; {_DROP}" if unread else hint)
