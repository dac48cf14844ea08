"""Submissions that end early: cancelled, late, interrupted, with the interpreter."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from aotc.vmfb.submit.deadlines import DEADLINES

pytest.importorskip("numba")

from vmfb.test_interruption import ENDLESS, ENDS

import aotc
from aotc.vmfb.host.interruption import RUNNING

pytestmark = [pytest.mark.cpu]

X = np.full((200, 200), 0.5, np.float32)
PATIENCE = 60


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("endless") / "endless.vmfb"
    path.write_bytes(aotc.compile(ENDLESS))
    return str(path)


@pytest.fixture(scope="module")
def module(bundle):
    return aotc.load(bundle, threads=2)


def under_way(fence):
    """Wait until somebody runs it."""
    while fence not in RUNNING.values():
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_call_under_way_is_cancelled(module, name):
    fence = module.submit(name, ENDS[name])
    after = module.submit("double", module.submit("double", X), wait=[fence])
    under_way(fence)
    assert fence.cancel()
    with pytest.raises(aotc.FenceCancelled, match=r"main: .*the submission was cancelled"):
        fence.result(PATIENCE)
    assert "which failed: FenceCancelled" in str(after.exception(PATIENCE))
    assert fence.cancel()
    assert module.submit("double", X).result(PATIENCE)[0][0, 0] == 1


def test_a_waiting_submission_is_cancelled_and_never_runs(module):
    start = aotc.Fence()
    fence = module.submit("fused", ENDS["fused"], wait=[start])
    assert fence.cancel()
    assert fence.done
    with pytest.raises(aotc.FenceCancelled):
        fence.result()
    start.signal()
    assert module.submit("double", X).result(PATIENCE)[0][0, 0] == 1


def test_a_completed_submission_cannot_be_cancelled(module):
    fence = module.submit("double", X)
    fence.wait(PATIENCE)
    assert not fence.cancel()
    assert fence.result()[0][0, 0] == 1


@pytest.mark.parametrize("name", ["fused", "unfused"])
@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_deadline_ends_a_call_under_way(module, name, timeout):
    """Without a timeout the waiting thread runs it itself."""
    fence = module.submit(name, ENDS[name], deadline=0.05)
    with pytest.raises(aotc.DeadlineExceeded, match=r"main: .*the deadline of the submission passed"):
        fence.result(timeout)
    assert not fence.cancel() or isinstance(fence.exception(), aotc.DeadlineExceeded)


def test_a_deadline_ends_a_waiting_submission(module):
    start = aotc.Fence()
    late = [module.submit("double", X, wait=[start], deadline=seconds) for seconds in (0.04, 0, 0.02, 1000)]
    for fence in late[:3]:
        assert isinstance(fence.exception(PATIENCE), aotc.DeadlineExceeded)
    assert not late[3].done
    start.signal()
    assert late[3].result(PATIENCE)[0][0, 0] == 1


def test_deadlines_of_completed_submissions_are_removed(module):

    for _ in range(3 * DEADLINES):
        module.submit("double", X[:200], deadline=3600).result()


def test_nothing_leaks(module):
    """Memory that a call works in comes back, whatever ended it, and so do threads."""
    from aotc.vmfb.memory.arena import ARENAS

    def ended(**more):
        fence = module.submit("unfused", X, **more)
        if not more:
            under_way(fence)
            fence.cancel()
        fence.exception(PATIENCE)

    ended()
    before, threads = ARENAS.idle_bytes(), threading.active_count()
    assert before > 0
    for _ in range(10):
        ended()
        ended(deadline=0.01)
    assert ARENAS.idle_bytes() == before
    assert threading.active_count() <= threads + 1
    assert not RUNNING


def test_more_endless_calls_than_threads_are_cancelled(module):
    fences = [module.submit("fused", ENDS["fused"]) for _ in range(40)]
    last = module.submit("double", X)
    for fence in fences:
        fence.cancel()
    assert last.result(PATIENCE)[0][0, 0] == 1
    assert all(isinstance(fence.exception(PATIENCE), aotc.FenceCancelled) for fence in fences)


def test_a_cancelled_task_ends_the_call_that_it_awaits(module):
    async def main():
        fence = module.submit("fused", ENDS["fused"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fence, 0.05)
        with pytest.raises(aotc.FenceCancelled):
            await fence
        return await module.submit("double", X)

    assert asyncio.run(main())[0][0, 0] == 1


INTERRUPTED = """
import os, signal, sys, threading
import aotc, numpy as np
path, name, how = sys.argv[1:]
module = aotc.load(path, threads=2)
x = np.full((200, 200), 0.5, np.float32)
fence = module.submit(name, x if name == "unfused" else np.float32(0.5))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    fence.result(*([60] if how == "timeout" else []))
except KeyboardInterrupt:
    print("interrupted", fence.done)
fence.cancel()
print(type(fence.exception(60)).__name__)
print(module.submit("double", x).result()[0][0, 0])
"""
ENDING = """
import sys, time
import aotc, numpy as np
module = aotc.load(sys.argv[1], threads=2)
x = np.full((200, 200), 0.5, np.float32)
start = aotc.Fence()
fences = [module.submit(name, value) for name, value in (("fused", np.float32(0.5)), ("unfused", x))]
fences += [module.submit("fused", np.float32(0.5), wait=[start], deadline=3600)]
fences += [module.submit("fused", np.float32(0.5)) for _ in range(20)]
time.sleep(0.2)
print("end")
"""


def run(code, *args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("how", ["timeout", "none"])
@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_an_interrupt_ends_the_wait_and_not_the_call(bundle, name, how):
    ended = run(INTERRUPTED, bundle, name, how)
    assert ended.stdout.split("\n") == ["interrupted False", "FenceCancelled", "1.0", ""], ended.stderr
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_interpreter_ends_under_submissions(bundle):
    ended = run(ENDING, bundle)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
