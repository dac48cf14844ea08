"""The server as an ASGI application, for uvicorn, hypercorn, or a route of FastAPI and Starlette."""

from __future__ import annotations

import asyncio
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from aotc.serve.engine import Engine
from aotc.serve.errors import CLOSED, RequestFault
from aotc.serve.http_io import Receive, Scope, Send, send_fault
from aotc.serve.logs import open_log
from aotc.serve.rest import make_app
from aotc.serve.settings import Settings
from aotc.vmfb.errors import Error, check_keywords


def asgi(source: str | os.PathLike[str], **settings: Any) -> AsgiApp:
    """Return an ASGI application that serves a bundle, or a folder of bundles; ``docs/serve.md`` has its routes.

    Parameters
    ----------
    source : path
        A bundle, or a folder of bundles.
    **settings
        Fields of :class:`aotc.serve.settings.Settings`, as the options of ``aotc serve``: ``max_batch=8``,
        ``token="..."``. The server that runs the application configures host, port, TLS and gRPC. Without a token the
        application only answers requests whose ``Host`` names this machine; ``insecure=True`` answers all.

    Raises
    ------
    CallError
        If a setting is invalid.
    """
    check_keywords("asgi", settings, [f.name for f in fields(Settings)])
    return AsgiApp(Settings(source=Path(source), **settings).check())


class AsgiApp:
    """An ASGI application that loads its models at start-up, or else before its first request.

    A framework that mounts an application on a route does not send the start-up event.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._log = open_log(settings.json_logs)
        self._starting: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or the start and end of the application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            await self._started()
        except Exception as error:
            self._log.error("cannot start", extra={"fields": {"error": str(error)}})
            await send_fault(send, RequestFault(CLOSED, "", _error_text(error)), close=True)
            return
        await self._app(scope, receive, send)

    async def _started(self) -> None:
        """Load the models unless they are loaded or another request loads them."""
        loop = asyncio.get_running_loop()
        if self._starting is None or self._loop is not loop:  # another loop: of a test client, say
            self._loop, self._starting = loop, asyncio.create_task(self._start())
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except Exception:
            if self._starting is starting:
                self._starting = None  # the next request tries again
            raise

    async def _start(self) -> None:
        self._engine = Engine(self._settings, self._log)
        self._app = make_app(self._engine)
        repository = self._engine.repository
        await repository.refresh()
        repository.check_bundle_loaded()
        self._watching = asyncio.create_task(repository.watch())

    async def _live(self, receive: Receive, send: Send) -> None:
        """Handle the lifespan events of ASGI: load the models at start-up, stop background tasks at shutdown."""
        await receive()
        try:
            await self._started()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": _error_text(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()
        finally:
            self._engine.closed.set()
            self._watching.cancel()
            self._engine.conversion.close()
        await send({"type": "lifespan.shutdown.complete"})


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
