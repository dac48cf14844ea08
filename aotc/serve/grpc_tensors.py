"""Requests and answers of gRPC's messages: tensors raw, or as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.serve.faults import BAD, RequestFault
from aotc.serve.protocol import InferRequest, check_no_other_output, check_no_sequence, timeout_of
from aotc.serve.tensors import checked_shape, datatype_of, dtype_of, from_bytes, from_json, to_bytes
from aotc.vmfb.dtypes import from_numpy

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


_NOT_OF_WISHES = ("priority", "binary_data_output", "triton_enable_empty_final_response")


def read_request(message: Any) -> InferRequest:
    """Return what a message asks for.

    Raises
    ------
    RequestFault
        Says what of it cannot be read.
    """
    where, parameters = message.model_name, _parameters(message)
    check_no_sequence(parameters, where)
    request = InferRequest(message.id, _inputs(message), timeout=timeout_of(parameters, where))
    if message.outputs:
        for row in message.outputs:
            check_no_other_output(row.parameters, f"{where}: output {row.name!r}")
        request.outputs = [(row.name, True) for row in message.outputs]
    return request


def read_wish(message: Any) -> dict[str, Any]:
    """Return the tokens that a message asks for, as a document of JSON says it.

    Raises
    ------
    RequestFault
        Says what of it cannot be read.
    """
    wish = {key: value for key, value in _parameters(message).items() if key not in _NOT_OF_WISHES}
    for name, array in _inputs(message).items():
        if array.dtype.kind not in "iu":
            found = datatype_of(from_numpy(array.dtype))
            raise RequestFault(BAD, f"{message.model_name}: input {name!r}", "tokens are integers", found, "INT64")
        wish[name] = array.reshape(-1).tolist()
    return wish


def _parameters(message: Any) -> dict[str, Any]:
    chosen = {key: (value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()}
    return {key: getattr(value, kind) for key, (value, kind) in chosen.items() if kind}


def _inputs(message: Any) -> dict[str, np.ndarray]:
    where, raw = message.model_name, message.raw_input_contents
    inputs: dict[str, np.ndarray] = {}
    if raw and len(raw) != len(message.inputs):
        what = "raw_input_contents are not as many as the inputs"
        raise RequestFault(BAD, where, what, len(raw), len(message.inputs))
    for number, row in enumerate(message.inputs):
        place = f"{where}: input {row.name!r}"
        if row.name in inputs:
            raise RequestFault(BAD, where, f"input {row.name!r} comes twice")
        dtype, shape = dtype_of(row.datatype, place), checked_shape(list(row.shape), place)
        if raw:
            inputs[row.name] = from_bytes(raw[number], dtype, shape, place)
            continue
        field = _CONTENTS.get(row.datatype)
        if field is None:
            raise RequestFault(BAD, place, f"contents have no {row.datatype}", hint="raw_input_contents")
        inputs[row.name] = from_json(list(getattr(row.contents, field)), dtype, shape, place)
    return inputs


def is_raw(message: Any) -> bool:
    """Is an answer to be raw, as the request is?"""
    return bool(message.raw_input_contents) or not message.inputs


def outputs_of(request: InferRequest, results: Mapping[str, np.ndarray], raw: bool) -> dict[str, Any]:
    """Return results as the client sent its inputs, if all of them have that form."""
    names = [name for name, _ in request.outputs] if request.outputs is not None else list(results)
    types = {name: datatype_of(from_numpy(results[name].dtype)) for name in names}
    rows = [{"name": n, "datatype": types[n], "shape": list(results[n].shape)} for n in names]
    if raw or not all(t in _CONTENTS for t in types.values()):
        return {"outputs": rows, "raw_output_contents": [to_bytes(results[n]) for n in names]}
    made = [{**row, "contents": {_CONTENTS[types[n]]: results[n].reshape(-1).tolist()}} for n, row in zip(names, rows)]
    return {"outputs": made}
