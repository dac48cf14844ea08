"""Who does what when of the kernels of a library: one emits, others make machine code, some before anybody waits."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from kernels.jobs.compilers import PADDED, TEXTS, answers, quiet, requests

from aotc.kernels.jobs import pool, run
from aotc.kernels.worker import begin_kernel

pytestmark = pytest.mark.cpu

BEFORE = sys.getswitchinterval()


@pytest.fixture
def compilers():
    made = pool.CompilerPool()
    yield made
    made.close()


def test_one_thread_emits_at_a_time(compilers):
    """Python's lock lets no more: the others make machine code."""
    emitting, most, by = [0], [0], set()

    def here(request):
        by.add(threading.get_ident())
        emitting[0] += 1
        most[0] = max(most[0], emitting[0])
        time.sleep(0.002)  # others have Python's lock
        emitting[0] -= 1
        return begin_kernel(request)

    made = answers(compilers, requests(), 4, quiet, here)
    assert most[0] == 1
    assert made == answers(compilers, requests(), 1)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_no_more_are_emitted_than_a_bound(compilers, jobs, monkeypatch):
    monkeypatch.setattr(run, "MOST_EMITTED", 2)
    waits, most, lock = [0], [0], threading.Lock()

    def here(request):
        finish = begin_kernel(request)
        with lock:
            waits[0] += 1
            most[0] = max(most[0], waits[0])

        def finished():
            with lock:
                waits[0] -= 1
            return finish()

        return finished

    assert len(answers(compilers, requests(), jobs, quiet, here)) == len(TEXTS)
    assert most[0] <= (1 if jobs == 1 else 2)


FAILING = """
    import sys, threading
    import jax, jax.numpy as jnp, numpy as np
    import aotc
    from aotc.lowering import lower
    from aotc.kernels.jobs import objects
    from aotc.kernels.jobs.pool import POOL
    begun, plain = threading.Event(), objects.begin_kernel
    def seen(request):
        begun.set()
        return plain(request)
    objects.begin_kernel = seen
    def fails(*given):
        print(begun.wait(20))
        raise ERROR
    planned, lower.emit_program = lower.emit_program, fails
    def model(x):
        for n in range(40):
            x = jnp.sort(jnp.sin(x + n)[::-1], axis=0) @ x
        return x
    before = sys.getswitchinterval()
    try:
        aotc.compile(model, np.ones((64, 64), "f4"), cache=False, jobs=3)
    except BaseException as error:
        print(type(error).__name__, sys.getswitchinterval() == before, threading.active_count() <= 3)
    lower.emit_program = planned
    print(len(aotc.compile(model, np.ones((64, 64), "f4"), cache=False, jobs=2)) > 0)
"""


@pytest.mark.parametrize(
    ("error", "said"), [("KeyError('mine')", "InternalError"), ("KeyboardInterrupt", "KeyboardInterrupt")]
)
def test_kernels_begun_ahead_end_with_what_fails_after_them(error, said, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAILING).replace("ERROR", error)], capture_output=True, text=True,
        check=False, timeout=300, env={**os.environ, "AOTC_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split("\n")[:3] == ["True", f"{said} True True", "True"], (done.stdout, done.stderr[-2000:])


def test_a_run_may_start_in_the_background(compilers):
    counts, one = [], answers(compilers, requests(), 1)
    with run.CompilerRun(compilers, requests(), 2, begin_kernel) as begun:
        begun.begin_ahead()
        assert sys.getswitchinterval() < BEFORE
        assert begun.finish(counts.append) == one
    assert counts[-1] == len(TEXTS)
    assert sys.getswitchinterval() == BEFORE


def test_a_run_that_nobody_waits_for_stops(compilers):
    begun, seen = threading.Event(), []

    def here(request):
        seen.append(request)
        begun.set()
        return begin_kernel(request)

    with run.CompilerRun(compilers, requests(), 2, here) as one:
        one.begin_ahead()
        begun.wait(60)
    count = len(seen)
    assert count < len(TEXTS)
    time.sleep(0.1)
    assert len(seen) == count


def test_one_small_kernel_waits_for_the_caller(compilers):
    with run.CompilerRun(compilers, requests([TEXTS[0].removesuffix(PADDED)]), 2, begin_kernel) as one:
        one.begin_ahead()
        assert not one._helping
        assert len(one.finish(quiet)) == 1


def test_concurrent_runs_restore_the_switch_interval(compilers):
    first, second = compilers.short_switch_interval(), compilers.short_switch_interval()
    for enter in (first, second):
        enter.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < BEFORE
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == BEFORE
