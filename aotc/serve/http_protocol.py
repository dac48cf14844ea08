"""HTTP/1.1 for clients that would rather speak something else.

Java's client and ``curl --http2`` ask with each request for an upgrade to HTTP/2, which a server may pass over. The
parser of ``httptools`` takes the body of such a request for the other protocol, and it is lost: so the offer is taken
out before the parser sees it.
"""

from __future__ import annotations

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)


class Http1Protocol(HttpToolsProtocol):
    """A connection on which nothing is spoken but HTTP/1.1."""

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests; a head that comes in several pieces keeps its offer."""
        if self.cycle is None or not self.cycle.more_body:
            end = data.find(b"\r\n\r\n")
            if end > 0 and _OFFER.search(data, 0, end):
                data = _OFFER.sub(b"", data[:end]) + data[end:]
        super().data_received(data)
