"""Errors of requests: message, HTTP status, gRPC code."""

from __future__ import annotations

import reprlib
from typing import Any

from aotc.vmfb.errors import BundleError, CallError, DeadlineExceeded, FenceCancelled

BAD, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LONG, COMPRESSED = 400, 401, 403, 404, 413, 415
CONFLICT, SLOW, BUSY, HEAD_TOO_LONG, FAILED, CLOSED, LATE = 409, 408, 429, 431, 500, 503, 504
GOOD = 200
CANCELLED = 499  # the client has disconnected, so nobody reads this status


class RequestFault(CallError):
    """Error response to a request.

    The parameters are an HTTP status and those of :class:`~aotc.vmfb.errors.CallError`; ``where`` is the model's name
    in the request. ``retry`` is the number of seconds after which a retry may succeed, 0 means that no retry will.
    """

    def __init__(
        self, status: int, where: str, what: str, found: object = None, expected: object = None, hint: str = "",
        retry: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(where, what, found, expected, hint)
        self.status, self.where, self.retry = status, where, retry


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 4, 2, 60, 40, 60


def shown_value(value: Any) -> str:
    """Return a shortened representation of a client's value, for an error message.

    Its cost is bounded: the ``repr`` of a client's value could be as long as the request, or nest too deeply.
    """
    return _SHORT.repr(value)[:80]


def without_references(error: Exception) -> Exception:
    """Return an error without references to the failed objects: no traceback and no earlier errors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def http_status_of(error: BaseException) -> int:
    """Return the HTTP status for an exception."""
    match error:
        case RequestFault():
            return error.status
        case DeadlineExceeded() | TimeoutError():
            return LATE
        case FenceCancelled():
            return CANCELLED
        case CallError():
            return BAD
        case MemoryError():
            return CLOSED
    return FAILED


# Maximum characters of an error message. A message may quote the request, which need not be returned whole.
ERROR_LETTERS = 4000


def client_error_text(error: BaseException) -> str:
    """Return the error message for the client, without the details of an internal error."""
    match error:
        case CallError() | BundleError():
            return str(error)[:ERROR_LETTERS]
        case MemoryError():
            return "error: the server has no memory for this request\n  try: again, or a smaller one"
    return f"error: the server failed: {type(error).__name__}\n  try: the server's log says more"
