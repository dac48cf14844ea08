"""Several collectives as one call, next to a call for each.

It measures LARGEST_OPERAND of the pass combine_collectives.

All ranks are on this machine, as threads or as processes that exchange by TCP. A sample is the median time of a call on
rank 0, combined and single calls in turn; all ranks wait for each other in each call.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import numpy as np
import typer

from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.link import Link, open_link
from aotc.vmfb.ranks.ranks import Ranks
from aotc.vmfb.ranks.threads import thread_links
from benchmarks import children, options, report, timing

SIZES = (256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
OPERANDS = 4


def seconds_of(link: Link, op: str, size: int, calls: int) -> tuple[float, float]:
    """Return the median times of one call of all operands, and of a call for each, on this rank."""
    c = Collective(op, 0, reduction="add" if op == "all_reduce" else "")
    xs = [np.full(size // 4, k + link.rank, np.float32) for k in range(OPERANDS)]
    outs = [np.empty(x.size * (link.size if op == "all_gather" else 1), np.float32) for x in xs]
    together, apart = [], []
    for _ in range(calls):
        start = time.perf_counter()
        run_collective(c, link, xs, outs)
        middle = time.perf_counter()
        for x, out in zip(xs, outs, strict=True):
            run_collective(c, link, [x], [out])
        together.append(middle - start)
        apart.append(time.perf_counter() - middle)
    return statistics.median(together), statistics.median(apart)


def rows_of(link: Link, sizes: Sequence[int], calls: int) -> list[tuple[str, int, float, float]]:
    """Return op, size and both times of each case, on this rank."""
    every = [(op, size) for op in ("all_reduce", "all_gather") for size in sizes]
    return [(op, size, *seconds_of(link, op, size, calls)) for op, size in every]


def by_threads(ranks: int, sizes: Sequence[int], calls: int) -> list[tuple[str, int, float, float]]:
    """Measure ranks as threads of this process."""
    found: dict[int, list[tuple[str, int, float, float]]] = {}

    def work(link: Link) -> None:
        found[link.rank] = rows_of(link, sizes, calls)

    threads = [threading.Thread(target=work, args=(link,)) for link in thread_links(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0]


def by_tcp(ranks: int, sizes: Sequence[int], calls: int) -> list[tuple[str, int, float, float]]:
    """Measure ranks as processes."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    words = [ranks, address, calls, *sizes]
    every = [
        subprocess.Popen(
            children.module_command_line("benchmarks.runtime.combined_collectives", rank, *words), text=True,
            stdout=subprocess.PIPE, env=children.environment(),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    printed = [child.communicate()[0] for child in every]
    return [tuple(row) for row in json.loads(printed[0])]


def run(
    rounds: options.Rounds = 3,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 8,
    calls: Annotated[int, typer.Option(help="Calls in a sample.")] = 60,
) -> None:
    """Measure threads and TCP, each with operands of several sizes."""
    sizes = SIZES
    if timing.SMOKE:
        rounds, ranks, calls, sizes = 1, 2, 2, SIZES[:1]
    table = report.Table("operands", report.us("one call"), report.us("a call for each"), report.ratio("ratio"))
    for name, measure in (("threads", by_threads), ("TCP", by_tcp)):
        every = [measure(ranks, sizes, calls) for _ in range(rounds)]
        for rows in zip(*every, strict=True):
            op, size = rows[0][:2]
            one, each = (statistics.median(row[n] for row in rows) for n in (2, 3))
            ratio = statistics.median(row[3] / row[2] for row in rows)
            table.add(f"{OPERANDS} {op} of {size:,} bytes, {ranks} ranks, {name}", one, each, ratio)


if __name__ == "__main__":
    rank, size, calls, *sizes = (int(word) for n, word in enumerate(sys.argv[1:]) if n != 2)
    with closing(open_link(Ranks(rank, size, sys.argv[3], "tcp"), {"bundle": "benchmark"})) as link:
        print(json.dumps(rows_of(link, sizes, calls)), flush=True)
