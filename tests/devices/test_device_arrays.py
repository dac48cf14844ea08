"""Arrays in memory of GPUs: what they are for other libraries, that calls take them as they are, when they go."""

import ctypes
import gc
import os
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices.mixes import HALVES
from lowering.test_devices import FIRST, SECOND, T, to
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, array_at, install

import aotc
from aotc.vmfb.devices.cuda import loaded_kernels as loaded_gpu
from aotc.vmfb.devices.cuda.loaded_kernels import IDLE_BUFFERS, IDLE_BYTES
from aotc.vmfb.devices.dlpack import _HELD, _Managed, _Versioned
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim


def step(h, w):
    return jnp.tanh(h @ w)


@pytest.fixture
def module(monkeypatch):
    data = aotc.compile(jax.jit(step), array(4, 4), array(4, 4), target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


def on_gpu(module, *arrays):
    (made,) = module.invoke("main", *arrays, results="device")
    return made


def test_numpy_results_of_a_cuda_bundle(module):
    """A model without names of devices gives NumPy arrays, unless it is asked otherwise."""
    h, w = array(4, 4), array(4, 4, seed=1)
    for result in (*module.invoke("main", h, w), *module.invoke("main", h, w, results="numpy"), module(h, w)):
        assert type(result) is np.ndarray
    made = on_gpu(module, h, w)
    assert isinstance(made, aotc.DeviceArray)
    assert (made.device, made.shape, made.dtype, made.nbytes, len(made)) == ("cuda:0", (4, 4), np.float32, 64, 4)
    for elements in (made.numpy(), np.asarray(made), np.array(made, dtype="f8"), made.copy().numpy()):
        np.testing.assert_allclose(elements, np.tanh(h @ w), rtol=1e-5)
    assert "device='cuda:0'" in repr(made)


def test_an_array_on_the_gpu_is_not_moved(module):
    """Its elements go neither to the host nor to other memory; a loop over results records graphs once."""
    h, w = array(4, 4), array(4, 4, seed=1)
    want, log = h, module._executable.gpu.log
    state, weight = on_gpu(module, h, np.eye(4, dtype="f4")), on_gpu(module, w, np.eye(4, dtype="f4"))
    want, weights = np.tanh(h), np.tanh(w)
    for iteration in range(8):
        log.clear()
        state, want = on_gpu(module, state, weight), np.tanh(want @ weights)
        assert not {"upload", "download", "copy"} & set(log)
        assert iteration < 6 or log.count("graph") == 1
    np.testing.assert_allclose(state.numpy(), want, rtol=1e-4)
    assert len(module._executable.gpu.memory) <= 2 + 2 + 2 * IDLE_BUFFERS


def test_an_array_of_another_module_or_shape(module, monkeypatch):
    made = on_gpu(module, array(4, 4), array(4, 4))
    other = aotc.load(aotc.compile(jax.jit(jnp.sin), array(4, 4)))
    np.testing.assert_allclose(other(made), np.sin(made.numpy()), rtol=1e-6)  # on the CPU
    with pytest.raises(CallError, match=r"has the wrong shape"):
        module.invoke("main", made, on_gpu(module, array(4, 4), array(4, 4)).numpy()[:3])
    text = aotc.compile(jax.jit(lambda x: x + 1), np.ones((4, 4), "i4"), target="cuda:sm_90")
    install(monkeypatch, text)
    with pytest.raises(CallError, match="has the wrong dtype"):
        aotc.load(text).invoke("main", made)


@pytest.mark.parametrize("most", [0, IDLE_BYTES])
def test_memory_comes_back(most, module, monkeypatch):
    """A few blocks of a size, or more while all of them are small, wait for later results."""
    monkeypatch.setattr(loaded_gpu, "IDLE_BYTES", most)
    gpu = module._executable.gpu
    h, w = array(4, 4), array(4, 4)
    module.invoke("main", h, w)
    blocks = len(gpu.memory)
    held = [on_gpu(module, h, w) for _ in range(IDLE_BUFFERS + 3)]
    assert len(gpu.memory) == blocks + len(held)
    del held
    assert len(gpu.memory) == blocks + (IDLE_BUFFERS + 3 if most else IDLE_BUFFERS)
    module.trim()
    assert len(gpu.memory) == 1  # of the constants


def test_memory_that_another_library_may_use_is_not_used_again(module):
    """It is freed, which waits for all streams of the GPU."""
    gpu = module._executable.gpu
    h, w = array(4, 4), array(4, 4)
    for share in (lambda x: x.__dlpack__(), lambda x: x.__cuda_array_interface__):
        made = on_gpu(module, h, w)
        kept = share(made)
        address, held = made.address, len(gpu.memory)
        del made, kept
        assert address not in gpu.memory
        assert len(gpu.memory) == held - 1


def test_arrays_at_other_places_of_the_call(module):
    """The graphs of a call whose first argument is on the GPU are none of one whose second is."""
    h, w = array(4, 4), array(4, 4, seed=1)
    there = on_gpu(module, h, np.eye(4, dtype="f4"))
    x = there.numpy()
    for _ in range(3):
        np.testing.assert_allclose(module.invoke("main", there, w)[0], np.tanh(x @ w), rtol=1e-5)
    for _ in range(3):
        np.testing.assert_allclose(module.invoke("main", w, there)[0], np.tanh(w @ x), rtol=1e-5)


def test_an_array_outlives_its_module(module):
    made = on_gpu(module, array(4, 4), np.eye(4, dtype="f4"))
    del module
    gc.collect()
    np.testing.assert_allclose(made.numpy(), np.tanh(array(4, 4)), rtol=1e-6)


def test_a_forked_child_gives_nothing_back(module, monkeypatch):
    made = on_gpu(module, array(4, 4), np.eye(4, dtype="f4"))
    kept = [on_gpu(module, array(4, 4), np.eye(4, dtype="f4")) for _ in range(IDLE_BUFFERS)]
    with warnings.catch_warnings(action="ignore"):  # JAX's, of threads
        process = os.fork()
    if not process:
        del made, kept
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    np.testing.assert_allclose(made.numpy(), np.tanh(array(4, 4)), rtol=1e-6)


def test_the_interface_of_arrays_on_gpus(module):
    made = on_gpu(module, array(4, 4), np.eye(4, dtype="f4"))
    row = made.__cuda_array_interface__
    assert (row["shape"], row["typestr"], row["strides"], row["version"]) == ((4, 4), "<f4", None, 3)
    np.testing.assert_array_equal(array_at(row["data"][0], "f32", (4, 4)), made.numpy())
    assert row["data"][1] is False


def tensor_of(capsule):
    """Take over a capsule as a consumer does: rename it, and call the deleter in the end."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
    versioned = "versioned" in repr(capsule)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = (_Versioned if versioned else _Managed).from_address(api.PyCapsule_GetPointer(capsule, name))
    assert api.PyCapsule_SetName(capsule, USED) == 0
    return managed


USED = b"used_dltensor"


@pytest.mark.parametrize("version", [None, (0, 8), (1, 1)])
@pytest.mark.parametrize("taken", [True, False])
def test_dlpack(module, taken, version):
    """The struct says where the array is, and the memory is there until the consumer has done with it."""
    made = on_gpu(module, array(4, 4), np.eye(4, dtype="f4"))
    want, before = made.numpy(), len(_HELD)
    assert made.__dlpack_device__() == (2, 0)
    capsule = made.__dlpack__(stream=None, max_version=version)
    assert len(_HELD) == before + 1
    del made
    if taken:
        managed = tensor_of(capsule)
        t = managed.tensor
        assert (t.device_type, t.device_id, t.ndim, t.code, t.bits, t.lanes, t.byte_offset) == (2, 0, 2, 2, 32, 1, 0)
        numbers = ctypes.c_int64 * 2
        assert [list(numbers.from_address(p)) for p in (t.shape, t.strides)] == [[4, 4], [4, 1]]
        np.testing.assert_array_equal(array_at(t.data, "f32", (4, 4)), want)
        del capsule
        assert len(_HELD) == before + 1
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
    else:
        del capsule
    assert len(_HELD) == before


@pytest.mark.parametrize(("dtype", "code", "bits"), [("bfloat16", 4, 16), ("bool", 6, 8), ("complex64", 5, 64)])
def test_dlpack_of_other_types(dtype, code, bits, monkeypatch):
    x = np.ones(3, dtype)
    data = aotc.compile(jax.jit(lambda x: x[::-1]), x, target="cuda:sm_90")
    install(monkeypatch, data)
    made = on_gpu(aotc.load(data), x)
    t = tensor_of(made.__dlpack__()).tensor
    assert (t.code, t.bits) == (code, bits)
    with pytest.raises(BufferError, match="copies it to the host"):
        made.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="ambiguous"):
        made.__dlpack__(stream=0)


def test_types_without_a_name_elsewhere(monkeypatch):
    x = np.ones(3, ml_dtypes.float8_e5m2)
    data = aotc.compile(jax.jit(lambda x: x[::-1]), x, target="cuda:sm_90")
    install(monkeypatch, data)
    made = on_gpu(aotc.load(data), x)
    assert not hasattr(made, "__cuda_array_interface__")
    with pytest.raises(BufferError, match="DLPack has no type for f8E5M2"):
        made.__dlpack__()
    np.testing.assert_array_equal(made.numpy(), x)


def update(cache, x):
    return jax.lax.dynamic_update_slice(cache, x, (1, 0)), x * 2


@pytest.fixture
def cache(monkeypatch):
    data = aotc.compile(jax.jit(update, donate_argnums=0), array(4, 4), array(1, 4), target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    assert module.main.signature.arguments[0]["donated"]
    return module


def test_a_donated_array_cannot_be_used_again(cache):
    rows, x = array(4, 4), array(1, 4, seed=1)
    want = rows.copy()
    want[1] = x
    (state,) = cache.invoke("main", rows, x, results="device")[:1]
    address = state.address
    after, _ = cache.invoke("main", state, 2 * x, results="device", donate=True)
    assert after.address == address
    with pytest.raises(CallError, match="was donated"):
        state.numpy()
    with pytest.raises(CallError, match="was donated"):
        cache.invoke("main", state, x)
    assert "<donated>" in repr(state)
    want[1] = 2 * x
    np.testing.assert_array_equal(after.numpy(), want)


def test_what_is_not_donated_is_kept(cache):
    rows, x = array(4, 4), array(1, 4, seed=1)
    want = rows.copy()
    want[1] = x
    state = cache.invoke("main", rows, 0 * x, results="device")[0]
    before = state.numpy()
    for results in ("device", "numpy"):
        for donate in (False, True):
            given = state if not donate else state.copy()
            found = cache.invoke("main", given, x, results=results, donate=donate)
            assert isinstance(found[0], np.ndarray) == (results == "numpy")
            np.testing.assert_array_equal(np.asarray(found[0]), want)
            np.testing.assert_array_equal(state.numpy(), before)
    out = [np.zeros((4, 4), "f4"), None]
    cache.invoke("main", state, x, out=out, donate=True)
    np.testing.assert_array_equal(out[0], want)


TWO = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = {to("d1", "%0")}
  %2 = stablehlo.multiply %1, %w : {T}
  return %0, %2 : {T}, {T} }}"""


@pytest.mark.parametrize("halves", HALVES)
def test_arrays_of_a_mix(halves, monkeypatch):
    """A result stays where it was made; an array is taken as it is where it belongs, and moved elsewhere."""
    data = aotc.compile(TWO, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    module = aotc.load(data)
    x, w = array(8, 8), array(8, 8, seed=1)
    homes = [target.partition(":")[0] for target in HALVES[halves].values()]
    first, second = module(x, w)
    assert [isinstance(a, np.ndarray) for a in (first, second)] == [home == "cpu" for home in homes]
    for pair in ((first, second), (second, first)):
        again = module.invoke("main", *pair, results="device")
        assert [a.device for a in again] == ["d0", "d1"]
        want = np.sin(np.asarray(pair[0]))
        np.testing.assert_allclose(np.asarray(again[0]), want, rtol=1e-5)
        np.testing.assert_allclose(again[1].numpy(), want * np.asarray(pair[1]), rtol=1e-5)
    for a in module.invoke("main", first, second, results="numpy"):
        assert type(a) is np.ndarray


@pytest.mark.parametrize("halves", HALVES)
def test_submissions_hand_arrays_on(halves, monkeypatch):
    """Results that do not exist yet are arguments, wherever they will be."""
    data = aotc.compile(TWO, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    module = aotc.load(data)
    x, w = array(8, 8), array(8, 8, seed=1)
    gate = aotc.Fence()
    first = module.submit("main", x, w, wait=[gate])
    second = module.submit("main", first[0], first[1])
    gate.signal()
    want = np.sin(x), np.sin(x) * w
    for found, expected in zip(second.result(60), (np.sin(want[0]), np.sin(want[0]) * want[1]), strict=True):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)
    third = module.submit("main", *first.result(60))
    np.testing.assert_allclose(np.asarray(third.result(60)[0]), np.sin(want[0]), rtol=1e-5)


def test_a_submission_takes_a_donated_array(cache):
    rows, x = array(4, 4), array(1, 4, seed=1)
    (state, _) = cache.invoke("main", rows, x, results="device")
    after = cache.submit("main", state, 2 * x, donate=True, results="device").result(60)[0]
    rows[1] = 2 * x
    np.testing.assert_array_equal(after.numpy(), rows)
    with pytest.raises(CallError, match="donate"):
        cache.submit("main", state, x).result(60)


def counted(sizes, move):
    """A copy that notes how many bytes it moves."""

    def noted(gpu, to, source, size):
        sizes.append(size)
        move(gpu, to, source, size)

    return noted


def test_nothing_of_a_donated_cache_is_copied(monkeypatch):
    """Given away again and again, in a loop of the model too and by submissions: the rows alone come from the host."""

    def updates(cache, row, at):
        return jax.lax.fori_loop(0, 3, lambda i, c: jax.lax.dynamic_update_slice(c, row * i, (at + i, 0)), cache)

    rows, row = array(1024, 64), array(1, 64, seed=1)
    data = aotc.compile(jax.jit(updates, donate_argnums=0), rows, row, np.int32(0), target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    (state,) = module.invoke("main", rows, row, np.int32(3), results="device")
    address, want = state.address, rows.copy()
    want[3:6] = row * np.arange(3, dtype="f4")[:, None]
    moved = {}
    for name in ("upload", "download", "copy"):
        move = getattr(SimulatedGpu, name)
        monkeypatch.setattr(SimulatedGpu, name, counted(moved.setdefault(name, []), move))
    for at in (9, 40, 80):
        want[at : at + 3] = row * np.arange(3, dtype="f4")[:, None]
        how = module.invoke if at == 9 else lambda *a, **k: module.submit(*a, **k).result(60)
        (state,) = how("main", state, row, np.int32(at), donate=True, results="device")
        assert state.address == address
    assert sum(moved["upload"]) == 3 * (row.nbytes + 4)
    assert max(moved["download"] + moved["copy"], default=0) <= row.nbytes
    np.testing.assert_array_equal(state.numpy(), want)
