"""The start of ranks: launchers, missing ranks, ranks that differ, strangers."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.rank_cases import run_threads
from support.rank_kills import free_port

from aotc.vmfb.errors import ArgumentValueError, CallError
from aotc.vmfb.ranks import frames, link, loss, rendezvous
from aotc.vmfb.ranks.ranks import Ranks, first_host, ranks_from_environment, split_address

pytestmark = pytest.mark.ir

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "4242"}
STEP = {**SLURM, "SLURM_STEP_NODELIST": "gpu[03-06,9],login"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
LAUNCHED = [
    ({}, None),
    ({"RANK": "1"}, None),
    (TORCHRUN, Ranks(1, 4, "node1:29500", "tcp")),
    ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, Ranks(1, 4, "node1:29501", "tcp")),
    ({**TORCHRUN, "MASTER_ADDR": "fe80::1"}, Ranks(1, 4, "[fe80::1]:29500", "tcp")),
    ({**TORCHRUN, "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}, Ranks(1, 4, "node1:65534", "tcp")),
    (OPEN_MPI, Ranks(0, 2, "", "mpi")),
    ({"PMI_RANK": "5", "PMI_SIZE": "6"}, Ranks(5, 6, "", "mpi")),
    (STEP, Ranks(3, 8, f"gpu03:{15_000 + 4242 * 31 % 15_000}", "tcp")),
    (SLURM, None),  # a batch script outside of srun
    ({**STEP, **OPEN_MPI}, Ranks(0, 2, "", "mpi")),
    ({**OPEN_MPI, "AOTC_RANKS_ADDRESS": "other:7"}, Ranks(0, 2, "other:7", "tcp")),
]


@pytest.mark.parametrize(("environ", "ranks"), LAUNCHED)
def test_ranks_of_a_launcher(environ, ranks):
    assert ranks_from_environment(environ) == ranks


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "one"}, "RANK: error: the environment variable is not a number.*\n.*'one'"),
        ({"RANK": "-1"}, "RANK: error: the environment variable is not a number"),
        ({"WORLD_SIZE": "\u0664"}, "WORLD_SIZE: error"),
        ({"RANK": "4"}, "torchrun set a rank that is out of range.*\n.*4\n.*0 to 3 by WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "torchrun set the number of ranks"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT: error"),
        ({"MASTER_PORT": "70000"}, "the address is not host:port.*\n.*node1:70000"),
    ],
)
def test_invalid_variables_are_named(changed, message):
    with pytest.raises(ArgumentValueError, match=message):
        ranks_from_environment({**TORCHRUN, **changed})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9],m", "n007"), ("r[2-4]n[10-11],x", "r2n10"),
     ("n[1-2]-ib.site", "n1-ib.site")],
)  # fmt: skip
def test_first_host_of_a_node_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    "values",
    [(0, 0), (-1, 2), (2, 2), ("0", 2), (True, 2), (0, 2, "node"), (0, 2, ":1"), (0, 2, "a:0"), (0, 2, "", "udp"),
     (0, 2, "", "", 0.0), (0, 2, "", "", float("nan"))],
)  # fmt: skip
def test_ranks_refuse_invalid_values(values):
    with pytest.raises(ArgumentValueError):
        Ranks(*values)


def test_an_ipv6_address():
    assert split_address("[::1]:80") == ("::1", 80)


class Start:
    """The start of a rank, in the place of its link."""

    def __init__(self, rank):
        self.rank = rank

    def close(self):
        pass


def start(address, size, present, facts=None, timeout=10.0, delays=()):
    """Return the links, or errors, of the ranks that are present."""
    delays = dict(delays)

    def work(one):
        time.sleep(delays.get(one.rank, 0))
        values = facts[one.rank] if facts else {}
        return link.open_link(Ranks(one.rank, size, address, "tcp", timeout), values)

    return run_threads([Start(rank) for rank in present], work)


def close_all(links):
    assert not [one for one in links if isinstance(one, Exception)]
    for one in links:
        one.close()


def local():
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("delays", [(), ((0, 0.4),), ((1, 0.4),)])
def test_missing_ranks_are_named_by_all_in_time(delays):
    began = time.monotonic()
    errors = start(local(), 5, (0, 1, 4), timeout=1.0, delays=delays)
    assert time.monotonic() - began < 1.0 + 1.0 + 0.4
    for error in errors:
        assert isinstance(error, CallError)
        assert "ranks 2-3 of 5 did not join within 1 s" in str(error), error


def test_a_missing_rank_0_is_named():
    (error,) = start(local(), 2, (1,), timeout=0.5)
    assert "rank 0 of 2 did not join within 0.5 s" in str(error)
    assert "refused" in str(error)


def test_ranks_that_start_late_join():
    close_all(start(local(), 3, (0, 1, 2), delays=((0, 0.5), (2, 0.2))))


def test_different_facts_are_listed_on_all_ranks():
    facts = [{"bundle": "aa" if rank in (0, 2) else "bb", "mesh": "x=3"} for rank in range(3)]
    errors = start(local(), 3, range(3), facts)
    for error in errors:
        assert isinstance(error, CallError)
        assert "bundle: aa on ranks 0, 2; bb on rank 1" in str(error)
        assert "mesh" not in str(error)


def test_different_sizes_are_an_error_on_all_that_agree():
    address = local()
    found = {}

    def one(rank, size):
        try:
            found[rank] = link.open_link(Ranks(rank, size, address, "tcp", 5.0), {})
        except CallError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=row) for row in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "ranks: 2 on rank 0; 3 on rank 1" in found[0]
    assert "ranks: 2 on rank 0; 3 on rank 1" in found[1]


def test_lists_of_ranks():
    assert loss.rank_list([3]) == "rank 3"
    assert loss.rank_list([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"


GARBAGE = (
    b"", b"GET / HTTP/1.1\r\n\r\n", b"aotc\xff\xff\xff\xff", b"aotc\0\0\0\x05[[[[[", b"aotc\0\0\0\x02{}", b"aotc\0\0",
    b"aotc\0\0\0\x0012345", b"aotc" + (40_000).to_bytes(4, "big") + b"[" * 40_000, b"\0" * 5000,
    frames.frame({"version": 1, "rank": "1"}), frames.frame({"version": 1, "rank": 1, "secret": "x"}),
    frames.frame({"version": 99, "rank": 1, "host": "h", "process": 1, "listens": ["127.0.0.1", 1], "facts": {}}),
    frames.frame({"version": 1, "rank": 9, "host": "h", "process": 1, "listens": ["127.0.0.1", 1], "facts": {}}),
)  # fmt: skip


def test_strangers_at_the_rendezvous_are_ignored():
    address = local()
    found = []
    ours = threading.Thread(target=lambda: found.extend(start(address, 2, (0, 1), delays=((1, 0.8),))))
    ours.start()
    strangers = []
    end = time.monotonic() + 0.7
    while time.monotonic() < end and len(strangers) < len(GARBAGE):
        try:
            sock = socket.create_connection(split_address(address), 1)
        except OSError:
            time.sleep(0.01)
            continue
        sock.sendall(GARBAGE[len(strangers)])
        strangers.append(sock)
    assert len(strangers) == len(GARBAGE)
    ours.join()
    x = np.zeros(1)
    threads = [threading.Thread(target=one.exchange, args=({k: x + k}, {k: x}, "w")) for one, k in zip(found, (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close_all(found)
    for sock in strangers:
        sock.close()


def test_a_stranger_without_the_secret_is_no_pair(monkeypatch):
    """It knows the port of a rank, and claims to be another one."""
    ours = rendezvous.connect_pairs

    def connect_pairs(ranks, meeting, deadline, check):
        if ranks.rank == 1:  # the others wait for its connection
            for data in (*GARBAGE, frames.frame({"secret": "0" * 64, "rank": 1}), frames.frame({"secret": "\u00e9"})):
                with socket.create_connection(meeting.addresses[0], 1) as sock:
                    sock.sendall(data)
            time.sleep(0.2)
        return ours(ranks, meeting, deadline, check)

    monkeypatch.setattr("aotc.vmfb.ranks.tcp.connect_pairs", connect_pairs)
    close_all(start(local(), 3, range(3)))


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CallError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            link.open_link(Ranks(0, 2, f"127.0.0.1:{port}", "tcp", 1.0), {})


def test_another_program_at_the_address_is_a_clear_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def serve():
            while True:
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.close()

        threading.Thread(target=serve, daemon=True).start()
        (error,) = start(f"127.0.0.1:{other.getsockname()[1]}", 2, (1,), timeout=0.5)
        assert "does not start a message" in str(error) or "Connection reset" in str(error), error
        other.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_joins_twice_is_refused():
    address = local()
    found = []

    def join(delay):
        time.sleep(delay)
        try:
            found.append(link.open_link(Ranks(1, 3, address, "tcp", 2.0), {}))
        except CallError as error:
            found.append(str(error))

    threads = [threading.Thread(target=join, args=(delay,)) for delay in (0.1, 0.4)]
    for thread in threads:
        thread.start()
    errors = start(address, 3, (0,), timeout=1.5)
    for thread in threads:
        thread.join()
    assert "rank 1 joined twice" in found[0]
    assert all("rank 2 of 3 did not join" in str(text) for text in (*errors, found[1]))


def test_ranks_that_are_threads_have_no_address():
    with pytest.raises(ArgumentValueError, match="thread_links"):
        link.open_link(Ranks(0, 1, "", "threads"), {})


def test_a_missing_address_is_a_clear_error(monkeypatch):
    with pytest.raises(CallError, match="TCP needs the address of rank 0"):
        link.open_link(Ranks(0, 2), {})


def test_a_missing_mpi_is_a_clear_error():
    code = (
        "from aotc.vmfb.ranks.link import open_link\nfrom aotc.vmfb.ranks.ranks import Ranks\n"
        "open_link(Ranks(0, 1, transport='mpi'), {})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOTC_MPI_LIBRARY": "/nowhere/libmpi_abi.so.1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "CallError: MPI cannot be loaded: /nowhere/libmpi_abi.so.1" in done.stderr
    assert "[mpi]', or AOTC_MPI_LIBRARY=" in done.stderr


def test_one_rank_needs_nobody():
    close_all(start(local(), 1, (0,)))


def test_a_forked_child_does_not_hide_the_end_of_a_rank():
    """The child's copies of the connections would keep them open."""
    code = """
import os, sys, time, threading, json
import numpy as np
from aotc.vmfb.errors import RankLost
from aotc.vmfb.ranks.link import open_link
from aotc.vmfb.ranks.ranks import Ranks
address = sys.argv[1]
if os.fork():
    one = open_link(Ranks(0, 2, address, "tcp"), {})
    x = np.zeros(1)
    one.exchange({1: x}, {}, "the first call")
    try:
        one.exchange({1: x}, {1: x.copy()}, "a call")
    except RankLost as error:
        print(str(error).splitlines()[0])
else:
    one = open_link(Ranks(1, 2, address, "tcp"), {})
    one.exchange({}, {0: np.zeros(1)}, "the first call")
    if not os.fork():
        time.sleep(5)
    os._exit(0)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    began = time.monotonic()
    done = subprocess.Popen([sys.executable, "-c", code, local()], env=env, stdout=subprocess.PIPE, text=True)
    line = done.stdout.readline()
    assert "ended" in line
    assert "rank 1 (" in line
    assert time.monotonic() - began < 5
    done.wait()


def test_frames_are_read_one_at_a_time():
    a, b = socket.socketpair()
    with a, b:
        b.setblocking(False)
        reader = frames.FrameReader(b)
        data = frames.frame({"x": 1}) + frames.frame({"y": [2]}) + b"rest"
        for k in range(len(data)):
            a.sendall(data[k : k + 1])
            if k in (7, 20):
                assert reader.read() in (None, {"x": 1})
        assert reader.read() in ({"x": 1}, {"y": [2]})
        assert json.dumps({"y": [2]}).encode() not in b.recv(100)
