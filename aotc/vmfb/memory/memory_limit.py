"""Pool of arenas with a memory limit for all concurrent calls of a module; calls that do not fit wait.

Calls are served in order of arrival. A call allocates all its memory at once, so calls that have memory always complete
and return it. A call with data-dependent sizes allocates step by step. Only one such call runs at a time, and its
requests have priority, so that no two calls wait for each other.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from weakref import WeakSet, ref

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.interruption import raise_if_interrupted
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.limits import KEPT_RESULTS, NOTICE_NANOSECONDS
from aotc.vmfb.memory.arena import Arena, ArenaPool
from aotc.vmfb.memory.result_pool import ResultMemory

_POOLS: WeakSet[LimitedPool] = WeakSet()


class _MemoryRequest:
    """A waiting request of a call: for an arena, or for the right to allocate several arenas step by step.

    ``size`` is in bytes. With ``exact``, a larger cached arena does not fit. ``grows`` requests the right.
    """

    __slots__ = ("arena", "exact", "gate", "granted", "grows", "size")

    def __init__(self, size: int, exact: bool = False, grows: bool = False) -> None:
        self.size, self.exact, self.grows = size, exact, grows
        self.arena: Arena | None = None
        self.granted = False
        self.gate = new_lock()
        self.gate.acquire()


class _LimitedResultMemory(ResultMemory):
    """Cache of freed results in a pool with a limit; it may use the memory that arenas leave unused."""

    def __init__(self, pool: LimitedPool) -> None:
        super().__init__(min(pool.limit, KEPT_RESULTS))
        self.watched = 0  # the limit changes with each call
        self._pool = ref(pool)

    def free_excess(self) -> None:
        """Free memory above the limit, or all of it if the pool no longer exists."""
        pool = self._pool()
        with self.lock:
            self.free_until_within(0 if pool is None else min(self.limit, pool.free_bytes()))


class LimitedPool(ArenaPool):
    """Pool of arenas whose total size, cached arenas and results included, is at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.results = _LimitedResultMemory(self)
        self._lock = self.results.lock  # reentrant: a signal handler may call too
        self._queue: deque[_MemoryRequest] = deque()
        self._promised = 0  # bytes granted but not yet allocated
        self._growing = False
        _POOLS.add(self)

    def take_arena(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes as soon as there is room, after earlier requests.

        Raises
        ------
        CallError
            If ``size`` exceeds the limit: the request would wait for ever.
        """
        return self._request_arena(size, 0, more=False)

    def take_further_arena(self, size: int, held_bytes: int) -> Arena:
        """Return an arena for the call that may allocate step by step and already has ``held_bytes`` bytes."""
        return self._request_arena(size, held_bytes, more=True)

    def _request_arena(self, size: int, held_bytes: int, more: bool) -> Arena:
        """Wait until an arena of ``size`` bytes fits, and return a cached or new one.

        With ``more``, before other requests.
        """
        if size + held_bytes > self.limit:
            what = f"this call needs {size + held_bytes:,} bytes of working memory"
            hint = "load it with a larger memory_limit, or pass smaller arrays"
            raise CallError("", what, expected=f"at most memory_limit, {self.limit:,} bytes", hint=hint)
        request = self._wait_for_grant(_MemoryRequest(size, exact=more), first=more)
        if request.arena is not None:
            return request.arena
        try:
            return self._allocate_arena(size)
        finally:
            with self._lock:
                self._promised -= size

    def return_arena(self, arena: Arena) -> None:
        """Return an arena to the pool, and grant waiting requests that fit now."""
        with self._lock:
            self._idle.append(arena)
            self._grant_waiting()

    def begin_stepwise_allocation(self) -> None:
        """Wait until this call may allocate step by step."""
        self._wait_for_grant(_MemoryRequest(0, grows=True), first=False)

    def end_stepwise_allocation(self) -> None:
        """End step-by-step allocation; the next call that waits for the right to it may start."""
        with self._lock:
            self._growing = False
            self._grant_waiting()

    def waiting_calls(self) -> int:
        """Return the number of calls that wait for memory."""
        return len(self._queue)

    def stats(self) -> dict[str, int]:
        """Return the counters of :meth:`ArenaPool.stats`, the limit, and the number of waiting calls."""
        return {**super().stats(), "limit": self.limit, "waiting": self.waiting_calls()}

    def _wait_for_grant(self, request: _MemoryRequest, first: bool) -> _MemoryRequest:
        """Queue a request, at the front if ``first``, and wait until it is granted or the call is interrupted."""
        try:
            with self._lock:
                if first:
                    self._queue.appendleft(request)
                else:
                    self._queue.append(request)
                self._grant_waiting()
            while not request.granted and not request.gate.acquire(timeout=NOTICE_NANOSECONDS / 1e9):
                raise_if_interrupted()
                with self._lock:
                    self._grant_waiting()  # an aborted call has dropped its arena
        except BaseException:
            self._withdraw_request(request)
            raise
        return request

    def _withdraw_request(self, request: _MemoryRequest) -> None:
        """Remove a request whose call was aborted, and free what it was granted."""
        with self._lock:
            if not request.granted:
                with suppress(ValueError):  # it was not in the queue yet
                    self._queue.remove(request)
            elif request.grows:
                self._growing = False
            elif request.arena is not None:
                self._idle.append(request.arena)
            else:
                self._promised -= request.size
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Grant waiting requests in order as long as they fit."""
        while self._queue and self._try_to_grant(self._queue[0]):
            request = self._queue.popleft()
            request.granted = True
            request.gate.release()

    def _try_to_grant(self, request: _MemoryRequest) -> bool:
        """Grant a request if it fits: reuse a cached arena, or reserve bytes for a new one; return True if granted."""
        if request.grows:
            free, self._growing = not self._growing, True
            return free
        size, exact = request.size, request.exact
        fits = [n for n, a in enumerate(self._idle) if a.size == size or (a.size > size and not exact)]
        if fits:
            request.arena = self._idle.pop(min(fits, key=lambda n: self._idle[n].size))
            return True
        while self._idle and request.size > self.free_bytes():
            self._idle.pop(0).free()
        if request.size > self.free_bytes():
            return False
        self._promised += request.size
        self.results.free_until_within(self.free_bytes())
        return True

    def free_bytes(self) -> int:
        """Return the bytes that neither arenas nor granted requests use; cached results may occupy them."""
        return self.limit - self.allocated_bytes() - self._promised

    def reset_after_fork(self) -> None:
        """Reset in a forked child, where no other calls run or wait."""
        self._queue.clear()
        self._promised, self._growing = 0, False
        self._held.clear()
        self._held.update((id(arena), arena.size) for arena in self._idle)


def _renew_limited_pools() -> None:
    for pool in tuple(_POOLS):
        pool.reset_after_fork()


after_fork(_renew_limited_pools)
