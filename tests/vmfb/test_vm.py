"""Loading and calling: the tiny bundle made by hand, no compiler of ours."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny

from aotc.vmfb.arguments import indices_that_share_memory
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.errors import CallError
from aotc.vmfb.host import machine
from aotc.vmfb.memory.arena import ArenaPool
from aotc.vmfb.memory.pointers import DATA_FIELD, address_of
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir

X = np.arange(4, dtype=np.float32)
Y = np.full(4, 10, np.float32)


@pytest.fixture(scope="module")
def module():
    return load(tiny.bundle(), threads=1)


def f32(*values):
    return np.array(values, np.float32)


# ---------------------------------------------------------------- programs


def test_a_static_call(module):
    (out,) = module.invoke("main", X, Y)
    assert out.tolist() == [10, 11, 12, 13]
    assert out.dtype == np.float32
    assert module(X, Y).tolist() == module.main(X, Y).tolist() == out.tolist()


@pytest.mark.parametrize("n", [4, 5, 1000])
def test_symbolic_dims_and_the_arena(module, n):
    for _ in range(3):
        (out,) = module.invoke("grow", np.arange(n, dtype=np.float32))
        np.testing.assert_array_equal(out, np.arange(n, dtype=np.float32) * 6)


def test_an_assertion_of_the_program(module):
    with pytest.raises(CallError, match="n is 3, expected at least 4"):
        module.invoke("grow", f32(1, 2, 3))


def test_a_loop_in_a_command_buffer(module):
    assert module.invoke("count", np.int64(100000))[0] == 100000


@pytest.mark.parametrize("n", [0, 1, 7])
def test_a_result_whose_size_depends_on_data(module, n):
    assert module.invoke("upto", np.int64(n))[0].tolist() == list(range(n))
    assert module.invoke("upto", np.int64(-1))[0].tolist() == []


@pytest.mark.parametrize(("i", "expected"), [(0, X), (1, Y), (-5, Y), (9, Y)])
def test_a_case(module, i, expected):
    np.testing.assert_array_equal(module.invoke("pick", np.int32(i), X, Y)[0], expected)


def test_more_shapes_than_plans_are_remembered(module):
    for n in range(4, 90):
        assert module.invoke("grow", np.ones(n, np.float32))[0].sum() == 6 * n


# ---------------------------------------------------------------- arguments


def test_arguments_of_every_layout(module):
    column = np.arange(8, dtype=np.float32).reshape(4, 2)[:, 1]
    swapped = X.astype(">f4")
    odd = np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32)
    frozen = X.copy()
    frozen.flags.writeable = False

    class Kind(np.ndarray):
        pass

    for x in (column, column[::-1], swapped, odd, frozen, X.view(Kind), memoryview_array(X)):
        got = module.invoke("main", x, Y)[0]
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, np.asarray(x, np.float32) + Y)


def memoryview_array(x):
    """An object that has nothing but ``__array__``."""

    class Holder:
        def __array__(self, dtype=None, copy=None):
            return x

    return Holder()


def test_dlpack_is_not_copied(module):
    class Speaks:
        def __dlpack__(self, **options):
            return X.__dlpack__(**options)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    np.testing.assert_array_equal(module.invoke("main", Speaks(), Y)[0], X + Y)


def test_jax_arrays(module):
    jnp = pytest.importorskip("jax.numpy")
    np.testing.assert_array_equal(module.invoke("main", jnp.asarray(X), Y)[0], X + Y)


def test_python_scalars(module):
    assert module.invoke("upto", 3)[0].tolist() == [0, 1, 2]
    with pytest.raises(CallError, match=r"argument 0 \(n\) has a scalar outside the range of its dtype"):
        module.invoke("upto", 3.0)
    with pytest.raises(CallError, match="scalar out of range"):
        module.invoke("upto", 1 << 70)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X,), "wrong number of arguments"),
        ((X.astype(np.float16), Y), r"argument 0 \(x\) has the wrong dtype\n    found:    f16\[4\]\n    expected: f32"),
        ((X, Y.astype(np.int32)), r"argument 1 \(y\) has the wrong dtype"),
        ((X[:3], Y), r"wrong shape\n    found:    f32\[3\]\n    expected: f32\[4\]"),
        ((X.reshape(2, 2), Y), "wrong shape"),
        (([1, 2, 3, 4], Y), "not an array\n    found:    list"),
        ((np.array(["a"] * 4), Y), "wrong dtype"),
        ((None, Y), "not an array"),
    ],
)
def test_wrong_arguments(module, arguments, message):
    with pytest.raises(CallError, match=message):
        module.invoke("main", *arguments)


def test_a_wrong_rank_of_symbolic_dims(module):
    with pytest.raises(CallError, match="wrong shape"):
        module.invoke("grow", np.zeros((2, 2), np.float32))


def test_names(module):
    with pytest.raises(CallError, match="no function 'train'"):
        module.invoke("train")
    with pytest.raises(AttributeError, match="no function 'train'"):
        _ = module.train
    with pytest.raises(CallError, match="no argument 'z', argument 'y' is missing"):
        module(X, z=Y)
    np.testing.assert_array_equal(module(X, y=Y), X + Y)
    assert repr(module.grow.signature) == "grow(x: f32[n]) -> (f32[n])"
    assert "main(x: f32[4], y: f32[4]) -> (f32[4])" in repr(module)


# ---------------------------------------------------------------- donation and buffers of the caller


def test_donated_arguments_are_the_callers_until_given(module):
    x = X.copy()
    assert module.invoke("update", x, Y)[0].tolist() == [10, 11, 12, 13]
    assert x.tolist() == X.tolist()
    assert module.invoke("update", x, Y, donate=True)[0].tolist() == [10, 11, 12, 13]
    assert x.tolist() == [10, 11, 12, 13]


def test_donated_arguments_that_cannot_be_overwritten(module):
    frozen = X.copy()
    frozen.flags.writeable = False
    assert module.invoke("update", frozen, Y, donate=True)[0].tolist() == [10, 11, 12, 13]
    assert frozen.tolist() == X.tolist()
    both = X.copy()
    assert module.invoke("update", both, both, donate=True)[0].tolist() == [0, 2, 4, 6]
    assert both.tolist() == X.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6))
def test_sharing_memory_is_what_numpy_says(parts):
    whole = np.zeros(40, np.uint8)
    arrays = [whole[start : start + size] for start, size in parts]
    expected = {
        i for i, x in enumerate(arrays) if any(np.may_share_memory(x, y) for j, y in enumerate(arrays) if j != i)
    }
    assert indices_that_share_memory(arrays) == expected


def test_out_buffers(module):
    out = np.empty(4, np.float32)
    assert module.invoke("main", X, Y, out=[out])[0] is out
    assert out.tolist() == [10, 11, 12, 13]
    assert module.invoke("upto", 4, out=[out])[0] is out
    assert module.invoke("main", X, Y, out=[None])[0].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([np.empty(5, np.float32)], "does not fit result 0"),
        ([np.empty(4, np.float64)], "does not fit result 0"),
        ([np.empty(8, np.float32)[::2]], "not contiguous"),
        ([X], r"out\[0\] shares memory"),
        ([], "wrong number of out buffers"),
        ([[0.0] * 4], "not a writable array"),
    ],
)
def test_out_buffers_that_do_not_fit(module, out, message):
    with pytest.raises(CallError, match=message):
        module.invoke("main", X, Y, out=out)


# ---------------------------------------------------------------- processes, threads, memory


def test_concurrent_calls(module):
    wrong = []

    def work(n):
        x = np.arange(n, dtype=np.float32)
        for _ in range(200):
            if not np.array_equal(module.invoke("grow", x)[0], x * 6) or module.invoke("count", n)[0] != n:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (4, 5, 4, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os
import aotc, numpy as np
x = np.ones(4, np.float32)
module = aotc.load({path!r}, threads=2)
module.invoke("grow", x)
child = os.fork()
good = module.invoke("grow", x)[0].tolist() == [6] * 4
if not child:
    os._exit(not good)
assert good and os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_call(tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(tiny.bundle())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORK.format(path=str(path))], check=True, env=environment)


def test_no_memfd(monkeypatch):
    manifest, segments = tiny.parts()
    tiny.seal(manifest["variants"][0], segments, tiny.KERNELS + "\nint another;")
    monkeypatch.delattr(native.os, "memfd_create")
    assert load(write_bundle(None, manifest, segments))(X, Y).tolist() == [10, 11, 12, 13]


def test_arenas_are_kept_grown_and_freed():
    pool = ArenaPool()
    first = pool.take_arena(100)
    assert first.address % 64 == 0
    pool.return_arena(first)
    assert pool.take_arena(50) is first
    pool.return_arena(first)
    second = pool.take_arena(1000)
    assert second is not first
    pool.return_arena(second)
    assert pool.idle_bytes() == 1000
    assert pool.trim() == 1000
    assert (pool.idle_bytes(), pool.high_water) == (0, 1000)


def test_trim(module):
    module.trim()
    module.invoke("grow", np.ones(1000, np.float32))
    assert module.stats()["arena_idle_bytes"] >= 4000
    assert module.trim() >= 4000


def test_the_data_pointer_is_found():
    assert DATA_FIELD or sys.implementation.name != "cpython"
    for x in (X, X[1:], X[::-1], np.zeros(()), np.zeros((0, 3))):
        assert address_of(x) == x.ctypes.data


def test_thread_counts(monkeypatch, tmp_path):
    monkeypatch.delenv("AOTC_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert machine.thread_count(None) == 5
    monkeypatch.setenv("AOTC_NUM_THREADS", "3")
    assert (machine.thread_count(None), machine.thread_count(7)) == (3, 7)
    monkeypatch.setenv("AOTC_NUM_THREADS", "many")
    for asked in (None, 0, -1):
        with pytest.raises(CallError, match="must be an integer from 1 to"):
            machine.thread_count(asked)


def test_cgroup_quotas(tmp_path):
    root = str(tmp_path)
    assert machine.cgroup_quota(root) == 0
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cgroup_quota(root) == 1.5
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.cgroup_quota(root) == 0.5
    assert machine.usable_cores(root) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cgroup_quota(root) == 0


# ---------------------------------------------------------------- promises of time
