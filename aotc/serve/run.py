"""Life cycle of a server: sockets, signals, and completion of running requests at shutdown."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from logging import Logger
from typing import Any

import uvicorn

from aotc.serve.background_threads import run_in_background
from aotc.serve.engine import Engine
from aotc.serve.http_protocol import Connections, GuardedConnection, TlsConnection
from aotc.serve.limits import HANDSHAKES, SPARE_CONNECTIONS
from aotc.serve.logs import open_log
from aotc.serve.rest import make_app
from aotc.serve.settings import Settings
from aotc.vmfb.errors import CallError

# Connections that may wait in the listen queue while the server is busy: more than the default size of the request
# queue.
BACKLOG = 1024


Started = Callable[[Engine, int, int | None], None]


class _HttpServer(uvicorn.Server):
    """Uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def serve(settings: Settings, started: Started | None = None) -> None:
    """Serve until SIGTERM or SIGINT; running requests finish first.

    Parameters
    ----------
    settings : Settings
        The settings of the server.
    started : callable, optional
        Called with the engine and the ports of REST and gRPC when the server accepts requests.

    Raises
    ------
    CallError, BundleError
        If a setting is invalid, an address is not available, or the only bundle cannot be loaded.
    """
    settings.check()
    _allow_files(settings)
    asyncio.run(_serve_until_stopped(settings, open_log(settings.json_logs), started))


async def _serve_until_stopped(settings: Settings, log: Logger, started: Started | None) -> None:
    """Open the socket, install signal handlers, load the models, and run the server."""
    engine = Engine(settings, log)
    listener = _listening_socket(settings)
    with listener:
        stop, loop = _ShutdownRequest(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError, RuntimeError):  # not on the main thread
                loop.add_signal_handler(number, stop.ask)
        engine.stop = lambda: loop.call_soon_threadsafe(stop.ask)
        if await _load_models(engine, stop):
            await _run_server(engine, listener, stop, started)


class _ShutdownRequest:
    """Shutdown requests: the first ends the server gracefully, the second immediately.

    Attributes
    ----------
    wanted, at_once : asyncio.Event
        Set by the first, and by the second request.
    """

    def __init__(self) -> None:
        self.wanted, self.at_once = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        """Request the shutdown."""
        (self.at_once if self.wanted.is_set() else self.wanted).set()


async def _load_models(engine: Engine, stop: _ShutdownRequest) -> bool:
    """Load the models; return False if a shutdown request arrived.

    Raises
    ------
    CallError
        If the folder cannot be read, or the only bundle cannot be loaded.
    """
    loading, stopping = asyncio.create_task(engine.repository.refresh()), asyncio.create_task(stop.wanted.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        loading.cancel()
        engine.log.info("ended while it loaded")
        return False
    loading.result()
    engine.repository.check_bundle_loaded()
    return True


async def _run_server(engine: Engine, listener: socket.socket, stop: _ShutdownRequest, started: Started | None) -> None:
    """Run the HTTP and gRPC servers until a shutdown request; then wait for running requests, or cancel them."""
    settings = engine.settings
    connections = Connections(settings)
    http = _HttpServer(_uvicorn_config(engine, connections))
    grpc = None
    if settings.grpc_port is not None:
        from aotc.serve.grpc import service  # gRPC is optional

        grpc = await service.start(engine)
    serving = asyncio.create_task(http.serve([listener]))
    watching = asyncio.create_task(engine.repository.watch())
    closing = asyncio.create_task(connections.watch())
    stopping, hurrying = (asyncio.create_task(event.wait()) for event in (stop.wanted, stop.at_once))
    try:
        while not http.started and not serving.done():
            await asyncio.sleep(0.001)
        if not serving.done():
            listener.listen(BACKLOG)  # asyncio used the number of connections to accept at once
        port, grpc_port = listener.getsockname()[1], None if grpc is None else grpc.port
        address = f"http{'s' * bool(settings.tls_cert)}://{settings.host}:{port}"
        engine.log.info("listening", extra={"fields": {"rest": address, "grpc_port": grpc_port}})
        if not settings.model_control and not engine.repository.models and not engine.repository.failures:
            engine.log.warning("no bundle to serve yet", extra={"fields": {"folder": str(settings.source)}})
        if started is not None:
            started(engine, port, grpc_port)
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        engine.closed.set()
        engine.log.info("ending", extra={"fields": {"in_flight": engine.in_flight}})
        http.should_exit = True
        connections.close_handshakes()
        ending: asyncio.Future[Any] = asyncio.gather(serving, *([] if grpc is None else [grpc.stop(settings.grace)]))
        await asyncio.wait((ending, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            for task in list(http.server_state.tasks):
                task.cancel()
            if grpc is not None:
                await grpc.stop(0)
        await ending
    finally:
        others: list[asyncio.Task[Any]] = [watching, closing, stopping, hurrying]
        for task in others:
            task.cancel()
        engine.conversion.close()
        await run_in_background(engine.repository.end_ranks)
        engine.log.info("ended", extra={"fields": {"lost": engine.in_flight}})


def _listening_socket(settings: Settings) -> socket.socket:
    """Return the listening socket of the HTTP server.

    Raises
    ------
    CallError
        If the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)  # with a protocol number, for which asyncio sets TCP_NODELAY
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{settings.host}:{settings.port}"
        expected = "an address of this machine, a free port"
        raise CallError("", "cannot listen there", f"{where}: {reason}", expected) from None


# Connections that the event loop accepts before it reads from them, so that a health check is read before newer
# connections close its own. A quarter of SPARE_CONNECTIONS: a connection is read in the second iteration after its own.
ACCEPTED_AT_ONCE = 16


def _uvicorn_config(engine: Engine, connections: Connections) -> Any:
    """Return uvicorn's configuration with guarded connections and TLS."""
    settings = engine.settings
    protocol: Callable[..., Any] = partial(GuardedConnection, connections)
    if settings.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        context.options |= ssl.OP_NO_RENEGOTIATION
        plain = protocol
        protocol = lambda **uvicorn: TlsConnection(connections, context, plain(**uvicorn))
    return uvicorn.Config(
        make_app(engine), http=protocol,  # type: ignore[arg-type]
        lifespan="off", ws="none", log_config=None, log_level="error", access_log=False, backlog=ACCEPTED_AT_ONCE,
        server_header=False, proxy_headers=False, timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=max(round(settings.grace), 1),
    )  # fmt: skip


# Files that a server opens in addition to its connections: bundles, pipes of converter processes, the log.
SPARE_FILES = 256


def _allow_files(settings: Settings) -> None:
    """Raise the limit of open files to the number of connections, health checks and bundles."""
    most = settings.connections * (1 if settings.grpc_port is None else 2)
    wanted = most + SPARE_CONNECTIONS + HANDSHAKES + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
