"""Server process under hostile load: its log, its memory, and the latency of health checks meanwhile."""

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from support.served import Running, ServeProcess, free_port, until

HEALTH_SECONDS = 0.1  # docs/serve.md: no request delays an answer about health by more
TRIES = 3  # of a measurement: others use this machine too
MOST_TRIES = 12  # with those that say nothing of the server, as the machine was too busy

# A process of its own: what the test does must not delay it. It asks the server, and in turn another process that has
# nothing else to do. Of an answer's time it subtracts the time for which the kernel had no core: for this process, for
# the server's event loop, and for that other thread of the server which waited longest, as it may hold the global lock.
# It prints the longest such time, the longest of all, and the longest of the other process.
WATCHER = """
import os, socket, subprocess, sys, threading, time
port, pid, ended = int(sys.argv[1]), sys.argv[2], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
request = b"GET /v2/health/live HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n"
idle = subprocess.Popen([sys.executable, "-c", sys.argv[3]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
idle_port = int(idle.stdout.readline())

def ask(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError as error:
        return repr(error).encode()

def waited(path):
    with open(f"{path}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9

def all_waited():
    tasks = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            tasks[task] = waited(f"/proc/{pid}/task/{task}")
        except OSError:
            pass  # it has ended
    return waited("/proc/self"), tasks

def delay(before, after):
    loop = after[1].pop(pid) - before[1].pop(pid)
    others = [seconds - before[1].get(task, 0.0) for task, seconds in after[1].items()]
    return after[0] - before[0] + loop + max(others, default=0.0)

stall = whole = other = 0.0
print("begun", flush=True)
while not ended.is_set():
    before, begin = all_waited(), time.perf_counter()
    answer = ask(port)
    seconds = time.perf_counter() - begin
    stall, whole = max(stall, seconds - delay(before, all_waited())), max(whole, seconds)
    if b" 200 " not in answer[:20]:
        print("refused", answer[:300])
        sys.exit(1)
    begin = time.perf_counter()
    assert ask(idle_port) == b"idle"
    other = max(other, time.perf_counter() - begin)
    time.sleep(0.002)
print(stall, whole, other)
idle.kill()
"""
IDLE = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"idle")
"""


@dataclass(frozen=True)
class Health:
    """Largest latencies of health checks of a server under attack, in seconds.

    Attributes
    ----------
    stall : float
        Without the time that the client and the server's threads waited for a core.
    whole : float
        With that time.
    idle : float
        The largest latency of a process without other work, in the same period.
    """

    stall: float
    whole: float
    idle: float


class HostileServer(Running):
    """A server in another process, with both protocols.

    Attributes
    ----------
    pid : int
        Its process id.
    x, n : str
        Names of the arguments of ``double`` and ``spin``, if it serves the folder ``hostile_models``.
    """

    def __init__(self, process, port, grpc_port, log):
        super().__init__(None, port, grpc_port)
        self.pid, self._log = process.made.pid, log

    def log(self):
        """Return the server's log so far."""
        return Path(self._log).read_text()

    @cached_property
    def x(self):
        return self.json("/v2/models/double")[1]["inputs"][0]["name"]

    @cached_property
    def n(self):
        return self.json("/v2/models/spin")[1]["inputs"][0]["name"]

    def memory(self):
        """Return the private memory of the server and its children in bytes."""
        pids = [self.pid, *map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]
        return sum(int(_field(pid, "RssAnon")) * 1024 for pid in pids)

    def figure(self, name):
        """Return the value of a metric of ``/metrics``."""
        lines = self.ask("/metrics")[2].decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])


def _field(pid, name):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return line.split()[1]
    return 0


@contextmanager
def hostile_server(source, folder, *options):
    """Start a server of ``source`` with its log in ``folder``; assert at the end that the log has no traceback."""
    port, grpc_port, path = free_port(), free_port(), folder / "serve.log"
    with open(path, "w") as log:
        line = (f"--port={port}", f"--grpc-port={grpc_port}", *options)
        with ServeProcess(source, *line, stderr=log) as process:
            assert until(lambda: "listening" in path.read_text() or process.made.poll() is not None)
            server = HostileServer(process, port, grpc_port, path)
            yield server
            assert process.made.poll() is None, server.log()
    assert "Traceback" not in server.log()
    assert "Exception" not in server.log()


@contextmanager
def watched(server, found):
    """Measure the latency of health checks in the ``with`` block; append the largest to ``found`` (:class:`Health`)."""
    command = [sys.executable, "-c", WATCHER, str(server.port), str(server.pid), IDLE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        yield
        time.sleep(0.05)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        found.append(Health(*map(float, rest.split())))
    finally:
        process.kill()
        process.wait()


def assert_no_stall(server, attack):
    """Run an attack, and repeat it if a health check was delayed: an attack that stalls the server always does.

    An attempt in which an idle process is delayed as much is not conclusive. If all attempts are, the test is skipped:
    the machine has no time to measure.
    """
    found = []
    for _ in range(MOST_TRIES):
        with watched(server, found):
            attack()
        if found[-1].stall < HEALTH_SECONDS:
            return
        if len([try_ for try_ in found if try_.idle < HEALTH_SECONDS / 2]) == TRIES:
            raise AssertionError(f"health took too long, expected below {HEALTH_SECONDS} s: {found}")
    pytest.skip(f"the machine is too busy to time answers about health: {found}")
