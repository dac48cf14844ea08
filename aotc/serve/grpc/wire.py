"""Decoding and encoding of gRPC messages without copies of the tensors in them.

Protobuf copies each tensor when it decodes a message, and again on access, while holding the GIL. So the bytes of
tensors are cut out of a large request before it is decoded, and inserted into a response after it is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from aotc.serve.conversion import Conversion
from aotc.serve.errors import BAD, RequestFault
from aotc.serve.grpc.messages import MESSAGE
from aotc.serve.limits import INLINE_BYTES
from aotc.serve.tensors import Buffer

# Maximum number of fields in a large message; with more it is refused before it is decoded, because each field becomes
# an object in memory. More than any model has inputs; counting them takes 20 ms.
MOST_FIELDS = 1 << 14


REQUEST, RESPONSE, STREAM_RESPONSE = "ModelInferRequest", "ModelInferResponse", "ModelStreamInferResponse"
_RAW_INPUTS, _RAW_OUTPUTS, _INFER_RESPONSE = 7, 6, 2  # field numbers
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(slots=True)
class ReceivedRequest:
    """A decoded inference or generation request.

    Attributes
    ----------
    message : ModelInferRequest
        The message without its raw inputs.
    raw : sequence of buffers
        The raw inputs.
    numbers : bool
        True if the response should have numbers, like the request.
    """

    message: Any
    raw: Sequence[Any]
    numbers: bool


def decode(kind: str, data: bytes) -> Any:
    """Decode a gRPC message of type ``kind``.

    Raises
    ------
    RequestFault
        If the bytes are not such a message.
    """
    try:
        return MESSAGE[kind].FromString(data)
    except DecodeError as error:
        raise _undecodable_error(kind, str(error)) from None


def _undecodable_error(kind: str, why: str) -> RequestFault:
    return RequestFault(BAD, "", "the message cannot be decoded", why[:200], f"inference.{kind}")


async def receive(conversion: Conversion, data: bytes) -> ReceivedRequest:
    """Decode an inference request, in a converter process if it has many numbers.

    Raises
    ------
    RequestFault
        If it cannot be decoded, or has too many numbers or fields.
    """
    if len(data) <= INLINE_BYTES:
        return _received_message(decode(REQUEST, data), ())
    rest, raw = split(data)
    size = sum(map(len, rest))
    if not conversion.is_large(size, "", "raw_input_contents, or --max-json-mb"):
        async with conversion.turn:
            return _received_message(decode(REQUEST, b"".join(rest)), raw)
    if raw:
        raise _undecodable_error(REQUEST, f"raw inputs, and {size} other bytes")
    data, _ = await conversion.run({"job": "raw_message", "most": MOST_FIELDS}, data)
    rest, raw = split(data)
    return ReceivedRequest(decode(REQUEST, b"".join(rest)), raw, True)


def _received_message(message: Any, raw: Sequence[Any]) -> ReceivedRequest:
    raw = raw or message.raw_input_contents
    return ReceivedRequest(message, raw, bool(message.inputs) and not raw)


def split(data: bytes) -> tuple[list[memoryview], list[memoryview]]:
    """Split an encoded request: return the parts without its raw inputs, and the raw inputs, as views.

    Raises
    ------
    RequestFault
        If it is not a message, or has too many fields.
    """
    view, at, raw, rest, count = memoryview(data), 0, [], [], 0
    while at < len(data):
        begin = at
        count += 1
        if count > MOST_FIELDS:
            raise RequestFault(BAD, "", "the message has too many fields", f"more than {MOST_FIELDS}")
        tag, at = _decode_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _decode_varint(data, at)
        elif kind == _BYTES:
            size, at = _decode_varint(data, at)
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _undecodable_error(REQUEST, f"type {kind} of a field")
        if at > len(data):
            raise _undecodable_error(REQUEST, "it is truncated")
        if number == _RAW_INPUTS and kind == _BYTES:
            raw.append(view[at - size : at])
        else:
            rest.append(view[begin:at])
    return rest, raw


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at offset ``at``; return the number and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _undecodable_error(REQUEST, "a number has no end")


def encode(fields: dict[str, Any], raw: Sequence[Buffer], stream: bool) -> list[Buffer]:
    """Encode a response with raw outputs, and return its parts; ``stream`` wraps the response as a stream message."""
    parts: list[Buffer] = [MESSAGE[RESPONSE](**fields).SerializeToString()]
    for data in raw:
        parts += [_field_prefix(_RAW_OUTPUTS, len(data)), data]
    return as_stream_message(parts) if stream else parts


def as_stream_message(parts: list[Buffer]) -> list[Buffer]:
    """Wrap the parts of an encoded response as a message of a stream."""
    return [_field_prefix(_INFER_RESPONSE, sum(map(len, parts))), *parts]


def _field_prefix(number: int, size: int) -> bytes:
    """Return the bytes before the content of a message field: its number, wire type and size."""
    found = bytearray((number << 3 | _BYTES,))
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
