"""The gRPC service: server, methods of the protocol, and health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from aotc.serve.auth import AccessCheck
from aotc.serve.engine import Engine
from aotc.serve.errors import (
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
    client_error_text,
    http_status_of,
    without_references,
)
from aotc.serve.grpc.messages import HEALTH_METHODS, INFER, MESSAGE, METHODS, SERVICE, STREAM
from aotc.serve.grpc.reads import MessageReads
from aotc.serve.grpc.stream import InferStream, infer, trace_context, write
from aotc.serve.grpc.wire import decode, receive
from aotc.serve.limits import COPIES
from aotc.serve.memory import retain_freed_memory
from aotc.serve.model import model_config, model_metadata, model_statistics
from aotc.serve.protocol import EXTENSIONS
from aotc.vmfb.errors import CallError

_CODES = {
    BAD: grpc.StatusCode.INVALID_ARGUMENT, UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED, NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    CONFLICT: grpc.StatusCode.ABORTED, TOO_LONG: grpc.StatusCode.RESOURCE_EXHAUSTED,
    BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED, FAILED: grpc.StatusCode.INTERNAL, CLOSED: grpc.StatusCode.UNAVAILABLE,
    LATE: grpc.StatusCode.DEADLINE_EXCEEDED, CANCELLED: grpc.StatusCode.CANCELLED,
}  # fmt: skip
HEALTH = "grpc.health.v1.Health"  # the health protocol that Kubernetes and others use
_SERVING, _NOT_SERVING = 1, 2  # its response values
Handler = Callable[[Any, Any], Awaitable[Any]]


class GrpcServer:
    """A running gRPC server.

    Attributes
    ----------
    port : int
        The port that it listens on.
    """

    def __init__(self, server: Any, port: int, watching: asyncio.Task[None]) -> None:
        self._server, self.port, self._watching = server, port, watching

    async def stop(self, grace: float) -> None:
        """Accept no new calls, and wait for running ones."""
        await self._server.stop(grace)
        self._watching.cancel()


async def start(engine: Engine) -> GrpcServer:
    """Start a gRPC server on the port of the settings.

    Raises
    ------
    CallError
        If the port is not available.
    """
    settings = engine.settings
    options = [
        ("grpc.max_receive_message_length", settings.max_message),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_head),
        ("grpc.absolute_max_metadata_size", settings.max_head),
        ("grpc.max_connection_idle_ms", _milliseconds(settings.idle_timeout)),
        ("grpc.server_handshake_timeout_ms", _milliseconds(settings.head_timeout)),
        ("grpc.max_allowed_incoming_connections", settings.connections),
        ("grpc.so_reuseport", 0),
    ]
    retain_freed_memory()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_metadata_error)
    server = grpc.aio.server(options=options)
    service = _Service(engine)
    # Messages are handled as bytes, so that one that cannot be decoded gets an error with a reason. Unary methods are
    # registered as streams, which look the same on the wire, so that reading their message can time out.
    handlers = {name: grpc.stream_unary_rpc_method_handler(service.unary_handler(name)) for name in METHODS}
    handlers |= {
        name: grpc.stream_unary_rpc_method_handler(service.health_handler(name)) for name in HEALTH_METHODS
    }  # without a token, as over REST
    handlers[INFER] = grpc.stream_stream_rpc_method_handler(service.infer)
    handlers[STREAM] = grpc.stream_stream_rpc_method_handler(service.stream)
    check = grpc.stream_unary_rpc_method_handler(service.health_handler(HEALTH))
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
        raise CallError("", "gRPC cannot listen there", f"{address}: {error}", "a free port") from None
    await server.start()
    return GrpcServer(server, port, asyncio.create_task(service.reads.watch()))


def _is_not_metadata_error(record: logging.LogRecord) -> bool:
    """Logging filter: return False for the gRPC library's traceback about metadata that is not UTF-8."""
    return not str(record.msg).startswith("Invalid encoding on")


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1e3), 1), 1 << 30)


# Calls that are read beyond those of the queue: they are refused with a reason, or are health checks. Each may hold a
# message of the maximum size.
SPARE_RPCS = 64


class _Service:
    """Methods of the gRPC service, named as in the protocol.

    Attributes
    ----------
    reads : MessageReads
        Pending reads of messages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._access = engine, AccessCheck(engine.settings)
        self.reads = MessageReads(engine)
        self._calls = 0  # running calls except health checks
        self._asking: dict[asyncio.Timeout, None] = {}  # health checks whose message is pending, oldest first

    @contextmanager
    def _count_call(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Check the token of a call, and count the call while it runs, as a context manager.

        Raises
        ------
        RequestFault
            If the token is wrong, or too many calls are running.
        """
        try:
            self._access.check(_authorization_headers(context))
            self._check_capacity()
        except RequestFault as error:
            self._engine.metrics.refused("grpc", error)
            raise
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _check_capacity(self) -> None:
        most = self._engine.settings.queue + SPARE_RPCS
        if self._calls >= most:
            what = "too many gRPC calls are running"
            raise RequestFault(BUSY, "", what, self._calls, f"fewer than {most}", "later, or --queue", retry=1)

    async def _read(self, context: Any) -> bytes:
        """Read the message of a call.

        Raises
        ------
        RequestFault
            If the message does not arrive in time.
        """
        try:
            async with asyncio.timeout(self._engine.settings.body_timeout):
                data = await self.reads.read(context)
        except TimeoutError:
            raise RequestFault(LATE, "", "the message of the call was not read in its time") from None
        if data is grpc.aio.EOF:
            raise RequestFault(BAD, "", "the call has no message", hint="send one request")
        return data

    def unary_handler(self, name: str) -> Handler:
        """Return a gRPC handler for method ``name`` that reads the message and converts exceptions to a status."""
        method: Callable[[Any], Awaitable[dict[str, Any]]] = getattr(self, name)
        response = MESSAGE[f"{name}Response"]

        async def answer(context: grpc.aio.ServicerContext) -> bytes:
            try:
                request = decode(f"{name}Request", await self._read(context))
                return response(**await method(request)).SerializeToString()
            except Exception as error:
                self._engine.metrics.refused("grpc", error)
                raise

        async def call(requests: Any, context: Any) -> Any:
            try:
                with self._count_call(context):
                    return await answer(context)
            except Exception as error:
                fault = without_references(error)
            await _abort_grpc_call(context, fault)

        return call

    def health_handler(self, name: str) -> Handler:
        """Return a gRPC handler for the health check ``name``."""

        async def call(requests: Any, context: Any) -> Any:
            try:
                return await self._answer_health_check(context, name)
            except Exception as error:
                fault = without_references(error)
            await _abort_grpc_call(context, fault)

        return call

    async def _answer_health_check(self, context: Any, name: str) -> bytes:
        """Answer a health check.

        Health checks are accepted however many other calls run; a new one replaces the oldest pending one.
        """
        try:
            async with asyncio.timeout(self._engine.settings.head_timeout) as limit:
                if len(self._asking) >= SPARE_RPCS:
                    oldest = next(iter(self._asking))
                    del self._asking[oldest]
                    oldest.reschedule(0)
                self._asking[limit] = None
                try:
                    data = await self.reads.read(context)
                finally:
                    self._asking.pop(limit, None)
        except TimeoutError:
            raise RequestFault(LATE, "", "the message of the call was not read in its time") from None
        if name == HEALTH:
            return await self._status(b"" if data is grpc.aio.EOF else data, context)
        good = name == "ServerLive" or self._engine.ready
        return MESSAGE[f"{name}Response"](**{name.removeprefix("Server").lower(): good}).SerializeToString()

    async def ModelReady(self, request: Any) -> dict[str, Any]:
        """Report whether a model is loaded."""
        try:
            model, function = self._engine.repository.find(request.name, request.version)
            model.check_function(function)
        except RequestFault:
            return {"ready": False}
        return {"ready": model.is_ready}

    async def ServerMetadata(self, request: Any) -> dict[str, Any]:
        """Return the server's metadata."""
        more = ["model_repository"] if self._engine.settings.model_control else []
        extensions = [*EXTENSIONS[1:], *more]  # the first one is for REST only
        return {"name": "aotc", "version": self._engine.settings.version, "extensions": extensions}

    async def ModelMetadata(self, request: Any) -> dict[str, Any]:
        """Return the metadata of a model."""
        model, function = self._engine.repository.find(request.name, request.version)
        return model_metadata(model, function, self._engine.repository.versions(model))

    async def ModelConfig(self, request: Any) -> dict[str, Any]:
        """Return the configuration of a model in Triton's form."""
        model, function = self._engine.repository.find(request.name, request.version)
        return {"config": model_config(model, function, self._engine.settings.max_delay)}

    async def ModelStatistics(self, request: Any) -> dict[str, Any]:
        """Return the statistics of a model, or of all of them."""
        repository = self._engine.repository
        found = [repository.find(request.name, request.version)] if request.name else repository.all_functions()
        return {"model_stats": model_statistics(found)}

    async def RepositoryIndex(self, request: Any) -> dict[str, Any]:
        """Return the repository index."""
        return {"models": self._engine.repository.index(request.ready)}

    async def RepositoryModelLoad(self, request: Any) -> dict[str, Any]:
        """Load a model."""
        self._engine.check_control(request.model_name)
        await self._engine.repository.load(request.model_name)
        return {}

    async def RepositoryModelUnload(self, request: Any) -> dict[str, Any]:
        """Unload a model."""
        self._engine.check_control(request.model_name)
        await self._engine.repository.unload(request.model_name)
        return {}

    async def infer(self, requests: Any, context: Any) -> None:
        """Handle an inference request."""
        try:
            with self._count_call(context):
                await self._infer(context)
            return
        except Exception as error:
            fault = without_references(error)
        await _abort_grpc_call(context, fault)

    async def _infer(self, context: Any) -> None:
        """Handle an inference request; its memory is reserved until the client has read the response or has left."""
        engine = self._engine
        with engine.memory.lease() as lease:
            with engine.admit("grpc") as ticket:
                data = await self._read(context)
                lease.grow(len(data))
                received = await receive(engine.conversion, data)
                del data
                answer = await infer(engine, received, ticket, trace_context(engine, context))
                lease.grow(COPIES * len(answer))
            await write(context, answer, engine.settings.idle_timeout)

    async def _status(self, data: bytes, context: Any) -> bytes:
        """Report whether the server can accept requests, and, for a named model, whether it is loaded."""
        request = decode("ModelReadyRequest", data)  # the name has the field number of the health protocol's service
        if request.name:
            self._access.check(_authorization_headers(context))
            model, function = self._engine.repository.find(request.name)
            model.check_function(function)
        return bytes((8, _SERVING if self._engine.ready else _NOT_SERVING))

    async def stream(self, requests: Any, context: Any) -> None:
        """Handle the requests of a stream."""
        try:
            with self._count_call(context):
                await InferStream(self._engine, context, self.reads).run()
            return
        except RequestFault as error:
            fault = without_references(error)
        except ExceptionGroup as group:  # reading failed while requests were running
            fault = without_references(group.exceptions[0])
        await _abort_grpc_call(context, fault)


async def _abort_grpc_call(context: Any, error: Exception) -> None:
    """End a call with the status of an error.

    gRPC keeps the exception raised here in a reference cycle until garbage collection. So ``error`` must be bare, and
    this is called after the ``except`` block: otherwise all memory of the request would be kept alive.
    """
    if isinstance(error, RequestFault) and error.retry:
        context.set_trailing_metadata((("retry-after", str(error.retry)),))
    try:
        await context.abort(_CODES.get(http_status_of(error), grpc.StatusCode.UNKNOWN), client_error_text(error))
    except grpc.aio.AbortError:
        raise
    except Exception:  # the client or gRPC has ended the call: it would log a traceback
        raise asyncio.CancelledError from None


def _authorization_headers(context: Any) -> Mapping[bytes, bytes]:
    """Return the client's authorization header."""
    pairs = context.invocation_metadata() or ()
    return {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in pairs if k == "authorization"}
