"""Exceptions that arrive as a Python function of a custom call begins or ends, where ctypes drops what is raised."""

import signal
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.vmfb import custom_calls
from aotc.vmfb.custom_calls import Callbacks, _CallbackFailures

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

TEXT = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @python_function(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.add %0, %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}"""
X = np.arange(4, dtype=np.float32)
ENTRY = next(c for c in Callbacks._make_callback.__code__.co_consts if getattr(c, "co_name", "") == "call")


@pytest.fixture(scope="module")
def bundle():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_calls, "_REGISTRY", {})
        aotc.register_custom_call("python_function", native=False)
        return aotc.compile(TEXT)


@pytest.fixture
def interrupts():
    """Python's own handler, whatever the shell that started the tests ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def entering(code, times, act):
    """Return a profiler that acts when code is entered for the first ``times``."""
    left = [times]

    def profile(frame, what, argument):
        if frame.f_code is code and what == "call" and left[0]:
            left[0] -= 1
            if left[0]:
                sys.setprofile(profile)
            act()

    return profile


def profiled(profile, call, *args):
    sys.setprofile(profile)
    try:
        return call(*args)
    finally:
        sys.setprofile(None)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_as_a_function_begins_is_not_lost(bundle, interrupts):
    calls = []
    module = aotc.load(bundle, threads=1, custom_calls={"python_function": lambda x, out: calls.append(1)})
    with pytest.raises(KeyboardInterrupt):
        profiled(entering(ENTRY, 1, interrupt), module, X)
    assert not calls
    np.testing.assert_array_equal(module(X).shape, X.shape)
    assert calls


def test_an_interrupt_while_an_exception_is_noted_is_not_lost(bundle, interrupts):
    calls = []

    def raises(x, out):
        calls.append(1)
        raise ValueError

    module = aotc.load(bundle, threads=1, custom_calls={"python_function": raises})
    with pytest.raises(KeyboardInterrupt):
        profiled(entering(_CallbackFailures.store_exception.__code__, 1, interrupt), module, X)
    assert len(calls) == 1
    with pytest.raises(aotc.CallError, match="ValueError"):
        module(X)


def test_what_another_handler_raises_is_an_error_all_the_same(bundle):
    def alarm(*args):
        raise TimeoutError

    module = aotc.load(bundle, threads=1, custom_calls={"python_function": lambda x, out: None})
    before = signal.signal(signal.SIGINT, alarm)
    try:
        with pytest.raises(aotc.CallError, match="arrived before it began; Python printed it"):
            profiled(entering(ENTRY, 1, interrupt), module, X)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_function_is_called_until_it_begins(bundle, interrupts):
    module = aotc.load(bundle, threads=1, custom_calls={"python_function": lambda x, out: None})
    with pytest.raises(KeyboardInterrupt):
        profiled(entering(ENTRY, 5, interrupt), module, X)


def test_a_failure_is_that_of_its_own_call(bundle):
    """Of two calls at a time, in either order of their ends."""
    first_is_in, second_is_done = threading.Event(), threading.Event()

    def function(x, out):
        if x[0] == 1:
            first_is_in.set()
            second_is_done.wait(60)
            raise ValueError("the first's")
        out[...] = x

    module = aotc.load(bundle, threads=1, custom_calls={"python_function": function})
    found = []

    def first():
        try:
            found.append(module(X + 1))
        except aotc.CallError as error:
            found.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    raising = aotc.load(bundle, threads=1, custom_calls={"python_function": fails})
    with pytest.raises(aotc.CallError, match="the second's"):
        raising(X)
    np.testing.assert_array_equal(module(X), 2 * X)
    second_is_done.set()
    thread.join()
    assert "the first's" in found[0]


def fails(x, out):
    raise ValueError("the second's")


def test_a_call_beside_one_that_failed_goes_on(bundle):
    failed, go_on = threading.Event(), threading.Event()

    def function(x, out):
        if x[0] == 1:
            failed.wait(60)
        elif x[0] == 2:
            try:
                raise ValueError("mine")
            finally:
                go_on.set()
        out[...] = x

    module = aotc.load(bundle, threads=1, custom_calls={"python_function": function})
    results = []
    thread = threading.Thread(target=lambda: results.append(module(X + 1)))
    thread.start()
    with pytest.raises(aotc.CallError, match="mine"):
        module(X + 2)
    failed.set()
    thread.join()
    np.testing.assert_array_equal(results, [2 * (X + 1)])


def test_a_failure_on_a_workers_thread_is_the_calls():
    """Functions that wait for each other run on two threads."""
    text = """func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
      %0 = stablehlo.custom_call @meets(%x) {backend_config = "a"} : (tensor<4xf32>) -> tensor<4xf32>
      %1 = stablehlo.custom_call @meets(%x) {backend_config = "b"} : (tensor<4xf32>) -> tensor<4xf32>
      return %0, %1 : tensor<4xf32>, tensor<4xf32>
    }"""
    main, seen = threading.get_ident(), []

    def meets(x, out, *, backend_config):
        seen.append(threading.get_ident())
        end = 200
        while len(set(seen)) < 2 and end:
            threading.Event().wait(0.01)
            end -= 1
        if threading.get_ident() != main:
            raise ValueError("on a worker")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_calls, "_REGISTRY", {})
        aotc.register_custom_call("meets", native=False)
        module = aotc.load(aotc.compile(text), threads=2, custom_calls={"meets": meets})
    message = ""
    try:
        module(X)
    except aotc.CallError as error:
        message = str(error)
    assert ("on a worker" in message) == (set(seen) != {main})
