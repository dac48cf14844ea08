"""What a block takes of a GPU: asked for at its launch, estimated before it is compiled, counted by the linker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, normal

import aotc
from aotc.targets import TARGETS
from aotc.tools.explain.fusion import explain_fusion
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda.launch import fits_gpu_limits


@pytest.mark.ir
@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90a", 1024, 32, 0, 2), ("sm_90a", 1024, 33, 0, 1), ("sm_90a", 1024, 65, 0, 0), ("sm_90a", 128, 32, 0, 16),
        ("sm_90a", 32, 16, 0, 32), ("sm_90a", 128, 168, 0, 3), ("sm_90a", 256, 32, 100 << 10, 2),
        ("sm_90a", 256, 32, 227 << 10, 1), ("sm_90a", 256, 32, 228 << 10, 0), ("sm_80", 256, 32, 80 << 10, 2),
        ("sm_80", 256, 32, 82 << 10, 1), ("sm_86", 1024, 32, 0, 1), ("sm_86", 768, 40, 0, 2), ("sm_89", 64, 32, 0, 24),
    ],
)  # fmt: skip
def test_blocks_of_a_multiprocessor(name, threads, registers, shared, blocks):
    """As NVIDIA's occupancy calculator has them."""
    held = TARGETS[f"cuda:{name}"].multiprocessor
    assert held.resident_blocks(threads, registers, shared) == blocks
    assert held.occupancy(threads, registers, shared) == 100 * blocks * threads // held.threads


def entries(function, *shapes, **flags):
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    bundle = open_bundle(aotc.compile(jax.jit(function), *arguments, **flags))
    return [k for variant in bundle.manifest["variants"] for k in variant["kernels"]]


@pytest.mark.cpu
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_rows_that_ask_for_shared_memory(target):
    """A row of 160 KB is kept in dynamic shared memory; with 48 KiB, and with 4096 bytes, it is read in parts."""
    most = TARGETS[target].shared_memory
    (asks,) = entries(jax.nn.softmax, (256, 40_960), target=target)
    assert 40_960 * 4 < asks["launch"]["shared"] == asks["resources"]["shared"] <= most
    assert asks["launch"]["blocks"] == [256, 1, 1]
    assert fits_gpu_limits(asks)
    assert asks["resources"]["blocks"] == 1
    for limit in (48 << 10, 4096):
        kernels = entries(jax.nn.softmax, (256, 40_960), target=target, shared_memory_limit=limit)
        assert len(kernels) == 3
        assert all("launch" not in k and k["resources"]["shared"] <= limit for k in kernels)


@pytest.mark.cpu
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_products_keep_to_a_limit(target):
    """By the linker's count, and what the launch asks for."""
    asked = []
    for limit in (0, 48 << 10, 4096):
        *_, kernel = entries(jnp.dot, (256, 128), (128, 192), target=target, shared_memory_limit=limit)
        assert kernel["resources"]["shared"] <= min(limit or 227 << 10, TARGETS[target].shared_memory)
        asked.append(kernel.get("launch", {}).get("shared", 0))
    assert asked[0] > asked[1] > asked[2] == 0


@pytest.mark.cpu
def test_a_row_is_kept_by_enough_threads():
    (region,) = explain_fusion(jax.jit(jax.nn.softmax), normal(256, 40_000), target="cuda:sm_90").regions
    assert (region.threads, region.occupancy) == (1024, 50)


REGIONS = {
    "sine": (lambda x: jnp.tanh(x) * 2 + 1, [(64, 1000)]),
    "many": (lambda *xs: sum(jnp.abs(x) * (n + 1) for n, x in enumerate(xs)), [(1000,)] * 9),
    "softmax": (jax.nn.softmax, [(256, 3000)]),
    "layer_norm": (lambda x: (x - x.mean(-1, keepdims=True)) / (x.var(-1, keepdims=True) + 1), [(256, 3000)]),
    "gelu": (lambda x, y: jax.nn.gelu(x + y) * y, [(64, 1000)] * 2),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", REGIONS)
def test_the_estimate_of_registers_is_near_the_linkers_count(name):
    function, shapes = REGIONS[name]
    (entry,) = entries(function, *shapes, target="cuda:sm_90")
    arguments = [np.zeros(shape, "float32") for shape in shapes]
    (region,) = explain_fusion(jax.jit(function), *arguments, target="cuda:sm_90").regions
    assert entry["resources"]["registers"] / 2 <= region.registers <= 2 * entry["resources"]["registers"]
    assert region.threads == entry["threads"]
    assert entry["resources"]["spills"] == 0


@pytest.mark.cuda
@pytest.mark.parametrize("limit", [0, 48 << 10, 4096])
@pytest.mark.parametrize("length", [40_960, 50_000, 1 << 17])
def test_long_rows_on_a_gpu(length, limit):
    x = 3 * normal(140, length) + 1
    data = aotc.compile(jax.jit(jax.nn.softmax), x, target="cuda:sm_80,cuda:sm_90", shared_memory_limit=limit)
    close([aotc.load(data, devices="cuda")(x)], [jax.jit(jax.nn.softmax)(x)], factor=20)
