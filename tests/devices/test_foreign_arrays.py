"""Arrays of other libraries on a GPU: taken without a copy, after their producer's work; or refused with a reason."""

import ctypes
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.growing import GROWING
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, array_at, install

import aotc
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.devices.cuda.foreign import imported_array
from aotc.vmfb.devices.dlpack import make_capsule
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

PATIENCE = 60


def step(h, w):
    return jnp.tanh(h @ w)


class Producer:
    """An array of another library, whose stream has still to write it."""

    read_only = False

    @property
    def buffer(self):
        return self

    def __init__(self, values, ordinal=0):
        self.gpu, self.ordinal = SimulatedGpu(ordinal), ordinal
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        self.address = self.gpu.allocate(values.nbytes)
        self.write(values)

    def write(self, values):
        data = values.tobytes()
        self.gpu._give(lambda: ctypes.memmove(self.address, data, len(data)))

    def read(self):
        for gpu in list(SimulatedGpu.every):
            gpu.wait()
        return array_at(self.address, from_numpy(self.dtype), self.shape).copy()


class ByDlpack(Producer):
    newest = (1, 0)

    def __dlpack_device__(self):
        return 2, self.ordinal

    def __dlpack__(self, *, stream, max_version):
        SimulatedGpu.streams[stream].wait_for_stream(self.gpu.handle)
        return make_capsule(self, max_version=min(max_version, self.newest))


class ByOldDlpack(ByDlpack):
    def __dlpack__(self, *, stream):
        SimulatedGpu.streams[stream].wait_for_stream(self.gpu.handle)
        return make_capsule(self)


class ByInterface(Producer):
    strides = None
    more: ClassVar[dict] = {}

    @property
    def __cuda_array_interface__(self):
        row = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, self.read_only), "version": 3}
        return {**row, "strides": self.strides, "stream": self.gpu.handle, **self.more}


class ByFirstInterface(ByInterface):
    more: ClassVar[dict] = {"version": 2, "stream": None}


KINDS = [ByDlpack, ByOldDlpack, ByInterface, ByFirstInterface]


@pytest.fixture
def module(monkeypatch):
    data = aotc.compile(jax.jit(step), array(4, 4), array(4, 4), target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


def moved(module):
    """What was copied by anybody."""
    return [what for gpu in SimulatedGpu.every for what in gpu.log if what in ("upload", "download", "copy")]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_taken_without_a_copy(kind, module):
    h, w = array(4, 4), array(4, 4, seed=1)
    for _ in range(4):
        before = len(moved(module))
        (made,) = module.invoke("main", kind(h), kind(w), results="device")
        assert len(moved(module)) == before
        np.testing.assert_allclose(made.numpy(), np.tanh(h @ w), rtol=1e-5)
    np.testing.assert_allclose(module(kind(h), w), np.tanh(h @ w), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_written_to_buffers_of_others(kind, module):
    h, w = array(4, 4), array(4, 4, seed=1)
    for wanted in ("", "numpy", "device"):
        out = kind(np.zeros((4, 4), "f4"))
        before = len(moved(module))
        (made,) = module.invoke("main", kind(h), kind(w), out=[out], results=wanted)
        assert made is out
        assert len(moved(module)) == before
        np.testing.assert_allclose(out.read(), np.tanh(h @ w), rtol=1e-5)
    ours = module.put(np.zeros((4, 4), "f4"))
    assert module.invoke("main", h, w, out=[ours]) == [ours]
    np.testing.assert_allclose(ours.numpy(), np.tanh(h @ w), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_submissions_take_them_too(kind, module):
    """The producer is heard when the call is submitted; what writes to the buffer earlier comes first."""
    h, w = array(4, 4), array(4, 4, seed=1)
    gate, out = aotc.Fence(), kind(np.zeros((4, 4), "f4"))
    first = module.submit("main", kind(h), kind(w), out=[out], wait=[gate])
    second = module.submit("main", out, kind(w), results="device")
    gate.signal()
    want = np.tanh(np.tanh(h @ w) @ w)
    np.testing.assert_allclose(second.result(PATIENCE)[0].numpy(), want, rtol=1e-4)
    assert first.result(PATIENCE)[0] is out


class Sideways(ByInterface):
    strides = (4, 16)


class Fixed(ByDlpack):
    read_only = True


def refused(module, match, *arrays, **options):
    with pytest.raises(CallError, match=match):
        module.invoke("main", *arrays, **options)


def test_what_does_not_fit_is_refused(module):
    h = array(4, 4)
    refused(module, r"argument 0 (.|\n)*not in row-major order \(strides of \(4, 16\)", Sideways(h), h)
    refused(module, r"argument 1 (.|\n)*wrong dtype", h, ByDlpack(np.ones((4, 4), "i4")))
    refused(module, r"argument 1 (.|\n)*wrong shape", h, ByInterface(np.ones((4, 3), "f4")))
    refused(module, r"out\[0\] cannot be written to: it is read-only", h, h, out=[Fixed(h)])
    refused(module, r"out\[0\] does not fit", h, h, out=[ByDlpack(np.ones((4, 5), "f4"))])
    refused(module, r"out\[0\] is not a writable array", h, h, out=[[1, 2]])
    buffer = ByDlpack(h)
    refused(module, r"out\[0\] shares memory with an argument", buffer, h, out=[buffer])
    np.testing.assert_allclose(module(Fixed(h), h), np.tanh(h @ h), rtol=1e-5)  # it may be read


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_that_begins_between_vectors_is_copied(kind, module):
    """Kernels read 16 bytes at a time, which memory of a GPU refuses anywhere else."""
    h, w = array(4, 4), array(4, 4, seed=1)
    behind = kind(np.zeros((5, 4), "f4"))
    behind.address, behind.shape, behind.nbytes = behind.address + 4, (4, 4), 64
    behind.write(h)
    assert behind.address % GPU_ALIGNMENT == 4
    assert imported_array(behind).address % GPU_ALIGNMENT == 0
    np.testing.assert_allclose(module(behind, kind(w)), np.tanh(h @ w), rtol=1e-5)
    refused(module, r"out\[0\] cannot be written to: it begins 4 bytes behind a multiple of 16", h, w, out=[behind])
    with pytest.raises(CallError, match="4 bytes behind"):
        module.submit("main", h, w, out=[behind]).result(PATIENCE)


def test_other_devices(monkeypatch):
    """Arguments of another GPU, or for the host, are copied; a buffer that is elsewhere is refused."""
    h, w = array(4, 4), array(4, 4, seed=1)
    data = aotc.compile(jax.jit(step), h, w, target="cpu,cuda:sm_90")
    install(monkeypatch, data, count=2)
    first, second, host = (aotc.load(data, devices=d) for d in ("cuda:0", "cuda:1", "cpu"))
    for kind in (ByDlpack, ByInterface):
        for module in (first, second, host):
            np.testing.assert_allclose(module(kind(h, 1), kind(w)), np.tanh(h @ w), rtol=1e-5)
    refused(first, r"out\[0\] is on another device(.|\n)*GPU 1(.|\n)*on GPU 0", h, w, out=[ByDlpack(h, 1)])
    refused(host, r"out\[0\] is on another device(.|\n)*in memory of the host", h, w, out=[ByInterface(h)])


def test_a_donated_array_of_another_library(monkeypatch):
    """With ``donate=True`` the result is in its memory; one that is read-only, or not donated, is copied."""
    x = array(4, 4)
    data = aotc.compile(jax.jit(lambda c: c.at[0].add(1.0), donate_argnums=0), x, target="cuda:sm_90")
    install(monkeypatch, data)
    module, want = aotc.load(data), x + np.eye(4, dtype="f4")[:, :1]
    for kind in (ByDlpack, ByInterface):
        given = kind(x)
        (made,) = module.invoke("main", given, donate=True, results="device")
        assert made.address == given.address
        np.testing.assert_array_equal(made.numpy(), want)
    for given, donate in ((Fixed(x), True), (ByDlpack(x), False)):
        (made,) = module.invoke("main", given, donate=donate, results="device")
        assert made.address != given.address
        np.testing.assert_array_equal(made.numpy(), want)
        np.testing.assert_array_equal(given.read(), x)


def test_a_program_that_reads_sizes_from_its_data(monkeypatch):
    data = aotc.compile(GROWING.replace("64", "8").encode(), target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    arguments = module.main.signature.arguments
    arrays = [np.ones([8 if isinstance(d, str) else d for d in a["dims"]], a["dtype"].replace("i32", "i4").replace(
        "f32", "f4")) for a in arguments]
    want = module.invoke("main", *arrays)
    out = [ByDlpack(np.zeros_like(x)) for x in want]
    module.invoke("main", *map(ByDlpack, arrays), out=out)
    for x, y in zip(out, want, strict=True):
        np.testing.assert_array_equal(x.read(), y)


class TestPutAndBind:
    """Arrays that are put on the device once."""

    def test_put(self, module):
        h, w = array(4, 4), array(4, 4, seed=1)
        for where in ("", "cuda:0", "w", "args[1]"):
            if where not in ("", "cuda:0", *(a["name"] for a in module.functions["main"].signature.arguments)):
                continue
            put = module.put(w, where)
            assert (put.ordinal, put.device, put.shape) == (0, "cuda:0", (4, 4))
            np.testing.assert_allclose(module(h, put), np.tanh(h @ w), rtol=1e-5)
            assert module.put(put, where) is put
        given = ByDlpack(w)
        assert module.put(given).address == given.address
        with pytest.raises(CallError, match=r"no argument and no device 'cuda:7'(.|\n)*cuda:0"):
            module.put(w, "cuda:7")

    def test_put_by_the_name_of_an_argument(self, module):
        name = module.functions["main"].signature.arguments[0]["name"]
        with pytest.raises(CallError, match="wrong shape"):
            module.put(array(3, 4), name)
        assert module.put(array(4, 4), name).ordinal == 0

    def test_bind(self, module):
        h, w = array(4, 4), array(4, 4, seed=1)
        for key in (1, module.functions["main"].signature.arguments[1]["name"]):
            bound = module.bind({key: w})
            assert bound.arrays[1].ordinal == 0
            for _ in range(3):
                np.testing.assert_allclose(bound(h), np.tanh(h @ w), rtol=1e-5)
            before = moved(module).count("upload")
            (made,) = bound.invoke(ByDlpack(h), results="device")
            assert moved(module).count("upload") == before
            np.testing.assert_allclose(made.numpy(), np.tanh(h @ w), rtol=1e-5)
            np.testing.assert_allclose(bound.submit(h).result(PATIENCE), np.tanh(h @ w), rtol=1e-5)
            assert "bound" in repr(bound)
        with pytest.raises(CallError, match=r"1 argument is positional, not 2(.|\n)*found: +2"):
            bound(h, w)
        with pytest.raises(CallError, match="no argument 'v' to bind"):
            module.bind({"v": w})
        with pytest.raises(CallError, match="wrong dtype"):
            module.bind({1: w.astype("f2")})

    def test_on_the_host_arrays_are_kept_as_they_are(self):
        h, w = array(4, 4), array(4, 4, seed=1)
        module = aotc.load(aotc.compile(jax.jit(step), h, w))
        bound = module.bind({1: w})
        np.testing.assert_allclose(bound(h), np.tanh(h @ w), rtol=1e-5)
        assert np.shares_memory(bound.arrays[1].numpy(), w)
        put = module.put(w)
        assert (put.ordinal, put.device) == (-1, "cpu:0")
        np.testing.assert_allclose(module(h, put), np.tanh(h @ w), rtol=1e-5)

    def test_a_donated_argument_is_not_bound(self):
        module = aotc.load(aotc.compile(jax.jit(lambda c: c.at[0].add(1.0), donate_argnums=0), array(4, 4)))
        with pytest.raises(CallError, match="is donated"):
            module.bind({0: array(4, 4)})


def test_buffers_of_other_libraries_for_the_host():
    torch = pytest.importorskip("torch")
    x = array(4, 4)
    module, out = aotc.load(aotc.compile(jax.jit(jnp.negative), x)), torch.zeros((4, 4))
    assert module.invoke("main", torch.from_numpy(x.copy()), out=[out])[0] is out
    np.testing.assert_array_equal(out.numpy(), -x)
