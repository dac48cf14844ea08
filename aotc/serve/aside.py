"""Work that takes long, beside the event loop, on threads that a process which ends does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def run_aside(function: Callable[[], Result]) -> Result:
    """Return what a function returns, or raise what it raises; it goes on if nobody waits for it any more."""
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
