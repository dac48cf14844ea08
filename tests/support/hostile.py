"""A server as a process under hostile load: its log, its memory, and a watcher that times its health meanwhile."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from support.served import Running, ServeProcess, free_port, until

HEALTH_SECONDS = 0.1  # docs/serve.md: no request delays an answer about health by more
TRIES = 3  # of a measurement: others use this machine too

# A process of its own: what the test does must not delay it. It prints the longest answer when its input ends.
WATCHER = """
import socket, sys, threading, time
port, ended = int(sys.argv[1]), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
request = b"GET /v2/health/live HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n"
worst = 0.0
print("begun", flush=True)
while not ended.is_set():
    begin = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(request)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError as error:
        answer = repr(error).encode()
    worst = max(worst, time.perf_counter() - begin)
    if b" 200 " not in answer[:20]:
        print("refused", answer[:300])
        sys.exit(1)
    time.sleep(0.002)
print(worst)
"""


class HostileServer(Running):
    """A server in another process, with both protocols.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, process, port, grpc_port, log):
        super().__init__(None, port, grpc_port)
        self.pid, self._log = process.made.pid, log

    def log(self):
        """Return what the server has written to its log."""
        return Path(self._log).read_text()

    def memory(self):
        """Return the bytes of memory of the server and its children that are their own."""
        pids = [self.pid, *map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]
        return sum(int(_field(pid, "RssAnon")) * 1024 for pid in pids)

    def figure(self, name):
        """Return a figure of ``/metrics``."""
        lines = self.ask("/metrics")[2].decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])


def _field(pid, name):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return line.split()[1]
    return 0


@contextmanager
def hostile_server(source, folder, *options):
    """Start a server of ``source`` whose log lies in ``folder``; its log has no traceback at the end."""
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
    """Time the answers about health within the block; append the longest to ``found``."""
    command = [sys.executable, "-c", WATCHER, str(server.port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        yield
        time.sleep(0.05)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        found.append(float(rest))
    finally:
        process.kill()
        process.wait()


def assert_no_stall(server, attack):
    """Run an attack, again if something delayed an answer about health: an attack that stalls always does."""
    found = []
    for _ in range(TRIES):
        with watched(server, found):
            attack()
        if found[-1] < HEALTH_SECONDS:
            return
    raise AssertionError(f"health took {found} s, expected below {HEALTH_SECONDS}")
