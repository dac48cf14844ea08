"""What several functions read of a module's weights is there once, and no more of files than calls read."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vmfb.test_check_bundle import rewritten

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((512, 768)).astype("f4"), "gain": RNG.standard_normal(768).astype("f4")}
MANY, ONE = (RNG.standard_normal((rows, 512)).astype("f4") for rows in (64, 1))
IDS = np.array([[3, 299, 7], [0, 999, 128]], np.int32)


def layer(p, x):
    return (x @ p["w"]) * p["gain"]


def two(**options):
    args = {"prefill": (PARAMS, MANY), "decode": (PARAMS, ONE)}
    return aotc.compile({"prefill": layer, "decode": layer}, args=args, bind=["p"], **options)


def rows_of(module):
    """Return what the functions of a module read that does not change between calls."""
    functions = module.own_weights.functions.values()
    return [[x for x in function.partial.row if x is not None] for function in functions]


def test_functions_share_one_copy_of_weights():
    module = aotc.load(two(weights="unpacked"))
    first, second = rows_of(module)
    assert [x.ctypes.data for x in first] == [x.ctypes.data for x in second]
    np.testing.assert_allclose(module.invoke("decode", ONE)[0], layer(PARAMS, ONE), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(module.invoke("prefill", MANY)[0], layer(PARAMS, MANY), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["w", "gain"])
def test_an_update_reaches_all_functions(name):
    module = aotc.load(two(weights="unpacked"))
    module.update_weights({f"p/{name}": 2 * PARAMS[name]})
    first, second = rows_of(module)
    assert [x.ctypes.data for x in first] == [x.ctypes.data for x in second]
    np.testing.assert_allclose(module.invoke("decode", ONE)[0], 2 * layer(PARAMS, ONE), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(module.invoke("prefill", MANY)[0], 2 * layer(PARAMS, MANY), rtol=1e-3, atol=1e-3)


def test_differently_prepared_weights_are_separate():
    args = {"a": (PARAMS, MANY), "b": (PARAMS, MANY)}
    models = {"a": layer, "b": lambda p, x: (x @ (p["w"] * 2)) * p["gain"]}
    module = aotc.load(aotc.compile(models, args=args, bind=["p"], weights="unpacked"))
    np.testing.assert_allclose(module.invoke("b", MANY)[0], 2 * module.invoke("a", MANY)[0], rtol=1e-4)


def test_arguments_of_different_names_are_separate_weights():
    models = {"a": lambda w, x: x @ w, "b": lambda v, x: x @ v}
    w, v = PARAMS["w"], -PARAMS["w"]
    args = {"a": (w, MANY), "b": (v, MANY)}
    module = aotc.load(aotc.compile(models, args=args, bind=[0], weights="unpacked"))
    np.testing.assert_array_equal(module.invoke("b", MANY)[0], -module.invoke("a", MANY)[0])


def test_separately_bound_functions_have_separate_weights():
    module = aotc.load(two())
    other = {"w": 3 * PARAMS["w"], "gain": PARAMS["gain"]}
    first, second = module.bind({"p": PARAMS}, "prefill"), module.bind({"p": other}, "decode")
    np.testing.assert_allclose(first.invoke(MANY)[0], layer(PARAMS, MANY), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second.invoke(ONE)[0], 3 * layer(PARAMS, ONE), rtol=1e-3, atol=1e-3)


def test_concurrent_updates_of_shared_weights_are_all_applied():
    module = aotc.load(two(weights="unpacked"))
    threads = [
        threading.Thread(target=module.update_weights, args=({f"p/{name}": 2 * PARAMS[name]},)) for name in PARAMS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(module.invoke("decode", ONE)[0], 4 * layer(PARAMS, ONE), rtol=1e-3, atol=1e-3)


def test_one_weight_number_for_two_types_is_refused():
    p = {"w": PARAMS["w"], "u": PARAMS["w"].T.copy()}
    opened = open_bundle(aotc.compile(lambda p, x: x @ p["w"] @ p["u"], p, MANY, bind=["p"]))

    def change(manifest, _):
        for row in manifest["variants"][0]["prepared"]["main"]["prepare"]["results"]:
            row["value"] = 0

    with pytest.raises(BundleError, match="prepared for 'main' has the number of what is of another type"):
        aotc.load(rewritten(opened, change))


def gathered(p, ids):
    x = p["table"][ids]
    return x, x @ p["table"].T


def by_einsum(p, ids):
    x = p["table"][ids]
    return x, jnp.einsum("...d,vd->...v", x, p["table"])


def in_bf16(p, ids):
    table = p["table"].astype(jnp.bfloat16)
    return table[ids], table[ids] @ table.T


def decoding(p, ids):
    def step(token, _):
        x = p["table"][token]
        return jnp.argmax(x @ p["table"].T, -1).astype(jnp.int32), x

    return jax.lax.scan(step, ids, length=4)


@pytest.mark.parametrize("model", [gathered, by_einsum, in_bf16, decoding])
@pytest.mark.parametrize("depth", [64, 130])
def test_a_bound_tied_table_is_stored_once(model, depth):
    p = {"table": RNG.standard_normal((1000, depth)).astype("f4")}
    data = aotc.compile(jax.jit(model), p, IDS, bind=["p"])
    bound = aotc.load(data).bind({"p": p})
    read = [x for x in bound.function.partial.row if x is not None]
    assert len(read) == 1
    assert read[0].size < 1.2 * p["table"].size
    got, want = (jax.tree.leaves(x) for x in (bound(IDS), jax.jit(model)(p, IDS)))
    np.testing.assert_array_equal(np.asarray(got[0], "f4"), np.asarray(want[0], "f4"))
    np.testing.assert_allclose(np.asarray(got[1], "f4"), np.asarray(want[1], "f4"), rtol=2e-2, atol=1e-3)
    other = {"table": p["table"][::-1].copy()}
    bound.update({"p": other})
    np.testing.assert_array_equal(bound(IDS)[0], aotc.load(data)(other, IDS)[0])


def test_a_bound_table_with_another_reader_is_also_stored_unpacked():
    p = {"table": RNG.standard_normal((300, 64)).astype("f4")}

    def model(p, ids, at):
        return *gathered(p, ids), jax.lax.dynamic_slice(p["table"], (at, at), (4, 5))

    args = IDS % 300, np.int32(2)
    bound = aotc.load(aotc.compile(jax.jit(model), p, *args, bind=["p"])).bind({"p": p})
    rows, _, part = bound(*args)
    np.testing.assert_array_equal(rows, p["table"][args[0]])
    np.testing.assert_array_equal(part, p["table"][2:6, 2:7])
    assert len([x for x in bound.function.partial.row if x is not None]) == 2


RESIDENT = """
import sys, numpy as np, aotc
module = aotc.load(sys.argv[1])
module.invoke("decode", np.ones((1, 1024), "f4"))
for _ in range(2):
    print([int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssFile")][0] >> 10)
    module.update_weights({"p/gain": np.zeros(2048, "f4")})
    assert not module.invoke("decode", np.ones((1, 1024), "f4"))[0].any()
"""


@pytest.mark.parametrize("beside", [False, True])
def test_pages_of_weights_that_no_call_reads_are_freed(tmp_path, beside):
    p = {"w": np.ones((16 * 1024, 2048), "f4"), "gain": np.ones(2048, "f4")}
    model = lambda p, x: (jnp.tile(x, (1, 16)) @ p["w"]) * p["gain"]
    args = {"prefill": (p, np.ones((64, 1024), "f4")), "decode": (p, np.ones((1, 1024), "f4"))}
    weights = os.fspath(tmp_path / "w.safetensors") if beside else "unpacked"
    data = aotc.compile({"prefill": model, "decode": model}, args=args, bind=["p"], weights=weights, source=False)
    path = tmp_path / "m.vmfb"
    path.write_bytes(data)
    told = subprocess.run([sys.executable, "-c", RESIDENT, path], capture_output=True, text=True, check=True)
    assert all(int(line) < 100 for line in told.stdout.split()), told.stdout  # of 128 MB
