"""Submissions and fences: order, arguments that do not exist yet, errors that travel, what is refused at once."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from operator import itemgetter

import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.module import load
from aotc.vmfb.submit.dispatcher_threads import PROCESS

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
PATIENCE = 60  # seconds, for what takes microseconds: a test that hangs fails


@pytest.fixture(scope="module")
def module():
    return load(tiny.bundle(), threads=1)


def test_a_submission_gives_what_a_call_gives(module):
    fence = module.submit("main", X, Y)
    (got,) = fence.result()
    assert got.tolist() == (X + Y).tolist()
    assert fence.done
    assert fence.exception() is None
    assert "done" in repr(fence)
    assert fence.result(0)[0] is got


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_results_do_not_depend_on_the_running_thread(module, timeout):
    """With a timeout a dispatcher does; without one, whoever waits may."""
    for _ in range(200):
        assert module.submit("main", X, Y).result(timeout)[0].tolist() == (X + Y).tolist()


def test_results_are_arguments_before_they_exist(module):
    start = aotc.Fence()
    first = module.submit("main", X, Y, wait=[start])
    second = module.submit("main", first, first[0])
    third = load(tiny.bundle(), threads=1).submit("main", second.results[0], X)
    assert not any(fence.done for fence in (start, first, second, third))
    assert start.signal()
    assert third.result(PATIENCE)[0].tolist() == (2 * (X + Y) + X).tolist()
    assert first.done


def test_a_result_that_is_done_is_an_argument(module):
    fence = module.submit("main", X, Y)
    fence.wait()
    assert module.submit("main", fence, X).result()[0].tolist() == (2 * X + Y).tolist()
    assert module.invoke("main", fence[0], X)[0].tolist() == (2 * X + Y).tolist()
    assert np.asarray(fence[0]).tolist() == fence[0].numpy().tolist() == (X + Y).tolist()


def test_sizes_are_known_when_it_runs(module):
    """``upto`` reads the size of its result from memory."""
    start = aotc.Fence()
    made = module.submit("upto", np.int64(7), wait=[start])
    grown = module.submit("grow", made)
    assert made[0].dims == ("?",)
    start.signal()
    assert grown.result(PATIENCE)[0].tolist() == [6 * n for n in range(7)]
    short = module.submit("grow", module.submit("upto", np.int64(3), wait=[aotc_done()]))
    assert "n is 3, expected at least 4" in str(short.exception(PATIENCE))


def aotc_done():
    fence = aotc.Fence()
    fence.signal()
    return fence


def test_device_arrays_are_arguments_and_results(module):
    first = module.submit("main", DeviceArray(X, "d0"), DeviceArray(Y, "d1"), results="device")
    assert type(first.result()[0]) is DeviceArray
    assert module.submit("main", first, X).result()[0].tolist() == (2 * X + Y).tolist()


def test_out_is_written(module):
    out = np.zeros(4, np.float32)
    assert module.submit("main", X, Y, out=[out]).result(PATIENCE)[0] is out
    assert out.tolist() == (X + Y).tolist()


def test_waiting_before_signalling_on_two_threads(module):
    """Each waits for the other's fence."""
    fences = [aotc.Fence(), aotc.Fence()]
    found = []

    def wait(n):
        last = module.submit("main", X, Y, wait=[fences[n]])
        fences[1 - n].signal()
        found.append(last.result(PATIENCE)[0].tolist())

    threads = [threading.Thread(target=wait, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(X + Y).tolist()] * 2


def test_many_threads_make_one_order(module):
    """Each thread adds to the sum that the last one left, through fences alone."""
    last, lock = module.submit("main", np.zeros(4, np.float32), np.zeros(4, np.float32)), threading.Lock()

    def add():
        nonlocal last
        for _ in range(200):
            with lock:
                last = module.submit("main", last, Y)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert last.result(PATIENCE)[0].tolist() == [8000] * 4


def test_callbacks_are_called_once(module, capsys):
    start, seen = aotc.Fence(), threading.Semaphore(0)
    fence = module.submit("main", X, Y, wait=[start])
    fence.add_done_callback(lambda _: 1 // 0)
    fence.add_done_callback(lambda f: seen.release() if f is fence else None)
    start.signal()
    assert seen.acquire(timeout=PATIENCE)
    fence.add_done_callback(lambda _: seen.release())
    assert seen.acquire(timeout=PATIENCE)
    assert not seen.acquire(blocking=False)
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---------------------------------------------------------------- errors


def test_an_error_travels_through_three_modules(module):
    modules = [load(tiny.bundle(), threads=1) for _ in range(3)]
    start = aotc.Fence()
    first = modules[0].submit("grow", modules[0].submit("upto", np.int64(2), wait=[start]))
    second = modules[1].submit("grow", first)
    third = modules[2].submit("grow", second)
    beside = modules[2].submit("main", X, Y, wait=[start])
    start.signal()
    with pytest.raises(aotc.CallError, match=r"waits for a submission of tiny: grow, which failed: .*n is 2") as error:
        third.result(PATIENCE)
    assert error.value.__cause__ is first.exception()
    assert beside.result(PATIENCE)[0].tolist() == (X + Y).tolist()


def test_a_long_chain_fails_to_its_end(module):
    start = aotc.Fence()
    last = module.submit("main", X, Y, wait=[start])
    for _ in range(5000):
        last = module.submit("main", last, Y)
    start.fail(ZeroDivisionError("why"))
    error = last.exception(PATIENCE)
    assert "a fence of the user's, which failed: ZeroDivisionError: why" in str(error)
    with pytest.raises(ZeroDivisionError, match="why"):
        start.result()


def test_a_fence_is_settled_once():
    fence = aotc.Fence()
    assert fence.signal()
    assert not fence.fail(ValueError())
    assert not fence.cancel()
    assert fence.result() == []
    with pytest.raises(aotc.CallError, match="a fence fails with an exception"):
        aotc.Fence().fail("why")
    with pytest.raises(TimeoutError, match=r"not done after 0.01 s"):
        aotc.Fence().result(0.01)


REFUSED = {
    "no function": (("other", X, Y), {}, "no function 'other'"),
    "arguments": (("main", X), {}, "wrong number of arguments"),
    "shape": (("main", X, X[:2]), {}, "argument 1 .y. has the wrong shape"),
    "dtype": (("main", X, X.astype("f2")), {}, "argument 1 .y. has the wrong dtype"),
    "no fence": (("main", X, Y), {"wait": [asyncio.Event()]}, "wait is not a list of fences"),
    "no list": (("main", X, Y), {"wait": aotc.Fence()}, "wait is not a list of fences"),
    "negative": (("main", X, Y), {"deadline": -1}, "the deadline is not in the future"),
    "not a number": (("main", X, Y), {"deadline": float("nan")}, "the deadline is not in the future"),
    "a word": (("main", X, Y), {"deadline": "soon"}, "the deadline is not in the future"),
    "no float": (("main", X, Y), {"deadline": 10**400}, "the deadline is not in the future"),
    "out": (("main", X, Y), {"out": [None, None]}, "out is not a list of buffers"),
    "user's fence": (("main", X, aotc.Fence()), {}, "a fence with 0 results"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_at_submission(module, case):
    arguments, more, message = REFUSED[case]
    with pytest.raises(aotc.CallError, match=message):
        module.submit(*arguments, **more)


def test_results_that_cannot_fit_are_refused(module):
    start = aotc.Fence()
    number, row = module.submit("count", np.int64(3), wait=[start]), module.submit("main", X, Y, wait=[start])
    with pytest.raises(aotc.CallError, match=r"argument 0 .x. has the wrong dtype"):
        module.submit("main", number, Y)
    with pytest.raises(aotc.CallError, match=r"argument 0 .limit. has the wrong dtype"):
        module.submit("count", row)
    start.signal()


def test_failed_and_settled_fences(module):
    failed = module.submit("grow", X[:2])
    assert failed.exception(PATIENCE)
    for more in ({"wait": [failed]}, {"wait": [aotc_done(), failed]}):
        with pytest.raises(aotc.CallError, match="waits for a submission of tiny: grow, which failed"):
            module.submit("main", X, Y, **more)
    with pytest.raises(aotc.CallError, match="which failed"):
        module.submit("grow", failed)
    with pytest.raises(aotc.CallError, match="settled by its call"):
        failed.signal()
    with pytest.raises(aotc.CallError, match="settled by its call"):
        failed.fail(ValueError())
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(failed)


# ---------------------------------------------------------------- threads and memory


def test_waiting_submissions_need_no_threads_and_no_arenas(module):
    module.submit("grow", X).wait()
    module.trim()
    start = aotc.Fence()
    before = threading.active_count()
    fences = [module.submit("grow", X, wait=[start]) for _ in range(10_000)]
    assert threading.active_count() <= before + 1
    assert module.stats()["arena_idle_bytes"] == 0
    start.signal()
    assert [f.result(PATIENCE)[0][1] for f in fences] == [6] * 10_000
    assert threading.active_count() <= before + PROCESS.dispatchers._most  # an earlier server in this process raises it


def test_a_signal_handler_may_signal_and_submit(module):
    start, made = aotc.Fence(), []
    waiting = module.submit("main", X, Y, wait=[start])

    def handler(*_):
        made.append(module.submit("main", waiting, Y))
        start.signal()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert waiting.result(PATIENCE)[0].tolist() == (X + Y).tolist()
        assert made[0].result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    finally:
        signal.signal(signal.SIGUSR1, before)


def in_a_child(function):
    context = multiprocessing.get_context("fork")
    child = context.Process(target=function)
    child.start()
    child.join(PATIENCE)
    alive = child.is_alive()
    child.kill()
    assert not alive, "the child hangs"
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_while_submissions_are_queued(module):
    done, start = module.submit("main", X, Y), aotc.Fence()
    done.wait()
    queued = [module.submit("main", X, Y, wait=[start]) for _ in range(100)]

    def child():
        with pytest.raises(aotc.CallError, match="belongs to the process before a fork"):
            queued[0].result()
        with pytest.raises(aotc.CallError, match="belongs to the process before a fork"):
            module.submit("main", queued[1], Y)
        assert module.submit("main", done, Y).result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
        mine = module.submit("main", X, Y, wait=[start])
        start.signal()
        assert mine.result(PATIENCE)[0].tolist() == (X + Y).tolist()
        assert "belongs to" in str(queued[2]._outcome[1])

    in_a_child(child)
    assert not start.done
    start.signal()
    assert [f.result(PATIENCE)[0].tolist() for f in queued] == [(X + Y).tolist()] * 100


# ---------------------------------------------------------------- asyncio


def test_a_coroutine_awaits_many(module):
    async def main():
        start = aotc.Fence()
        fences = [module.submit("main", X, np.full(4, n, np.float32), wait=[start]) for n in range(200)]
        asyncio.get_running_loop().call_later(0.01, start.signal)
        await start
        return await asyncio.gather(*fences)

    got = asyncio.run(main())
    assert list(map(itemgetter(0), map(itemgetter(0), got))) == list(range(200))


def test_a_coroutine_that_is_cancelled_cancels_its_submission_but_no_fence_of_the_users(module):
    async def main():
        start = aotc.Fence()
        fence = module.submit("main", X, Y, wait=[start])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fence, 0.01)
        assert isinstance(fence.exception(0), aotc.FenceCancelled)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start, 0.01)
        assert not start.done
        shielded = module.submit("main", X, Y, wait=[start])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(shielded), 0.01)
        start.signal()
        return await shielded

    assert asyncio.run(main())[0].tolist() == (X + Y).tolist()
