"""Run long work outside of the event loop, on daemon threads: the process does not wait for these threads at exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from aotc.serve.limits import INLINE_BYTES, PIECE_BYTES
from aotc.serve.tensors import Buffer

Result = TypeVar("Result")


async def join_in_background(parts: Sequence[Buffer]) -> bytes:
    """Join buffers to one bytes object; large buffers on another thread, with the GIL released.

    Most of the time is spent on new memory, not on the copy, because the kernel clears each page at the first access.
    ``bytes.join`` releases the GIL only if all its parts are ``bytes``, so other buffers are first copied in small
    pieces.
    """
    if sum(map(len, parts)) <= INLINE_BYTES:
        return b"".join(parts)
    return await run_in_background(lambda: b"".join(_copy_pieces(parts)))


def _copy_pieces(parts: Sequence[Buffer]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            yield from (bytes(part[at : at + PIECE_BYTES]) for at in range(0, len(part), PIECE_BYTES))


async def run_in_background(function: Callable[[], Result]) -> Result:
    """Run a function on a background thread and return its result.

    If the caller is cancelled, the function continues.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, found = None, None
        try:
            result = function()
        except BaseException as error:
            found = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, found)

    threading.Thread(target=run, name="aotc-serve-aside", daemon=True).start()
    return await future
