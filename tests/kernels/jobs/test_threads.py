"""Kernels that threads compile side by side, each with a context of LLVM's and a machine of its own."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import llvmlite.binding as llvm
import pytest
from kernels.jobs.compilers import TEXTS, answers, quiet, requests
from llvmlite.binding import ffi

from aotc.diagnostics import CallbackFailed, InternalError
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels import back_end, unlocked
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.jobs import pool
from aotc.kernels.worker import begin_kernel
from aotc.targets import TARGETS, host_target

pytestmark = pytest.mark.cpu

@pytest.fixture
def compilers():
    made = pool.CompilerPool()
    yield made
    made.close()


def in_threads(call, count):
    """Return what ``count`` threads get of a call."""
    found = [None] * count

    def run(n):
        found[n] = call()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v4", "cpu:aarch64"])
def test_many_threads_make_the_bytes_of_one(compilers, target):
    asked = requests(target=TARGETS[target])
    one = answers(compilers, asked, 1, quiet, begin_kernel)
    assert [x[:4] for x in one] == [b"\x7fELF"] * len(TEXTS)
    for _ in range(3):
        assert answers(compilers, asked, 4, quiet, begin_kernel) == one
    assert compilers._idle == []


def test_a_kept_thread_works_beside_the_caller(compilers):
    first = compilers.run_in_background(threading.get_ident)
    failing = compilers.run_in_background(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    kept = {first.result(60)}
    for _ in range(20):
        time.sleep(0.01)  # the last one is idle again
        kept.add(compilers.run_in_background(threading.get_ident).result(60))
    assert len(kept) <= 2
    assert threading.get_ident() not in kept


def test_processes_make_the_same(compilers):
    assert answers(compilers, requests(), 2, quiet) == answers(compilers, requests(), 4, quiet, begin_kernel)


def test_several_callers_compile_at_the_same_time(compilers):
    asked = requests()
    found = in_threads(lambda: answers(compilers, asked, 2, quiet, begin_kernel), 3)
    assert found == [answers(compilers, asked, 1, quiet, begin_kernel)] * 3


def test_threads_compile_at_the_same_time(compilers):
    at_once, most, lock, begun = [0], [0], threading.Lock(), []
    together = threading.Barrier(2, timeout=60)

    def here(request):
        finish, first = begin_kernel(request), len(begun) < 2
        begun.append(request)

        def finished():
            with lock:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
            if first:
                together.wait()
            with lock:
                at_once[0] -= 1
            return finish()

        return finished

    answers(compilers, requests(), 2, quiet, here)
    assert most[0] == 2


def test_each_thread_has_its_own_context_and_machine():
    context, generator = unlocked.llvm_context_of_thread(), back_end.codegen_for(host_target())
    assert unlocked.llvm_context_of_thread() is context
    assert back_end.codegen_for(host_target()) is generator
    others = in_threads(lambda: (unlocked.llvm_context_of_thread(), back_end.codegen_for(host_target())), 2)
    assert len({id(x) for pair in [*others, (context, generator)] for x in pair}) == 6


def test_the_long_calls_are_made_without_the_lock():
    for call in (*unlocked._LONG, unlocked._short_llvm_name("VerifyModule")):
        assert type(call) is not type(ffi.lib.LLVMPY_ParseAssembly)
    with ffi.lib._lock:
        (text,) = in_threads(lambda: str(unlocked._PARSE is not None), 1)
    assert text == "True"


def test_an_llvmlite_of_another_kind_is_called_with_its_lock(monkeypatch):
    class Other:
        _name = "no such library"
        LLVMPY_ParseAssembly = staticmethod(lambda *_: "locked")

    monkeypatch.setattr(unlocked.ffi, "lib", Other())
    assert unlocked._llvm_c_function(ctypes.CDLL, "LLVMPY_ParseAssembly")() == "locked"
    assert unlocked._llvm_c_function(ctypes.PyDLL, "LLVMPY_ParseAssembly")() == "locked"


def test_invalid_llvm_ir_is_an_error():
    with pytest.raises(RuntimeError, match="LLVM IR parsing error"):
        unlocked.parse_assembly("define nothing")


def test_bitcode_comes_back():
    module = unlocked.parse_assembly("define i32 @f() {\n  ret i32 7\n}\n")
    assert "ret i32 7" in str(unlocked.parse_bitcode(module.as_bitcode()))


def test_threads_are_kept_with_what_llvm_made_for_them(compilers):
    seen = []
    for _ in range(4):
        note = lambda: seen.append((threading.get_ident(), id(unlocked.llvm_context_of_thread())))
        answers(compilers, requests(TEXTS[:1]), 2, quiet, begin_kernel, note)
    assert len(set(seen)) == 1
    assert seen[0][0] != threading.get_ident()


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_other_work_runs_once_while_kernels_compile(compilers, jobs):
    done = []
    made = answers(compilers, requests(), jobs, quiet, begin_kernel, lambda: done.append(threading.get_ident()))
    assert len(done) == 1
    assert (done == [threading.get_ident()]) == (jobs == 1)
    assert made == answers(compilers, requests(), 1, quiet, begin_kernel)


@pytest.mark.parametrize("jobs", [1, 2])
def test_other_work_that_fails_does_not_fail_the_run(compilers, jobs):
    """Who needs what it makes calls it again."""

    def fails():
        raise KeyError("mine")

    assert len(answers(compilers, requests(), jobs, quiet, begin_kernel, fails)) == len(TEXTS)


def test_a_call_that_has_not_begun_is_not_waited_for(compilers, monkeypatch):
    """As when an interrupt comes between it and its thread: the caller answers alone."""
    monkeypatch.setattr(compilers._helpers._idle, "acquire", lambda blocking: True)
    assert len(answers(compilers, requests(TEXTS[:2]), 2, quiet, begin_kernel)) == 2
    monkeypatch.undo()
    assert len(answers(compilers, requests(TEXTS[:2]), 2, quiet, begin_kernel)) == 2


FORKED = """
    import os, sys
    from aotc.kernels.jobs.pool import CompilerPool
    from kernels.jobs.compilers import answers, quiet
    from aotc.kernels.worker import begin_kernel, target_fields
    from aotc.targets import host_target
    asked = [{"text": text, "target": target_fields(host_target())} for text in TEXTS]
    compilers = CompilerPool()
    made = answers(compilers, asked, 4, quiet, begin_kernel)
    child = os.fork()
    if not child:
        os._exit(answers(compilers, asked, 4, quiet, begin_kernel) != made)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own():
    program = f"TEXTS = {TEXTS!r}\n{textwrap.dedent(FORKED)}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0\n", done.stderr


def test_a_kernel_that_fails_in_a_thread_names_itself(compilers):
    broken = [text.replace("a[i]", "missing[i]") for text in TEXTS[:1]]
    with pytest.raises(InternalError, match=r"missing\[i\]"):
        answers(compilers, requests([*TEXTS[1:], *broken]), 4, quiet, begin_kernel)
    assert answers(compilers, requests(TEXTS[:1]), 4, quiet, begin_kernel)[0][:4] == b"\x7fELF"


@pytest.mark.parametrize("error", [CallbackFailed(KeyError("mine")), MemoryError("no room")])
def test_the_exception_of_a_thread_is_raised(compilers, error):
    def here(request):
        raise error

    with pytest.raises(type(error)):
        answers(compilers, requests(), 4, quiet, here)


def test_progress_is_told_of_each_once(compilers):
    counts = []
    answers(compilers, requests(), 4, counts.append, begin_kernel)
    assert counts == list(range(1, len(TEXTS) + 1))


def test_the_size_of_stacks_is_as_before(compilers):
    before = threading.stack_size()
    answers(compilers, requests(), 4, quiet, begin_kernel)
    assert threading.stack_size() == before


def test_llvmlite_of_the_user_works_beside_it(compilers):
    """Modules of its own, in the context that all share, while kernels are compiled."""
    stop, failed = threading.Event(), []

    def user():
        while not stop.is_set():
            module = llvm.parse_assembly("define i32 @f(i32 %x) {\n  %y = add i32 %x, 1\n  ret i32 %y\n}\n")
            module.verify()
            if "add i32" not in str(module):
                failed.append(str(module))

    thread = threading.Thread(target=user)
    thread.start()
    try:
        answers(compilers, requests(), 3, quiet, begin_kernel)
    finally:
        stop.set()
        thread.join()
    assert failed == []


INTERRUPTED = """
    import signal, sys, threading, time, os
    import jax, jax.numpy as jnp, numpy as np
    import aotc
    from aotc.kernels import worker
    from aotc.kernels.jobs import objects
    begun, busy = threading.Event(), []
    plain = worker.begin_kernel
    def slow(request):
        finish = plain(request)
        def finished():
            begun.set()
            busy.append(request)
            try:
                return finish()
            finally:
                busy.remove(request)
        return finished
    objects.begin_kernel = slow
    def poke():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=poke, daemon=True).start()
    def model(x):
        for n in range(40):
            x = jnp.sort(jnp.sin(x + n)[::-1], axis=0) @ x
        return x
    try:
        aotc.compile(model, np.ones((64, 64), "f4"), cache=False, jobs=4)
    except KeyboardInterrupt:
        print("interrupted", len(busy), flush=True)
"""


def test_an_interrupt_waits_for_the_kernels_at_hand_and_no_more(tmp_path):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "AOTC_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == "interrupted 0", (done.stdout, done.stderr[-2000:])
    assert done.returncode in (0, -signal.SIGINT)
    assert time.monotonic() - begin < 300


CALLED = "declare void @called()\ndefine void @f() {\n  call void @called()\n  ret void\n}\n"
DEFINED = "define linkonce_odr void @called() {\n  ret void\n}\ndefine linkonce_odr void @alone() {\n  ret void\n}\n"


def test_linked_functions_become_internal():
    library = back_end.parse_assembly_for_target(CALLED, host_target())
    library.link_text(DEFINED, ["called", "alone"])
    assert {f.name: f.linkage.name for f in library.module.functions} == {"f": "external", "called": "internal"}


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:aarch64-sve256"])
def test_two_threads_compile_to_equal_objects_at_the_same_time(target):
    kernels = [parse_kernel(text) for text in TEXTS]
    alone = [compile_kernel(kernel, TARGETS[target]) for kernel in kernels]
    together = threading.Barrier(2)

    def compile_all():
        together.wait()
        return [compile_kernel(kernel, TARGETS[target]) for kernel in kernels]

    assert in_threads(compile_all, 2) == [alone, alone]


def test_a_function_that_is_defined_twice_is_an_error():
    text = DEFINED.replace("linkonce_odr ", "")
    library = back_end.parse_assembly_for_target(text, host_target())
    with pytest.raises(RuntimeError, match="called"):
        library.link_text(text, ["called"])


def test_modules_of_two_threads_are_not_linked():
    (other,) = in_threads(lambda: back_end.parse_assembly_for_target(DEFINED, host_target()), 1)
    with pytest.raises(RuntimeError, match="modules of two LLVM contexts cannot be linked"):
        back_end.parse_assembly_for_target(CALLED, host_target()).link(other)
