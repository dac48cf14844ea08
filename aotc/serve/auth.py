"""Access control: the bearer token; without one, protection against requests of foreign web pages (DNS rebinding)."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from aotc.serve.errors import UNAUTHORIZED, RequestFault
from aotc.serve.settings import Settings, is_local

HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready")
OPEN = (*HEALTH_PATHS, "/")  # the page itself contains no data: its requests need the token


class AccessCheck:
    """Access check of requests by bearer token, or by host name without a token."""

    def __init__(self, settings: Settings) -> None:
        self._token = f"Bearer {settings.token}".encode() if settings.token else b""
        self._local = not settings.token and not settings.insecure and is_local(settings.host)

    def check(self, headers: Mapping[bytes, bytes], path: str = "") -> None:
        """Refuse a request that is not allowed.

        Raises
        ------
        RequestFault
            If the token is missing or wrong. Without a configured token, if the host name is not this machine's: a
            foreign web page may have pointed its own name to this address.
        """
        if self._token:
            if path not in OPEN and not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
                what, expected = "the request has no token, or a wrong one", "Authorization: Bearer TOKEN"
                raise RequestFault(UNAUTHORIZED, "", what, expected=expected)
        elif self._local:
            host = headers.get(b"host")
            if host is not None and not is_local(_host_without_port(host.decode("latin-1"))):
                hint = "http://127.0.0.1, or a server with a token"
                raise RequestFault(UNAUTHORIZED, "", "the server is asked under a name of another machine's", hint=hint)


def _host_without_port(host: str) -> str:
    """Return a host name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
