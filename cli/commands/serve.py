"""``aotc serve``: serve bundles by the Open Inference Protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from aotc import __version__
from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.device_option import PLACES_HELP, parse_places
from aotc_cli.shared.option_groups import KEY_HELP, THREADS_HELP, Panel

TOKEN = "AOTC_SERVE_TOKEN"
SUMMARY = "Serve bundles over HTTP and gRPC."
EXAMPLES = """
Serve one bundle:

aotc serve model.vmfb

Serve a folder over HTTP and gRPC, in batches of up to 8 rows:

aotc serve models/ --port=8000 --grpc-port=8001 --max-batch=8

Serve a sharded model, whose ranks run on this host:

aotc serve model.vmfb --ranks=2 --weights=shards/

Serve other machines, with a token and TLS:

aotc serve models/ --host=0.0.0.0 --token-file=token --tls-cert=cert.pem --tls-key=key.pem
"""


def command(
    source: Path = typer.Argument(
        ..., metavar="BUNDLE|FOLDER", help="A .vmfb file; or a folder of NAME.vmfb and NAME/VERSION/model.vmfb."
    ),
    host: str = typer.Option(
        "127.0.0.1", rich_help_panel=Panel.NETWORK, metavar="ADDRESS",
        help="Address to listen on; other addresses need a token, or --insecure.",
    ),
    port: int = typer.Option(
        8000, min=0, max=65535, rich_help_panel=Panel.NETWORK, metavar="PORT", help="HTTP port; 0: a free one."
    ),
    grpc_port: int | None = typer.Option(
        None, min=0, max=65535, rich_help_panel=Panel.NETWORK, metavar="PORT", help="gRPC port; default: no gRPC."
    ),
    connections: int = typer.Option(
        512, min=1, rich_help_panel=Panel.NETWORK, metavar="N",
        help="HTTP connections; additional ones can request only the health.",
    ),
    token: str | None = typer.Option(
        None, rich_help_panel=Panel.ACCESS, metavar="TEXT",
        help=f"Token that clients must send. `ps` shows it: prefer --token-file or {TOKEN}.",
    ),
    token_file: Path | None = typer.Option(
        None, rich_help_panel=Panel.ACCESS, metavar="FILE", help="A file with the token on its first line."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", rich_help_panel=Panel.ACCESS, help="Accept other machines without a token."
    ),
    tls_cert: str = typer.Option(
        "", rich_help_panel=Panel.ACCESS, metavar="FILE.pem", help="TLS certificate of the server."
    ),
    tls_key: str = typer.Option("", rich_help_panel=Panel.ACCESS, metavar="FILE.pem", help="Key of the certificate."),
    trusted_keys: list[str] = typer.Option(
        [], "--trusted-key", rich_help_panel=Panel.TRUST, metavar="FILE.pub", help=KEY_HELP
    ),
    verify: bool = typer.Option(
        False, "--verify", rich_help_panel=Panel.TRUST, help="Verify the digests of a bundle when it is loaded."
    ),
    poll: float = typer.Option(
        1.0, min=0.0, rich_help_panel=Panel.MODELS, metavar="SECONDS",
        help="Interval of checks for changed bundles; 0: no checks.",
    ),
    copy: bool = typer.Option(
        False, "--copy", rich_help_panel=Panel.MODELS,
        help="Read bundles into memory, for files that are overwritten in place.",
    ),
    model_control: bool = typer.Option(
        False, "--model-control", rich_help_panel=Panel.MODELS, help="Let clients load and unload models."
    ),
    custom_calls: list[str] = typer.Option(
        [], "--custom-calls", rich_help_panel=Panel.MODELS, metavar="FILE.py", help=HELP
    ),
    max_batch: int = typer.Option(
        1, min=1, rich_help_panel=Panel.BATCHING, metavar="ROWS",
        help="Batch concurrent requests up to this many rows, for models with independent rows.",
    ),
    max_delay_ms: float = typer.Option(
        0.0, min=0.0, rich_help_panel=Panel.BATCHING, metavar="MS",
        help="Longest wait of a request for others; 0: it waits only while a batch runs.",
    ),
    pad: bool = typer.Option(
        False, "--pad", rich_help_panel=Panel.BATCHING, help="Pad batches to sizes that the bundle is specialized for."
    ),
    queue: int = typer.Option(
        256, min=1, rich_help_panel=Panel.BATCHING, metavar="N", help="Requests that wait or run; others get 429."
    ),
    sequences: int = typer.Option(
        64, min=0, rich_help_panel=Panel.SEQUENCES, metavar="N", help="Sequences whose state is kept between requests."
    ),
    sequence_timeout: float = typer.Option(
        600.0, min=0.0, rich_help_panel=Panel.SEQUENCES, metavar="SECONDS",
        help="Idle time after which the state of a sequence is dropped.",
    ),
    timeout: float = typer.Option(
        60.0, rich_help_panel=Panel.TIMEOUTS, metavar="SECONDS", help="Time limit of a request."
    ),
    head_timeout: float = typer.Option(
        10.0, rich_help_panel=Panel.TIMEOUTS, metavar="SECONDS", help="Time limit for receiving the head of a request."
    ),
    body_timeout: float = typer.Option(
        30.0, rich_help_panel=Panel.TIMEOUTS, metavar="SECONDS", help="Time limit for receiving the body of a request."
    ),
    idle_timeout: float = typer.Option(
        60.0, rich_help_panel=Panel.TIMEOUTS, metavar="SECONDS",
        help="Time limit of an idle connection, or of an unread response.",
    ),
    grace: float = typer.Option(
        30.0, min=0.0, rich_help_panel=Panel.TIMEOUTS, metavar="SECONDS",
        help="Time limit of running requests after SIGTERM or Ctrl-C.",
    ),
    max_body_mb: float = typer.Option(
        64.0, rich_help_panel=Panel.LIMITS, metavar="MB", help="Largest body of an HTTP request."
    ),
    max_message_mb: float = typer.Option(
        20.0, rich_help_panel=Panel.LIMITS, metavar="MB", help="Largest gRPC message."
    ),
    max_json_mb: float = typer.Option(
        16.0, rich_help_panel=Panel.LIMITS, metavar="MB", help="Largest JSON of a request, or of results as numbers."
    ),
    max_head_kb: float = typer.Option(
        32.0, rich_help_panel=Panel.LIMITS, metavar="KB", help="Largest head of an HTTP request."
    ),
    memory_mb: float = typer.Option(
        1024.0, rich_help_panel=Panel.LIMITS, metavar="MB", help="Memory of all requests and responses at a time."
    ),
    device: list[str] = typer.Option([], rich_help_panel=Panel.DEVICES, metavar="[NAME=]DEVICE", help=PLACES_HELP),
    threads: int | None = typer.Option(None, rich_help_panel=Panel.DEVICES, metavar="N", help=THREADS_HELP),
    ranks: int | None = typer.Option(
        None, min=1, rich_help_panel=Panel.DEVICES, metavar="N",
        help="Ranks of sharded bundles, which run on this host; default: as many as a bundle is for.",
    ),
    weights: Path | None = typer.Option(
        None, rich_help_panel=Panel.DEVICES, metavar="FILE|FOLDER",
        help="Weights of the bundle: a file, or a folder that `aotc shard-weights` wrote.",
    ),
    access_log: bool = typer.Option(False, "--access-log", rich_help_panel=Panel.LOGS, help="Log each request."),
    json_logs: bool = typer.Option(False, "--json-logs", rich_help_panel=Panel.LOGS, help="Log as JSON lines."),
    traces: bool = typer.Option(False, "--traces", rich_help_panel=Panel.LOGS, help="Emit OpenTelemetry spans."),
) -> None:
    """Serve a bundle, or the bundles of a folder, by the Open Inference Protocol (KServe v2).

    The root page shows traffic and latency of each model. SIGTERM or Ctrl-C ends the server after the running requests.
    """
    register_custom_calls_from(custom_calls)
    _import_server(
        source=source,
        host=host,
        port=port,
        grpc_port=grpc_port,
        token=_access_token(token, token_file),
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_batch=max_batch,
        max_delay=max_delay_ms / 1e3,
        pad=pad,
        queue=queue,
        timeout=timeout,
        grace=grace,
        max_body=_megabytes_to_bytes(max_body_mb, "--max-body-mb"),
        max_message=_megabytes_to_bytes(max_message_mb, "--max-message-mb"),
        max_json=_megabytes_to_bytes(max_json_mb, "--max-json-mb"),
        max_head=_megabytes_to_bytes(max_head_kb / 1024, "--max-head-kb"),
        memory=_megabytes_to_bytes(memory_mb, "--memory-mb"),
        connections=connections,
        head_timeout=head_timeout,
        body_timeout=body_timeout,
        idle_timeout=idle_timeout,
        poll=poll,
        sequences=sequences,
        sequence_timeout=sequence_timeout,
        model_control=model_control,
        access_log=access_log,
        json_logs=json_logs,
        traces=traces,
        devices=parse_places(device),
        threads=threads,
        ranks=ranks,
        weights=weights,
        verify=verify,
        copy=copy,
        trusted_keys=tuple(trusted_keys),
        version=__version__,
    )


def _import_server(**settings: object) -> None:
    """Import the server and check its settings; report a missing package of ``aotc[serve]``."""
    from aotc.vmfb.errors import CallError
    from aotc.vmfb.host.install import install_command

    try:
        from aotc.serve.run import serve
        from aotc.serve.settings import Settings
    except ImportError as error:
        what = f"the server needs packages that are not installed: {error}"
        raise CallError("", what, hint=install_command("serve")) from None
    serve(Settings(**settings))  # type: ignore[arg-type]


def _megabytes_to_bytes(megabytes: float, option: str) -> int:
    """Convert megabytes to bytes."""
    from aotc.vmfb.errors import CallError

    if not 0 < megabytes * (1 << 20) < sys.maxsize:
        raise CallError("", f"{option} must be positive and finite", megabytes, "megabytes that a machine can have")
    return max(int(megabytes * (1 << 20)), 1)


def _access_token(given: str | None, file: Path | None) -> str:
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
