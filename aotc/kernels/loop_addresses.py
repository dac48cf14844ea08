"""How machine code for x86 counts the addresses of loops: an option of LLVM's for the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm


class _Turns:
    """Who makes machine code now: any number of threads, all with the option alike."""

    def __init__(self) -> None:
        self.condition, self.count, self.kept, self.indexed = threading.Condition(), 0, 0, False

    def enter(self, indexed: bool) -> None:
        with self.condition:
            self.condition.wait_for(lambda: not self.count or self.indexed == indexed)
            if self.indexed != indexed:
                self._set(indexed)
            self.count += 1

    def leave(self) -> None:
        with self.condition:
            self.count -= 1
            if not self.count:
                self._settle()
                self.condition.notify_all()

    def keep(self, more: int) -> None:
        with self.condition:
            self.kept += more
            self._settle()

    def _settle(self) -> None:
        """Set the option back if nobody needs it any more."""
        if self.indexed and not self.count and not self.kept:
            self._set(False)

    def _set(self, indexed: bool) -> None:
        llvm.set_option("aotc", "-disable-lsr" if indexed else "-disable-lsr=0")
        self.indexed = indexed

    def begin_again(self) -> None:
        """Forget the threads of the parent, in a forked child."""
        self.condition, self.count, self.kept = threading.Condition(), 0, 0
        self._settle()


_TURNS = _Turns()
os.register_at_fork(after_in_child=_TURNS.begin_again)


@contextmanager
def loop_addresses(indexed: bool) -> Iterator[None]:
    """Let machine code keep the addresses of loops as they are, if ``indexed``: a pointer, and an index that is scaled.

    LLVM would count a pointer of its own up for each array (``LoopStrengthReduce``), which takes a quarter of code
    generation. Vector code gains nothing by that where an instruction adds and scales. A thread waits for those that
    make code the other way; whoever else makes machine code in this process, as Numba in a thread of the user's, gets
    what they have.
    """
    _TURNS.enter(indexed)
    try:
        yield
    finally:
        _TURNS.leave()


@contextmanager
def kept_addresses() -> Iterator[None]:
    """Leave LLVM's option as the last kernel had it until all are machine code: to set it takes 80 us."""
    _TURNS.keep(1)
    try:
        yield
    finally:
        _TURNS.keep(-1)
