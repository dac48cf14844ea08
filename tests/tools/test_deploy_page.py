"""The programs of docs/deploy.md, run as they stand there."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import jax
import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a bundle of two rows by a matrix."""
    w = np.arange(12, dtype="float32").reshape(4, 3)
    data = aotc.compile(lambda x: jax.nn.relu(x @ w), jax.ShapeDtypeStruct((2, 4), "f4"))
    (tmp_path / "model.vmfb").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def post(app, path, body):
    """Return the status and the JSON that an ASGI application answers with."""
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = []

    async def receive():
        return given.pop() if given else await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1), "app": app,
        "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))


def test_the_service_on_the_page_responds(folder):
    names = {}
    exec(PROGRAMS[1], names)
    app = names["app"]

    async def visit():
        async with names["life"](app):
            both = await asyncio.gather(*(post(app, "/predict", [[1, 0, 0, n]] * 2) for n in range(3)))
            return both, await post(app, "/predict", [1, 2])

    answers, (status, refused) = asyncio.run(visit())
    w = np.arange(12, dtype="float32").reshape(4, 3)
    for n, (code, found) in enumerate(answers):
        assert code == 200
        assert found == [[float(v) for v in w[0] + n * w[3]]] * 2
    assert status == 400
    assert "expected" in refused["error"]


@pytest.mark.parametrize("number", [2, 3], ids=["processes", "renamed"])
def test_programs_on_the_page_run(folder, number):
    (folder / "program.py").write_text(PROGRAMS[number])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "program.py"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_service_of_the_image_responds(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = PROGRAMS[0].replace("/app/", "").replace('("0.0.0.0", 8000)', f'("127.0.0.1", {port})')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL) as service:
        try:
            answers = [asked(port, rows) for rows in ([[1, 0, 0, 1]] * 2, [[1, 2]])]
        finally:
            service.kill()
    w = np.arange(12, dtype="float32").reshape(4, 3)
    assert answers[0] == (200, [[float(v) for v in w[0] + w[3]]] * 2)
    assert answers[1][0] == 400
    assert "expected: f32[2, 4]" in answers[1][1]["error"]


def asked(port, rows):
    """Return status and JSON of an answer, which is waited for until the service has begun."""
    end = time.monotonic() + 60
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/predict", json.dumps(rows))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except ConnectionRefusedError:
            assert time.monotonic() < end, "it does not begin"
            time.sleep(0.05)
        finally:
            connection.close()


def test_every_program_on_the_page_has_a_test():
    assert len(PROGRAMS) == 10
    assert "from ray import serve" in PROGRAMS[4]  # tests/serve/test_ray.py does as this and the next ones
    assert "autoscaling_config" in PROGRAMS[5]
    assert "applications(" in PROGRAMS[6]
    assert "autoscaling_config" in PROGRAMS[7]  # tests/serve/test_ray_gang_replicas.py does as this and the next one
    assert "hosts=2" in PROGRAMS[8]
    assert "RayGang(" in PROGRAMS[9]  # tests/serve/test_ray_gang.py
