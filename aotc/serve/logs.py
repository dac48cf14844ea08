"""The server's log on standard error: one line for each event, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LOGGER = "aotc.serve"


class EventFormatter(logging.Formatter):
    """Formatter of an event with its fields as one line; client data cannot start another line."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of an event."""
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        event, level = record.getMessage(), record.levelname.lower()
        if self._as_json:
            return json.dumps({"time": stamp, "level": level, "event": event, **fields}, default=str)
        rest = "".join(f" {key}={_log_word(value)}" for key, value in fields.items())
        return f"{stamp} {level} {json.dumps(event)[1:-1]}{rest}"


def _log_word(value: Any) -> str:
    text = json.dumps(str(value))
    return text if any(letter in text for letter in " \\=") or len(text) == 2 else text[1:-1]


def open_log(as_json: bool) -> logging.Logger:
    """Return the server's logger, whose handler also receives warnings of uvicorn and gRPC."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(as_json))
    for name, level in ((LOGGER, logging.INFO), ("uvicorn", logging.WARNING), ("grpc", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return logging.getLogger(LOGGER)
