"""Kill a random rank at a random time, repeatedly, and collect the reports of the others with their delays.

As a program: ``python rank_kills.py ROUNDS [SEED [SIZE]]`` prints a line of JSON for each round, and a summary.
"""

import json
import os
import random
import select
import signal
import socket
import sys
import time

import numpy as np

from aotc.vmfb.errors import CallError, RankLost
from aotc.vmfb.ranks import tcp  # noqa: F401  imported before the fork
from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.link import open_link
from aotc.vmfb.ranks.ranks import Ranks

# When the rank is killed: in collectives one after another, between rare ones, while rank 0 computes and all others
# wait, and at load.
KINDS = ("busy", "idle", "late", "load")
ROUND_SECONDS = 20


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def step(link, kind, number):
    """Run one collective, of all ranks or of one half of them."""
    if kind == "idle":
        time.sleep(0.2)
    if kind == "late" and link.rank == 0:
        time.sleep(1.5)
    began = time.time()
    half = link.size // 2
    groups = () if number % 3 else (tuple(range(half)), tuple(range(half, link.size)))
    c = Collective("all_reduce", number, groups, reduction="add", place="model.py:35")
    x = np.ones((2, 3000, 250_000)[number % 3], np.float32)
    return began, c, x


def life(rank, size, address, kind, out):
    """Run collectives until an error, and report it."""
    began = time.time()
    try:
        link = open_link(Ranks(rank, size, address, "tcp", 3.0), {})
        os.write(out, b"ready\n")
        for number in range(1 << 30):
            began, c, x = step(link, kind, number)
            run_collective(c, link, [x], [np.empty_like(x)])
    except CallError as error:
        now = time.time()
        again = ""
        if isinstance(error, RankLost) and "connected" not in str(error):
            try:
                link.exchange({}, {}, "another call")
            except RankLost as second:
                again = str(second)
        lost = getattr(error, "rank", None)
        row = {"rank": rank, "lost": lost, "text": str(error), "again": again, "began": began, "time": now}
        os.write(out, json.dumps(row).encode() + b"\n")
        time.sleep(random.random() * 0.05)  # some ranks end before others have noticed
    finally:
        os._exit(0)


def one_round(seed, size, kind):
    """Kill one rank; return its number, the time, and the report of each other rank."""
    chance = random.Random(seed)
    address = f"127.0.0.1:{free_port()}"
    children, pipes = {}, {}
    for rank in range(size):
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            life(rank, size, address, kind, writes)
        os.close(writes)
        children[rank], pipes[rank] = pid, reads
    texts = dict.fromkeys(pipes, b"")
    if kind != "load":
        while not all(text.startswith(b"ready") for text in texts.values()):
            read_some(pipes, texts)
    time.sleep(chance.random() * (0.1 if kind == "load" else 0.5))
    victim = chance.randrange(1 if kind == "late" else 0, size)
    killed = time.time()
    os.kill(children[victim], signal.SIGKILL)
    end = time.monotonic() + ROUND_SECONDS
    while time.monotonic() < end and read_some(pipes, texts):
        pass
    for rank, pid in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipes[rank])
    reports = [json.loads(line) for text in texts.values() for line in text.splitlines() if line.startswith(b"{")]
    return victim, killed, {row["rank"]: row for row in reports}


def read_some(pipes, texts):
    """Read the ranks' output so far into ``texts``; return False when all ranks have ended."""
    if not pipes:
        return False
    ready, _, _ = select.select(list(pipes.values()), [], [], 0.2)
    for rank, pipe in pipes.items():
        if pipe in ready:
            data = os.read(pipe, 1 << 16)
            texts[rank] += data
            if not data:
                ended.add(pipe)
    return any(pipe not in ended for pipe in pipes.values())


ended: set[int] = set()


def judge(seed, size, kind):
    """Run a round and return its faults as text, and the longest delay in seconds."""
    ended.clear()
    victim, killed, reports = one_round(seed, size, kind)
    faults = []
    survivors = set(range(size)) - {victim}
    reports.pop(victim, None)
    if set(reports) != survivors:
        faults.append(f"only {sorted(reports)} reported")
    delays = [row["time"] - max(killed, row["began"]) for row in reports.values() if row["lost"] is not None]
    for row in reports.values():
        names = row["lost"] == victim or (kind == "load" and f"rank {victim} of {size} did not join" in row["text"])
        if not names:
            faults.append(f"rank {row['rank']} says {row['text']}")
        if row["lost"] is not None and row["again"] not in ("", row["text"]):
            faults.append(f"rank {row['rank']} says later {row['again']}")
    return {"kind": kind, "victim": victim, "faults": faults, "delay": max(delays, default=0.0)}


def rounds(count, seed=0, size=4):
    return [judge(seed + k, size, KINDS[k % len(KINDS)]) for k in range(count)]


if __name__ == "__main__":
    count, seed, size = [*map(int, sys.argv[1:]), *(5, 0, 4)[len(sys.argv) - 1 :]]
    found = []
    for k in range(count):
        found.append(judge(seed + k, size, KINDS[k % len(KINDS)]))
        print(json.dumps(found[-1]), flush=True)
    bad = sum(bool(row["faults"]) for row in found)
    print(json.dumps({"rounds": count, "bad": bad, "longest delay": max(row["delay"] for row in found)}))
