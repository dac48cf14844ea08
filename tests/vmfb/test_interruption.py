"""Calls that never end: what ends them, and that the module works afterwards."""

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.vmfb.host.interruption import raise_if_interrupted

pytestmark = [pytest.mark.cpu]

# sin(x) < 2 for ever: in one kernel, and as a loop of the command buffer over kernels that several threads share.
ENDLESS = """
func.func public @fused(%x: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.while(%a = %x) : tensor<f32> cond {
    %two = stablehlo.constant dense<2.0> : tensor<f32>
    %p = stablehlo.compare LT, %a, %two : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %s = stablehlo.sine %a : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }
  return %0 : tensor<f32>
}
func.func public @unfused(%x: tensor<200x200xf32>) -> tensor<200x200xf32> {
  %0 = stablehlo.while(%a = %x) : tensor<200x200xf32> cond {
    %two = stablehlo.constant dense<2.0> : tensor<f32>
    %c = stablehlo.slice %a [0:1, 0:1] : (tensor<200x200xf32>) -> tensor<1x1xf32>
    %r = stablehlo.reshape %c : (tensor<1x1xf32>) -> tensor<f32>
    %p = stablehlo.compare LT, %r, %two : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %d = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
      : (tensor<200x200xf32>, tensor<200x200xf32>) -> tensor<200x200xf32>
    %s = stablehlo.sine %d : tensor<200x200xf32>
    stablehlo.return %s : tensor<200x200xf32>
  }
  return %0 : tensor<200x200xf32>
}
func.func public @double(%x: tensor<200x200xf32>) -> tensor<200x200xf32> {
  %d = stablehlo.add %x, %x : tensor<200x200xf32>
  return %d : tensor<200x200xf32>
}
"""
ENDS = {"fused": np.float32(0.5), "unfused": np.full((200, 200), 0.5, np.float32)}

CHILD = """
import asyncio, os, signal, sys, threading, time
import aotc, numpy as np
path, name, how, threads = sys.argv[1:]
module = aotc.load(path, threads=int(threads))
x = np.full((200, 200), 0.5, np.float32)
endless = lambda: module.invoke(name, x if name == "unfused" else np.float32(0.5))
timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

async def direct():
    endless()

async def to_thread():
    await asyncio.to_thread(endless)

handlers = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
timer.start()
try:
    endless() if how == "main" else asyncio.run({"direct": direct, "to_thread": to_thread}[how]())
except KeyboardInterrupt:
    print("interrupted")
timer.join()
assert handlers == (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1))
assert np.array_equal(module.invoke("double", x)[0], 2 * x)
before = time.process_time()
time.sleep(0.4)
assert time.process_time() - before < 0.2, "something computes on"
print("usable")
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("endless") / "endless.vmfb"
    path.write_bytes(aotc.compile(ENDLESS))
    return str(path)


def run(code, *args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("how", ["main", "direct", "to_thread"])
@pytest.mark.parametrize("name", ["fused", "unfused"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_an_endless_loop(bundle, name, how, threads):
    ended = run(CHILD, bundle, name, how, threads)
    assert (ended.returncode, ended.stdout.split()) == (0, ["interrupted", "usable"]), ended.stderr
    assert ended.stderr == ""


@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_deadline_of_asyncio_ends_a_call_in_a_thread(bundle, name):
    """The awaiting future is cancelled; that of the pool cannot be, once it runs."""
    module = aotc.load(bundle, threads=2)
    ended = threading.Event()

    def endless():
        try:
            module.invoke(name, ENDS[name])
        finally:
            ended.set()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(endless), 0.05)

    asyncio.run(main())
    assert ended.wait(60)


def test_a_shielded_call_goes_on():
    async def main():
        loop, go = asyncio.get_running_loop(), threading.Event()
        inner = loop.run_in_executor(None, lambda: (go.wait(60), raise_if_interrupted(), 5)[-1])
        outer = asyncio.shield(inner)
        outer.cancel()
        go.set()
        return await inner

    assert asyncio.run(main()) == 5


def test_an_exception_for_another_thread_ends_its_call(bundle):
    """As debuggers and notebooks raise one."""
    import ctypes

    module, caught, started = aotc.load(bundle, threads=1), [], threading.Event()

    def endless():
        started.set()
        try:
            module.invoke("fused", ENDS["fused"])
        except ZeroDivisionError as error:
            caught.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    started.wait()
    while not caught and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(ZeroDivisionError))
        thread.join(0.1)
    assert len(caught) == 1


EXIT = """
import sys, threading, time
import aotc, numpy as np
module = aotc.load(sys.argv[1], threads=2)
x = np.full((200, 200), 0.5, np.float32)
for name, value in (("fused", np.float32(0.5)), ("unfused", x), ("unfused", x)):
    threading.Thread(target=module.invoke, args=(name, value), daemon=True).start()
time.sleep(0.2)
print("end")
"""


def test_the_interpreter_ends_under_calls_of_daemon_threads(bundle):
    ended = run(EXIT, bundle)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def test_a_python_function_that_fails_ends_the_call():
    def fail(x, y):
        raise ZeroDivisionError

    text = """
    func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.while(%a = %x) : tensor<4xf32> cond {
        %true = stablehlo.constant dense<true> : tensor<i1>
        stablehlo.return %true : tensor<i1>
      } do {
        %s = stablehlo.custom_call @fails_in_a_loop(%a) : (tensor<4xf32>) -> tensor<4xf32>
        stablehlo.return %s : tensor<4xf32>
      }
      return %0 : tensor<4xf32>
    }
    """
    aotc.register_custom_call("fails_in_a_loop", fail, native=False)
    module = aotc.load(aotc.compile(text), threads=1)
    with pytest.raises(aotc.CallError, match="ZeroDivisionError"):
        module(np.zeros(4, np.float32))


SHARED = """
import sys, time
import aotc, numpy as np
from aotc.vmfb.abi import POOL_ALIVE
from aotc.vmfb.devices.cpu import native
x = np.full((200, 200), 0.5, np.float32)
for threads in range(1, 33):
    aotc.load(sys.argv[1], threads=threads).invoke("product", x)
(pool,) = native._PROCESS.executors.values()
print(0 < pool[POOL_ALIVE] <= 31)
while pool[POOL_ALIVE]:
    time.sleep(0.1)
print("none left")
"""
PRODUCT = """
func.func public @product(%x: tensor<200x200xf32>) -> tensor<200x200xf32> {
  %d = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<200x200xf32>, tensor<200x200xf32>) -> tensor<200x200xf32>
  return %d : tensor<200x200xf32>
}
"""


def test_all_modules_share_workers_which_end_when_unused(tmp_path):
    path = tmp_path / "product.vmfb"
    path.write_bytes(aotc.compile(PRODUCT))
    ended = run(SHARED, path)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["True", "none left", ""]), ended.stderr


