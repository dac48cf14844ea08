"""Sharded functions: one bundle, eight ranks, the results of one device."""

import functools
import math
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.halves import half_of_pairs
from support.random_sharded import random_case
from support.rank_cases import run_threads
from support.sharded_models import CASES, LINE, check, decode, f32, over, run_on_threads

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.cpu

AS_FILES = ("mlp", "training", "every_collective")


@pytest.mark.parametrize("name", CASES)
def test_sharded_models_match_one_device(name):
    case = CASES[name]
    check(case, run_on_threads(case.compile(source=False), case.args))


def check_random(seed):
    case = random_case(seed)
    size = math.prod(case.mesh.values())
    check(case, run_on_threads(case.compile(source=False), case.args, size))


@pytest.mark.parametrize("seed", range(12))
def test_random_sharded_functions_match_one_device(seed):
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_random_sharded_functions_match_one_device(first):
    for seed in range(first, first + 50):
        check_random(seed)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", ["layer", "loop", "ring"])
def test_sharded_models_match_at_every_level(name, level):
    case = CASES[name]
    check(case, run_on_threads(case.compile(opt_level=level, verify_each=True), case.args))


def on_mesh(case):
    """Return the function of a case with shardings of its own, and examples."""
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))

    def named(specs):
        return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))

    given = {"in_shardings": case.ins, "out_shardings": case.outs}
    return jax.jit(case.function, **{key: named(value) for key, value in given.items() if value is not None})


@pytest.mark.parametrize(("form", "name"), half_of_pairs(["function", "export", "file", "text"], AS_FILES))
def test_every_form_of_a_sharded_model_matches_one_device(form, name, tmp_path):
    case = CASES[name]
    function = on_mesh(case)
    match form:
        case "function":
            data = aotc.compile(function, *case.args)
        case "text":
            text = function.trace(*case.args).lower(lowering_platforms=("cpu",)).as_text()
            data = aotc.compile(text)
        case _:
            exported = jax.export.export(function, platforms=("cpu",))(*case.args)
            path = tmp_path / "m.jaxexp"
            path.write_bytes(exported.serialize())
            data = aotc.compile(exported if form == "export" else path)
    if form == "text":  # it has neither the structure of the arguments nor that of the results
        flat = jax.tree.leaves(case.args)
        check(case, run_on_threads(data, flat))
    else:
        check(case, run_on_threads(data, case.args))


def test_an_export_for_gpus_compiles_for_cpus():
    case = CASES["mlp"]
    exported = jax.export.export(on_mesh(case), platforms=("cuda",))(*case.args)
    check(case, run_on_threads(aotc.compile(exported, target="cpu"), case.args))


def test_a_model_for_512_ranks_compiles():
    mesh = AbstractMesh((64, 8), ("data", "model"))
    x = jax.ShapeDtypeStruct((128, 64), np.float32, sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=NamedSharding(mesh, P(None, "model")))
    bundle = aotc.compile(lambda x, w: x @ w, x, w, source=False)
    with pytest.raises(aotc.BundleError, match=r"for 512 ranks \(data=64 x model=8\)"):
        bundle.load()


def test_an_upgraded_sharded_bundle_matches_one_device():
    case = CASES["layer"]
    check(case, run_on_threads(aotc.upgrade(case.compile()), case.args))


def test_a_mesh_with_reordered_devices_matches_one_device():
    """The ranks of a mesh need not be in order: here rank 7 comes first."""
    text = CASES["mlp"]
    function = on_mesh(text).trace(*text.args).lower(lowering_platforms=("cpu",)).as_text()
    order = list(range(7, -1, -1))
    moved = function.replace('<["data"=2, "model"=4]>', f'<["data"=2, "model"=4], device_ids={order}>')
    assert moved != function
    check(text, run_on_threads(aotc.compile(moved), text.args))


def test_sharded_functions_may_have_static_arguments():
    @functools.partial(jax.jit, static_argnames="name")
    def chosen(x, name):
        return getattr(jnp, name)(x)

    x = f32(8, 4)
    data = aotc.compile(chosen, x, "tanh", mesh=LINE, out_shardings=P("data"))
    for (found,) in run_on_threads(data, (x,)):
        np.testing.assert_allclose(found, np.tanh(x), rtol=1e-6)


class TestRefused:
    @pytest.mark.parametrize(("given", "message"), [
        ({"mesh": {"data": 0}}, "mesh is"),
        ({"mesh": 3}, "mesh is 3"),
        ({"in_shardings": P("data")}, "shardings without a mesh"),
        ({"mesh": {"data": 2}, "in_shardings": P("model")}, "does not fit"),
        ({"mesh": {"data": 3}, "in_shardings": P("data")}, "divisible|Indivisible"),
    ])  # fmt: skip
    def test_invalid_meshes_are_refused(self, given, message):
        with pytest.raises(CompileError, match=message):
            aotc.compile(lambda x: x + 1, f32(8, 4), **given)

    def test_unknown_sizes_of_a_sharded_function_are_refused(self):
        mesh = AbstractMesh((2,), ("data",))
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), np.float32)
        function = jax.jit(lambda x: x + 1, in_shardings=NamedSharding(mesh, P(None, "data")))
        with pytest.raises(CompileError, match="for several devices, and its size b is not known"):
            aotc.compile(function, x)

    def test_collectives_in_rank_dependent_branches_are_refused(self):
        @over(LINE, P("data"), P("data"))
        def branches(x):
            return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "data") + x, lambda x: x, x)

        with pytest.raises(CompileError, match="may differ between the ranks that it connects"):
            aotc.compile(branches, f32(8, 4))

    def test_text_for_several_devices_without_shardings_is_refused(self):
        text = """module attributes {mhlo.num_partitions = 2 : i32} {
          func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }
        }"""
        with pytest.raises(CompileError, match="several devices"):
            aotc.compile(text)


class TestArrays:
    def test_whole_arrays_are_refused_by_a_rank(self):
        case = CASES["rows"]
        data = case.compile(source=False)

        def work(link):
            with aotc.load(data, ranks=link) as module:
                with pytest.raises(aotc.ArgumentValueError, match="is the whole array") as caught:
                    module(*case.args)
                assert "module.shard" in str(caught.value)
                with pytest.raises(aotc.ArgumentValueError, match="is not the whole array"):
                    module.shard(*module.shard(*case.args))
                return module.rank, str(module.mesh)

        found = run_threads(thread_links(8), work)
        assert found == [(rank, "data=8") for rank in range(8)]

    def test_a_bundle_for_one_device_takes_no_ranks(self):
        module = aotc.compile(lambda x: x + 1, f32(2)).load()
        assert (module.rank, module.mesh) == (0, None)
        with pytest.raises(aotc.CallError, match="one device"):
            module.shard(f32(2))

    def test_each_rank_has_its_own_state(self):
        """Caches stay on their rank between calls, and are overwritten there: they are donated."""
        case = CASES["decode"]
        data = case.compile()
        rows = open_bundle(data).manifest["functions"]["main"]["arguments"]
        assert [row["name"] for row in rows if row["donated"]] == ["cache['keys']", "cache['values']"]

        def work(link):
            with aotc.load(data, ranks=link, threads=1) as module:
                weights, cache, x, _ = module.shard(*case.args)
                state = module.state("cache", init={"cache": cache}, results={"result[1]": "cache"})
                return [np.asarray(jax.tree.leaves(state(weights, x, np.int32(at)))[0]) for at in range(4)]

        found = run_threads(thread_links(8), work)
        weights, cache, x, _ = case.args
        for at in range(4):
            want, cache = jax.jit(decode)(weights, cache, x, np.int32(at))
            for results in found:
                np.testing.assert_allclose(results[at], want, atol=2e-6)


@pytest.mark.parametrize("attempt", range(4))
def test_the_partitioner_leaves_no_folder(tmp_path, monkeypatch, attempt):
    """XLA writes into it until the child has ended: its removal in the child failed at times."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    CASES["mlp"].compile(source=False)
    assert not list(tmp_path.glob("aotc-partition-*"))
