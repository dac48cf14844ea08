"""Results of a submission that are read while the call goes on with others."""

import asyncio
import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering.test_devices import T, inputs_of, on_one_device, random_program

import aotc
from aotc.vmfb.commands import all_commands
from aotc.vmfb.devices.early import EarlyResults

pytestmark = pytest.mark.cpu

PATIENCE = 20
X = np.linspace(0, 1, 64, dtype="float32").reshape(8, 8)
TWO = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}})
    -> ({T}, {T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = stablehlo.custom_call @slow(%y) : ({T}) -> {T}
  %2 = stablehlo.cosine %1 : {T}
  %3 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  return %0, %2, %3 : {T}, {T}, {T} }}"""


class Slow:
    """A Python function on d1: it takes as long as a test wants, and fails if it is to."""

    def __init__(self):
        self.gate, self.entered, self.error = threading.Event(), threading.Event(), None

    def __call__(self, x, out):
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if self.error:
            raise self.error
        out[...] = x + 1


@pytest.fixture(scope="module")
def data():
    aotc.register_custom_call("slow", native=False)
    return aotc.compile(TWO)


@pytest.fixture
def slow():
    made = Slow()
    yield made
    made.gate.set()


@pytest.fixture(params=[1, 2])
def module(request, data, slow):
    return aotc.load(data, threads=request.param, custom_calls={"slow": slow})


@pytest.fixture
def two(data, slow):
    return aotc.load(data, threads=2, custom_calls={"slow": slow})


def wanted():
    return np.sin(X), np.cos(X + 1), X @ X


def check(found, want):
    np.testing.assert_allclose(np.asarray(found), want, rtol=1e-5, atol=1e-6)


def test_a_result_is_read_while_the_other_device_works(two, slow):
    """One thread is in the slow call of d1; what d0 makes is there long before that ends."""
    fence = two.submit("main", X, X)
    assert [result.device for result in fence.results] == ["d0", "d1", "d0"]
    check(fence[0].result(PATIENCE), np.sin(X))
    check(fence.results[2].numpy(), X @ X)
    assert fence[0].ready()
    assert fence[0].done
    assert fence[0].exception() is None
    assert not fence.done
    assert not fence[1].ready()
    assert not fence[1].done
    with pytest.raises(TimeoutError, match=r"result 1 of a submission of .* is not there after 0.01 s"):
        fence[1].result(0.01)
    slow.gate.set()
    for found, want in zip(fence.result(PATIENCE), wanted(), strict=True):
        check(found, want)
    assert fence[1].ready()
    check(fence[1].result(), np.cos(X + 1))


def test_early_results_are_read_only_until_the_call_ends(two, slow):
    """Its other commands may read them too; a donated one is copied."""
    fence = two.submit("main", X, X)
    early = fence[2].result(PATIENCE)
    assert not early.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        early[0, 0] = 1
    slow.gate.set()
    late = fence.result(PATIENCE)[2]
    assert late.flags.writeable
    assert np.shares_memory(early, late)
    del fence, late
    gc.collect()
    check(early, X @ X)


def test_results_of_devices(two, slow):
    fence = two.submit("main", X, X, results="device")
    early = fence[0].result(PATIENCE)
    assert early.device == "d0"
    assert not fence.done
    check(early, np.sin(X))
    slow.gate.set()
    assert fence[1].result(PATIENCE).device == "d1"


def test_a_coroutine_waits_for_one_result(two, slow):
    async def main():
        fence = two.submit("main", X, X)
        first, last = await asyncio.wait_for(asyncio.gather(fence[0], fence[2]), PATIENCE)
        assert not fence.done
        slow.gate.set()
        return first, await fence[1], last

    for found, want in zip(asyncio.run(main()), wanted(), strict=True):
        check(found, want)


def test_completed_results_survive_an_error(two, slow):
    """Also what nobody had looked at when the error came."""
    fence = two.submit("main", X, X)
    first = fence[0].result(PATIENCE)
    while not fence[2].ready():
        time.sleep(0.001)
    slow.error = ValueError("no slow value")
    slow.gate.set()
    with pytest.raises(aotc.CallError, match="no slow value"):
        fence.result(PATIENCE)
    with pytest.raises(aotc.CallError, match="no slow value"):
        fence[1].result()
    assert "no slow value" in str(fence[1].exception())
    assert fence[1].done
    assert not fence[1].ready()
    check(first, np.sin(X))
    check(fence[0].result(), np.sin(X))
    check(fence[2], X @ X)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_completed_results_survive_cancellation_and_deadlines(two, slow, how):
    fence = two.submit("main", X, X, **({"deadline": 0.2} if how == "deadline" else {}))
    check(fence[0].result(PATIENCE), np.sin(X))
    assert slow.entered.wait(PATIENCE)
    if how == "cancel":
        fence.cancel()
    else:
        time.sleep(0.25)
    slow.gate.set()
    error = aotc.FenceCancelled if how == "cancel" else aotc.DeadlineExceeded
    with pytest.raises(error):
        fence.result(PATIENCE)
    with pytest.raises(error):
        fence[1].result()
    check(fence[0], np.sin(X))


@pytest.fixture(scope="module")
def doubled():
    return aotc.compile(f"""func.func public @main(%x: {T}) -> {T} {{
      %0 = stablehlo.add %x, %x : {T}
      return %0 : {T} }}""")


def test_a_submission_waits_for_its_argument_alone(two, slow, doubled):
    """Also if its call has not begun, and over several submissions."""
    other, start = aotc.load(doubled, threads=1), aotc.Fence()
    fence = two.submit("main", X, X, wait=[start])
    chain = [other.submit("main", fence[0])]
    for _ in range(3):
        chain.append(other.submit("main", chain[-1]))
    late = other.submit("main", fence[1])
    assert not chain[0].done
    start.signal()
    check(chain[-1].result(PATIENCE)[0], 16 * np.sin(X))
    check(other.submit("main", fence[2]).result(PATIENCE)[0], 2 * (X @ X))
    assert not fence.done
    assert not late.done
    slow.gate.set()
    check(late.result(PATIENCE)[0], 2 * np.cos(X + 1))


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_submission_has_an_argument_that_was_whole_before_its_call_ended(two, slow, doubled, how):
    other, hold = aotc.load(doubled, threads=1), aotc.Fence()
    fence = two.submit("main", X, X)
    first, last = (other.submit("main", fence[n], wait=[hold]) for n in (0, 1))
    fence[0].wait(PATIENCE)
    assert slow.entered.wait(PATIENCE)
    if how == "fails":
        slow.error = ValueError("no slow value")
    else:
        fence.cancel()
    slow.gate.set()
    assert fence.exception(PATIENCE) is not None
    hold.signal()
    check(first.result(PATIENCE)[0], 2 * np.sin(X))
    check(other.submit("main", fence[0]).result(PATIENCE)[0], 2 * np.sin(X))
    with pytest.raises(aotc.CallError, match="which failed"):
        last.result(PATIENCE)
    with pytest.raises(aotc.CallError, match="which failed"):
        other.submit("main", fence[1])


def test_a_submission_that_is_given_a_result_waits_for_its_call(two, slow):
    """It writes to the memory of the result, which the call may still read."""
    step = aotc.load(aotc.compile(jax.jit(lambda x: x.at[0].add(1.0), donate_argnums=0), X), threads=1)
    fence = two.submit("main", X, X)
    fence[2].wait(PATIENCE)
    given = step.submit("main", fence[2], donate=True)
    with pytest.raises(TimeoutError):
        given.result(0.05)
    slow.gate.set()
    want = X @ X
    want[0] += 1
    check(given.result(PATIENCE)[0], want)


def test_memory_is_in_order_behind_an_early_argument(two, slow, doubled):
    """Who writes to the memory of a result comes behind a submission that reads it early."""
    other, out, hold = aotc.load(doubled, threads=1), np.zeros_like(X), aotc.Fence()
    fence = two.submit("main", X, X, out=[out, None, None])
    reader = other.submit("main", fence[0], wait=[hold])
    slow.gate.set()
    fence.wait(PATIENCE)
    writer = other.submit("main", X, out=[out])
    with pytest.raises(TimeoutError):
        writer.result(0.05)
    hold.signal()
    check(reader.result(PATIENCE)[0], 2 * np.sin(X))
    check(writer.result(PATIENCE)[0], 2 * X)


def test_a_submission_that_never_began_has_no_results(two):
    start = aotc.Fence()
    fence = two.submit("main", X, X, wait=[start])
    assert not fence[0].ready()
    start.fail(ValueError("never"))
    for result in fence.results:
        with pytest.raises(aotc.CallError, match="never"):
            result.result(PATIENCE)


def test_buffers_and_one_thread(module, slow):
    slow.gate.set()
    out = [np.zeros_like(X), None, None]
    fence = module.submit("main", X, X, out=out)
    check(fence[0].result(PATIENCE), np.sin(X))
    for found, want in zip(fence.result(PATIENCE), wanted(), strict=True):
        check(found, want)
    assert fence.result()[0] is out[0]


def loops(x, y):
    a = jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(c @ x), x)
    b = jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c + jnp.abs(y), y)
    return a, b, jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, x), x, jnp.zeros((0, 3)), a + b


def convolved(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    z = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return z, jax.nn.softmax(z.reshape(-1, 8)), y.sum()


IMAGE = np.random.default_rng(0).standard_normal((1, 96, 96, 8)).astype("float32")
FILTER = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype("float32")


@pytest.mark.parametrize(("function", "arrays"), [(loops, (X, X)), (convolved, (IMAGE, FILTER))])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_each_result_is_whole_once_it_is_ready(function, arrays, level, threads):
    """In loops, branches and tiled graphs, whoever waits for it, in any order."""
    module = aotc.load(aotc.compile(jax.jit(function), *arrays, opt_level=level), threads=threads)
    want = module.invoke("main", *arrays)
    for first in range(len(want)):
        fence = module.submit("main", *arrays)
        found = [np.array(fence[(first + n) % len(want)].result(PATIENCE)) for n in range(len(want))]
        for n, x in enumerate(found):
            np.testing.assert_array_equal(x, want[(first + n) % len(want)])
        fence.result(PATIENCE)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    text = random_program(np.random.default_rng(seed))
    module = aotc.load(aotc.compile(text), threads=2)
    arrays = inputs_of(module)
    want = aotc.load(aotc.compile(on_one_device(text))).invoke("main", *arrays)
    for _ in range(20):
        fence = module.submit("main", *arrays)
        for n, y in enumerate(want):
            np.testing.assert_allclose(np.array(fence[n].result(PATIENCE)), y, rtol=1e-4, atol=1e-5)


ASSERTED = f"""func.func public @main(%x: {T}, %y: {T}) -> ({T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %s = stablehlo.reduce(%y init: %z) applies stablehlo.add across dimensions = [0, 1]
    : ({T}, tensor<f32>) -> tensor<f32>
  %c = stablehlo.compare GT, %s, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%c) {{error_message = "y sums to nothing", has_side_effect = true}}
    : (tensor<i1>) -> ()
  %1 = stablehlo.custom_call @slow(%y) : ({T}) -> {T}
  return %0, %1 : {T}, {T} }}"""


def test_a_result_waits_for_the_assertions_on_what_is_computed_with_it(slow):
    aotc.register_custom_call("slow", native=False)
    module = aotc.load(aotc.compile(ASSERTED), threads=2, custom_calls={"slow": slow})
    fence = module.submit("main", X, -X)
    for result in (fence, *fence.results):
        with pytest.raises(aotc.CallError, match="y sums to nothing"):
            result.result(PATIENCE)
    fence = module.submit("main", X, X)
    check(fence[0].result(PATIENCE), np.sin(X))
    assert not fence.done
    slow.gate.set()
    check(fence[1].result(PATIENCE), X + 1)


def test_marks_of_work_that_was_stopped_do_not_count():
    """A kernel that looks for the end of its call may leave early, and its successors may run before all have left."""
    early, stopped = EarlyResults(), []
    early.begin([X, X], [1, 1, 0], [0, 0], lambda: bool(stopped))
    assert [early.is_ready(n) for n in range(2)] == [True, False]
    stopped.append(True)
    assert not early.is_ready(0)


def test_calls_that_are_not_submitted_have_no_marks(two, slow):
    """A mark is a command of its own, for submissions alone."""
    slow.gate.set()
    nodes = two._executable.buffers.nodes
    count = sum(len(list(all_commands(buffer))) for buffer in nodes)
    two.submit("main", X, X).result(PATIENCE)
    assert sum(len(list(all_commands(buffer))) for buffer in two._executable.buffers.nodes) == count
    assert two.submit("main", X, X).result(PATIENCE)[0].flags.writeable
