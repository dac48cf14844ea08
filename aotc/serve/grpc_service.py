"""The protocol over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from aotc.serve.access import AccessCheck
from aotc.serve.engine import Engine
from aotc.serve.faults import (
    BAD,
    BUSY,
    CANCELLED,
    CLOSED,
    FAILED,
    FORBIDDEN,
    LATE,
    NOT_FOUND,
    TOO_LONG,
    UNAUTHORIZED,
    RequestFault,
    status_of,
    text_of,
)
from aotc.serve.grpc_messages import MESSAGE, METHODS, SERVICE
from aotc.serve.model import model_metadata
from aotc.serve.protocol import InferRequest, check_no_other_output
from aotc.serve.tensors import checked_shape, datatype_of, dtype_of, from_bytes, from_json, to_bytes
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import VmError

_CODES = {
    BAD: grpc.StatusCode.INVALID_ARGUMENT, UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED, NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    TOO_LONG: grpc.StatusCode.RESOURCE_EXHAUSTED, BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FAILED: grpc.StatusCode.INTERNAL, CLOSED: grpc.StatusCode.UNAVAILABLE, LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    CANCELLED: grpc.StatusCode.CANCELLED,
}  # fmt: skip
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
Answer = Callable[[Any, Any], Awaitable[Any]]


class GrpcServer:
    """A server of gRPC that runs.

    Attributes
    ----------
    port : int
    """

    def __init__(self, server: Any, port: int) -> None:
        self._server, self.port = server, port

    async def stop(self, grace: float) -> None:
        """Let nobody new in, and wait for what is under way."""
        await self._server.stop(grace)


async def start(engine: Engine) -> GrpcServer:
    """Return a server that listens at the port of the settings.

    Raises
    ------
    VmError
        If the port cannot be had.
    """
    settings = engine.settings
    options = [("grpc.max_receive_message_length", settings.max_body), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
    service = _Service(engine)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            service.answered(getattr(service, name)),
            request_deserializer=MESSAGE[f"{name}Request"].FromString,
            response_serializer=MESSAGE[f"{name}Response"].SerializeToString,
        )
        for name in METHODS
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.tls_cert:
            pair = Path(settings.tls_key).read_bytes(), Path(settings.tls_cert).read_bytes()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise VmError("", "gRPC cannot listen there", f"{address}: {error}", "a free port") from None
    await server.start()
    return GrpcServer(server, port)


class _Service:
    """The methods of the service; each is named as in the protocol."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._access = engine, AccessCheck(engine.settings)

    def answered(self, method: Callable[[Any, Any], Awaitable[dict[str, Any]]]) -> Answer:
        """Return a method that ends with the status of what it raises."""
        response = MESSAGE[f"{method.__name__}Response"]

        async def call(request: Any, context: Any) -> Any:
            try:
                self._access.check(_headers(context))
                return response(**await method(request, context))
            except Exception as error:
                status = status_of(error)
                if isinstance(error, RequestFault) and error.retry:
                    context.set_trailing_metadata((("retry-after", str(error.retry)),))
                await context.abort(_CODES.get(status, grpc.StatusCode.UNKNOWN), text_of(error))

        return call

    async def ServerLive(self, request: Any, context: Any) -> dict[str, Any]:
        """Is the process there?"""
        return {"live": True}

    async def ServerReady(self, request: Any, context: Any) -> dict[str, Any]:
        """Can it take requests?"""
        return {"ready": self._engine.ready}

    async def ModelReady(self, request: Any, context: Any) -> dict[str, Any]:
        """Is a model there?"""
        try:
            model, function = self._engine.repository.find(request.name, request.version)
            model.function(function)
        except RequestFault:
            return {"ready": False}
        return {"ready": True}

    async def ServerMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        """What is it?"""
        more = ["model_repository"] if self._engine.settings.model_control else []
        return {"name": "aotc", "version": self._engine.settings.version, "extensions": more}

    async def ModelMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        """What does a model take and give?"""
        model, function = self._engine.repository.find(request.name, request.version)
        return model_metadata(model, function, self._engine.repository.versions(model))

    async def RepositoryIndex(self, request: Any, context: Any) -> dict[str, Any]:
        """Which models are there?"""
        return {"models": self._engine.repository.index(request.ready)}

    async def RepositoryModelLoad(self, request: Any, context: Any) -> dict[str, Any]:
        """Load a model."""
        self._engine.check_control(request.model_name)
        await self._engine.repository.load(request.model_name)
        return {}

    async def RepositoryModelUnload(self, request: Any, context: Any) -> dict[str, Any]:
        """Unload a model."""
        self._engine.check_control(request.model_name)
        await self._engine.repository.unload(request.model_name)
        return {}

    async def ModelInfer(self, request: Any, context: Any) -> dict[str, Any]:
        """Return results."""
        engine, name = self._engine, request.model_name
        with engine.admit("grpc") as ticket:
            model, function = engine.find(ticket, name, request.model_version)
            asked = read_request(request)
            seconds = engine.time_of(asked)
            try:
                async with asyncio.timeout(seconds):
                    headers = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
                    results = await engine.infer(function, asked, headers, name)
            except TimeoutError:
                what = "the request was not done in its time"
                raise RequestFault(LATE, name, what, f"{seconds:g} s", hint="a longer timeout") from None
            raw = bool(request.raw_input_contents) or not request.inputs
            about = {"model_name": name, "model_version": str(model.version), "id": request.id}
            return about | _outputs(asked, results, raw)


def _headers(context: Any) -> Mapping[bytes, bytes]:
    """Return what a client shows."""
    pairs = context.invocation_metadata() or ()
    return {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in pairs if k == "authorization"}


def read_request(message: Any) -> InferRequest:
    """Return what a message asks for.

    Raises
    ------
    RequestFault
        Says what of it cannot be read.
    """
    where, raw = message.model_name, message.raw_input_contents
    request = InferRequest(message.id)
    if raw and len(raw) != len(message.inputs):
        what = "raw_input_contents are not as many as the inputs"
        raise RequestFault(BAD, where, what, len(raw), len(message.inputs))
    for number, row in enumerate(message.inputs):
        place = f"{where}: input {row.name!r}"
        if row.name in request.inputs:
            raise RequestFault(BAD, where, f"input {row.name!r} comes twice")
        dtype, shape = dtype_of(row.datatype, place), checked_shape(list(row.shape), place)
        if raw:
            request.inputs[row.name] = from_bytes(raw[number], dtype, shape, place)
            continue
        field = _CONTENTS.get(row.datatype)
        if field is None:
            raise RequestFault(BAD, place, f"contents have no {row.datatype}", hint="raw_input_contents")
        request.inputs[row.name] = from_json(list(getattr(row.contents, field)), dtype, shape, place)
    if message.outputs:
        for row in message.outputs:
            check_no_other_output(row.parameters, f"{where}: output {row.name!r}")
        request.outputs = [(row.name, True) for row in message.outputs]
    timeout = message.parameters["timeout"].int64_param if "timeout" in message.parameters else 0
    if timeout < 0:
        raise RequestFault(BAD, where, "the timeout is no time", timeout, "microseconds")
    request.timeout = timeout / 1e6 or None
    return request


def _outputs(request: InferRequest, results: Mapping[str, np.ndarray], raw: bool) -> dict[str, Any]:
    """Return results as the client sent its inputs, if all of them have that form."""
    names = [name for name, _ in request.outputs] if request.outputs is not None else list(results)
    types = {name: datatype_of(from_numpy(results[name].dtype)) for name in names}
    rows = [{"name": n, "datatype": types[n], "shape": list(results[n].shape)} for n in names]
    if raw or not all(t in _CONTENTS for t in types.values()):
        return {"outputs": rows, "raw_output_contents": [to_bytes(results[n]) for n in names]}
    made = [{**row, "contents": {_CONTENTS[types[n]]: results[n].reshape(-1).tolist()}} for n, row in zip(names, rows)]
    return {"outputs": made}
