"""The protocol over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from aotc.serve.access import AccessCheck
from aotc.serve.engine import Engine
from aotc.serve.faults import (
    BAD,
    BUSY,
    CANCELLED,
    CLOSED,
    CONFLICT,
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
from aotc.serve.grpc_messages import MESSAGE, METHODS, SERVICE, STREAM
from aotc.serve.grpc_stream import InferStream, infer, trace_texts
from aotc.serve.limits import SPARE_RPCS
from aotc.serve.model import model_metadata
from aotc.vmfb.errors import VmError

_CODES = {
    BAD: grpc.StatusCode.INVALID_ARGUMENT, UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED, NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    CONFLICT: grpc.StatusCode.ABORTED, TOO_LONG: grpc.StatusCode.RESOURCE_EXHAUSTED,
    BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED, FAILED: grpc.StatusCode.INTERNAL, CLOSED: grpc.StatusCode.UNAVAILABLE,
    LATE: grpc.StatusCode.DEADLINE_EXCEEDED, CANCELLED: grpc.StatusCode.CANCELLED,
}  # fmt: skip
HEALTH = "grpc.health.v1.Health"  # what Kubernetes and others ask a server of any kind
_SERVING, _NOT_SERVING = 1, 2  # its answers
_OPEN = ("ServerLive", "ServerReady")  # without the token, as over REST
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
    most = settings.queue + SPARE_RPCS
    server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=most)
    service = _Service(engine)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            service.answered(getattr(service, name)),
            request_deserializer=MESSAGE[f"{name}Request"].FromString,
            response_serializer=MESSAGE[f"{name}Response"].SerializeToString,
        )
        for name in METHODS
    }
    handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
        service.stream,
        request_deserializer=MESSAGE["ModelInferRequest"].FromString,
        response_serializer=MESSAGE[f"{STREAM}Response"].SerializeToString,
    )
    check = grpc.unary_unary_rpc_method_handler(
        service.health,
        request_deserializer=MESSAGE["ModelReadyRequest"].FromString,  # its name is where that of a service is
        response_serializer=lambda status: bytes((8, status)),
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(SERVICE, handlers),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        ]
    )
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
                if method.__name__ not in _OPEN:
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
            model.check_function(function)
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
        return await infer(self._engine, request, trace_texts(self._engine, context))

    async def health(self, request: Any, context: Any) -> int:
        """Can the server take requests? If a model is named, is that one there?"""
        try:
            if request.name:
                self._access.check(_headers(context))
                model, function = self._engine.repository.find(request.name)
                model.check_function(function)
        except RequestFault as error:
            await context.abort(_CODES[error.status], text_of(error))
        return _SERVING if self._engine.ready else _NOT_SERVING

    async def stream(self, requests: Any, context: Any) -> None:
        """Answer requests as they come, each as soon as it can be."""
        try:
            self._access.check(_headers(context))
        except RequestFault as error:
            await context.abort(_CODES[error.status], text_of(error))
        await InferStream(self._engine, context).run()


def _headers(context: Any) -> Mapping[bytes, bytes]:
    """Return what a client shows."""
    pairs = context.invocation_metadata() or ()
    return {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in pairs if k == "authorization"}
