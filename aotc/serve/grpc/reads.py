"""Memory limit for incomplete gRPC messages, whose size the gRPC library does not report.

A client may send part of a message and then wait. The library stores the part; Python sees only complete messages. So
the memory of the process is measured while reads are pending: its growth beyond the reservations of requests is
attributed to incomplete messages. Above the limit some of the calls are ended, and the library frees their parts. A
stream that waits for its client's next request looks the same; it may be ended by mistake, but only if memory is short.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from aotc.serve.background_threads import run_in_background
from aotc.serve.engine import Engine
from aotc.serve.errors import CLOSED, RequestFault
from aotc.serve.limits import RETAINED_BYTES
from aotc.serve.memory import anonymous_bytes, return_freed_memory

# Seconds between two measurements of the process's memory while messages are being received. A measurement takes 30 us;
# clients on the same machine send up to 2 GB/s, 40 MB in this time.
LOOK_AT_READS_SECONDS = 0.02
# Seconds after which an incomplete message may be cancelled when memory is short. Most messages are complete within a
# millisecond.
PENDING_SECONDS = 0.05


class MessageReads:
    """Pending reads of gRPC messages, with a limit of their memory.

    Parameters
    ----------
    engine : Engine
        The server's state.

    Attributes
    ----------
    most : int
        Maximum bytes of all incomplete messages, in addition to the budget of requests.
    """

    def __init__(self, engine: Engine) -> None:
        settings = engine.settings
        self.most = settings.memory // 2 + RETAINED_BYTES + 2 * settings.max_message
        self._engine = engine
        self._base = anonymous_bytes()  # memory of the process when no read was pending for long
        self._pending: dict[asyncio.Timeout, tuple[float, Any]] = {}  # start and call of each, oldest first
        self._some = asyncio.Event()

    async def read(self, context: Any) -> Any:
        """Read the next message of a call, or the end of the stream.

        Raises
        ------
        RequestFault
            If pending messages use too much memory, and this read was chosen to end.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self._pending[limit] = asyncio.get_running_loop().time(), context
                self._some.set()
                try:
                    return await context.read()
                finally:
                    self._pending.pop(limit, None)
        except TimeoutError:
            if not limit.expired():
                raise
        what, hint = "messages that are being received take too much memory", "later, or --memory-mb"
        raise RequestFault(CLOSED, "", what, expected=f"at most {self.most:,} bytes", hint=hint, retry=1)

    async def watch(self) -> None:
        """End reads whenever incomplete messages use too much memory; runs for the lifetime of the server."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            if self._end_large_reads(loop.time()):
                await run_in_background(return_freed_memory)
            if not self._pending:
                self._some.clear()
            await asyncio.sleep(LOOK_AT_READS_SECONDS)

    def _end_large_reads(self, now: float) -> bool:
        """End reads if incomplete messages use too much memory; return True if any were ended."""
        long = [limit for limit, (began, _) in self._pending.items() if now - began > PENDING_SECONDS]
        used = anonymous_bytes() - self._engine.memory.used
        if not long:
            self._base = used
            return False
        excess = used - self._base - self.most
        if excess <= 0:
            return False
        for limit in self._select_reads_to_end(long, 1 + excess // self._engine.settings.max_message):
            del self._pending[limit]
            limit.reschedule(now)
        self._engine.log.warning("messages that are being received take too much memory")
        return True

    def _select_reads_to_end(self, long: list[asyncio.Timeout], count: int) -> list[asyncio.Timeout]:
        """Return the ``count`` reads to end: from the connections with the most reads, the newest first."""
        peers = {limit: self._pending[limit][1].peer() for limit in long}
        pending = Counter(peers.values())
        order = sorted(long, key=lambda limit: (-pending[peers[limit]], -self._pending[limit][0]))
        return order[:count]
