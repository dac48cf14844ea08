"""Control of LLVM's ``LoopStrengthReduce`` on x86, by an option that is global to the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm


class _AddressModeUsers:
    """The threads that generate machine code at present, all with the same value of LLVM's option."""

    def __init__(self) -> None:
        self.condition, self.count, self.kept, self.indexed = threading.Condition(), 0, 0, False

    def enter(self, indexed: bool) -> None:
        with self.condition:
            self.condition.wait_for(lambda: not self.count or self.indexed == indexed)
            if self.indexed != indexed:
                self._set_llvm_option(indexed)
            self.count += 1

    def leave(self) -> None:
        with self.condition:
            self.count -= 1
            if not self.count:
                self._reset_unused_option()
                self.condition.notify_all()

    def keep(self, more: int) -> None:
        with self.condition:
            self.kept += more
            self._reset_unused_option()

    def _reset_unused_option(self) -> None:
        """Reset the option if no thread needs it."""
        if self.indexed and not self.count and not self.kept:
            self._set_llvm_option(False)

    def _set_llvm_option(self, indexed: bool) -> None:
        llvm.set_option("aotc", "-disable-lsr" if indexed else "-disable-lsr=0")
        self.indexed = indexed

    def forget_threads(self) -> None:
        """Forget the parent's threads, in a forked child."""
        self.condition, self.count, self.kept = threading.Condition(), 0, 0
        self._reset_unused_option()


_USERS = _AddressModeUsers()
os.register_at_fork(after_in_child=_USERS.forget_threads)


@contextmanager
def loop_addresses(indexed: bool) -> Iterator[None]:
    """Disable LLVM's ``LoopStrengthReduce`` in the block if ``indexed``: addresses are then a base and a scaled index.

    The pass introduces an incremented pointer for each array, and takes a quarter of the time of code generation.
    Vector code gains nothing by it on machines whose addressing modes add and scale. A thread waits while others
    generate code with the other value. Other users of LLVM in this process, such as Numba in a user's thread, are
    affected by the current value.
    """
    _USERS.enter(indexed)
    try:
        yield
    finally:
        _USERS.leave()


@contextmanager
def with_fixed_addresses() -> Iterator[None]:
    """Keep the value of LLVM's option during the block, in which several kernels are compiled: a change takes 80 us."""
    _USERS.keep(1)
    try:
        yield
    finally:
        _USERS.keep(-1)
