"""How a server starts: settings, the command line, TLS, its log, traces."""

import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny
from support.served import running
from typer.testing import CliRunner

from aotc.serve.auth import AccessCheck
from aotc.serve.errors import RequestFault, client_error_text, http_status_of
from aotc.serve.logs import EventFormatter
from aotc.serve.settings import Settings
from aotc.serve.telemetry import open_traces
from aotc.vmfb.errors import BundleError, CallError, DeadlineExceeded
from aotc.vmfb.host.install import install_command
from aotc_cli.commands import serve as command
from aotc_cli.main import app

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype="f4"), np.full(4, 10, "f4")
ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": a.tolist()} for n, a in (("x", X), ("y", Y))]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bundle(tmp_path):
    """Path of the tiny bundle."""
    path = tmp_path / "tiny.vmfb"
    path.write_bytes(tiny.bundle())
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": Path("/nowhere")}, "/nowhere: error: there is no such file or folder"),
        ({"tls_cert": "cert.pem"}, "a certificate and its key"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "cannot be read"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_delay": -1.0}, "max_delay"),
        ({"queue": 0}, "queue"),
        ({"threads": -1}, "threads"),
        ({"threads": 0}, "threads"),
        ({"max_json": 0}, "max_json"),
        ({"max_head": 1}, "max_head"),
        ({"connections": 0}, "connections"),
        ({"head_timeout": float("inf")}, "head_timeout"),
        ({"body_timeout": -1.0}, "body_timeout"),
        ({"idle_timeout": float("nan")}, "idle_timeout"),
        ({"memory": 1 << 20}, "--memory-mb"),
        ({"max_message": 2 << 30}, "--max-message-mb"),
        ({"max_message": 2 << 30, "grpc_port": 0}, "--max-message-mb"),
        ({"max_message": 2 << 30, "memory": 1 << 50}, "max_message is too large"),
        ({"max_json": 2 << 30}, "--max-json-mb"),
        ({"max_head": (1 << 30) + 1}, "--max-head-kb"),
        ({"max_head": 2 << 30, "memory": 1 << 50}, "max_head is too large"),
        ({"connections": 2 << 30}, "connections is too large"),
        ({"grace": float("inf")}, "grace"),
        ({"max_body": 0}, "max_body"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"timeout": float("nan")}, "timeout must be positive"),
        ({"model_control": True}, "in a folder only"),
        ({"host": "0.0.0.0"}, "--insecure"),
    ],
)
def test_invalid_settings_are_refused(bundle, changes, words):
    good = Settings(bundle)
    assert good.check() is good
    with pytest.raises(CallError, match=words):
        replace(good, **changes).check()
    assert replace(good, host="0.0.0.0", insecure=True).check()
    assert replace(good, host="::1").check()


def test_serve_command_passes_on_its_options(bundle, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(command, "_import_server", lambda **settings: seen.update(settings))
    (tmp_path / "token").write_text("secret\n")
    options = ["--port=0", "--grpc-port=7", f"--token-file={tmp_path / 'token'}", "--max-delay-ms=2", "--max-body-mb=1"]
    assert CliRunner().invoke(app, ["serve", str(bundle), *options]).exit_code == 0
    assert (seen["source"], seen["port"], seen["grpc_port"], seen["token"]) == (bundle, 0, 7, "secret")
    assert (seen["max_delay"], seen["max_body"]) == (0.002, 1 << 20)
    assert set(seen) == set(Settings.__dataclass_fields__) - {"start_ranks"}  # a hook for Ray Serve
    monkeypatch.setenv(command.TOKEN, "other")
    assert CliRunner().invoke(app, ["serve", str(bundle)]).exit_code == 0
    assert seen["token"] == "other"


@pytest.mark.parametrize("token", ["", " \n", "two words", "tschüß"])
def test_a_token_that_is_not_a_header_value_is_refused(bundle, tmp_path, token):
    (tmp_path / "token").write_text(token)
    found = CliRunner().invoke(app, ["serve", str(bundle), f"--token-file={tmp_path / 'token'}"])
    assert isinstance(found.exception, CallError)
    assert "token" in str(found.exception)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-body-mb=inf", "--max-body-mb"),
        ("--max-json-mb=nan", "--max-json-mb"),
        ("--max-message-mb=9999999", "--max-message-mb"),
        ("--max-json-mb=9999999", "--max-json-mb"),
        ("--memory-mb=-1", "--memory-mb"),
        ("--max-head-kb=inf", "--max-head-kb"),
        ("--token=", "the token is empty"),
        ("--threads=-1", "threads"),
        ("--timeout=inf", "timeout"),
        ("--max-delay-ms=inf", "max_delay"),
        ("--trusted-key=/nowhere", "/nowhere"),
    ],
)
def test_an_invalid_option_is_an_error_at_start(tmp_path, option, words):
    """Of a folder too, which would be served without a single model otherwise."""
    found = CliRunner().invoke(app, ["serve", str(tmp_path), "--port=0", option])
    assert isinstance(found.exception, CallError | BundleError), found.output
    assert words in str(found.exception)


def test_an_empty_token_of_the_environment_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(command.TOKEN, "")
    found = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert "the token is empty" in str(found.exception)


def certificate(tmp_path, *more):
    """Write a certificate of our own and its key; return their paths."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", *names, "-keyout", key, "-out", cert, *more]
    try:
        subprocess.run(line, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    return cert, key


def test_invalid_tls_files_are_refused(bundle, tmp_path):
    """Not PEM, in the wrong order, or with a password: one message, and nobody is asked for the password."""
    cert, key = certificate(tmp_path, "-nodes")
    good = Settings(bundle, tls_cert=cert, tls_key=key)
    assert good.check() is good
    (tmp_path / "none.pem").write_text("no certificate")
    for changes in (
        {"tls_cert": str(tmp_path / "none.pem")},
        {"tls_cert": key, "tls_key": cert},
        {"tls_key": str(tmp_path)},
    ):
        with pytest.raises(CallError, match="TLS"):
            replace(good, **changes).check()
    cert, key = certificate(tmp_path, "-passout", "pass:secret")
    with pytest.raises(CallError, match="encrypted"):
        replace(good, tls_cert=cert, tls_key=key).check()


def test_serve_without_its_extra_names_the_install_command(bundle):
    program = """
import sys
sys.modules["uvicorn"] = None
sys.argv = ["aotc", "serve", sys.argv[1]]
from aotc_cli.start import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program, bundle], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"try: {install_command('serve')}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("explicit", [False, True])
def test_an_empty_folder_is_a_warning(tmp_path, capsys, explicit):
    with running(tmp_path, model_control=explicit) as server:
        assert server.json("/v2/health/live")[0] == 200
    assert ("warning no bundle to serve yet" in capsys.readouterr().err) == (not explicit)


def test_an_unreadable_bundle_is_one_error_message(tmp_path):
    (tmp_path / "bad.vmfb").write_bytes(b"no bundle")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    line = [sys.executable, "-c", "from aotc_cli.start import main; main()", "serve", "bad.vmfb", "--port=0"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "bad.vmfb" in done.stderr


def test_logs_are_readable_on_a_terminal(bundle):
    """A line for each event, without colours; Ctrl-C ends it."""
    master, slave = os.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    line = [sys.executable, "-c", "from aotc_cli.start import main; main()", "serve", bundle, "--port=0"]
    made = subprocess.Popen(line, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    text = ""
    try:
        while "listening" not in text:
            text += os.read(master, 1 << 12).decode()
        made.send_signal(signal.SIGINT)
        assert made.wait(30) == 0
        while "info ended" not in text:
            text += os.read(master, 1 << 12).decode()
    finally:
        made.kill()
        made.wait()
        os.close(master)
    assert "\x1b" not in text
    assert [line.split()[2] for line in text.splitlines()] == ["loaded", "listening", "ending", "ended"]


def test_the_server_responds_over_tls(bundle, tmp_path):
    """Over REST and gRPC, with a certificate of our own."""
    cert, key = certificate(tmp_path, "-nodes")
    with running(bundle, tls_cert=cert, tls_key=key, token="secret", grpc_port=0) as server:
        context = ssl.create_default_context(cafile=cert)
        shown = {"Authorization": "Bearer secret"}
        asked = urllib.request.Request(f"https://localhost:{server.port}/v2/models/tiny", headers=shown)
        with urllib.request.urlopen(asked, context=context) as found:
            assert json.load(found)["name"] == "tiny"
        grpc_of = pytest.importorskip("tritonclient.grpc")
        with grpc_of.InferenceServerClient(f"localhost:{server.grpc_port}", ssl=True, root_certificates=cert) as client:
            assert client.is_model_ready("tiny", headers={"authorization": "Bearer secret"})


def record(**fields):
    made = logging.LogRecord("aotc.serve", logging.INFO, "", 0, "loaded", (), None)
    made.fields = fields
    return made


def test_a_log_event_is_one_line_for_any_request():
    text = EventFormatter(False).format(record(model="a\nb", path='x "y"', size=3))
    assert "\n" not in text
    assert text.endswith('loaded model="a\\nb" path="x \\"y\\"" size=3')
    found = json.loads(EventFormatter(True).format(record(model="a\nb")))
    assert (found["event"], found["level"], found["model"]) == ("loaded", "info", "a\nb")


def test_a_traceback_is_in_the_log_line():
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        made = logging.LogRecord("aotc.serve", logging.ERROR, "", 0, "request failed", (), sys.exc_info())
    assert "ZeroDivisionError: why" in json.loads(EventFormatter(True).format(made))["traceback"]


def test_clients_see_no_details_of_internal_errors():
    assert [http_status_of(e) for e in (KeyError("x"), MemoryError(), DeadlineExceeded("", "x"))] == [500, 503, 504]
    assert "secret" not in client_error_text(KeyError("secret"))
    assert len(client_error_text(CallError("", "x" * 10_000))) <= 4000


@pytest.mark.parametrize(
    ("host", "good"),
    [("localhost", True), ("127.0.0.1:80", True), ("[::1]:80", True), ("[::1]", True), ("a.b:80", False), ("", False)],
)
def test_the_host_header_must_name_this_machine(bundle, host, good):
    check = AccessCheck(Settings(bundle))
    if good:
        check.check({b"host": host.encode()})
    else:
        with pytest.raises(RequestFault, match="another machine"):
            check.check({b"host": host.encode()})
    AccessCheck(Settings(bundle, insecure=True)).check({b"host": host.encode()})


def test_a_request_is_a_span_of_its_trace(bundle, monkeypatch):
    trace = pytest.importorskip("opentelemetry.trace")
    spans = []

    class Tracer(trace.NoOpTracer):
        @contextmanager
        def start_as_current_span(self, name, context=None, **more):
            parent = trace.get_current_span(context).get_span_context()
            spans.append((name, f"{parent.trace_id:032x}", more["attributes"]["model"], more["kind"]))
            yield trace.INVALID_SPAN

    monkeypatch.setattr(trace, "get_tracer", lambda *args: Tracer())
    with running(bundle, traces=True) as server:
        parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        assert server.json("/v2/models/tiny/infer", {"inputs": ROWS}, parent)[0] == 200
    assert spans == [("infer", "ab" * 16, "tiny", trace.SpanKind.SERVER)]


def test_traces_without_opentelemetry_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(CallError, match="opentelemetry-api"):
        open_traces(True)
