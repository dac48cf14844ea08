"""Settings of a server, validated before anything is opened."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.machine import MOST_THREADS
from aotc.vmfb.verify.trust import check_public_keys

if TYPE_CHECKING:
    from aotc.vmfb.gang.base import BaseGang

# Largest value of an option of gRPC's library, a C int: bytes of a message and of a head, connections.
GRPC_MOST = 2**31 - 1


@dataclass(frozen=True)
class Settings:
    """All settings of a server; :meth:`check` refuses invalid ones.

    Attributes
    ----------
    source : Path
        A bundle, or a folder of bundles.
    host, port : str, int
        Address of REST; port 0 selects any free port.
    grpc_port : int or None
        Port of gRPC; None disables it.
    token : str
        Bearer token that clients must send; "" disables the check.
    insecure : bool
        Allow access from other machines without a token.
    tls_cert, tls_key : str
        PEM files, both or none.
    max_batch : int
        Maximum rows of a batch; 1 disables batching.
    max_delay : float
        Maximum seconds that a request waits for others.
    pad : bool
        Pad a batch to the next size for which the bundle is specialized.
    queue : int
        Maximum number of requests that wait or run; more are refused.
    timeout : float
        Maximum seconds of a request; it may ask for less.
    grace : float
        Seconds that running requests have to finish at shutdown.
    max_body : int
        Maximum bytes of a request.
    max_message : int
        Maximum bytes of a gRPC message.
    max_json : int
        Maximum bytes of JSON in a request, and of results sent as numbers.
    max_head : int
        Maximum bytes of a request head.
    memory : int
        Maximum bytes of all requests and responses together.
    connections : int
        Maximum number of HTTP connections; further ones may only send health checks.
    head_timeout, body_timeout : float
        Seconds in which a client must send a request's head, and then its body.
    idle_timeout : float
        Seconds that a connection may be idle, or a response unread.
    poll : float
        Seconds between two scans of the folder; 0 disables them.
    sequences : int
        Maximum number of sequences stored between requests.
    sequence_timeout : float
        Seconds after which an unused sequence is dropped.
    model_control : bool
        Allow clients to load and unload models of the folder.
    traces : bool
        Export spans to OpenTelemetry, if it is installed.
    version : str
        The version of aotc, for clients.
    devices, threads, verify, copy, trusted_keys
        As in :func:`aotc.load`.
    ranks : int or None
        Ranks that sharded bundles must be for; they run on this host. None: as many as a bundle is for.
    weights : Path or None
        As in :func:`aotc.load`: a file, or a folder of shards of a sharded bundle.
    start_ranks : callable or None
        Starts the ranks of a sharded bundle, with arguments of :func:`aotc.gang`. None: :func:`aotc.gang`.
    """

    source: Path
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    token: str = ""
    insecure: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    max_batch: int = 1
    max_delay: float = 0.0
    pad: bool = False
    queue: int = 256
    timeout: float = 60.0
    grace: float = 30.0
    max_body: int = 64 << 20
    max_message: int = 20 << 20
    max_json: int = 16 << 20
    max_head: int = 32 << 10
    memory: int = 1 << 30
    connections: int = 512
    head_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 60.0
    poll: float = 1.0
    sequences: int = 64
    sequence_timeout: float = 600.0
    model_control: bool = False
    access_log: bool = False
    json_logs: bool = False
    traces: bool = False
    devices: Any = None
    threads: int | None = None
    verify: bool = False
    copy: bool = False
    trusted_keys: Sequence[str] = ()
    ranks: int | None = None
    weights: Path | None = None
    start_ranks: Callable[..., BaseGang] | None = None
    version: str = ""

    def check(self) -> Settings:
        """Validate the settings and return them.

        Raises
        ------
        CallError
            If a setting is invalid, or would allow access from other machines without a token.
        """
        if not self.source.exists():
            expected = "a bundle, or a folder of bundles"
            raise CallError(str(self.source), "there is no such file or folder", expected=expected)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise CallError("", "TLS needs a certificate and its key", hint="--tls-cert cert.pem --tls-key key.pem")
        if self.tls_cert:
            _check_certificate(self.tls_cert, self.tls_key)
        if self.trusted_keys:
            check_public_keys(self.trusted_keys)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise CallError("", f"threads must be an integer from 1 to {MOST_THREADS}", self.threads)
        if self.ranks is not None and self.ranks < 1:
            raise CallError("", "ranks must be positive", self.ranks, "1 or more")
        least: dict[str, tuple[float, float]] = {
            "max_batch": (self.max_batch, 1), "max_delay": (self.max_delay, 0), "queue": (self.queue, 1),
            "sequences": (self.sequences, 0), "sequence_timeout": (self.sequence_timeout, 0),
            "grace": (self.grace, 0), "max_body": (self.max_body, 1), "poll": (self.poll, 0),
            "max_json": (self.max_json, 1), "max_message": (self.max_message, 1),
            "max_head": (self.max_head, 256), "connections": (self.connections, 1),
        }  # fmt: skip
        for name, (value, bound) in least.items():
            if not bound <= value < float("inf"):
                raise CallError("", f"{name} is too small or endless", value, f"{bound} or more")
        for name in ("timeout", "head_timeout", "body_timeout", "idle_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CallError("", f"{name} must be positive and finite", getattr(self, name), "seconds above 0")
        self._check_memory()
        for name in ("max_message", "max_head", "connections"):
            if getattr(self, name) > GRPC_MOST:
                raise CallError("", f"{name} is too large", getattr(self, name), f"{GRPC_MOST} or less, as in gRPC")
        if self.model_control and not self.source.is_dir():
            raise CallError("", "models can be loaded and unloaded in a folder only", str(self.source), "a folder")
        if not (self.token or self.insecure or is_local(self.host)):
            hint = "--token-file, or --insecure to let every client use the models"
            raise CallError("", "other machines would reach the server without a token", self.host, "127.0.0.1", hint)
        return self

    def _check_memory(self) -> None:
        """Refuse limits for single requests above the limit for all requests together.

        A default limit is only checked where it applies.
        """
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        sizes = [self.max_body, *(chosen.get(name, 0) for name in ("max_message", "max_json", "max_head"))]
        longest = max(*sizes, self.max_message if self.grpc_port is not None else 0)
        if not longest <= self.memory < float("inf"):
            hint = "--memory-mb, --max-body-mb, --max-message-mb, --max-json-mb, or --max-head-kb"
            what = "the memory of all requests must be at least that of one"
            raise CallError("", what, self.memory, f"{longest} bytes or more", hint)


def _check_certificate(cert: str, key: str) -> None:
    """Refuse a certificate and a private key that a server cannot use.

    Raises
    ------
    CallError
        If a file cannot be read, is not PEM, is encrypted, or they do not match.
    """
    for path in (cert, key):
        if not os.access(path, os.R_OK) or not os.path.isfile(path):
            raise CallError("", "a file of TLS cannot be read", path, "a PEM file")

    def refuse_password() -> str:
        raise CallError("", "the key of TLS is encrypted", key, "a PEM file without a password", "openssl pkey -in KEY")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what, expected = "the certificate and key of TLS cannot be used", "a certificate and its private key, both PEM"
        raise CallError("", what, f"{cert}, {key}: {error}", expected) from None


def is_local(host: str) -> bool:
    """Return True if an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
