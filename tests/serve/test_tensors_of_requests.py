"""Tensors of requests: numbers of JSON and bytes become arrays, or an error that says what is wrong."""

import asyncio
import json
import math
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import served  # noqa: F401  skips where the server's packages are missing

from aotc.serve.background_threads import join_in_background
from aotc.serve.errors import RequestFault
from aotc.serve.protocol import InferRequest, infer_response_body, parse_infer
from aotc.serve.tensors import (
    checked_shape,
    datatype_of,
    dtype_of,
    tensor_from_bytes,
    tensor_from_json,
    tensor_to_bytes,
    tensor_to_json,
    unique_tensor_names,
)

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64"])
def test_numbers_round_trip_through_json_and_bytes(dtype):
    array = tensor_from_json([[0, 1], [2, 3]], dtype, (2, 2), "here")
    assert tensor_to_json(array, "here") == [0, 1, 2, 3]
    assert tensor_from_bytes(array.tobytes(), dtype, (2, 2), "here").tobytes() == array.tobytes()
    assert dtype_of(datatype_of(dtype), "here") == dtype


@pytest.mark.parametrize(
    ("data", "dtype", "shape", "what"),
    [
        ([1.5], "i32", (1,), "not of type INT32"),
        ([300], "u8", (1,), "out of the range"),
        ([-1], "u64", (1,), "out of the range"),
        ([1 << 70], "i64", (1,), "not of type INT64"),
        ([1e300], "f32", (1,), "out of the range"),
        ([1], "i1", (1,), "not of type BOOL"),
        ([True], "i32", (1,), "not of type INT32"),
        ([1, 2], "f32", (3,), "number of elements"),
        ([[1], [2, 3]], "f32", (3,), "not a list of numbers"),
        (["x"], "f32", (1,), "not a list of numbers"),
        ([None], "f32", (1,), "not a list of numbers"),
        ([{}], "f32", (1,), "not a list of numbers"),
        ([1], "c64", (1,), "no numbers for c64"),
    ],
)
def test_json_numbers_outside_the_dtype_are_refused(data, dtype, shape, what):
    with pytest.raises(RequestFault, match=what):
        tensor_from_json(data, dtype, shape, "here")


def test_nan_and_infinities_are_strings_in_json():
    array = tensor_from_json(["NaN", "-Infinity", 1, "Infinity"], "f32", (4,), "here")
    assert tensor_to_json(array, "here") == ["NaN", "-Infinity", 1, "Infinity"]
    assert json.loads(json.dumps(tensor_to_json(array.astype(ml_dtypes.bfloat16), "here"), allow_nan=False))[0] == "NaN"
    with pytest.raises(RequestFault, match="complex"):
        tensor_to_json(np.ones(1, "c8"), "here")


def test_binary_data_must_match_shape_and_dtype():
    with pytest.raises(RequestFault, match=r"found: .*3\n.*expected: .*4 for FP32"):
        tensor_from_bytes(b"abc", "f32", (1,), "here")
    with pytest.raises(RequestFault, match="not a value of BOOL"):
        tensor_from_bytes(b"\x02", "i1", (1,), "here")
    with pytest.raises(RequestFault, match="not a value of i4"):
        tensor_from_bytes(b"\x09", "i4", (1,), "here")
    assert tensor_from_bytes(b"\xff\x07", "i4", (2,), "here").astype("i1").tolist() == [-1, 7]
    with pytest.raises(RequestFault, match="too large"):
        checked_shape([0, 1 << 47, 1 << 47], "here")


@pytest.mark.parametrize("shape", [None, 3, [-1], [True], [1.0], ["n"], [1 << 60], [1] * 40])
def test_invalid_shapes_are_refused(shape):
    with pytest.raises(RequestFault, match="shape"):
        checked_shape(shape, "here")


def test_tensor_names_are_unique():
    rows = [{"name": n} for n in ("x", "", "x", "")]
    assert unique_tensor_names(rows, "output") == ["x", "output1", "x#2", "output3"]


def body_of(rows, tensors=b"", **more):
    head = json.dumps({"inputs": rows, **more}).encode()
    return head + tensors, str(len(head))


def test_binary_tensors_follow_the_json_in_order():
    x, y = np.arange(3, dtype="f4"), np.arange(4, dtype="i8").reshape(2, 2)
    rows = [
        {"name": n, "shape": list(a.shape), "datatype": t, "parameters": {"binary_data_size": a.nbytes}}
        for n, a, t in (("x", x, "FP32"), ("y", y, "INT64"))
    ]
    rows.insert(1, {"name": "z", "shape": [1], "datatype": "INT8", "data": [7]})
    body, length = body_of(rows, x.tobytes() + y.tobytes(), id="7", parameters={"timeout": 250_000})
    request = parse_infer(body, length, "m", 4)
    assert (request.id, request.timeout, request.outputs) == ("7", 0.25, None)
    for name, array in {"x": x, "y": y, "z": np.array([7], "i1")}.items():
        np.testing.assert_array_equal(request.inputs[name], array)


X = {"name": "x", "shape": [1], "datatype": "FP32"}


@pytest.mark.parametrize(
    ("body", "length", "what"),
    [
        (b"", None, "not JSON"),
        (b"[1]", None, "not a JSON object"),
        (b"[" * 100_000, None, "not JSON"),
        (b"{}", None, "inputs is not a list"),
        (b'{"inputs": [3]}', None, "inputs is not a list"),
        (b"{}", "3", "not a length of JSON"),
        (b"{}", "-1", "not a length of JSON"),
        (b"{}", "9" * 5000, "not a length of JSON"),
        (b'{"inputs": []} ', "14", "bytes after"),
        (*body_of([{}]), "no name"),
        (*body_of([X]), "no data"),
        (*body_of([{**X, "data": [1]}] * 2), "twice"),
        (*body_of([{**X, "datatype": "BYTES", "data": ["a"]}]), "not accept strings"),
        (*body_of([{**X, "datatype": "STRING", "data": ["a"]}]), "unknown datatype"),
        (*body_of([{**X, "parameters": {"binary_data_size": 4}}], b"abc"), "fewer bytes"),
        (*body_of([{**X, "parameters": {"binary_data_size": -1}}], b"abc"), "fewer bytes"),
        (*body_of([{**X, "parameters": 3}]), "parameters is of the wrong type"),
        (*body_of([], parameters={"timeout": -1}), "not a time"),
        (*body_of([], id=3), "id is of the wrong type"),
        (*body_of([], outputs=[{"name": "y", "parameters": {"classification": 3}}]), "no classification"),
    ],
)
def test_malformed_bodies_are_refused(body, length, what):
    with pytest.raises(RequestFault, match=what) as failed:
        parse_infer(body, length, "m", 4)
    assert failed.value.status == 400


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.none() | st.text(max_size=6))
def test_any_bytes_are_read_or_refused(body, length):
    with suppress(RequestFault):
        parse_infer(body, length, "m", 4)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
ANY = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3))


@settings(max_examples=100, deadline=None)
@given(ANY, ANY, ANY, ANY)
def test_any_document_is_read_or_refused(shape, data, parameters, outputs):
    row = {"name": "x", "shape": shape, "datatype": "FP32", "data": data, "parameters": parameters}
    document = {"inputs": [row], "outputs": outputs, "parameters": parameters}
    with suppress(RequestFault):
        parse_infer(json.dumps(document).encode(), None, "m", 4)


def test_a_response_has_the_requested_outputs_and_formats():
    results = {"y": np.array([1, math.inf], "f4"), "z": np.array([2], "i4")}
    parts, length = infer_response_body("m", 3, InferRequest("id", outputs=[("z", True), ("y", False)]), results)
    document = json.loads(parts[0])
    assert length == len(parts[0])
    assert parts[1] == b"\x02\0\0\0"
    assert (document["model_name"], document["model_version"], document["id"]) == ("m", "3", "id")
    assert [row["name"] for row in document["outputs"]] == ["z", "y"]
    assert document["outputs"][1]["data"] == [1, "Infinity"]


def test_a_large_result_is_sent_without_a_copy():
    """Rows of a batch are copied: a client that reads slowly would keep the results of all."""
    x = np.arange(1 << 16, dtype="f4").reshape(2, -1)
    for array, shared in ((x, True), (x[:1], False), (x.T, False), (x[:, :4], False)):
        data = tensor_to_bytes(array)
        assert bytes(data) == array.tobytes()
        assert np.shares_memory(np.frombuffer(data, "u1"), x) == shared


def test_buffers_are_joined_on_another_thread():
    x = np.arange(1 << 18, dtype="f4")
    for parts in ([b"a", b"bc"], [], [b"a", tensor_to_bytes(x), b"", tensor_to_bytes(x[:5]), b"b"]):
        assert asyncio.run(join_in_background(parts)) == b"".join(parts)
