"""Arenas of a module with a memory limit for all concurrent calls; calls that do not fit wait.

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


class _Waiter:
    """A waiting request: for ``size`` bytes (not more if ``exact``), or for the right to allocate step by step."""

    __slots__ = ("arena", "exact", "gate", "granted", "grows", "size")

    def __init__(self, size: int, exact: bool = False, grows: bool = False) -> None:
        self.size, self.exact, self.grows = size, exact, grows
        self.arena: Arena | None = None
        self.granted = False
        self.gate = new_lock()
        self.gate.acquire()


class _Rest(ResultMemory):
    """The cache of freed results of a pool with a limit: it may use the memory that the pool leaves unused."""

    def __init__(self, pool: LimitedPool) -> None:
        super().__init__(min(pool.limit, KEPT_RESULTS))
        self.watched = 0  # the limit changes with each call
        self._pool = ref(pool)

    def free_excess(self) -> None:
        """Free memory above the limit, or all of it if the pool no longer exists."""
        pool = self._pool()
        with self.lock:
            self.keep_within(0 if pool is None else min(self.limit, pool.free_bytes()))


class LimitedPool(ArenaPool):
    """Arenas of at most ``limit`` bytes in total, including cached arenas and results."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.results = _Rest(self)
        self._lock = self.results.lock  # reentrant: a signal handler may call too
        self._queue: deque[_Waiter] = deque()
        self._promised = 0  # bytes granted but not yet allocated
        self._growing = False
        _POOLS.add(self)

    def take(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes as soon as there is room, after earlier requests.

        Raises
        ------
        CallError
            If ``size`` exceeds the limit: the request would wait for ever.
        """
        return self._arena(size, 0, more=False)

    def grow(self, size: int, held_bytes: int) -> Arena:
        """Return an arena for the call that may allocate step by step and has ``held_bytes`` bytes."""
        return self._arena(size, held_bytes, more=True)

    def _arena(self, size: int, held_bytes: int, more: bool) -> Arena:
        if size + held_bytes > self.limit:
            what = f"this call needs {size + held_bytes:,} bytes of working memory"
            hint = "load it with a larger memory_limit, or pass smaller arrays"
            raise CallError("", what, expected=f"at most memory_limit, {self.limit:,} bytes", hint=hint)
        waiter = self._wait(_Waiter(size, exact=more), first=more)
        if waiter.arena is not None:
            return waiter.arena
        try:
            return self._make(size)
        finally:
            with self._lock:
                self._promised -= size

    def give(self, arena: Arena) -> None:
        """Return an arena to the pool, and serve waiting requests."""
        with self._lock:
            self._idle.append(arena)
            self._serve()

    def begin(self) -> None:
        """Wait until this call may allocate step by step."""
        self._wait(_Waiter(0, grows=True), first=False)

    def end(self) -> None:
        """End step-by-step allocation; the next call that waits for the right may start."""
        with self._lock:
            self._growing = False
            self._serve()

    def waiting(self) -> int:
        """Return the number of calls that wait for memory."""
        return len(self._queue)

    def stats(self) -> dict[str, int]:
        """Return the counters of :meth:`ArenaPool.stats`, the limit, and the number of waiting calls."""
        return {**super().stats(), "limit": self.limit, "waiting": self.waiting()}

    def _wait(self, waiter: _Waiter, first: bool) -> _Waiter:
        try:
            with self._lock:
                if first:
                    self._queue.appendleft(waiter)
                else:
                    self._queue.append(waiter)
                self._serve()
            while not waiter.granted and not waiter.gate.acquire(timeout=NOTICE_NANOSECONDS / 1e9):
                raise_if_interrupted()
                with self._lock:
                    self._serve()  # an aborted call has dropped its arena
        except BaseException:
            self._withdraw(waiter)
            raise
        return waiter

    def _withdraw(self, waiter: _Waiter) -> None:
        """Withdraw a waiting request whose call was aborted."""
        with self._lock:
            if not waiter.granted:
                with suppress(ValueError):  # it was not in the queue yet
                    self._queue.remove(waiter)
            elif waiter.grows:
                self._growing = False
            elif waiter.arena is not None:
                self._idle.append(waiter.arena)
            else:
                self._promised -= waiter.size
            self._serve()

    def _serve(self) -> None:
        """Grant requests in order while there is room."""
        while self._queue and self._grant(self._queue[0]):
            waiter = self._queue.popleft()
            waiter.granted = True
            waiter.gate.release()

    def _grant(self, waiter: _Waiter) -> bool:
        if waiter.grows:
            free, self._growing = not self._growing, True
            return free
        size, exact = waiter.size, waiter.exact
        fits = [n for n, a in enumerate(self._idle) if a.size == size or (a.size > size and not exact)]
        if fits:
            waiter.arena = self._idle.pop(min(fits, key=lambda n: self._idle[n].size))
            return True
        while self._idle and waiter.size > self.free_bytes():
            self._idle.pop(0).free()
        if waiter.size > self.free_bytes():
            return False
        self._promised += waiter.size
        self.results.keep_within(self.free_bytes())
        return True

    def free_bytes(self) -> int:
        """Return the bytes not used by arenas or grants; cached results may occupy them."""
        return self.limit - self.allocated_bytes() - self._promised

    def renew(self) -> None:
        """Reset in a forked child, where no other calls run or wait."""
        self._queue.clear()
        self._promised, self._growing = 0, False
        self._held.clear()
        self._held.update((id(arena), arena.size) for arena in self._idle)


def _renew_limited_pools() -> None:
    for pool in tuple(_POOLS):
        pool.renew()


after_fork(_renew_limited_pools)
