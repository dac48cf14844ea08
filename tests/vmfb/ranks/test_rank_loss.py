"""A rank that ends, fails or closes is an error on all others, which name the same rank."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support import rank_kills
from support.rank_cases import run_threads

from aotc.vmfb.errors import CallError, RankLost
from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.link import open_link
from aotc.vmfb.ranks.ranks import Ranks
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.ir


def test_all_survivors_of_a_kill_name_the_same_rank():
    """Rounds in a process of its own, which forks: pytest's has threads."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, rank_kills.__file__, "5", str(time.time_ns() % 1000)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6, done.stderr
    assert rows[-1]["bad"] == 0, done.stdout
    assert rows[-1]["longest delay"] < 5, done.stdout  # below 1 s where the machine is not loaded


def tcp_links(size, **options):
    """Return the links of ranks that are threads here and are connected by TCP, or their errors."""
    address = f"127.0.0.1:{rank_kills.free_port()}"

    class Start:
        def __init__(self, rank):
            self.rank = rank

        def close(self):
            pass

    def work(start):
        return open_link(Ranks(start.rank, size, address, "tcp", **options), {})

    return run_threads([Start(rank) for rank in range(size)], work)


BOTH = pytest.mark.parametrize("links_of", [thread_links, tcp_links])


def reduce(link, number=0, n=4, groups=()):
    c = Collective("all_reduce", number, groups, reduction="add", place="model.py:35")
    x = np.full(n, link.rank, np.float32)
    result = np.empty_like(x)
    run_collective(c, link, [x], [result])
    return result.tolist()


@BOTH
def test_a_rank_that_closes_early_is_named_by_all(links_of):
    """Ranks 2 and 3 do not exchange with rank 1; rank 2 waits for 3, which waits for 1."""
    links = links_of(4)

    def work(link):
        assert reduce(link) == [6.0] * 4
        if link.rank == 1:
            return link.close()
        if link.rank == 0:
            return reduce(link, 1, groups=((0, 1), (2, 3)))
        if link.rank == 3:
            return reduce(link, 1, groups=((0, 2), (1, 3)))
        return reduce(link, 1, groups=((0, 1), (2, 3)))

    start = time.monotonic()
    found = run_threads(links, work)
    assert time.monotonic() - start < 5
    for rank in (0, 2, 3):
        assert isinstance(found[rank], RankLost), found[rank]
        assert found[rank].rank == 1
        # A slow rank learns it in the collective before: that one is not complete there.
        assert "closed the module before all_reduce at model.py:35, collective" in str(found[rank])
        with pytest.raises(RankLost) as again:
            reduce(links[rank], 9)
        assert str(again.value) == str(found[rank])
    for link in links:
        link.close()


@BOTH
@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_orderly_end_in_any_order_is_no_loss(links_of, first):
    links = links_of(3)

    def work(link):
        for number in range(20):
            assert reduce(link, number, n=10_000) == [3.0] * 10_000
        if link.rank != first:
            time.sleep(0.05)
        link.close()
        link.close()
        with pytest.raises(CallError, match="this rank closed the module before"):
            reduce(link)
        return "done"

    assert run_threads(links, work) == ["done"] * 3


@BOTH
def test_a_rank_that_fails_is_named_by_all(links_of):
    """Its collective is another one: it raises, and its link closes with the reason."""
    links = links_of(3)

    def work(link):
        return reduce(link, 7 if link.rank == 2 else 1)

    found = run_threads(links, work)
    assert all(isinstance(error, CallError) for error in found)
    assert any("another collective" in str(error) for error in found)
    named = {error.rank for error in found if isinstance(error, RankLost)}
    assert len(named) <= 1
    for link in links:
        link.close()


@BOTH
def test_a_rank_exchanges_with_itself_and_with_others(links_of):
    links = links_of(3)

    def work(link):
        found = {rank: np.zeros(1, np.int64) for rank in range(3)}
        link.exchange({rank: np.array([[10 * link.rank + rank]]) for rank in range(3)}, found, "all_to_all")
        return [int(found[rank][0]) for rank in range(3)]

    assert run_threads(links, work) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    for link in links:
        link.close()


@BOTH
def test_a_second_thread_gets_a_clear_error(links_of):
    links = links_of(2)
    inside = threading.Thread(target=lambda: reduce(links[0]))
    inside.start()
    time.sleep(0.2)  # it waits for rank 1
    with pytest.raises(CallError, match="two threads"):
        reduce(links[0], 1)
    assert reduce(links[1]) == [1.0] * 4
    inside.join()
    for link in links:
        link.close()


@BOTH
def test_an_exception_in_a_wait_ends_the_link(links_of, monkeypatch):
    """As of a deadline, or of a signal: half of the data are on the way, so the others must not go on."""
    from aotc.vmfb.host import interruption

    links = links_of(2)
    waits = threading.local()

    def stop():
        if getattr(waits, "stopped", False):
            raise TimeoutError("too late")

    monkeypatch.setattr(interruption, "raise_if_submission_stopped", stop)

    def work(link):
        waits.stopped = link.rank == 0
        if link.rank == 1:
            time.sleep(0.3)
            reduce(link, 1)  # complete by TCP: rank 0 has sent its data
            return reduce(link, 2)
        return reduce(link, 1)

    found = run_threads(links, work)
    assert isinstance(found[0], TimeoutError)
    assert isinstance(found[1], RankLost)
    assert "failed (TimeoutError) before all_reduce" in str(found[1])
    for link in links:
        link.close()
