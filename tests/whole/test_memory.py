"""What calls take of memory: as much as the bundle says, no more than a limit, and given back when asked."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.vmfb.abi import Graph
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import device_module
from aotc.vmfb.devices.cpu.device import CpuExecutable
from aotc.vmfb.verify.buffers import load_command_buffers

pytestmark = pytest.mark.cpu

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
DIAMOND = (PROGRAMS / "diamond.mlir").read_text()
REREAD = (PROGRAMS / "reread.mlir").read_text()

CHILD = """
import json, sys
import numpy as np, aotc
path, threads, name, shapes = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
rng = np.random.default_rng(0)
arguments = [rng.standard_normal(s).astype(np.float32) for s in shapes]
module = aotc.load(path, threads=threads)
idle = rss()
for _ in range(3):
    module.invoke(name, *arguments)
busy = rss()
before = module.stats()["memory"]["cpu"]
module.trim()
print(json.dumps({"memory": before, "after": module.stats()["memory"]["cpu"], "rss": [idle, busy, rss()]}))
"""


def variant(data):
    return open_bundle(data).manifest["variants"][0]


def memory(data, name="main"):
    """Arena and scratch bytes of a function."""
    row = variant(data)["memory"][name]
    return row["arena"], row["scratch"]


def in_a_process(path, data, threads, name, shapes):
    path.write_bytes(data)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(path), str(threads), name, json.dumps(shapes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.fixture(scope="module")
def diamond():
    return aotc.compile(DIAMOND, verify_each=True)


def sorted_rows(x):
    return jnp.sort(x, 1)[::-1] * 2


@pytest.fixture(scope="module")
def sorts():
    """A function whose threads each want memory of their own."""
    return aotc.compile(sorted_rows, *random((1024, 1024)), verify_each=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_allocates_exactly_the_stated_memory(tmp_path, sorts, threads):
    """The scratch memory of the threads included, to the byte; trimmed, the process is as small as before."""
    found = in_a_process(tmp_path / "s.vmfb", sorts, threads, "main", [[1024, 1024]])
    arena, scratch = memory(sorts)
    assert scratch > 0
    idle = {name: found["memory"][name] for name in ("in_use", "idle", "high_water")}
    assert idle == {"in_use": 0, "idle": arena + threads * scratch, "high_water": arena + threads * scratch}
    assert found["after"]["idle"] == 0
    idle, busy, trimmed = found["rss"]
    assert busy > idle
    assert trimmed < 1.1 * idle


def test_small_kernels_run_next_to_a_matmul(diamond):
    """Nothing that they read is made by another command."""
    bundle = open_bundle(diamond)
    device_module("cpu").check(bundle, variant(diamond))
    names = [k["name"] for k in variant(diamond)["kernels"]]
    buffers = load_command_buffers(bundle, variant(diamond)).nodes
    (graph,) = (n for nodes in buffers for n in nodes if isinstance(n, Graph))
    small = [c for c in graph.commands if "cos" in names[c.kernel]]
    assert len(small) == 64
    assert {c.predecessors for c in small} == {0}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_memory_limit_of_60_percent_is_kept(tmp_path, diamond, threads):
    """The numbers are the same."""
    limit = 6 * sum(memory(diamond, "diamond")) // 10
    small = aotc.compile(DIAMOND, memory_limit=limit, verify_each=True)
    assert variant(small)["memory_limit"] == limit
    found = in_a_process(tmp_path / "d.vmfb", small, threads, "diamond", [[1024, 1024], [64, 32]])
    assert found["memory"]["high_water"] <= limit
    arguments = random((1024, 1024), (64, 32))
    want = aotc.load(diamond, threads=threads).invoke("diamond", *arguments)
    got = aotc.load(small, threads=threads).invoke("diamond", *arguments)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_threads_without_scratch_memory_do_not_take_part(tmp_path, sorts):
    arena, scratch = memory(sorts)
    limited = aotc.compile(sorted_rows, *random((1024, 1024)), memory_limit=arena + 3 * scratch // 2)
    found = in_a_process(tmp_path / "s.vmfb", limited, 2, "main", [[1024, 1024]])
    assert found["memory"]["high_water"] == arena + scratch


def test_a_memory_limit_recomputes_values():
    whole = aotc.compile(REREAD, verify_each=True)
    peak = sum(memory(whole))
    small = aotc.compile(REREAD, memory_limit=3 * peak // 4, verify_each=True)
    assert sum(memory(small)) <= 3 * peak // 4
    buffers = load_command_buffers(open_bundle(small), variant(small)).nodes
    launches = [c.kernel for nodes in buffers for c in nodes[0].commands]
    assert len(launches) > len(set(launches))  # a kernel runs twice
    (x,) = random((512, 512))
    for a, b in zip(aotc.load(small).invoke("main", x), aotc.load(whole).invoke("main", x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unattainable_memory_limit_is_an_error_with_sizes():
    with pytest.raises(aotc.CompileError) as caught:
        aotc.compile(REREAD, memory_limit=1_000_000)
    message = str(caught.value)
    assert "more than the memory limit of 1,000,000" in message
    assert "1,048,576 bytes of k" in message
    assert "memory-limit" in message


def test_symbolic_sizes_keep_a_limit_at_their_typical_values(tmp_path):
    text, typical = REREAD.replace("512x", "?x"), {"d1": 512}
    whole = aotc.compile(text, typical=typical, verify_each=True)
    (path := tmp_path / "whole.vmfb").write_bytes(whole)
    peak = in_a_process(path, whole, 1, "main", [[512, 512]])["memory"]["high_water"]
    limit = 5 * peak // 6
    small = aotc.compile(text, typical=typical, memory_limit=limit, verify_each=True)
    (path := tmp_path / "small.vmfb").write_bytes(small)
    assert in_a_process(path, small, 1, "main", [[512, 512]])["memory"]["high_water"] <= limit < peak
    (x,) = random((300, 300))
    np.testing.assert_array_equal(*(aotc.load(b).invoke("main", x)[0] for b in (small, whole)))


def test_a_limit_too_small_for_symbolic_sizes_is_an_error_with_the_assumed_sizes():
    text = r"at d1=512 \(assumed\), [\d,]+ more than the memory limit of 1,000,000"
    with pytest.raises(aotc.CompileError, match=text):
        aotc.compile(REREAD.replace("512x", "?x"), typical={"d1": 512}, memory_limit="1MB")


def test_the_order_of_ops_lowers_the_peak():
    """Each product is summed before the next one is made."""

    def products_then_sums(x):
        return [p.sum(1) for p in [x @ (x * n) for n in range(1, 9)]]

    (x,) = random((256, 256))
    data = aotc.compile(jax.jit(products_then_sums), x, verify_each=True)
    assert memory(data)[0] < 5 * x.nbytes
    got = aotc.load(data, threads=2).invoke("main", x)
    for a, b in zip(got, jax.jit(products_then_sums)(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_temporaries_of_a_result_use_its_memory():
    def layer(h, w):
        return jnp.tanh(h @ w) + h @ w.T

    arguments = random((50, 64), (64, 64))
    data = aotc.compile(jax.jit(layer), *arguments, verify_each=True)
    got = aotc.load(data).invoke("main", *arguments)
    np.testing.assert_allclose(got[0], jax.jit(layer)(*arguments), rtol=1e-5, atol=1e-4)


def test_concurrent_calls_share_the_memory_limit(diamond):
    arguments = random((1024, 1024), (64, 32))
    arena, scratch = memory(diamond, "diamond")
    limit = arena + scratch
    module = aotc.load(diamond, threads=2, memory_limit=limit)
    want = aotc.load(diamond, threads=1).invoke("diamond", *arguments)
    wrong = []

    def work():
        got = module.invoke("diamond", *arguments)
        if not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
            wrong.append(got)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert module.stats()["memory"]["cpu"]["high_water"] == limit
    small = aotc.load(diamond, memory_limit=arena - 1)
    with pytest.raises(aotc.CallError, match="bytes of working memory"):
        small.invoke("diamond", *arguments)


def test_functions_have_scratch_memory_of_their_own():
    """A sort of 2,000 takes scratch memory; a function beside it does not."""
    text = """module {
  func.func public @order(%x: tensor<2000xf32>, %i: tensor<2000xi32>) -> tensor<2000xi32> {
    %0:2 = "stablehlo.sort"(%x, %i) <{dimension = 0 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
      %1 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    }) : (tensor<2000xf32>, tensor<2000xi32>) -> (tensor<2000xf32>, tensor<2000xi32>)
    return %0#1 : tensor<2000xi32>
  }
  func.func public @plain(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.sine %x : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}"""
    data = aotc.compile(text)
    assert memory(data, "order")[1] > 16_000
    assert memory(data, "plain") == (0, 0)
    module = aotc.load(data, threads=2, memory_limit=2 * memory(data, "order")[1])
    module.invoke("plain", np.ones(4, np.float32))
    assert module.stats()["memory"]["cpu"]["high_water"] == 0
    (x,) = random((2000,))
    got = module.invoke("order", x, np.arange(2000, dtype=np.int32))[0]
    np.testing.assert_array_equal(got, np.argsort(x, kind="stable"))
    assert module.stats()["memory"]["cpu"]["high_water"] == 2 * memory(data, "order")[1]


def test_calls_with_computed_sizes_limit_their_threads(monkeypatch):
    """It takes its memory bit by bit; no thread works in scratch memory that there is not."""
    text = """func.func public @main(%x: tensor<32x2000xf32>, %i: tensor<32x2000xi32>, %n: tensor<i32>)
      -> (tensor<32x2000xi32>, tensor<i32>) {
    %0:2 = "stablehlo.sort"(%x, %i) <{dimension = 1 : i64, is_stable = true}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
      %1 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    }) : (tensor<32x2000xf32>, tensor<32x2000xi32>) -> (tensor<32x2000xf32>, tensor<32x2000xi32>)
    %s = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %j = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %m = stablehlo.reduce(%j init: %zero) applies stablehlo.maximum across dimensions = [0]
      : (tensor<?xi32>, tensor<i32>) -> tensor<i32>
    return %0#1, %m : tensor<32x2000xi32>, tensor<i32>
  }"""
    data = aotc.compile(text)
    scratch = memory(data)[1]
    used = []
    call = CpuExecutable._native_call

    def noted(self, buffer, slots, parameters, start, threads):
        used.append(buffer.stride * threads)
        return call(self, buffer, slots, parameters, start, threads)

    monkeypatch.setattr(CpuExecutable, "_native_call", noted)
    module = aotc.load(data, threads=4, memory_limit=scratch + 20_000)
    (x,) = random((32, 2000))
    got = module.invoke("main", x, np.tile(np.arange(2000, dtype=np.int32), (32, 1)), np.int32(7))
    np.testing.assert_array_equal(got[0], np.argsort(x, axis=1, kind="stable"))
    assert got[1] == 6
    assert max(used) == scratch
