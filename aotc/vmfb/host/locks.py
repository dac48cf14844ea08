"""Registry of the runtime's locks, which are reset in a forked child.

A thread that holds a lock during a fork of another thread does not exist in the child and could not release it.
Counters protected by locks are reset by callbacks after the locks have been reset.
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
    """Create a lock that is unlocked in a forked child."""
    return _register_lock(allocate_lock())


def new_recursive_lock() -> threading.RLock:
    """Create a reentrant lock that is unlocked in a forked child."""
    return _register_lock(RLock())


def new_condition(lock: threading.Lock) -> threading.Condition:
    """Create a condition variable on ``lock``, from :func:`new_lock`; several conditions may share one lock."""
    from threading import Condition

    return Condition(lock)


def after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Register ``function`` to be called in a forked child after all locks have been released; return it."""
    _AFTER_FORK.append(function)
    return function


def _register_lock(lock: Any) -> Any:
    LOCKS.add(lock)
    return lock


def _renew_locks() -> None:
    for lock in LOCKS:
        lock._at_fork_reinit()
    for function in _AFTER_FORK:
        function()


os.register_at_fork(after_in_child=_renew_locks)
