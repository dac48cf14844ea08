"""The CPU and GPUs together, on the hardware: numbers, memory, copies between GPUs, the end of a process."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, alone
from devices.test_gpu_fences import ended, under_way
from devices.test_streams import ROUND
from lowering.test_devices import (
    FIRST,
    PROGRAMS,
    SECOND,
    T,
    inputs_of,
    on_one_device,
    product,
    random_program,
    stages,
)  # fmt: skip
from support.small_models import array
from vmfb.test_interruption import ENDLESS

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.errors import CallError
from aotc.vmfb.profile.cost_record import record_problem

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]

GPUS = 0 if driver.missing() else driver.device_count()
several = pytest.mark.skipif(GPUS < 2, reason="one GPU")


def check(module, arrays, want, calls=3, tolerance=1e-4):
    for n in range(calls):
        results = "device" if n == 1 else ""
        for x, y in zip(module.invoke("main", *arrays, results=results), want, strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=tolerance, atol=tolerance * max(np.abs(y).max(), 1))


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_one_device(name, halves, level):
    text = PROGRAMS[name][0]
    module = aotc.load(aotc.compile(text, devices=HALVES[halves], opt_level=level))
    arrays = inputs_of(module)
    check(module, arrays, alone(text, *arrays))


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    text = random_program(np.random.default_rng(seed))
    kinds = ["cpu", "cuda:sm_90", "cuda:sm_90", "cpu"]
    devices = {f"d{n}": kinds[(n + seed) % 4] for n in range(4) if f'"d{n}"' in text}
    module = aotc.load(aotc.compile(text, opt_level=seed % 4, devices=devices))
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    check(module, arrays, interpret(import_model(on_one_device(text)), *arrays))


@pytest.mark.parametrize("halves", HALVES)
def test_large_stages(halves):
    """The seed of S1 at its own sizes, many times: what is not waited for would show."""
    text = stages().replace("256", "4096")
    module = aotc.load(aotc.compile(text, devices=HALVES[halves]))
    arrays = inputs_of(module)
    check(module, arrays, alone(text, *arrays), calls=50)


def test_two_logical_devices_on_one_gpu():
    module = aotc.load(aotc.compile(ROUND, devices=HALVES["cuda, cuda"]), devices={"d0": "cuda:0", "d1": "cuda:0"})
    arrays = inputs_of(module)
    check(module, arrays, alone(ROUND, *arrays), calls=50)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_stages_on_as_many_devices(count):
    body = "".join(
        f"%a{n} = {product(f'%b{n - 1}' if n else '%x', f'%w{n}')}\n%b{n} = stablehlo.sine %a{n} : {T}\n"
        for n in range(count)
    )
    weights = ", ".join(f'%w{n}: {T} {{aotc.affinity = "d{n}"}}' for n in range(count))
    text = f"func.func public @main(%x: {T} {FIRST}, {weights}) -> {T} {{ {body} return %b{count - 1} : {T} }}"
    text = text.replace("8x8x", "512x512x")
    devices = {f"d{n}": "cpu" if n % 3 == 0 else "cuda:sm_90" for n in range(count)}
    module = aotc.load(aotc.compile(text, devices=devices))
    arrays = [x / np.float32(16) for x in inputs_of(module)]
    check(module, arrays, alone(text, *arrays), calls=10)


def step(h, w):
    return jnp.tanh(h @ w)


def test_a_loop_over_arrays_on_the_gpu():
    """State stays there; its memory is used again, and so are the graphs."""
    h, w = array(256, 256, scale=0.05), array(256, 256, seed=1, scale=0.05)
    module = aotc.load(aotc.compile(jax.jit(step), h, w, target="cuda:sm_90"))
    (state,), (weight,) = (module.invoke("main", x, np.eye(256, dtype="f4"), results="device") for x in (h, w))
    want, weights, used = np.tanh(h), np.tanh(w), []
    for _ in range(20):
        (state,), want = module.invoke("main", state, weight, results="device"), np.tanh(want @ weights)
        used.append(module.stats()["device_bytes"])
    assert len(set(used[4:])) == 1
    np.testing.assert_allclose(state.numpy(), want, rtol=1e-3, atol=1e-5)


def test_a_donated_cache_is_updated_in_place():
    def update(cache, x):
        return jax.lax.dynamic_update_slice(cache, x, (1, 0)), x * 2

    rows, x = array(64, 64), array(1, 64, seed=1)
    module = aotc.load(aotc.compile(jax.jit(update, donate_argnums=0), rows, x, target="cuda:sm_90"))
    (state, _) = module.invoke("main", rows, x, results="device")
    address = state.address
    (after, _) = module.invoke("main", state, 2 * x, results="device", donate=True)
    rows[1] = 2 * x
    assert after.address == address
    np.testing.assert_array_equal(after.numpy(), rows)
    with pytest.raises(CallError, match="was donated"):
        state.numpy()


def test_dlpack_and_the_interface():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("a torch without CUDA")
    x = array(5, 7)
    (made,) = aotc.load(aotc.compile(jax.jit(jnp.sin), x, target="cuda:sm_90")).invoke("main", x, results="device")
    for taken in (torch.from_dlpack(made), torch.as_tensor(made, device="cuda")):
        assert taken.data_ptr() == made.address
        np.testing.assert_allclose(taken.cpu().numpy(), np.sin(x), rtol=1e-6, atol=1e-6)
    kept = torch.from_dlpack(made)
    del made
    np.testing.assert_allclose(kept.cpu().numpy(), np.sin(x), rtol=1e-6, atol=1e-6)


END = """
import os, sys
import numpy as np
import aotc
module = aotc.load(sys.argv[1])
x = np.ones((8, 8), "f4")
kept = [module.invoke("main", x, x, results="device") for _ in range(8)]
if sys.argv[2] == "fork" and not os.fork():
    del kept, module
    sys.exit(0)
if sys.argv[2] == "fork":
    assert os.wait()[1] == 0
    assert np.isfinite(np.asarray(kept[0][0])).all()
capsule = kept[-1][-1].__dlpack__()
"""


@pytest.mark.parametrize("way", ["exit", "fork"])
def test_the_end_of_a_process_that_holds_arrays(way, tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile(PROGRAMS["two results"][0], devices=HALVES["cpu, cuda"]))
    command = [sys.executable, "-W", "ignore", "-c", END, str(path), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_does_not_grow():
    """Events, graphs and blocks of plans that are forgotten go back."""
    shape = jax.export.symbolic_shape("b, 8")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(shape, "float32"))
    module = aotc.load(aotc.compile(exported, target="cuda:sm_90"))
    gpu = module._executable.gpu
    for iteration in range(3):
        for size in range(1, 300):
            module.invoke("main", array(size, 8))
        if not iteration:
            blocks = len(gpu._held.blocks)
    assert len(gpu._held.blocks) <= blocks + 2
    module.trim()
    assert len(gpu._held.blocks) <= 2


class TestOnTwoGpus:
    """Copies from one GPU to the other."""

    pytestmark = several

    def test_default_devices_are_the_gpus_in_order(self):
        module = aotc.load(aotc.compile(ROUND, devices=HALVES["cuda, cuda"]))
        assert module.devices == {"d0": "cuda:0", "d1": "cuda:1"}

    @pytest.mark.parametrize("places", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
    def test_stages(self, places):
        text = ROUND.replace("8x8x", "1024x1024x")
        devices = dict(zip(("d0", "d1"), places))
        module = aotc.load(aotc.compile(text, devices=HALVES["cuda, cuda"]), devices=devices)
        arrays = [x / np.float32(8) for x in inputs_of(module)]
        check(module, arrays, alone(text, *arrays), calls=30)

    def test_a_large_value_is_moved_whole(self):
        big = "tensor<4096x4096xf32>"
        text = f"""func.func public @main(%x: {big} {FIRST}, %w: tensor<f32> {SECOND}) -> {big} {{
          %0 = stablehlo.negate %x : {big}
          %1 = stablehlo.custom_call @aotc.transfer(%0) {{aotc.to = "d1"}} : ({big}) -> {big}
          %b = stablehlo.broadcast_in_dim %w, dims = [] : (tensor<f32>) -> {big}
          %2 = stablehlo.multiply %1, %b : {big}
          return %2 : {big} }}"""
        module = aotc.load(aotc.compile(text, devices=HALVES["cuda, cuda"]))
        x = array(4096, 4096)
        for n in range(1, 5):
            (found,) = module.invoke("main", x, np.float32(n))
            assert found.ordinal == 1
            np.testing.assert_array_equal(found.numpy(), -x * np.float32(n))

    def test_an_array_of_the_other_gpu_is_moved(self):
        data = aotc.compile(jax.jit(jnp.negative), array(8, 8), target="cuda:sm_90")
        one, other = (aotc.load(data, devices=f"cuda:{n}") for n in range(2))
        (made,) = one.invoke("main", array(8, 8), results="device")
        (again,) = other.invoke("main", made, results="device")
        assert (made.ordinal, again.ordinal) == (0, 1)
        np.testing.assert_array_equal(again.numpy(), array(8, 8))


class TestFencesOnAGpu:
    """Calls that end early, and calls that follow each other."""

    @pytest.fixture
    def endless(self):
        return aotc.load(aotc.compile(ENDLESS.replace("200", "512"), target="cuda:sm_90"))

    @pytest.mark.parametrize("how", ["cancel", "deadline"])
    def test_a_loop_of_the_host_ends(self, endless, how):
        x = np.full((512, 512), 0.5, "f4")
        gpu = endless._executable.gpu
        for iteration in range(5):
            fence = endless.submit("unfused", x, results="device", **({"deadline": 0.05} if how == "deadline" else {}))
            if how == "cancel":
                under_way(fence)
                assert fence.cancel()
                assert fence.done
            with pytest.raises(aotc.FenceCancelled if how == "cancel" else aotc.DeadlineExceeded):
                fence.result()
            ended(endless)
            if iteration == 1:
                blocks, events = len(gpu._held.blocks), len(gpu._held.events)
        assert (len(gpu._held.blocks), len(gpu._held.events)) == (blocks, events)
        np.testing.assert_array_equal(endless.submit("double", x).result()[0], 2 * x)

    def test_a_kernel_under_way(self):
        """The fence fails while the kernel runs on; the array that it reads stays, and the next call is right."""
        iterations = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y) + x, x))
        x = array(7)
        module = aotc.load(aotc.compile(iterations, np.int32(1), x, target="cuda:sm_90"))
        given = module.invoke("main", np.int32(1), x, results="device")[0]
        copied = given.numpy()
        fence = module.submit("main", np.int32(2_000_000), given, results="device")
        under_way(fence)
        del given
        assert fence.cancel()
        assert fence.done
        after = module.submit("main", np.int32(1), copied, results="device").result()[0]
        np.testing.assert_allclose(after.numpy(), np.sin(copied) + copied, rtol=1e-5, atol=1e-6)
        ended(module)

    @pytest.mark.parametrize("halves", HALVES)
    def test_many_calls_at_the_same_time(self, halves):
        text = stages()
        module = aotc.load(aotc.compile(text, devices=HALVES[halves]))
        x, *rest = inputs_of(module)
        want = [alone(text, x + n, *rest)[0] for n in range(4)]
        made = [
            module.submit("main", x + n % 4, *rest, results="numpy" if n % 3 else "device") for n in range(200)
        ]
        for n, fence in enumerate(made):
            scale = np.abs(want[n % 4]).max()
            np.testing.assert_allclose(np.asarray(fence.result(300)[0]), want[n % 4], rtol=1e-3, atol=1e-4 * scale)


def test_a_cache_that_stays_on_the_gpu():
    """Given away again and again, in a loop of the model too and by submissions: the same memory, nothing copied."""

    def updates(cache, row, at):
        return jax.lax.fori_loop(0, 4, lambda i, c: jax.lax.dynamic_update_slice(c, row * i, (at + i, 0)), cache)

    rows, row = array(1024, 256), array(1, 256, seed=1)
    module = aotc.load(aotc.compile(jax.jit(updates, donate_argnums=0), rows, row, np.int32(0), target="cuda:sm_90"))
    (cache,) = module.invoke("main", rows, row, np.int32(3), results="device")
    address, want = cache.address, rows.copy()
    for at in (3, 9, 40, 80):
        want[at : at + 4] = row * np.arange(4, dtype="f4")[:, None]
        old = cache
        if at == 40:
            (cache,) = module.submit("main", cache, row, np.int32(at), donate=True, results="device").result()
        else:
            (cache,) = module.invoke("main", cache, row, np.int32(at), donate=True, results="device")
        assert cache.address == address
        with pytest.raises(CallError, match="was donated"):
            old.numpy()
    np.testing.assert_array_equal(cache.numpy(), want)


@pytest.mark.parametrize("halves", HALVES)
def test_profiles(halves):
    """Each kernel has a time, by the name of its GPU too, and the call that was measured is right."""
    text = stages()
    module = aotc.load(aotc.compile(text, devices=HALVES[halves]))
    record = module.profile("main", *inputs_of(module))
    assert record_problem(record) == ""
    homes = {"cpu": ("cpu",), "d0": ("cuda", "d0"), "d1": ("cuda", "d1")}
    want = {homes["cpu" if target == "cpu" else name] for name, target in HALVES[halves].items()}
    assert {tuple(row["ns"]) for row in record["kernels"]} == want
    assert all(0 < ns < 1e8 for row in record["kernels"] for ns in row["ns"].values())


def test_a_memory_limit():
    """Plans of other sizes give their memory back; a call too large says so."""
    n = jax.export.symbolic_shape("n, 1024")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(n, "float32"))
    module = aotc.load(aotc.compile(exported, target="cuda:sm_90"), memory_limit=24 << 20)
    for rows in (2000, 1000, 1999, 2048, 10, 2000):
        x = array(rows, 1024)
        np.testing.assert_allclose(module.invoke("main", x)[0], jax.nn.softmax(x), rtol=1e-4, atol=1e-7)
    row = module.stats()["memory"]["cuda:0"]
    assert row["high_water"] <= row["limit"] + module.stats()["constants_bytes"]
    with pytest.raises(CallError, match="working memory on GPU 0"):
        module.invoke("main", array(9000, 1024))
    module.trim()
    assert module.stats()["memory"]["cuda:0"]["in_use"] == module.stats()["constants_bytes"]
