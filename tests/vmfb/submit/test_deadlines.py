"""The thread that waits for deadlines outlives errors of those that it wakes."""

import sys
import threading

import pytest

from aotc.vmfb.submit.deadlines import DeadlineClock

pytestmark = pytest.mark.cpu


class Waiter:
    """Is woken once, and may fail."""

    def __init__(self, error=None):
        self.error, self.done, self.woken = error, False, threading.Event()

    def expire(self):
        self.woken.set()
        if self.error:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("late"), SystemExit(1)])
def test_a_failing_waiter_stops_no_other(monkeypatch, error):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, found, trace: shown.append(found))
    clock, failing, other = DeadlineClock(), Waiter(error), Waiter()
    clock.add_deadline(0, failing)
    assert failing.woken.wait(60)
    clock.add_deadline(0.01, other)
    assert other.woken.wait(60)
    assert shown == [error]
