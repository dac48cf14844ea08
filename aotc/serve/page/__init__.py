"""The status page at ``/``: traffic and latency of the server and its models, and facts about their bundles.

It is one document without external resources. The page polls ``/v2/state`` every two seconds, with the token if one is
set.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_HERE = Path(__file__).parent
_STYLE, _SCRIPT = (_HERE / "page.css").read_text("utf-8"), (_HERE / "page.js").read_text("utf-8")
PAGE = (_HERE / "page.html").read_text("utf-8").replace("@@STYLE@@", _STYLE).replace("@@SCRIPT@@", _SCRIPT)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; script-src 'sha256-{_digest(_SCRIPT)}'; "
    f"style-src 'sha256-{_digest(_STYLE)}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Only the page's own script can run, whatever the names of models are."""
