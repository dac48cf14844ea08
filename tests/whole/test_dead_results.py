"""Results that nobody reads take no memory, at any level, and the others are what they are without that."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from vmfb.simulated_gpu import install

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.describe import describe_bundle

pytestmark = pytest.mark.cpu

TOPK = Path(__file__).parents[1] / "support" / "programs" / "topk.mlir"
LEVELS = (0, 1, 2, 3)
DTYPES = {
    "i8": np.int8, "ui8": np.uint8, "i16": np.int16, "ui16": np.uint16, "i32": np.int32, "ui32": np.uint32,
    "i64": np.int64, "ui64": np.uint64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32,
    "f64": np.float64,
}  # fmt: skip


@pytest.fixture(scope="module", params=LEVELS)
def bundle(request):
    return aotc.compile(TOPK.read_text(), opt_level=request.param)


def facts(data, target=0):
    """What ``aotc inspect --json`` says of a target, the first of which may be the only one."""
    return json.loads(json.dumps(describe_bundle(open_bundle(data), len(data))))["variants"][target]


def in_total_order(x):
    """Integers that order as IEEE 754's totalOrder does."""
    bits = np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").astype(object)
    return np.where(bits < 0, -(bits & ((1 << (8 * x.dtype.itemsize - 1)) - 1)) - 1, bits)


def largest(x, k):
    """Values and positions of the ``k`` largest of each row, equal ones by position."""
    key = x.astype(object) if x.dtype.kind in "iu" else in_total_order(x)
    order = np.array([sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in key], np.int32)
    order = order.reshape(len(x), k)
    return np.take_along_axis(x, order.astype(np.int64), 1), order


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def test_each_function_has_one_dispatch_without_unused_outputs(bundle):
    module = open_bundle(bundle).manifest["variants"][0]
    assert [len(k["extents"]) - k["inputs"] for k in module["kernels"]] == [2, 1, 1]  # outputs
    assert len(module["command_buffers"]) == 3


def test_unused_results_take_no_memory(bundle):
    found = facts(bundle)
    buffers = {}
    for row in found["buffers"]:
        buffers.setdefault(row["of"], []).append((row["name"], row["space"], row["bytes"]))
    assert buffers["idx_only"] == [("argument 0", "global", 128), ("result 0", "global", 64)]
    assert [row[1:] for row in buffers["kv_sort"]] == [("global", 256), ("global", 512), ("global", 512)]
    assert {name: row["arena"] for name, row in found["memory"].items()} == {"both": 0, "idx_only": 0, "kv_sort": 0}
    spaces = {row["space"] for row in found["buffers"]}
    assert spaces <= {"global", "arena", "scratch", "private", "shared"}
    held = [row for row in found["buffers"] if row["of"].endswith("sort") and "f32" in row["name"]]
    assert held
    assert {row["space"] for row in held} <= {"scratch", "private"}


@pytest.mark.parametrize("level", LEVELS)
def test_unused_results_take_no_memory_on_gpus(level):
    data = aotc.compile(TOPK.read_text(), target="cuda:sm_80,cuda:sm_90", opt_level=level)
    for n, variant in enumerate(open_bundle(data).manifest["variants"]):
        assert [len(k["extents"]) - k["inputs"] for k in variant["kernels"]] == [2, 1, 1]  # outputs
        found = facts(data, n)
        assert {name: row["arena"] for name, row in found["memory"].items()} == dict.fromkeys(found["memory"], 0)
        of_kernels = {row["space"] for row in found["buffers"] if row["of"].startswith("k")} - {"global"}
        assert of_kernels <= {"private", "shared"}
        arguments = [row["bytes"] for row in found["buffers"] if row["of"] == "idx_only"]
        assert arguments == [128, 64]


def test_remaining_results_match_numpy(bundle):
    module = aotc.load(bundle, threads=2)
    rng = np.random.default_rng(0)
    for rows in (1, 3, 70):
        x = rng.standard_normal((rows, 2, 2)).astype(np.float32)
        values, positions = module.invoke("both", x)
        want = largest(x.reshape(-1, 2), 2)
        np.testing.assert_array_equal(values.reshape(-1, 2), want[0])
        np.testing.assert_array_equal(positions.reshape(-1, 2), want[1])
    x = rng.integers(-2, 3, (8, 4)).astype(np.float32)
    x[0] = [np.nan, 0.0, -0.0, np.nan]
    x[1] = [-np.nan, -np.inf, -0.0, 0.0]
    np.testing.assert_array_equal(module.invoke("idx_only", x)[0], largest(x, 2)[1])
    keys = rng.integers(-5, 5, 64).astype(np.float32)
    keys[[3, 9, 40]] = [np.nan, -0.0, -np.nan]
    values = rng.integers(-(2**62), 2**62, 64)
    order = sorted(range(64), key=lambda i: (in_total_order(keys)[i], i))
    np.testing.assert_array_equal(module.invoke("kv_sort", keys, values)[0], values[order])


@pytest.mark.cuda
@pytest.mark.parametrize("level", LEVELS)
def test_remaining_results_on_a_gpu_have_the_same_bits(level):
    data = aotc.compile(TOPK.read_text(), target="cpu,cuda:sm_80,cuda:sm_90", opt_level=level)
    cpu, gpu = (aotc.load(data, devices=kind) for kind in ("cpu", "cuda"))
    rng = np.random.default_rng(0)
    keys, few = rng.integers(-5, 5, 64).astype(np.float32), rng.integers(-2, 3, (8, 4)).astype(np.float32)
    keys[[3, 9, 40]], few[0] = [np.nan, -0.0, -np.nan], [np.nan, 0.0, -0.0, np.nan]
    pairs = rng.standard_normal((3, 2, 2)).astype(np.float32)
    for name, *arguments in (("both", pairs), ("idx_only", few), ("kv_sort", keys, np.arange(64))):
        for a, b in zip(gpu.invoke(name, *arguments), cpu.invoke(name, *arguments), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


SIZES = ((0, 6), (2, 6), (6, 6), (1, 1))  # k and columns


def of_every_dtype(sizes=SIZES):
    """Functions of 6 columns: positions alone, values alone, both; k of 0, 2, 6, and of one column."""
    lines = ["module {"]
    for name in DTYPES:
        for k, n in sizes:
            x, v, i = f"tensor<5x{n}x{name}>", f"tensor<5x{k}x{name}>", f"tensor<5x{k}xi32>"
            for form, types, read in (("i", i, "%i"), ("v", v, "%v"), ("b", f"{v}, {i}", "%v, %i")):
                lines.append(f"func.func public @{form}_{name}_{k}_{n}(%x: {x}) -> ({types}) {{")
                lines.append(f"%v, %i = chlo.top_k(%x, k = {k}) : {x} -> ({v}, {i})")
                lines.append(f"return {read} : {types} }}")
    return "\n".join([*lines, "}"])


def sample(rng, dtype, columns):
    kind = np.dtype(dtype).kind
    if kind in "iu":
        low = 0 if kind == "u" else -2
        x = rng.integers(low, 3, (5, columns)).astype(dtype)
        info = np.iinfo(dtype)
        x[0, 0], x[-1, -1] = info.max, info.min
        return x
    x = rng.integers(-2, 3, (5, columns)).astype(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[2, -1], x[3, 0] = np.nan, -np.inf, 0.0, -0.0, -np.nan
    return x


@pytest.mark.parametrize("level", [pytest.param(n, marks=[] if n == 2 else pytest.mark.slow) for n in LEVELS])
def test_remaining_results_of_every_dtype_are_right(level):
    """Nothing assumes that values and positions are of one type."""
    check_dtypes(aotc.load(aotc.compile(of_every_dtype(), opt_level=level), threads=1))


@pytest.mark.parametrize("level", [0, 1, 3])
def test_remaining_results_of_every_dtype_and_one_shape_are_right(level):
    check_dtypes(aotc.load(aotc.compile(of_every_dtype(SIZES[1:2]), opt_level=level), threads=1), SIZES[1:2])


@pytest.mark.cuda
@pytest.mark.parametrize("level", LEVELS)
def test_remaining_results_of_every_dtype_on_a_gpu_are_right(level):
    check_dtypes(aotc.load(aotc.compile(of_every_dtype(), target="cuda:sm_80,cuda:sm_90", opt_level=level)))


@pytest.mark.cudasim
def test_remaining_results_of_every_dtype_on_a_simulated_gpu_are_right(monkeypatch):
    pytest.importorskip("cuda.bindings.nvjitlink")
    data = aotc.compile(of_every_dtype(SIZES[1:2]), target="cuda:sm_90")
    install(monkeypatch, data)
    check_dtypes(aotc.load(data), SIZES[1:2])


def check_dtypes(module, sizes=SIZES):
    rng = np.random.default_rng(1)
    for name, dtype in DTYPES.items():
        for k, n in sizes:
            x = sample(rng, dtype, n)
            values, positions = largest(x, k)
            for form, want in (("i", [positions]), ("v", [values]), ("b", [values, positions])):
                got = module.invoke(f"{form}_{name}_{k}_{n}", x)
                for a, b in zip(got, want, strict=True):
                    assert a.shape == b.shape, (name, form, k)
                    np.testing.assert_array_equal(bits(a), bits(b), err_msg=f"{name} {form} k={k}")


def wide(x):
    return jax.lax.top_k(x, 50)[1]


def chosen(x, table):
    _, positions = jax.lax.top_k(x, 3)
    return jnp.take_along_axis(table, positions, axis=1)


def other_of_two(k, v, w):
    return jax.lax.sort((k, v, w), num_keys=1)[2]


def where_largest(x):
    return jnp.argmax(x, axis=0), x.sum(1)


def beside_xla(function, **flags):
    """Compare a function with XLA, bit for bit at all levels."""
    rng = np.random.default_rng(2)
    rows = rng.integers(-9, 9, (3, 400)).astype(np.float32)
    shapes = {
        wide: [rng.standard_normal((1, 131_072)).astype(np.float32)],
        chosen: [rows, rng.standard_normal((3, 400)).astype(np.float32)],
        other_of_two: [rows[0], rows[1], np.arange(400, dtype=np.int32)],
        where_largest: [rng.integers(-9, 9, (30, 50)).astype(np.float32)],
    }
    arguments = shapes[function]
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]
    for level in LEVELS:
        data = aotc.compile(jax.jit(function), *arguments, opt_level=level, **flags)
        got = aotc.load(data, threads=2).invoke("main", *arguments)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


FUNCTIONS = pytest.mark.parametrize("function", [wide, chosen, other_of_two, where_largest], ids=lambda f: f.__name__)


@FUNCTIONS
def test_functions_with_unused_results_match_xla(function):
    """By selection, with a gather behind it, of three arrays, of a reduction."""
    beside_xla(function)


@pytest.mark.cuda
@FUNCTIONS
def test_functions_with_unused_results_on_a_gpu_match_xla(function):
    beside_xla(function, target="cuda:sm_90")
