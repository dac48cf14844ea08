"""Inference requests and responses as gRPC messages, with raw tensors or numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.serve.background_threads import join_in_background
from aotc.serve.conversion import Conversion
from aotc.serve.errors import BAD, RequestFault
from aotc.serve.grpc.messages import MESSAGE
from aotc.serve.grpc.wire import REQUEST, RESPONSE, ReceivedRequest, as_stream_message, decode, encode
from aotc.serve.limits import MOST_DIMS, SPARE_TENSORS
from aotc.serve.protocol import (
    InferRequest,
    check_count,
    check_no_other_output,
    check_no_sequence,
    checked_outputs,
    requested_outputs,
    timeout_of,
)
from aotc.serve.tensors import (
    Buffer,
    checked_shape,
    datatype_of,
    dtype_of,
    tensor_from_bytes,
    tensor_from_json,
    tensor_to_bytes,
)
from aotc.vmfb.dtypes import from_numpy

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


_NOT_OF_WISHES = ("priority", "binary_data_output", "triton_enable_empty_final_response")


def read_request(received: ReceivedRequest, most: int) -> InferRequest:
    """Convert a message to an inference request, with at most ``most`` inputs and as many outputs.

    Raises
    ------
    RequestFault
        Its message names the malformed part.
    """
    message = received.message
    where, parameters = message.model_name, _request_parameters(message)
    check_no_sequence(parameters, where)
    check_count(len(message.outputs), "outputs", where, most)
    request = InferRequest(message.id, _request_inputs(received, most), timeout=timeout_of(parameters, where))
    if message.outputs:
        for row in message.outputs:
            check_no_other_output(row.parameters, f"{where}: output {row.name!r}")
        request.outputs = checked_outputs([(row.name, True) for row in message.outputs], where)
    return request


def read_parameters(received: ReceivedRequest) -> dict[str, Any]:
    """Return the parameters of a generation request, in the form of its JSON document.

    Raises
    ------
    RequestFault
        Its message has the malformed part.
    """
    message = received.message
    parameters = {key: value for key, value in _request_parameters(message).items() if key not in _NOT_OF_WISHES}
    for name, array in _request_inputs(received, SPARE_TENSORS).items():
        if array.dtype.kind not in "iu":
            found = datatype_of(from_numpy(array.dtype))
            raise RequestFault(BAD, f"{message.model_name}: input {name!r}", "tokens are integers", found, "INT64")
        parameters[name] = array.reshape(-1).tolist()
    return parameters


def _request_parameters(message: Any) -> dict[str, Any]:
    check_count(len(message.parameters), "parameters", message.model_name, SPARE_TENSORS)
    chosen = {key: (value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()}
    return {key: getattr(value, kind) for key, (value, kind) in chosen.items() if kind}


def _request_inputs(received: ReceivedRequest, most: int) -> dict[str, np.ndarray]:
    """Convert the inputs of a message to arrays by name, from raw bytes or numbers."""
    message, raw = received.message, received.raw
    where = message.model_name
    inputs: dict[str, np.ndarray] = {}
    check_count(len(message.inputs), "inputs", where, most)
    if raw and len(raw) != len(message.inputs):
        what = "raw_input_contents are not as many as the inputs"
        raise RequestFault(BAD, where, what, len(raw), len(message.inputs))
    for number, row in enumerate(message.inputs):
        place = f"{where}: input {row.name!r}"
        if row.name in inputs:
            raise RequestFault(BAD, where, f"input {row.name!r} comes twice")
        dtype = dtype_of(row.datatype, place)
        shape = checked_shape(list(row.shape[: MOST_DIMS + 1]), place)
        if raw:
            inputs[row.name] = tensor_from_bytes(raw[number], dtype, shape, place)
            continue
        field = _CONTENTS.get(row.datatype)
        if field is None:
            raise RequestFault(BAD, place, f"contents have no {row.datatype}", hint="raw_input_contents")
        inputs[row.name] = tensor_from_json(list(getattr(row.contents, field)), dtype, shape, place)
    return inputs


def with_raw_inputs(data: bytes, most: int) -> bytes:
    """Replace the numbers of a request with at most ``most`` inputs by raw tensors.

    Raises
    ------
    RequestFault
        If it cannot be decoded, or a tensor is malformed.
    """
    message = decode(REQUEST, data)
    arrays = _request_inputs(ReceivedRequest(message, (), True), most)
    for row in message.inputs:
        row.ClearField("contents")
    message.raw_input_contents.extend(array.tobytes() for array in arrays.values())
    return message.SerializeToString()


async def write_answer(
    conversion: Conversion, about: dict[str, Any], request: InferRequest, results: Mapping[str, np.ndarray],
    numbers: bool, stream: bool = False,
) -> bytes:  # fmt: skip
    """Encode a response with the fields ``about``: as numbers if the request has numbers and all results allow it.

    Raises
    ------
    RequestFault
        If there are too many numbers.
    """
    arrays = [(name, results[name]) for name, _ in requested_outputs(request, results)]
    rows = [(name, datatype_of(from_numpy(x.dtype)), x) for name, x in arrays]
    outputs: list[dict[str, Any]] = [
        {"name": name, "datatype": datatype, "shape": list(x.shape)} for name, datatype, x in rows
    ]
    fields = {**about, "outputs": outputs}
    if not numbers or not all(datatype in _CONTENTS for _, datatype, _ in rows):
        return await join_in_background(encode(fields, [tensor_to_bytes(x) for _, x in arrays], stream))
    if conversion.check_numbers([x for _, x in arrays], about["model_name"], "inputs in raw_input_contents"):
        raw = encode(fields, [tensor_to_bytes(x) for _, x in arrays], False)
        data, _ = await conversion.run({"job": "number_message", "stream": stream}, *raw)
        return data
    for row, (_, datatype, x) in zip(outputs, rows):
        row["contents"] = {_CONTENTS[datatype]: x.reshape(-1).tolist()}
    async with conversion.turn:
        return b"".join(encode(fields, (), stream))


def with_number_outputs(data: bytes, stream: bool) -> bytes:
    """Replace the raw outputs of a response by numbers; ``stream`` wraps the response as a stream message."""
    message = MESSAGE[RESPONSE].FromString(data)
    for row, raw in zip(message.outputs, message.raw_output_contents):
        array = tensor_from_bytes(raw, dtype_of(row.datatype, row.name), tuple(row.shape), row.name)
        getattr(row.contents, _CONTENTS[row.datatype]).extend(array.reshape(-1).tolist())
    message.ClearField("raw_output_contents")
    parts: list[Buffer] = [message.SerializeToString()]
    return b"".join(as_stream_message(parts) if stream else parts)
