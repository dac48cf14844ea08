"""Large constants of sharded functions: XLA's partitioner does not get them, and bundles have them as others do."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.rank_cases import run_threads
from support.sharded_models import CASES, check, run_on_threads

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.partition import hoist, partition
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.cpu

MESH = AbstractMesh((2, 2), ("data", "model"))
SIZE = 4096
COLUMNS = NamedSharding(MESH, P(None, "model"))


def weight(size=SIZE):
    return (np.arange(size * size, dtype=np.int64) * 2654435761 % 1021).astype("f4").reshape(size, size) / 1021


# The same function on four devices of JAX, in a process of its own.
ORACLE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
w = (np.arange(4096 * 4096, dtype=np.int64) * 2654435761 % 1021).astype("f4").reshape(4096, 4096) / 1021
x = np.linspace(-1, 1, 8 * 4096, dtype="f4").reshape(8, 4096)

def f(x):
    cut = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "model")))
    return x @ cut + jax.numpy.tanh(x) @ w

y = jax.jit(f, in_shardings=NamedSharding(mesh, P("data")))(x)
np.save(sys.argv[1], np.asarray(y))
"""


@pytest.fixture
def sent(monkeypatch):
    """Return a list of the sizes of the programs that XLA's partitioner gets."""
    sizes = []
    ask = partition.ask_partitioner

    def counted(request, code, path):
        sizes.append(len(code))
        return ask(request, code, path)

    monkeypatch.setattr(partition, "ask_partitioner", counted)
    return sizes


@pytest.fixture
def all_hoisted(monkeypatch):
    monkeypatch.setattr(hoist, "HOISTED_BYTES", 2)


def rank_results(data, ranks, *args):
    """Return the whole result of a bundle on ranks that are threads."""

    def work(link):
        module = aotc.load(data, ranks=link)
        return module.gather(module(*module.shard(*args)))

    results = run_threads(thread_links(ranks), work)
    errors = [r for r in results if isinstance(r, Exception)]
    if errors:
        raise errors[0]
    return results[0]


def test_64_mib_cut_and_whole_are_those_of_jax(sent, tmp_path):
    w = weight()
    x = np.linspace(-1, 1, 8 * SIZE, dtype="f4").reshape(8, SIZE)

    def f(x):
        cut = jax.lax.with_sharding_constraint(w, COLUMNS)
        return x @ cut + jnp.tanh(x) @ w

    raw = fetch(aotc_function(f), (x,))
    assert sent[0] < 20_000
    assert w.nbytes < len(raw.data) < 1.01 * w.nbytes
    data = aotc.compile(f, x, mesh=MESH, in_shardings=(P("data"),))
    assert len(bytes(data)) < 1.02 * w.nbytes
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ORACLE, str(tmp_path / "y.npy")], env=environment, check=True)
    np.testing.assert_allclose(rank_results(data, 4, x), np.load(tmp_path / "y.npy"), 1e-5, 1e-3)


def aotc_function(f):
    from aotc.frontend.partition.meshes import function_on_mesh

    return function_on_mesh(f, MESH, (P("data"),), None)


def nested(size=64, manual=True):
    """Return a function with a constant in itself, in functions that it calls, in a loop and in ``shard_map``."""
    w = weight(size)

    def inner(x):
        return x @ w

    def f(x):
        y = jax.jit(inner)(x) + jax.jit(inner)(x + 1)
        z = jax.lax.fori_loop(0, 3, lambda i, v: v + jax.lax.with_sharding_constraint(w, COLUMNS)[i], y)
        if not manual:
            return z + x @ w @ w
        mapped = jax.shard_map(lambda a: jax.jit(inner)(a) @ w, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        return z + mapped(x)

    def whole(x):
        return x @ w + (x + 1) @ w + w[0] + w[1] + w[2] + x @ w @ w

    return f, whole, np.linspace(-1, 1, 8 * size, dtype="f4").reshape(8, size)


@pytest.mark.usefixtures("all_hoisted")
def test_constants_of_calls_loops_and_manual_computations():
    f, whole, x = nested()
    data = aotc.compile(f, x, mesh=MESH, in_shardings=(P("data"),))
    np.testing.assert_allclose(rank_results(data, 4, x), whole(x), 1e-5, 1e-5)


def test_a_constant_of_several_functions_is_one_argument(sent, monkeypatch):
    f, whole, x = nested(manual=False)
    raws = []
    for least in (1 << 30, 1 << 14):
        monkeypatch.setattr(hoist, "HOISTED_BYTES", least)
        raws.append(fetch(aotc_function(f), (x,)))
    assert sent[1] < sent[0] - 16_000  # of 16,384 bytes
    assert abs(len(raws[0].data) - len(raws[1].data)) < 1_000
    assert raws[0].metadata["ranks"] == raws[1].metadata["ranks"]
    data = aotc.compile(raws[1])
    np.testing.assert_allclose(rank_results(data, 4, x), whole(x), 1e-5, 1e-5)


@pytest.mark.usefixtures("all_hoisted")
@pytest.mark.parametrize("name", CASES)
def test_all_constants_of_sharded_models_may_be_hoisted(name):
    case = CASES[name]
    check(case, run_on_threads(case.compile(source=False), case.args))


def test_a_bundle_is_as_without_hoisting(monkeypatch):
    f, _, x = nested(manual=False)
    found = []
    for least in (1 << 30, 1 << 14):
        monkeypatch.setattr(hoist, "HOISTED_BYTES", least)
        found.append(aotc.compile(f, x, mesh=MESH, in_shardings=(P("data"),), source=False))
    manifests = [open_bundle(data).manifest for data in found]
    for key in ("functions", "mesh"):
        assert manifests[0][key] == manifests[1][key]
    sizes = [aotc.inspect(data).variants[0].weights for data in found]
    assert sizes[0] == sizes[1] >= 64 * 64 * 4


OLD = """module attributes {mhlo.num_partitions = 4 : i32} {
  func.func public @main(%x: tensor<8x16xf32> {mhlo.sharding = "{devices=[4,1]<=[4]}"}) -> tensor<8x16xf32> {
    %w = stablehlo.constant dense<"0xWEIGHTS"> : tensor<16x16xf32>
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
    return %y : tensor<8x16xf32>
  }
}"""


def test_text_with_shardings_of_mhlo(sent, monkeypatch):
    w, x = weight(16), np.linspace(-1, 1, 128, dtype="f4").reshape(8, 16)
    text = OLD.replace("WEIGHTS", w.tobytes().hex().upper())
    monkeypatch.setattr(hoist, "HOISTED_BYTES", 1024)
    data = aotc.compile(text)
    assert sent[0] < 2_000
    np.testing.assert_allclose(rank_results(data, 4, x), x @ w, 1e-5, 1e-5)


def test_repeated_and_small_constants_stay(sent):
    big = np.full((1024, 1024), 2.0, "f4")

    def f(x):
        return x @ big + np.arange(1024, dtype="f4")

    x = np.ones((8, 1024), "f4")
    data = aotc.compile(f, x, mesh=MESH, in_shardings=(P("data"),))
    assert 4096 < sent[0] < 20_000
    np.testing.assert_allclose(rank_results(data, 4, x), 2048 + np.broadcast_to(np.arange(1024.0), (8, 1024)), 1e-6)
