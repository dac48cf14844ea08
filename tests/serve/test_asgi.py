"""The server as an ASGI application: alone, mounted on a route, and without its models."""

import asyncio
import json

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.routing import Mount

import aotc
from aotc.serve.asgi import AsgiApp

pytestmark = pytest.mark.cpu

ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]


async def ask(app, method, path, document=None):
    """Send a request to an application; return status and document."""
    body = b"" if document is None else json.dumps(document).encode()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "root_path": "", "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    sent, parts = [], [{"type": "http.request", "body": body}]

    async def receive():
        if parts:
            return parts.pop()
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 60)
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]) or b"null")


async def begin_and_end(app, between):
    """Start an application, await ``between``, and end it; return what it said."""
    said, told = [], asyncio.Queue()

    async def send(message):
        said.append(message)
        started.set()

    started = asyncio.Event()
    life = asyncio.create_task(app({"type": "lifespan"}, told.get, send))
    await told.put({"type": "lifespan.startup"})
    await asyncio.wait_for(started.wait(), 60)
    if "complete" in said[0]["type"]:
        await between()
        await told.put({"type": "lifespan.shutdown"})
    await asyncio.wait_for(life, 60)
    return said


def test_an_asgi_application_serves_models(tiny_folder):
    app = aotc.asgi(tiny_folder)

    async def between():
        status, found = await ask(app, "POST", "/v2/models/tiny/infer", {"inputs": ROWS})
        assert status == 200
        assert found["outputs"][0]["data"] == [2, 4, 6, 8]
        assert (await ask(app, "GET", "/v2/models/tiny/ready"))[0] == 200

    said = asyncio.run(begin_and_end(app, between))
    assert [m["type"] for m in said] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_mounted_application_loads_for_its_first_requests(tiny_folder):
    app = Starlette(routes=[Mount("/models", aotc.asgi(tiny_folder))])

    async def both():
        asked = (ask(app, "POST", "/models/v2/models/tiny/infer", {"inputs": ROWS}) for _ in range(2))
        return await asyncio.gather(*asked)

    for status, found in asyncio.run(both()):
        assert status == 200
        assert found["outputs"][0]["data"] == [2, 4, 6, 8]


def test_an_unloadable_bundle_responds_503(tmp_path):
    (tmp_path / "bad.vmfb").write_bytes(b"no bundle")
    app = aotc.asgi(tmp_path / "bad.vmfb")

    async def never():
        raise AssertionError("it started")

    (said,) = asyncio.run(begin_and_end(app, never))
    assert said["type"] == "lifespan.startup.failed"
    assert "not an aotc bundle" in said["message"]

    async def mounted():
        around = Starlette(routes=[Mount("/m", aotc.asgi(tmp_path / "bad.vmfb"))])
        return await ask(around, "GET", "/m/v2/models/bad/ready")

    status, found = asyncio.run(mounted())
    assert status == 503
    assert "not an aotc bundle" in found["error"]


def test_a_failed_start_is_retried(tiny_folder, monkeypatch):
    """Also for an error that is not aotc's, and with requests that wait for it together."""
    app, starts, begin = aotc.asgi(tiny_folder), [], AsgiApp._start

    async def start(self):
        starts.append(None)
        await asyncio.sleep(0.05)
        if len(starts) == 1:
            raise OSError("the disk is away")
        await begin(self)

    monkeypatch.setattr(AsgiApp, "_start", start)

    async def several():
        first = await asyncio.gather(*(ask(app, "GET", "/v2/health/ready") for _ in range(3)))
        second = await asyncio.gather(*(ask(app, "GET", "/v2/health/ready") for _ in range(3)))
        return [status for status, _ in first], [status for status, _ in second], first[0][1]

    failed, good, said = asyncio.run(several())
    assert failed == [503] * 3
    assert "the disk is away" in said["error"]
    assert good == [200] * 3
    assert len(starts) == 2


def test_an_application_restarts_in_another_event_loop(tiny_folder):
    app = aotc.asgi(tiny_folder)
    for _ in range(2):
        assert asyncio.run(ask(app, "POST", "/v2/models/tiny/infer", {"inputs": ROWS}))[0] == 200


def test_invalid_asgi_settings_are_refused(tmp_path):
    with pytest.raises(aotc.ArgumentError, match="max_batch="):
        aotc.asgi(tmp_path, max_bach=2)
    with pytest.raises(aotc.CallError, match="no such file or folder"):
        aotc.asgi(tmp_path / "none")
    with pytest.raises(aotc.CallError, match="threads"):
        aotc.asgi(tmp_path, threads=-1)
