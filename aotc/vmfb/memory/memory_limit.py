"""Arenas of a module whose calls, all at a time, may take so much memory and no more: what does not fit waits.

Calls are served in the order in which they came. A call takes all of its memory at once, so whoever has some ends by
itself and gives it back. Where a call learns its sizes on the way it takes memory while it has some; of such calls one
runs at a time, and what it asks for comes first, so that no two wait for each other.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from weakref import WeakSet, ref

from aotc.vmfb.errors import VmError
from aotc.vmfb.host.interruption import notice
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.limits import KEPT_RESULTS, NOTICE_NANOSECONDS
from aotc.vmfb.memory.arena import Arena, ArenaPool
from aotc.vmfb.memory.result_pool import ResultMemory

_POOLS: WeakSet[LimitedPool] = WeakSet()


class _Waiter:
    """A request: for ``size`` bytes, no more of them if it is ``exact``, or for the right to take memory bit by bit."""

    __slots__ = ("arena", "exact", "gate", "granted", "grows", "size")

    def __init__(self, size: int, exact: bool = False, grows: bool = False) -> None:
        self.size, self.exact, self.grows = size, exact, grows
        self.arena: Arena | None = None
        self.granted = False
        self.gate = new_lock()
        self.gate.acquire()


class _Rest(ResultMemory):
    """Keeps of results that are gone what a pool has no use for."""

    def __init__(self, pool: LimitedPool) -> None:
        super().__init__(min(pool.limit, KEPT_RESULTS))
        self.watched = 0  # how much may be kept changes with each call
        self._pool = ref(pool)

    def shrink(self) -> None:
        """Free what is too much, or all if the pool is gone."""
        pool = self._pool()
        with self.lock:
            self.keep_within(0 if pool is None else min(self.limit, pool.free_bytes()))


class LimitedPool(ArenaPool):
    """Arenas of ``limit`` bytes in all, idle ones included, and what is kept for results."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.results = _Rest(self)
        self._lock = self.results.lock  # a recursive one: a signal handler may call, too
        self._queue: deque[_Waiter] = deque()
        self._promised = 0  # bytes that were granted and are not made yet
        self._growing = False
        _POOLS.add(self)

    def take(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes when that many may be taken, after those who asked before.

        Raises
        ------
        VmError
            If ``size`` is more than the limit: it would wait for ever.
        """
        return self._arena(size, 0, more=False)

    def grow(self, size: int, held: int) -> Arena:
        """Return an arena for the call that may take memory bit by bit and holds ``held`` bytes."""
        return self._arena(size, held, more=True)

    def _arena(self, size: int, held: int, more: bool) -> Arena:
        if size + held > self.limit:
            what = f"this call needs {size + held:,} bytes of working memory"
            hint = "load it with a larger memory_limit, or give it less at a time"
            raise VmError("", what, expected=f"at most memory_limit, {self.limit:,} bytes", hint=hint)
        waiter = self._wait(_Waiter(size, exact=more), first=more)
        if waiter.arena is not None:
            return waiter.arena
        try:
            return self._make(size)
        finally:
            with self._lock:
                self._promised -= size

    def give(self, arena: Arena) -> None:
        """Take an arena back, and let those have it who wait."""
        with self._lock:
            self._idle.append(arena)
            self._serve()

    def begin(self) -> None:
        """Wait until this call is the one that may take memory bit by bit."""
        self._wait(_Waiter(0, grows=True), first=False)

    def end(self) -> None:
        """Let the next such call begin."""
        with self._lock:
            self._growing = False
            self._serve()

    def waiting(self) -> int:
        """Return how many calls wait for memory."""
        return len(self._queue)

    def stats(self) -> dict[str, int]:
        """Return what :meth:`ArenaPool.stats` does, the limit, and how many calls wait."""
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
                notice()
                with self._lock:
                    self._serve()  # a call that ended early dropped its arena
        except BaseException:
            self._withdraw(waiter)
            raise
        return waiter

    def _withdraw(self, waiter: _Waiter) -> None:
        """Forget a request whose call was ended while it waited."""
        with self._lock:
            if not waiter.granted:
                with suppress(ValueError):  # it was not there yet
                    self._queue.remove(waiter)
            elif waiter.grows:
                self._growing = False
            elif waiter.arena is not None:
                self._idle.append(waiter.arena)
            else:
                self._promised -= waiter.size
            self._serve()

    def _serve(self) -> None:
        """Grant requests in their order, as far as memory goes."""
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
        """Return the bytes that are neither an arena's nor promised; results that are gone may lie there."""
        return self.limit - self.held_bytes() - self._promised

    def renew(self) -> None:
        """Begin anew in a forked child: nobody waits there, and no other call runs."""
        self._queue.clear()
        self._promised, self._growing = 0, False
        self._held.clear()
        self._held.update((id(arena), arena.size) for arena in self._idle)


def _renew() -> None:
    for pool in tuple(_POOLS):
        pool.renew()


after_fork(_renew)
