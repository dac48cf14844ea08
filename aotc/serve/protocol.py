"""Parse requests and write responses: Open Inference Protocol, version 2, REST, binary tensor extension.

A body is JSON. With the header ``Inference-Header-Content-Length`` only that many bytes are JSON; after them follow,
in order, the bytes of the tensors that have a ``binary_data_size``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, RequestFault, shown_value
from aotc.serve.tensors import (
    Buffer,
    checked_shape,
    datatype_of,
    dtype_of,
    tensor_from_bytes,
    tensor_from_json,
    tensor_to_bytes,
    tensor_to_json,
)
from aotc.vmfb.dtypes import from_numpy

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
PLATFORM = "aotc_vmfb"


@dataclass(slots=True)
class InferRequest:
    """An inference request, independent of the protocol.

    Attributes
    ----------
    id : str
        Identifier for the response.
    inputs : dict of str to numpy.ndarray
        Arrays by input name.
    outputs : list of (str, bool), or None
        Names of outputs, each with True for binary; None for all outputs.
    binary : bool
        True if outputs without a setting are binary.
    timeout : float or None
        In seconds.
    """

    id: str = ""
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[tuple[str, bool]] | None = None
    binary: bool = False
    timeout: float | None = None


def parse_infer(body: bytes, header_length: str | None, where: str, most: int) -> InferRequest:
    """Parse the body of a request with at most ``most`` inputs and as many outputs.

    Raises
    ------
    RequestFault
        Its message has the malformed part.
    """
    size = json_size(body, header_length, where)
    document = parse_object(body[:size] if size < len(body) else body, where)
    rest, at = memoryview(body), size
    request = InferRequest(_document_text(document, "id", where))
    parameters = _document_part(document, "parameters", dict, where)
    check_no_sequence(parameters, where)
    request.timeout = timeout_of(parameters, where)
    request.binary = bool(parameters.get("binary_data_output", False))
    for row in _document_rows(document, "inputs", where, most):
        name = _tensor_name(row, where)
        if name in request.inputs:
            raise RequestFault(BAD, where, f"input {name!r} comes twice")
        place = f"{where}: input {name!r}"
        dtype, shape = dtype_of(row.get("datatype"), place), checked_shape(row.get("shape"), place)
        count = _document_part(row, "parameters", dict, place).get("binary_data_size")
        if count is None:
            if "data" not in row:
                raise RequestFault(BAD, place, "the tensor has no data", expected='"data", or "binary_data_size"')
            request.inputs[name] = tensor_from_json(row["data"], dtype, shape, place)
            continue
        if type(count) is not int or not 0 <= count <= len(body) - at:
            raise RequestFault(
                BAD, place, "the body has fewer bytes", shown_value(count), f"0 to {len(body) - at}"
            )
        request.inputs[name] = tensor_from_bytes(rest[at : at + count], dtype, shape, place)
        at += count
    if at != len(body):
        raise RequestFault(BAD, where, "the body has bytes after its last tensor", f"{len(body) - at} bytes", "none")
    if document.get("outputs") is not None:
        rows = _document_rows(document, "outputs", where, most)
        request.outputs = checked_outputs([_requested_output(row, request.binary, where) for row in rows], where)
    return request


def json_size(body: bytes, header_length: str | None, where: str) -> int:
    """Return the number of JSON bytes in a body.

    Raises
    ------
    RequestFault
        If the header with that number is invalid.
    """
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit()) or int(header_length[:20]) > len(body):
        what, expected = f"{HEADER_LENGTH} is not a length of JSON in the body", f"0 to {len(body)}"
        raise RequestFault(BAD, where, what, header_length[:40], expected)
    return int(header_length)


def parse_object(body: bytes, where: str) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises
    ------
    RequestFault
        If the body is not a JSON object.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestFault(BAD, where, "the body is not JSON", f"{type(error).__name__}: {error}"[:200]) from None
    if not isinstance(found, dict):
        raise RequestFault(BAD, where, "the body is not a JSON object", type(found).__name__, '{"inputs": [...]}')
    return found


def requested_outputs(request: InferRequest, results: Mapping[str, np.ndarray]) -> list[tuple[str, bool]]:
    """Return the names of the outputs of a response, each with True for binary."""
    return request.outputs if request.outputs is not None else [(n, request.binary) for n in results]


def infer_response_body(
    name: str, version: int, request: InferRequest, results: Mapping[str, np.ndarray]
) -> tuple[list[Buffer], int | None]:
    """Return the body of a response in parts, and the length of its JSON if binary tensors follow, else None.

    Raises
    ------
    RequestFault
        If a requested result cannot be represented in JSON.
    """
    rows: list[dict[str, Any]] = []
    tensors: list[Buffer] = []
    for output, binary in requested_outputs(request, results):
        array = results[output]
        row: dict[str, Any] = {"name": output, "datatype": datatype_of(from_numpy(array.dtype))}
        row["shape"] = list(array.shape)
        if binary:
            tensors.append(tensor_to_bytes(array))
            row["parameters"] = {"binary_data_size": len(tensors[-1])}
        else:
            row["data"] = tensor_to_json(array, f"{name}: output {output!r}")
        rows.append(row)
    document = {"model_name": name, "model_version": str(version), "outputs": rows}
    if request.id:
        document["id"] = request.id
    head = json.dumps(document, allow_nan=False).encode()
    return [head, *tensors], len(head) if tensors else None


def check_count(count: int, what: str, where: str, most: int) -> None:
    """Refuse a request with many more tensors or parameters than the model has.

    Raises
    ------
    RequestFault
        If there are more than ``most``.
    """
    if count > most:
        raise RequestFault(BAD, where, f"the request has too many {what}", count, f"at most {most}")


def checked_outputs(outputs: list[tuple[str, bool]], where: str) -> list[tuple[str, bool]]:
    """Validate the requested outputs.

    Raises
    ------
    RequestFault
        If an output is requested twice: it would be encoded and sent twice.
    """
    seen: set[str] = set()
    for name, _ in outputs:
        if name in seen:
            raise RequestFault(
                BAD, where, f"output {shown_value(name)} is requested twice", hint="request each output once"
            )
        seen.add(name)
    return outputs


def check_no_other_output(parameters: Mapping[str, Any], where: str) -> None:
    """Refuse output parameters of Triton that this server lacks.

    Raises
    ------
    RequestFault
        If there is such a parameter.
    """
    for key in ("classification", "shared_memory_region"):
        if key in parameters:
            raise RequestFault(BAD, where, f"there is no {key} here", hint="leave it out")


# Upper bound of a requested timeout in microseconds, 30,000 years. JSON integers may exceed the range of a float.
MOST_MICROSECONDS = 1e18


def timeout_of(parameters: Mapping[str, Any], where: str) -> float | None:
    """Return the timeout of a request in seconds, or None without a timeout; the protocol uses microseconds.

    Raises
    ------
    RequestFault
        If the timeout is invalid.
    """
    found = parameters.get("timeout")
    if found is None:
        return None
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not number or not 0 <= found < MOST_MICROSECONDS:
        raise RequestFault(BAD, where, "the timeout is not a time", shown_value(found), "microseconds")
    return found / 1e6 if found else None


def check_no_sequence(parameters: Mapping[str, Any], where: str) -> None:
    """Refuse an inference request with sequence parameters: inference has no state.

    Raises
    ------
    RequestFault
        If the request has a sequence.
    """
    if parameters.get("sequence_id"):
        found, hint = shown_value(parameters["sequence_id"]), "generate, generate_stream, or ModelStreamInfer"
        raise RequestFault(BAD, where, "results are not stored between requests", found, hint=hint)


# ---------------------------------------------------------------- parts of a document


def _document_part(document: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return the entry ``key`` of a request; refuse a value that is not of type ``kind``."""
    found = document.get(key)
    if found is None:
        return kind()
    if not isinstance(found, kind):
        raise RequestFault(BAD, where, f"{key} is of the wrong type", type(found).__name__, kind.__name__)
    return found


def _document_text(document: Mapping[str, Any], key: str, where: str) -> str:
    return _document_part(document, key, str, where)


def _document_rows(document: Mapping[str, Any], key: str, where: str, most: int) -> Sequence[dict[str, Any]]:
    """Return the list of objects under ``key``, at most ``most`` of them."""
    rows = document.get(key)
    if isinstance(rows, list):
        check_count(len(rows), key, where, most)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestFault(BAD, where, f"{key} is not a list of objects", type(rows).__name__, f'"{key}": [{{...}}]')
    return rows


def _tensor_name(row: Mapping[str, Any], where: str) -> str:
    name = row.get("name")
    if not isinstance(name, str):
        raise RequestFault(BAD, where, "a tensor has no name", shown_value(name), '"name": "x"')
    return name


def _requested_output(row: Mapping[str, Any], binary: bool, where: str) -> tuple[str, bool]:
    """Return the name of a requested output, and True if it is to be binary."""
    name = _tensor_name(row, where)
    parameters = _document_part(row, "parameters", dict, where)
    check_no_other_output(parameters, f"{where}: output {name!r}")
    return name, bool(parameters.get("binary_data", binary))
