"""``aotc serve``: serve bundles by the Open Inference Protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from aotc import __version__
from aotc_cli.shared.custom_calls import HELP, register_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places

TOKEN = "AOTC_SERVE_TOKEN"
SUMMARY = "Serve bundles over HTTP and gRPC."
EXAMPLES = """
aotc serve model.vmfb

aotc serve models/ --port=8000 --grpc-port=8001 --max-batch=8

aotc serve models/ --host=0.0.0.0 --token-file=token --tls-cert=cert.pem --tls-key=key.pem
"""


def command(
    source: Path = typer.Argument(..., help="A .vmfb file; or a folder of NAME.vmfb and NAME/VERSION/model.vmfb."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at; another needs a token, or --insecure."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port of REST; 0 for a free one."),
    grpc_port: int | None = typer.Option(None, min=0, max=65535, help="Port of gRPC; none by default."),
    token: str | None = typer.Option(None, help=f"What clients must show; ps shows it: better --token-file, {TOKEN}."),
    token_file: Path | None = typer.Option(None, help="A file with the token on its first line."),
    insecure: bool = typer.Option(False, "--insecure", help="Let other machines in without a token."),
    tls_cert: str = typer.Option("", help="Certificate, PEM."),
    tls_key: str = typer.Option("", help="Its key, PEM."),
    max_batch: int = typer.Option(1, min=1, help="Gather requests to so many rows, where a model's are independent."),
    max_delay_ms: float = typer.Option(
        0.0, min=0.0, help="How long a request waits for others at most; by default only while a batch runs."
    ),
    pad: bool = typer.Option(False, "--pad", help="Fill batches up to sizes that the bundle is specialized for."),
    queue: int = typer.Option(256, min=1, help="Requests that may wait or run; others get 429."),
    timeout: float = typer.Option(60.0, help="Seconds that a request may take."),
    grace: float = typer.Option(30.0, min=0.0, help="Seconds for requests under way when the server is told to end."),
    max_body_mb: float = typer.Option(64.0, help="Megabytes of a request over HTTP."),
    max_message_mb: float = typer.Option(20.0, help="Megabytes of a message of gRPC."),
    max_json_mb: float = typer.Option(16.0, help="Megabytes of JSON in a request, and of results sent as numbers."),
    max_head_kb: float = typer.Option(32.0, help="Kilobytes of a request's head."),
    memory_mb: float = typer.Option(1024.0, help="Megabytes of all requests and answers at a time."),
    connections: int = typer.Option(512, min=1, help="Connections of HTTP; further ones may ask for health only."),
    head_timeout: float = typer.Option(10.0, help="Seconds in which a client must send a request's head."),
    body_timeout: float = typer.Option(30.0, help="Seconds in which a client must send a request's body."),
    idle_timeout: float = typer.Option(60.0, help="Seconds that a connection may be idle, or an answer unread."),
    poll: float = typer.Option(1.0, min=0.0, help="Seconds between two looks at the folder; 0 for none."),
    sequences: int = typer.Option(64, min=0, help="Texts of clients that are kept between requests."),
    sequence_timeout: float = typer.Option(600.0, min=0.0, help="Seconds that one is kept without a request."),
    model_control: bool = typer.Option(False, "--model-control", help="Let clients load and unload models."),
    access_log: bool = typer.Option(False, "--access-log", help="A line for each request."),
    json_logs: bool = typer.Option(False, "--json-logs", help="Lines of JSON."),
    traces: bool = typer.Option(False, "--traces", help="Spans for OpenTelemetry."),
    device: list[str] = typer.Option([], help=PLACES_HELP),
    threads: int | None = typer.Option(None, help="Threads to compute with; all usable cores by default."),
    verify: bool = typer.Option(False, "--verify", help="Compare every byte of a bundle when it is loaded."),
    copy: bool = typer.Option(False, "--copy", help="Read bundles into memory: for files that are written in place."),
    trusted_keys: list[str] = typer.Option(
        [], "--trusted-key", help="A public key: bundles must be signed with it, or with another that is named."
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
) -> None:
    """Serve a bundle, or the bundles of a folder, by the Open Inference Protocol (KServe v2).

    The address shows a page with traffic and latency of each model. SIGTERM or Ctrl-C ends the server after the running
    requests.
    """
    register_from(custom_calls)
    _serve(
        source=source, host=host, port=port, grpc_port=grpc_port, token=_token(token, token_file), insecure=insecure,
        tls_cert=tls_cert, tls_key=tls_key, max_batch=max_batch, max_delay=max_delay_ms / 1e3, pad=pad, queue=queue,
        timeout=timeout, grace=grace, max_body=_bytes(max_body_mb, "--max-body-mb"),
        max_message=_bytes(max_message_mb, "--max-message-mb"),
        max_json=_bytes(max_json_mb, "--max-json-mb"), max_head=_bytes(max_head_kb / 1024, "--max-head-kb"),
        memory=_bytes(memory_mb, "--memory-mb"), connections=connections, head_timeout=head_timeout,
        body_timeout=body_timeout, idle_timeout=idle_timeout, poll=poll, sequences=sequences,
        sequence_timeout=sequence_timeout, model_control=model_control, access_log=access_log,
        json_logs=json_logs, traces=traces, devices=parse_places(device), threads=threads,
        verify=verify, copy=copy, trusted_keys=tuple(trusted_keys), version=__version__,
    )  # fmt: skip


def _serve(**settings: object) -> None:
    from aotc.vmfb.errors import CallError
    from aotc.vmfb.host.install import install_command

    try:
        from aotc.serve.run import serve
        from aotc.serve.settings import Settings
    except ImportError as error:
        what = f"the server needs packages that are not installed: {error}"
        raise CallError("", what, hint=install_command("serve")) from None
    serve(Settings(**settings))  # type: ignore[arg-type]


def _bytes(megabytes: float, option: str) -> int:
    """Convert megabytes to bytes."""
    from aotc.vmfb.errors import CallError

    if not 0 < megabytes * (1 << 20) < sys.maxsize:
        raise CallError("", f"{option} must be positive and finite", megabytes, "megabytes that a machine can have")
    return max(int(megabytes * (1 << 20)), 1)


def _token(given: str | None, file: Path | None) -> str:
    """Return the token from the file, the command line or the environment, in this order, or an empty string.

    An empty token is an error, also in the environment: a user who sets one expects the server to require it.
    """
    from aotc.vmfb.errors import CallError

    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CallError("", "cannot read the file of the token", f"{file}: {error}") from None
        given = lines[0].strip() if lines else ""
    else:
        given = os.environ.get(TOKEN) if given is None else given
        if given is None:
            return ""
    if not given or not given.isascii() or not given.isprintable() or " " in given:
        raise CallError("", "the token is empty, or has letters that a header cannot have", hint="openssl rand -hex 32")
    return given
