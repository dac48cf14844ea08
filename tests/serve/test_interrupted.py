"""Two servers at once, and what comes between: ports that are taken, Ctrl-C, disks that are full, folders that go."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from jax import export
from safetensors.numpy import save_file
from support import tiny
from support.served import Running, ServeProcess, ask, free_port, running, until
from typer.testing import CliRunner

import aotc
from aotc.serve import repository
from aotc.vmfb.errors import CallError
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
INFER = "/v2/models/tiny/infer"


def good(port):
    return ask(port, INFER, {"inputs": ROWS})[1]["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize("option", ["--port", "--grpc-port"])
def test_a_second_server_on_a_port_is_an_error(tiny_folder, option):
    """The second one says so and ends; the first one goes on."""
    taken, rest = free_port(), "--port=0" if option == "--grpc-port" else "--grpc-port=0"
    with ServeProcess(tiny_folder, f"{option}={taken}", rest) as first:
        port = first.port()
        with ServeProcess(tiny_folder, f"{option}={taken}", rest) as second:
            status, log = second.rest()
        assert status == 1
        assert "cannot listen there" in log
        assert str(taken) in log
        assert "Traceback" not in log
        assert good(port)


def test_two_servers_may_serve_one_folder(tmp_path):
    """Both take a new bundle, and one that ends is no matter to the other."""
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    options = ("--port=0", "--poll=0.05")
    with ServeProcess(tmp_path, *options) as one, ServeProcess(tmp_path, *options) as other:
        ports = one.port(), other.port()
        (tmp_path / ".new").write_bytes(tiny.bundle())
        os.replace(tmp_path / ".new", tmp_path / "tiny.vmfb")
        for process, port in zip((one, other), ports):
            assert "tiny" in process.until("replaced")
            assert good(port)
        one.made.send_signal(signal.SIGINT)
        assert one.rest()[0] == 0
        assert good(ports[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_loading_ends_the_server(tmp_path, number):
    """A bundle that is read for ever: nobody writes into the pipe."""
    path = tmp_path / "slow.vmfb"
    os.mkfifo(path)
    port = free_port()
    with ServeProcess(path, f"--port={port}") as process:
        assert until(lambda: listens(process.made.pid, port))
        time.sleep(0.3)
        began = time.monotonic()
        process.made.send_signal(number)
        status, log = process.rest()
        assert time.monotonic() - began < 5
    assert status == 0
    assert "ended while it loaded" in log
    assert "Traceback" not in log


def listens(pid, port):
    """Does somebody listen at a port?"""
    with open(f"/proc/{pid}/net/tcp") as rows:
        return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in list(rows)[1:])


def test_a_bundle_that_never_loads_does_not_block_others(tmp_path, monkeypatch):
    """Requests are answered meanwhile, and the end does not wait for it. What is not a file is not looked at."""
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    os.mkfifo(tmp_path / "pipe.vmfb")
    begun, ended = threading.Event(), threading.Event()

    def endless(*args):
        begun.set()
        ended.wait(60)
        raise CallError("", "too late")

    with running(tmp_path, poll=0.02) as server:
        monkeypatch.setattr(repository, "ServedModel", endless)
        (tmp_path / "slow.vmfb").write_bytes(tiny.bundle())
        assert begun.wait(20)
        assert good(server.port)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    ended.set()


def batched():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), np.float32)
    return aotc.compile(export.export(jax.jit(lambda x: x * 2))(x))


def test_requests_of_a_waiting_batch_are_answered_at_shutdown(tmp_path):
    """Its requests are answered."""
    (tmp_path / "rows.vmfb").write_bytes(batched())
    with ServeProcess(tmp_path, "--port=0", "--max-batch=64", "--max-delay-ms=1500", "--json-logs") as process:
        port, found = process.port(), []
        row = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        asking = [
            threading.Thread(target=lambda: found.append(ask(port, "/v2/models/rows/infer", {"inputs": [row]})))
            for _ in range(3)
        ]
        for thread in asking:
            thread.start()
        assert until(lambda: "aotc_in_flight 3.0" in metrics(port))
        process.made.send_signal(signal.SIGINT)
        status, log = process.rest()
        for thread in asking:
            thread.join(20)
    assert status == 0
    assert [answer[1]["outputs"][0]["data"] for answer in found] == [[2, 4, 6, 8]] * 3
    assert json.loads(log.splitlines()[-1])["lost"] == 0


def metrics(port):
    return Running(None, port, None).ask("/metrics")[2].decode()


def test_a_full_disk_for_the_log_does_not_end_the_server(tiny_folder):
    port = free_port()
    with (
        open("/dev/full", "w") as full,
        ServeProcess(tiny_folder, f"--port={port}", "--access-log", "--json-logs", stderr=full) as process,
    ):
        assert until(lambda: listens(process.made.pid, port))
        for _ in range(5):
            assert good(port)
        process.made.send_signal(signal.SIGTERM)
        assert process.rest()[0] == 0


def test_a_full_disk_for_traces_does_not_end_the_server(tiny_folder, monkeypatch, capsys):
    """The request is answered; the log says what is lost, once."""
    trace = pytest.importorskip("opentelemetry.trace")

    class Tracer(trace.NoOpTracer):
        @contextmanager
        def start_as_current_span(self, name, context=None, **more):
            yield trace.INVALID_SPAN
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "get_tracer", lambda *args: Tracer())
    with running(tiny_folder, traces=True) as server:
        for _ in range(3):
            assert good(server.port)
        bad = server.json(INFER, {"inputs": ROWS[:1]})
        assert bad[0] == 400
    assert capsys.readouterr().err.count("a trace is lost") == 1


class Denied:
    """Makes some places of a folder unreadable, as they are for a user who may not: tests run as root too."""

    def __init__(self, monkeypatch):
        self.names = set()
        real = os.stat

        def denied(path, *args, **more):
            if isinstance(path, str | os.PathLike) and os.path.basename(os.fspath(path)) in self.names:
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path, *args, **more)

        monkeypatch.setattr(os, "stat", denied)


def reasons(port):
    return {row["name"]: (row["state"], row["reason"]) for row in ask(port, "/v2/repository/index", {})[1]}


def test_models_with_unreadable_files_are_still_served(tmp_path, monkeypatch):
    """And changes nothing for the others."""
    for name in ("tiny", "other"):
        (tmp_path / f"{name}.vmfb").write_bytes(tiny.bundle())
    denied = Denied(monkeypatch)
    with running(tmp_path, poll=0.02) as server:
        denied.names = {"tiny.vmfb", "new.vmfb"}
        (tmp_path / "new.vmfb").write_bytes(tiny.bundle())
        os.unlink(tmp_path / "other.vmfb")
        assert until(lambda: "other" not in reasons(server.port))
        assert reasons(server.port)["tiny"][0] == "READY"
        assert "Permission denied" in reasons(server.port)["tiny"][1]
        assert reasons(server.port)["new"][0] == "UNAVAILABLE"
        assert good(server.port)
        denied.names = set()
        assert until(lambda: reasons(server.port) == dict.fromkeys(("tiny", "new"), ("READY", "")))


def test_models_are_served_while_their_folder_is_missing(tmp_path):
    """As one on another machine does."""
    folder, away = tmp_path / "models", tmp_path / "away"
    folder.mkdir()
    (folder / "tiny.vmfb").write_bytes(tiny.bundle())
    with running(folder, poll=0.02, model_control=True) as server:
        os.rename(folder, away)
        assert until(lambda: server.engine.repository.trouble)
        assert good(server.port)
        assert "No such file" in server.json("/v2/state")[1]["trouble"]
        status, document = server.json("/v2/repository/models/tiny/load", {})
        assert (status, "cannot be read" in document["error"]) == (503, True)
        os.rename(away, folder)
        assert until(lambda: not server.engine.repository.trouble)
        assert good(server.port)


def test_a_bundle_that_breaks_the_loader_does_not_end_the_watcher(tmp_path, monkeypatch):
    """Whatever is raised is a reason, is said once, and the next one is loaded."""
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    with running(tmp_path, poll=0.02) as server:
        real = repository.ServedModel

        def breaks(*args):
            raise KeyError("variants")

        monkeypatch.setattr(repository, "ServedModel", breaks)
        (tmp_path / "bad.vmfb").write_bytes(b"x")
        assert until(lambda: "KeyError" in reasons(server.port).get("bad", ("", ""))[1])
        monkeypatch.setattr(repository, "ServedModel", real)
        (tmp_path / "more.vmfb").write_bytes(tiny.bundle())
        assert until(lambda: "more" in reasons(server.port))
        assert good(server.port)


def test_a_load_without_memory_is_retried(tmp_path, monkeypatch):
    real, tries = repository.ServedModel, []

    def full(*args):
        tries.append(args)
        if len(tries) < 4:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(repository, "ServedModel", full)
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    with running(tmp_path, poll=0.02) as server:
        assert until(lambda: len(tries) > 3)
        assert until(lambda: reasons(server.port) == {"tiny": ("READY", "")})
        assert good(server.port)


def test_weights_of_a_served_folder_can_be_updated(tmp_path):
    """``aotc update-weights`` in place, while it is asked: each answer is of the old weights or of the new ones."""
    path, weights = tmp_path / "models" / "m.vmfb", tmp_path / "w.safetensors"
    path.parent.mkdir()
    x = np.ones((1, 4), np.float32)
    model = jax.jit(lambda params, x: x @ params["w"])
    path.write_bytes(aotc.compile(model, {"w": np.ones((4, 2), "f4")}, x, bind=["params"]))

    def update(n):
        save_file({"params/w": np.full((4, 2), n, "f4")}, weights)
        found = CliRunner().invoke(app, ["update-weights", str(path), str(weights)])
        assert found.exit_code == 0, found.exception or found.output

    update(1)
    with running(path.parent, poll=0.01) as server:
        (row,) = server.json("/v2/models/m")[1]["inputs"]
        rows = [{"name": row["name"], "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]
        values, ended = [], threading.Event()

        def load():
            while not ended.is_set():
                values.append(server.json("/v2/models/m/infer", {"inputs": rows})[1]["outputs"][0]["data"][0])

        thread = threading.Thread(target=load)
        thread.start()
        for n in range(2, 8):
            update(n)
            assert until(lambda n=n: values and values[-1] == 4.0 * n)
        ended.set()
        thread.join()
    assert set(values) == {4.0 * n for n in range(1, 8)}
    assert values == sorted(values)
