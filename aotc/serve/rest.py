"""The HTTP routes of the protocol, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from aotc.serve.auth import AccessCheck
from aotc.serve.engine import Engine, Ticket
from aotc.serve.errors import CLOSED, LATE, NOT_FOUND, RequestFault, client_error_text, http_status_of
from aotc.serve.generate.sse import CompleteAnswer, EventStreamAnswer, GenerateRoute
from aotc.serve.http_io import (
    JSON,
    ClientLeft,
    ClientWatch,
    Receive,
    Scope,
    Send,
    read_body,
    send_fault,
    send_parts,
    trace_headers,
)
from aotc.serve.limits import INLINE_BYTES
from aotc.serve.memory import Lease
from aotc.serve.metrics import CONTENT_TYPE
from aotc.serve.model import model_config, model_metadata, model_statistics
from aotc.serve.protocol import EXTENSIONS, HEADER_LENGTH, parse_object
from aotc.serve.statistics import OUTPUT
from aotc.serve.tensors import Buffer

_OCTETS = b"application/octet-stream"


def make_app(engine: Engine) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the ASGI application of a server."""
    endpoints = _Endpoints(engine)
    infer = _InferRoute(engine)
    events, complete = GenerateRoute(engine, EventStreamAnswer), GenerateRoute(engine, CompleteAnswer)
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    routes = [
        *(Route(f"{path}/infer", infer, methods=["POST"]) for path in (model, version)),
        *(Route(f"{path}/generate_stream", events, methods=["POST"]) for path in (model, version)),
        *(Route(f"{path}/generate", complete, methods=["POST"]) for path in (model, version)),
        *(Route(f"{path}/ready", endpoints.model_ready) for path in (model, version)),
        *(Route(f"{path}/config", endpoints.config) for path in (model, version)),
        Route("/v2/models/stats", endpoints.all_statistics),
        *(Route(f"{path}/stats", endpoints.statistics) for path in (model, version)),
        *(Route(path, endpoints.model) for path in (model, version)),
        Route("/v2/health/live", endpoints.live),
        Route("/v2/health/ready", endpoints.ready),
        Route("/v2", endpoints.server),
        Route("/v2/repository/index", endpoints.index, methods=["POST"]),
        Route("/v2/repository/models/{model}/{change}", endpoints.change, methods=["POST"]),
        Route("/metrics", endpoints.metrics),
        Route("/v2/state", endpoints.state),
        Route("/", endpoints.page),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: endpoints.unknown_path,
            RequestFault: endpoints.refused_request,
            Exception: endpoints.refused_request,
        },
    )
    return AccessMiddleware(app, engine)


class AccessMiddleware:
    """ASGI middleware that refuses requests that fail the access check."""

    def __init__(self, app: Starlette, engine: Engine) -> None:
        self._app, self._engine, self._access = app, engine, AccessCheck(engine.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            return
        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))  # Ray's prefix for an application
            self._access.check(dict(scope["headers"]), path)
        except RequestFault as error:
            self._engine.metrics.refused("rest", error)
            await send_fault(send, error, close=True)
            return
        await self._app(scope, receive, send)


# The status page: one document without external resources. It polls ``/v2/state``, with the token if there is one.
_HERE = Path(__file__).parent
_STYLE, _SCRIPT = (_HERE / "page.css").read_text("utf-8"), (_HERE / "page.js").read_text("utf-8")
PAGE = (_HERE / "page.html").read_text("utf-8").replace("@@STYLE@@", _STYLE).replace("@@SCRIPT@@", _SCRIPT)


def _etag_digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; script-src 'sha256-{_etag_digest(_SCRIPT)}'; "
    f"style-src 'sha256-{_etag_digest(_STYLE)}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Only the page's own script can run, whatever the names of models are."""

# Paths that the error of an unknown path names.
_PATHS = "GET /v2/models/NAME, POST /v2/models/NAME/infer, GET /v2/health/ready, or GET / for a page in a browser"


class _InferRoute:
    """ASGI application for inference requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        read = [False]
        try:
            with self._engine.memory.lease() as lease:
                with self._engine.admit("rest") as ticket:
                    parts, json_length = await self._answer(scope, receive, ticket, read, lease)
                await self._send(scope, send, parts, json_length)
        except ClientLeft:
            return
        except Exception as error:
            await send_fault(send, error, close=not read[0])

    async def _answer(
        self, scope: Scope, receive: Receive, ticket: Ticket, read: list[bool], lease: Lease
    ) -> tuple[list[Buffer], int | None]:
        """Read, parse and run a request; return the parts of the response and the length of its JSON."""
        engine, headers = self._engine, dict(scope["headers"])
        names = scope["path_params"]
        try:
            with ClientWatch(engine, receive) as watch:
                async with asyncio.timeout(engine.settings.timeout) as limit:
                    model, function = engine.find(ticket, names["model"], names.get("version", ""))
                    body = await read_body(headers, receive, engine.settings.max_body, lease)
                    read[0] = True
                    watch.begin()
                    ticket.end_phase()
                    length = headers.get(HEADER_LENGTH.encode())
                    text = None if length is None else length.decode("latin-1")
                    request = await engine.conversion.read_request(body, text, names["model"], function.most_tensors)
                    del body
                    if request.timeout is not None:
                        began = asyncio.get_running_loop().time()
                        limit.reschedule(began + engine.time_limit_of(request))
                    results = await engine.infer(
                        ticket, function, request, trace_headers(headers, engine), names["model"]
                    )
                    answer = await engine.conversion.write_answer(names["model"], model.version, request, results)
                    ticket.end_phase(OUTPUT)
                    lease.grow(sum(map(len, answer[0])))
                    return answer
        except TimeoutError:
            what = "the request was not done in its time"
            raise RequestFault(LATE, names["model"], what, hint="a longer timeout") from None

    async def _send(self, scope: Scope, send: Send, parts: list[Buffer], json_length: int | None) -> None:
        answer = [(b"content-length", b"%d" % sum(map(len, parts)))]
        answer.append((b"content-type", JSON if json_length is None else _OCTETS))
        if json_length is not None:
            answer.append((HEADER_LENGTH.encode(), b"%d" % json_length))
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        await send_parts(scope, send, parts, self._engine.settings.idle_timeout)


class _Endpoints:
    """Handlers of all routes except inference and generation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def unknown_path(self, request: Request, error: Exception) -> Response:
        """Return the error response for an unknown path or method."""
        assert isinstance(error, HTTPException)
        status, headers = error.status_code, error.headers
        what = "there is nothing at this path" if status == NOT_FOUND else error.detail
        fault = RequestFault(status, "", what, f"{request.method} {request.url.path}"[:200], _PATHS)
        self._engine.metrics.refused("rest", fault)
        return JSONResponse({"error": str(fault)}, status, headers)

    async def refused_request(self, request: Request, error: Exception) -> Response:
        """Return the error response for a request that is not for inference."""
        self._engine.metrics.refused("rest", error)
        return JSONResponse({"error": client_error_text(error)}, http_status_of(error))

    async def live(self, request: Request) -> Response:
        """Report that the process is alive."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Report whether the server can accept requests."""
        good = self._engine.ready
        return JSONResponse({"ready": good}, 200 if good else CLOSED)

    async def server(self, request: Request) -> Response:
        """Return the server's metadata."""
        more = ["model_repository"] if self._engine.settings.model_control else []
        about = {"name": "aotc", "version": self._engine.settings.version}
        return JSONResponse({**about, "extensions": [*EXTENSIONS, *more]})

    async def model_ready(self, request: Request) -> Response:
        """Report whether a model is loaded."""
        names = request.path_params
        model, function = self._engine.repository.find(names["model"], names.get("version", ""))
        model.check_function(function)
        return JSONResponse({"name": names["model"], "ready": model.is_ready}, 200 if model.is_ready else CLOSED)

    async def model(self, request: Request) -> Response:
        """Return the metadata of a model."""
        names = request.path_params
        model, function = self._engine.repository.find(names["model"], names.get("version", ""))
        versions = self._engine.repository.versions(model)
        return JSONResponse(model_metadata(model, function, versions))

    async def config(self, request: Request) -> Response:
        """Return the configuration of a model in Triton's form."""
        names = request.path_params
        model, function = self._engine.repository.find(names["model"], names.get("version", ""))
        return JSONResponse(model_config(model, function, self._engine.settings.max_delay))

    async def statistics(self, request: Request) -> Response:
        """Return the statistics of a model."""
        names = request.path_params
        found = self._engine.repository.find(names["model"], names.get("version", ""))
        return JSONResponse({"model_stats": model_statistics([found])})

    async def all_statistics(self, request: Request) -> Response:
        """Return the statistics of all models."""
        return JSONResponse({"model_stats": model_statistics(self._engine.repository.all_functions())})

    async def index(self, request: Request) -> Response:
        """Return the repository index."""
        headers, settings = dict(request.scope["headers"]), self._engine.settings
        with self._engine.memory.lease() as lease:
            body = await read_body(headers, request.receive, min(settings.max_body, INLINE_BYTES), lease)
        ready = bool(body) and bool(parse_object(body, "").get("ready"))
        return JSONResponse(self._engine.repository.index(ready))

    async def change(self, request: Request) -> Response:
        """Load or unload a model."""
        name, change = request.path_params["model"], request.path_params["change"]
        if change not in ("load", "unload"):
            raise HTTPException(NOT_FOUND)
        self._engine.check_control(name)
        repository = self._engine.repository
        await (repository.load(name) if change == "load" else repository.unload(name))
        return JSONResponse({})

    async def metrics(self, request: Request) -> Response:
        """Return the Prometheus metrics."""
        return Response(self._engine.metrics.text(), media_type=CONTENT_TYPE)

    async def state(self, request: Request) -> Response:
        """Return the state for the status page."""
        return JSONResponse(self._engine.state(), headers={"cache-control": "no-store"})

    async def page(self, request: Request) -> Response:
        """Return the status page."""
        return HTMLResponse(PAGE, headers=HEADERS)
