"""Calls that finalizers, exit handlers and daemon threads make while the interpreter ends, or the collector runs."""

import subprocess
import sys

import pytest

import aotc

pytestmark = pytest.mark.cpu

# Runs for more than one of the executor's notices (10 ms): then native code calls back into Python.
LONG = """func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %i = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%n = %i, %y = %x) : tensor<i32>, tensor<f32> cond {
    %most = stablehlo.constant dense<1000000> : tensor<i32>
    %c = stablehlo.compare LT, %n, %most : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %m = stablehlo.add %n, %one : tensor<i32>
    %z = stablehlo.sine %y : tensor<f32>
    stablehlo.return %m, %z : tensor<i32>, tensor<f32>
  }
  return %r#1 : tensor<f32>
}"""

START = """
import gc, os, sys, threading, time
import numpy as np
import aotc

module = aotc.load(sys.argv[1])
x = np.float32(0.5)

class Last:
    def __init__(self, module, call):
        self.module, self.call = module, call
    def __del__(self, write=os.write, error=aotc.CallError, x=x, str=str, float=float):
        try:
            value = self.call(self.module, x)
            write(1, b"called " + str(float(value)).encode())
        except error as found:
            write(1, b"refused " + str(found).encode())

def call(module, x):
    return module(x)

def submit(module, x):
    return module.main.submit(x).result()

def flat(module, x):
    return module.invoke("main", x)[0]

def flat_later(module, x):
    return module.submit("main", x).result()[0]
"""

# How a finalizer comes to run so late, after nothing, a call and a submission.
BEFORE = ["", "module(x)", "module.submit('main', x).result()"]
HOLDERS = {
    "a global": "last = Last(module, {how})",
    "a cycle": "last = Last(module, {how}); last.me = last; del last",
    "a function of a cycle": "def f(): pass\nf.f, f.last = f, Last(module, {how})",
    "sys": "sys.last = Last(module, {how})",
    "numpy": "np.last = Last(module, {how})",
    "a module of aotc": "sys.modules['aotc.vmfb.vm'].last = Last(module, {how})",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("exit") / "m.vmfb"
    path.write_bytes(aotc.compile(LONG))
    return path


def ended(path, *lines):
    """Run a script to its end; return what it printed."""
    command = [sys.executable, "-X", "faulthandler", "-c", "\n".join([START, *lines]), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("before", [*(pytest.param(x, marks=pytest.mark.slow) for x in BEFORE[:2]), BEFORE[2]])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_finalizer_calls_or_is_refused(path, holder, before):
    out, errors = ended(path, before, HOLDERS[holder].format(how="call"))
    assert out.startswith(("called 0.00", "refused the interpreter is ending")), errors
    if holder in ("a global", "a cycle") and before:
        assert out.startswith("called"), out  # nothing was cleared yet


WAYS = [("a global", "submit"), ("numpy", "submit"), ("numpy", "flat"), ("a module of aotc", "flat_later")]


@pytest.mark.parametrize(("holder", "how"), WAYS)
def test_other_calls_of_a_finalizer(path, holder, how):
    out, errors = ended(path, HOLDERS[holder].format(how=how))
    assert out.startswith(("called", "refused")), errors


IN_A_CYCLE = """
for n in range(3):
    module = aotc.load(sys.argv[1], copy=bool(n % 2))
    last = Last(module, call)
    module.__dict__["last"] = last.me = last
    del module, last
    gc.collect()
    os.write(1, b" ")
"""


def test_the_collector_runs_a_finalizer_that_calls(path):
    """The kernels are unloaded after all finalizers, whatever their order."""
    out, errors = ended(path, IN_A_CYCLE)
    assert len(out.split("called 0.00")) == 4, errors


EXITS = {
    "a submission that waits": "fence = aotc.Fence(); late = module.submit('main', x, wait=[fence])",
    "submissions under way": "late = [module.submit('main', x) for _ in range(20)]",
    "a handler that calls": "import atexit; atexit.register(lambda: os.write(1, str(float(module(x))).encode()))",
    "a handler that submits": "import atexit; atexit.register(lambda: os.write(1, "
    "str(float(module.submit('main', x).result()[0])).encode()))",
    "daemon threads that call": """
def go():
    while True:
        module(x)
for _ in range(3):
    threading.Thread(target=go, daemon=True).start()
time.sleep(0.05)""",
    "daemon threads that submit": """
def go():
    while True:
        module.submit("main", x).result()
for _ in range(3):
    threading.Thread(target=go, daemon=True).start()
time.sleep(0.05)""",
}


@pytest.mark.parametrize("how", EXITS)
@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_interpreter_ends_with(path, how, last):
    out, errors = ended(path, EXITS[how], HOLDERS["a global"].format(how="call") if last else "")
    if last and "daemon" not in how:  # frames of daemon threads are never freed, nor what they refer to
        assert "called 0.00" in out or "refused the interpreter is ending" in out, errors
    if "handler" in how:
        assert out.startswith("0.00"), errors
