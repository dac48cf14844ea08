"""The one list of the runtime's locks: each is made here, and is free again in a forked child.

A thread that holds a lock while another one forks is not there in the child to let it go. So are a few counters
that locks protect: what resets them is called after the locks are free.
"""

from __future__ import annotations

import os
from _thread import RLock, allocate_lock
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    import threading


LOCKS: WeakSet[Any] = WeakSet()
_AFTER_FORK: list[Callable[[], None]] = []


def new_lock() -> threading.Lock:
    """Return a lock that a forked child finds free."""
    return _listed(allocate_lock())


def new_recursive_lock() -> threading.RLock:
    """Return a lock that its holder can take again, and that a forked child finds free."""
    return _listed(RLock())


def after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Have ``function`` called in a forked child, when all locks are free; it is returned."""
    _AFTER_FORK.append(function)
    return function


def _listed(lock: Any) -> Any:
    LOCKS.add(lock)
    return lock


def _renew() -> None:
    for lock in LOCKS:
        lock._at_fork_reinit()
    for function in _AFTER_FORK:
        function()


os.register_at_fork(after_in_child=_renew)
