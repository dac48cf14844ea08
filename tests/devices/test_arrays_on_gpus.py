"""Arrays of jax, torch and cupy on the hardware, calls at the same time, and copies of large arrays."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import array

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]


def of_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("a torch without CUDA")
    return lambda x: torch.from_numpy(np.array(x)).cuda(), lambda x: x.cpu().numpy(), lambda x: x.data_ptr()


def of_cupy():
    cupy = pytest.importorskip("cupy")
    return cupy.asarray, cupy.asnumpy, lambda x: x.data.ptr


def of_jax():
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("a jax without CUDA")
    return lambda x: jax.device_put(x, device), np.asarray, lambda x: x.unsafe_buffer_pointer()


LIBRARIES = {"torch": of_torch, "cupy": of_cupy, "jax": of_jax}


@pytest.fixture(scope="module")
def module():
    function = jax.jit(lambda x, w: jnp.tanh(x) * w)
    return aotc.load(aotc.compile(function, array(64, 64), array(64, 64), target="cuda:sm_90"))


def moved(module, monkeypatch):
    """What is copied between host and GPU from now on, on any stream."""
    found = []
    for name in ("upload", "download", "copy"):
        copy = getattr(driver.Gpu, name)
        monkeypatch.setattr(driver.Gpu, name, noted(found, name, copy))
    return found


def noted(found, name, copy):
    def run(*arguments):
        found.append(name)
        copy(*arguments)

    return run


@pytest.mark.parametrize("library", LIBRARIES)
def test_arguments_and_buffers(library, module, monkeypatch):
    make, read, address = LIBRARIES[library]()
    x, w = array(64, 64), array(64, 64, seed=1)
    ours, weight, want = make(x), make(w), np.tanh(x) * w
    with monkeypatch.context() as patch:
        found = moved(module, patch)
        for _ in range(3):
            (made,) = module.invoke("main", ours, weight, results="device")
        assert not found
    np.testing.assert_allclose(made.numpy(), want, rtol=1e-5, atol=1e-6)
    bound = module.bind({1: weight})
    assert bound.arrays[1].address == address(weight)
    np.testing.assert_allclose(bound(ours), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.submit("main", ours, weight).result()[0], want, rtol=1e-5, atol=1e-6)
    if library == "jax":  # whose arrays nobody writes to
        return
    out = make(np.zeros((64, 64), "f4"))
    assert module.invoke("main", ours, weight, out=[out])[0] is out
    np.testing.assert_allclose(read(out), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_theirs(library, module):
    make, read, address = LIBRARIES[library]()
    (made,) = module.invoke("main", make(array(64, 64)), make(array(64, 64)), results="device")
    take = {"torch": lambda m: m.from_dlpack, "cupy": lambda m: m.from_dlpack, "jax": lambda m: m.dlpack.from_dlpack}
    taken = take[library](pytest.importorskip(library))(made)
    assert address(taken) == made.address
    np.testing.assert_allclose(read(taken), made.numpy())


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_the_producers_work_is_waited_for(library, module):
    """Its stream is given long work right before; the host does not wait for it before the call."""
    make, _, _ = LIBRARIES[library]()
    big = make(np.eye(4096, dtype="f4"))
    for n in range(20):
        y = big
        for _ in range(8):
            y = y @ big
        x = y[:64, :64].T.contiguous() if library == "torch" else y[:64, :64].copy()
        x = x * float(n)
        (made,) = module.invoke("main", x, make(np.ones((64, 64), "f4")), results="device")
        np.testing.assert_allclose(made.numpy(), np.tanh(n * np.eye(64, dtype="f4")), rtol=1e-5, atol=1e-6)


def test_another_stream_of_torch(module):
    torch = pytest.importorskip("torch")
    of_torch()
    with torch.cuda.stream(torch.cuda.Stream()):
        for n in range(20):
            x = torch.full((64, 64), float(n), device="cuda")
            for _ in range(50):
                x = x + 1
            (made,) = module.invoke("main", x, torch.ones((64, 64), device="cuda"), results="device")
            np.testing.assert_allclose(made.numpy(), np.tanh(np.full((64, 64), n + 50.0)), rtol=1e-5)


def test_what_is_not_row_major(module):
    make, _, _ = of_torch()
    x = make(array(64, 64))
    with pytest.raises(CallError, match="not in row-major order"):
        module.invoke("main", x.T, x)


def test_a_tensor_on_the_gpu_for_the_host():
    make, _, _ = of_torch()
    x = array(8, 8)
    np.testing.assert_array_equal(aotc.load(aotc.compile(jax.jit(jnp.negative), x))(make(x)), -x)


def test_products_of_arrays_that_lie_elsewhere():
    """Tensor maps, launches and copies of graphs that were recorded for other arrays; weights that are bound, too."""
    make = [lambda n: np.asarray(jnp.asarray(array(256, 256, seed=n), jnp.bfloat16))] * 3
    function = jax.jit(lambda x, w, y: (jnp.tanh(x @ w), y))
    module = aotc.load(aotc.compile(function, *(f(0) for f in make), target="cuda:sm_90a"))
    assert any(kernel.get("launch", {}).get("maps") for kernel in module._executable.gpus[0].kernels.values())
    given = [[f(n + 7 * k) for k, f in enumerate(make)] for n in range(12)]
    placed = [[module.put(a) for a in row] for row in given]
    bound = module.bind({1: given[0][1]})
    made = [module.invoke("main", *row, results="device") for row in placed]
    made += [bound.invoke(x, y, results="device") for x, _, y in placed]
    for n, (product, y) in enumerate(made):
        row = given[n % 12]
        w = row[1] if n < 12 else given[0][1]
        want = np.tanh(row[0].astype("f4") @ w.astype("f4"))
        np.testing.assert_allclose(product.numpy().astype("f4"), want, rtol=1e-2, atol=1e-2)
        np.testing.assert_array_equal(y.numpy(), row[2])


def test_large_arrays():
    x = np.random.default_rng(0).integers(0, 1 << 30, 40_000_001).astype("i4")
    module = aotc.load(aotc.compile(jax.jit(lambda x: x ^ 5), x, target="cuda:sm_90"))
    for n in range(3):
        np.testing.assert_array_equal(module(x + n), (x + n) ^ 5)


def test_many_threads(module):
    found = {}

    def run(n):
        x = np.full((64, 64), n, "f4")
        for _ in range(50):
            found.setdefault(n, []).append(module.invoke("main", x / 8, x)[0])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, made in found.items():
        assert len(made) == 50
        for x in made:
            np.testing.assert_allclose(x, np.tanh(np.full((64, 64), n / 8)) * n, rtol=1e-5)


def test_out_of_memory(module):
    """What is wanted, what there is, and the largest; afterwards all is as before."""
    data = aotc.compile(jax.jit(lambda x: x ^ 5), jax.ShapeDtypeStruct((1 << 28,), "int32"), target="cuda:sm_90")
    large = aotc.load(data)
    large._executable.gpu.make_context_current()
    taken = large._executable.gpu.allocate(driver.memory_info()[0] - (1 << 30))
    with pytest.raises(CallError, match=r"planned peak of [\d,]+(.|\n)*free of(.|\n)*1,073,741,824 of result 0"):
        large.invoke("main", np.zeros(1 << 28, "i4"))
    large._executable.gpu.free([taken])
    x = array(64, 64)
    np.testing.assert_allclose(module.invoke("main", x, x)[0], np.tanh(x) * x, rtol=1e-5, atol=1e-6)
