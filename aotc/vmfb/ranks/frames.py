"""Framing of short JSON messages on sockets: a magic number, the length, and the JSON text.

Any other data raise :class:`BadFrame`.
"""

from __future__ import annotations

import json
import socket
from time import monotonic, sleep
from typing import Any

MAGIC = b"aotc"
VERSION = 1
_HEAD = len(MAGIC) + 4

# Bytes of a message at most: the table of 4096 ranks has some 100 bytes for each. A stranger cannot make a rank
# allocate more.
MOST_BYTES = 1 << 20


class BadFrame(ValueError):
    """Data on a connection is not a frame of aotc."""


class FrameReader:
    """Reader of the messages on a non-blocking socket; it never reads beyond the end of a message."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = bytearray()
        self._need = _HEAD
        self._body = False

    def read(self) -> dict[str, Any] | None:
        """Return the next message, or None if it is not complete.

        Raises
        ------
        ConnectionError
            If the connection ended.
        BadFrame
            If the data are not a message.
        """
        while True:
            try:
                data = self.sock.recv(self._need - len(self._data))
            except (BlockingIOError, InterruptedError):
                return None
            if not data:
                raise ConnectionResetError("the connection ended")
            self._data += data
            if len(self._data) == self._need:
                if self._body:
                    return self._message()
                self._start_body()

    def _start_body(self) -> None:
        """Parse the complete head of a message, and prepare to read its body."""
        head = bytes(self._data)
        size = int.from_bytes(head[len(MAGIC) :], "big")
        if head[: len(MAGIC)] != MAGIC or not 0 < size <= MOST_BYTES:
            raise BadFrame(f"{head!r} does not start a message")
        self._data.clear()
        self._need, self._body = size, True

    def _message(self) -> dict[str, Any]:
        """Parse the complete body of a message, and prepare to read the next head."""
        data = bytes(self._data)
        self._data.clear()
        self._need, self._body = _HEAD, False
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise BadFrame("a message is not an object")
        return message


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame."""
    data = json.dumps(message).encode()
    return MAGIC + len(data).to_bytes(4, "big") + data


# Seconds to hand a message to the system. Its buffers hold thousands of them; only a stopped machine fills them.
_SEND_SECONDS = 1.0


def send_frame(sock: socket.socket, message: dict[str, Any]) -> bool:
    """Send a message on a non-blocking socket; return False if the connection has ended.

    The socket stays non-blocking: another thread may be reading from it.
    """
    data = memoryview(frame(message))
    end = monotonic() + _SEND_SECONDS
    while data:
        try:
            data = data[sock.send(data) :]
        except (BlockingIOError, InterruptedError):
            if monotonic() > end:
                return False
            sleep(0.001)
        except OSError:  # it has ended, or is closed
            return False
    return True
