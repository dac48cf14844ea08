"""The watcher of health tells a server that stalls from a machine that is busy."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from support.hostile import HEALTH_SECONDS, watched

pytestmark = pytest.mark.cpu

ANSWERS = """
import os, socket, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            end = time.thread_time() + float(sys.argv[2])
            while time.thread_time() < end:
                pass
            connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
"""
LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("begun", flush=True)
while True:
    pass
"""


@contextmanager
def process(program, *arguments):
    """Start a process; yield it and the first line that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started, started.stdout.readline()
        finally:
            started.kill()


def timed(seconds, loops):
    """Time a server that computes so long for an answer, on a core with so many loops."""
    core, found = min(os.sched_getaffinity(0)), []
    with ExitStack() as stack:
        server, port = stack.enter_context(process(ANSWERS, core, seconds))
        for _ in range(loops):
            stack.enter_context(process(LOOP, core))
        with watched(SimpleNamespace(port=int(port), pid=server.pid), found):
            pass
    return found[0]


def test_a_busy_core_is_not_a_stall():
    health = timed(0.02, 8)
    assert health.whole > 0.04
    assert health.stall < HEALTH_SECONDS


@pytest.mark.parametrize("loops", [0, 3])
def test_a_stalled_event_loop_is_found(loops):
    assert timed(1.5 * HEALTH_SECONDS, loops).stall > HEALTH_SECONDS
