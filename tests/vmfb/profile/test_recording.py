"""``with module.profile()``: every dispatch of the calls inside, results as ever, nothing left behind."""

import threading
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aotc
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256)


def recorded(module, *arrays, calls=2):
    with module.profile() as recording:
        results = [module.invoke("main", *arrays) for _ in range(calls)]
    return recording, results


def check_whole(dispatches):
    """The items of each dispatch were run once, and its facts are those of its claims."""
    for d in dispatches:
        spans = sorted((c.first, c.last) for c in d.parts)
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert d.items == spans[-1][1]
        assert d.claims == len(d.parts)
        assert d.start == min(c.began for c in d.parts)
        assert all(0 <= c.began <= c.ended for c in d.parts)
        assert d.threads == sorted({c.thread for c in d.parts})


@pytest.fixture(scope="module")
def softmax():
    return aotc.compile(lambda x: jnp.sort(jax.nn.softmax(x @ x, 1), 1), X)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_call_has_its_dispatches(softmax, threads):
    module = aotc.load(softmax, threads=threads)
    want = module.invoke("main", X)
    recording, results = recorded(module, X, calls=3)
    for got in results:
        np.testing.assert_array_equal(got[0], want[0])
    names = [t.name for t in module._executable.kernel_texts()]
    assert sorted(d.kernel for d in recording.dispatches) == sorted(names * 3)
    check_whole(recording.dispatches)
    assert recording.lost == 0
    product = next(d for d in recording.dispatches if "matmul" in d.kernel)
    assert product.flops == 2 * 256**3
    assert product.gflops == pytest.approx(product.flops / product.ns, abs=1e-3)
    assert product.gbs == pytest.approx(product.bytes / product.ns, abs=1e-3)
    assert product.roofline > 0
    assert "test_recording.py" in product.loc
    assert all(set(d.threads) <= set(range(threads)) for d in recording.dispatches)


def test_before_and_after_nothing_is_different(softmax):
    module = aotc.load(softmax, threads=1)
    before = [words.copy() for words in module._executable.words]
    with module.profile() as recording:
        assert any((a != b).any() for a, b in zip(before, module._executable.words))
    assert all((a == b).all() for a, b in zip(before, module._executable.words))
    module.invoke("main", X)
    assert recording.dispatches == []
    again, _ = recorded(module, X, calls=1)  # the same thunks once more
    assert len(again.dispatches) == module.stats()["kernels"]


def test_a_block_that_raises_puts_everything_back(softmax):
    module = aotc.load(softmax, threads=1)
    before = [words.copy() for words in module._executable.words]
    with pytest.raises(RuntimeError, match="mine"), module.profile():
        raise RuntimeError("mine")
    assert all((a == b).all() for a, b in zip(before, module._executable.words))


def test_sizes_of_calls_are_those_of_their_dispatches():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), np.float32)
    module = aotc.load(aotc.compile(jax.export.export(jax.jit(lambda x: jnp.sin(x).sum(1)))(shape)))
    with module.profile() as recording:
        for n in (3, 70, 3):
            module.invoke("main", np.ones((n, 8), np.float32))
    assert [d.sizes for d in recording.dispatches] == [{"n": 3}, {"n": 70}, {"n": 3}]
    assert [d.bytes for d in recording.dispatches] == [4 * (8 * n + n) for n in (3, 70, 3)]
    check_whole(recording.dispatches)


def test_turns_of_a_loop_are_dispatches_of_their_own():
    def function(x, n):
        return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ x), x)

    module = aotc.load(aotc.compile(function, X, np.int32(5)), threads=2)
    recording, _ = recorded(module, X, np.int32(5), calls=1)
    products = [d for d in recording.dispatches if "matmul" in d.kernel or "product" in d.kernel]
    assert len(products) == 5
    check_whole(recording.dispatches)


def test_calls_of_several_threads_are_told_apart(softmax):
    module = aotc.load(softmax, threads=2)
    module.invoke("main", X)
    with module.profile() as recording:
        some = [threading.Thread(target=lambda: [module.invoke("main", X) for _ in range(5)]) for _ in range(3)]
        for t in some:
            t.start()
        for t in some:
            t.join()
    assert len(recording.dispatches) == 15 * module.stats()["kernels"]
    check_whole(recording.dispatches)


def test_spans_are_named_and_lie_in_the_whole(softmax):
    module = aotc.load(softmax, threads=1)
    with module.profile() as recording, recording.span("first"):
        module.invoke("main", X)
    first, whole = recording.spans
    assert (first.name, whole.name) == ("first", "module.profile")
    assert whole.start == 0 <= first.start
    assert first.start + first.ns <= whole.ns
    for d in recording.dispatches:  # clocks of the processor and of the system agree
        assert first.start - 20_000 <= d.start
        assert d.start + d.ns <= first.start + first.ns + 20_000


def test_more_claims_than_have_room_are_counted(softmax, monkeypatch):
    monkeypatch.setattr("aotc.vmfb.profile.recording.RECORDED_CLAIMS", 4)
    module = aotc.load(softmax, threads=1)
    recording, _ = recorded(module, X)
    assert sum(d.claims for d in recording.dispatches) == 4
    assert recording.lost > 0


def test_errors_of_recordings_say_what_is_wrong(softmax):
    module = aotc.load(softmax)
    with module.profile() as recording:
        with pytest.raises(CallError, match="the recording is not over"):
            recording.dispatches  # noqa: B018
        with pytest.raises(CallError, match="another recording of this module is on"), module.profile():
            pass
    with pytest.raises(CallError, match="a recording is made once"), recording:
        pass
    with pytest.raises(CallError, match="profile begins with the name of a function"):
        module.profile(X)
    with pytest.raises(CallError, match="no kernel text"):
        aotc.load(aotc.compile(jnp.sin, X, debug_info=False)).profile()
    with pytest.raises(CallError, match="cannot write the trace"):
        recording.save("/nowhere/trace.json")
