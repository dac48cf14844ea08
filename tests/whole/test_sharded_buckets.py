"""Sharded models with symbolic sizes: a function of one rank for each listed size, chosen by the sizes of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from support.rank_cases import run_threads
from support.sharded_models import f32
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.ranks.threads import thread_links
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

MESH = {"data": 2, "model": 2}
SIZES = (4, 8)
PARAMS = {"up": f32(16, 32), "down": f32(32, 16)}
ROWS = f32(64, 16)  # the same on all ranks
LAYOUTS = {"up": P(None, "model"), "down": P("model", None)}


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"], jnp.sum(x, 0)


def symbolic(text):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(text), np.float32)


def named(spec):
    return NamedSharding(AbstractMesh(tuple(MESH.values()), tuple(MESH)), spec)


def exported(text="2*b, 16"):
    layouts = jax.tree.map(named, LAYOUTS, is_leaf=lambda x: isinstance(x, P))
    function = jax.jit(mlp, in_shardings=(layouts, named(P("data"))))
    return jax.export.export(function, platforms=("cpu",))(PARAMS, symbolic(text))


def compile_function(**options):
    given = {"mesh": MESH, "in_shardings": (LAYOUTS, P("data")), "specialize": {"b": SIZES}, **options}
    return aotc.compile(mlp, PARAMS, symbolic("b, 16"), **given)


@pytest.fixture(scope="module")
def bundle():
    return compile_function(bind=["params"])


def on_ranks(data, work, **options):
    def run(link):
        with aotc.load(data, ranks=link, threads=1, **options) as module:
            return work(module)

    results = run_threads(thread_links(4), run)
    for found in results:
        if isinstance(found, Exception):
            raise found
    return results


def check_call(module, size, params=(PARAMS,)):
    x = ROWS[:size]
    results = module.gather(module(*module.shard(*params, x)))
    for found, want in zip(results, mlp(PARAMS, x), strict=True):
        np.testing.assert_allclose(found, want, 1e-5, 1e-5)


def test_a_call_runs_the_bucket_of_its_size(bundle):
    def work(module):
        for size in (4, 8, 4):
            check_call(module, size)
        return str(module.signature), module.mesh.size

    found = on_ranks(bundle, work)
    down = "params['down']: f32[16, 16] of f32[32, 16] cut by model, -"
    up = "params['up']: f32[16, 16] of f32[16, 32] cut by -, model"
    takes = f"main({down}, {up}, x: f32[b/2, 16] of f32[b, 16] cut by data, -)"
    assert found == [(f"{takes} -> (result[0]: f32[b/2, 16] of f32[b, 16] cut by data, -, result[1]: f32[16])", 4)] * 4


def test_each_listed_size_has_its_own_function(bundle):
    assert list(aotc.inspect(bundle).functions) == ["main_b4", "main_b8"]

    def work(module):
        params, x = module.shard(PARAMS, f32(8, 16), function="main_b8")
        return [module.main_b8(params, x)[0].shape, module.invoke("main", *jax.tree.leaves(params), x)[0].shape]

    assert on_ranks(bundle, work) == [[(4, 16), (4, 16)]] * 4


@pytest.mark.parametrize("form", ["export", "file", "function"])
def test_every_form_of_a_model_has_buckets(form, tmp_path):
    """The sizes of an export replace its symbols, so its dims may be expressions of them."""
    model = exported()
    if form == "file":
        (tmp_path / "m.jaxexp").write_bytes(model.serialize())
        model = tmp_path / "m.jaxexp"
    if form == "function":
        data = aotc.compile(mlp, PARAMS, symbolic("2*b, 16"), mesh=MESH, in_shardings=(LAYOUTS, P("data")),
                            specialize={"b": (2, 4)})  # fmt: skip
    else:
        data = aotc.compile(model, specialize={"b": (2, 4)}, mesh={"rows": 2, "tensor": 2})
    assert list(aotc.inspect(data).functions) == ["main_b2", "main_b4"]
    assert aotc.inspect(data).functions["main_b2"].inputs[0].name == "params['down']"

    def work(module):
        check_call(module, 4)
        check_call(module, 8)
        return module.signature.inputs[2].whole

    assert on_ranks(data, work) == [("2*b", 16)] * 4


def test_an_export_with_shard_map_has_buckets():
    mesh = AbstractMesh((2,), ("data",))
    function = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    model = jax.export.export(jax.jit(function), platforms=("cpu",))(symbolic("2*n, 4"))
    data = aotc.compile(model, specialize={"n": (1, 3)})
    x, y = f32(2, 4), f32(6, 4)

    def check(link):
        with aotc.load(data, ranks=link, threads=1) as module:
            for z in (x, y):
                np.testing.assert_allclose(module(*module.shard(z)), z.reshape(2, -1, 4).sum(0), 1e-6)
            return True

    assert run_threads(thread_links(2), check) == [True, True]


def test_two_symbols_have_a_bucket_for_each_pair():
    def both(x, y):
        return x @ y.T

    sizes = {"b": (2, 4), "n": (2, 6)}
    data = aotc.compile(both, symbolic("b, 8"), symbolic("n, 8"), mesh=MESH, in_shardings=(P("data"), P("model")),
                        specialize=sizes)  # fmt: skip
    assert list(aotc.inspect(data).functions) == ["main_b2_n2", "main_b2_n6", "main_b4_n2", "main_b4_n6"]

    def work(module):
        for b, n in ((4, 2), (2, 6)):
            x, y = ROWS[:b, :8], ROWS[b : b + n, 8:]
            np.testing.assert_allclose(module.gather(module(*module.shard(x, y))), x @ y.T, 1e-5, 1e-5)
        with pytest.raises(aotc.ArgumentValueError, match=r"f32\[3, 8\]"):
            module.shard(f32(3, 8), f32(2, 8))
        return True

    assert on_ranks(data, work) == [True] * 4


def test_several_models_have_buckets_of_their_own():
    data = aotc.compile(
        {"scale": lambda x: x * 2, "first": lambda x: x[0]}, args={"scale": (symbolic("b, 8"),), "first": (f32(4, 8),)},
        mesh=MESH, in_shardings={"scale": P("data"), "first": P(None, "data")}, specialize={"b": (2, 4)},
    )  # fmt: skip
    assert sorted(aotc.inspect(data).functions) == ["first", "scale_b2", "scale_b4"]

    def work(module):
        (part,) = module.shard(f32(4, 8), function="scale")
        return module.scale(part).shape

    assert on_ranks(data, work) == [(2, 8)] * 4


def test_buckets_accept_bound_arguments_and_shards(bundle, tmp_path):
    bundle.save(tmp_path / "m.vmfb")
    save_file({f"params/{name}": value for name, value in PARAMS.items()}, tmp_path / "w.safetensors")
    aotc.shard_weights(tmp_path / "m.vmfb", tmp_path / "w.safetensors", tmp_path / "shards")

    def with_shards(module):
        check_call(module, 8, ())
        check_call(module, 4, ())
        return True

    assert on_ranks(tmp_path / "m.vmfb", with_shards, weights=tmp_path / "shards") == [True] * 4

    def bound(module):
        params, x = module.shard(PARAMS, ROWS[:8])
        half = x[:2]
        step = module.bind({"params": params})
        found = [np.asarray(step(value)[0]) for value in (x, half)]
        wanted = [np.asarray(module(params, value)[0]) for value in (x, half)]
        step.update({"params": jax.tree.map(lambda value: value * 2, params)})
        changed = np.asarray(step(half)[0])
        wanted.append(np.asarray(module(jax.tree.map(lambda value: value * 2, params), half)[0]))
        for one, want in zip([*found, changed], wanted, strict=True):
            np.testing.assert_array_equal(one, want)
        return True

    assert on_ranks(bundle, bound) == [True] * 4


def test_a_gang_takes_whole_arrays_of_each_size(bundle):
    with aotc.gang(bundle) as module:
        assert "x: f32[b, 16]" in str(module.signature)
        for size in (8, 4):
            x = f32(size, 16)
            for found, want in zip(module(PARAMS, x), mlp(PARAMS, x), strict=True):
                np.testing.assert_allclose(found, want, 1e-5, 1e-5)
        with pytest.raises(aotc.ArgumentValueError, match=r"argument 2 \(x\) has a size without a bucket") as caught:
            module(PARAMS, f32(6, 16))
        assert "f32[4, 16] for b=4; f32[8, 16] for b=8" in str(caught.value)


def test_a_size_without_a_bucket_lists_the_buckets(bundle):
    def work(module):
        params, _ = module.shard(PARAMS, f32(8, 16))
        with pytest.raises(aotc.ArgumentValueError, match="has a size without a bucket") as caught:
            module(params, f32(3, 16))
        assert "f32[2, 16] for b=4; f32[4, 16] for b=8" in str(caught.value)
        assert "specialize={'b': (...)}" in str(caught.value)
        with pytest.raises(aotc.ArgumentValueError, match="f32"):
            module.shard(PARAMS, f32(6, 16))
        with pytest.raises(aotc.CallError):
            module(params)
        return True

    assert on_ranks(bundle, work) == [True] * 4


def test_upgrade_gives_the_same_bytes(bundle):
    again = aotc.upgrade(bundle)
    assert again == bundle


def test_compile_and_run_commands_use_buckets(tmp_path):
    (tmp_path / "m.jaxexp").write_bytes(exported().serialize())
    words = ["compile", str(tmp_path / "m.jaxexp"), "-o", str(tmp_path / "m.vmfb")]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, CompileError)
    assert "the model is for several devices, and its size b is not known" in str(found.exception)
    assert "--specialize b=8,16" in str(found.exception)
    assert CliRunner().invoke(app, [*words, "--specialize", "b=2,4"]).exit_code == 0
    assert list(aotc.inspect(tmp_path / "m.vmfb").functions) == ["main_b2", "main_b4"]
    for dims, shape in ((), "8x16xf32"), (["--dim=b=2"], "4x16xf32"):
        found = CliRunner().invoke(app, ["run", str(tmp_path / "m.vmfb"), "--ranks=4", "--random", *dims])
        assert (found.exit_code, shape in found.output) == (0, True), found.output


class TestRefused:
    @pytest.mark.parametrize(("sizes", "message"), [
        ({}, "its size b is not known"),
        ({"c": (4,)}, "its size b is not known"),
        ({"b": (4,), "c": (4,)}, "no dim is called c"),
        ({"b": range(1, 200)}, "for b=1: .*IndivisibleError"),
        ({"b": tuple(range(2, 140, 2))}, "69 combinations of sizes, expected at most 64"),
    ])  # fmt: skip
    def test_invalid_bucket_sizes_are_refused(self, sizes, message):
        with pytest.raises(CompileError, match=message):
            compile_function(specialize=sizes)

    def test_sizes_that_an_export_does_not_allow_are_refused(self):
        x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*b, 16", constraints=["b >= 4"]), np.float32)
        function = jax.jit(lambda x: x + 1, in_shardings=named(P("data")))
        model = jax.export.export(function, platforms=("cpu",))(x)
        with pytest.raises(CompileError, match=r"for b=2: JAX cannot compute all sizes: .*b >= 4"):
            aotc.compile(model, specialize={"b": (2, 4)})


UNNAMED = """module attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%x: tensor<?x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %w: tensor<16x16xf32>, %y: tensor<?x16xf32>) -> tensor<?x16xf32> {
    %z = stablehlo.add %x, %y : tensor<?x16xf32>
    return %z : tensor<?x16xf32>
  }
}"""


@pytest.mark.parametrize("flags", [{}, {"mesh": {"a": 2, "b": 2}}, {"specialize": {"b": (8,)}}])
def test_text_with_sizes_without_names_says_what_to_do(flags):
    with pytest.raises(aotc.CompileError) as caught:
        aotc.compile(UNNAMED, **flags)
    text = str(caught.value)
    assert "sizes without names: argument 0 is tensor<?x16xf32>, argument 2 is tensor<?x16xf32>" in text
    assert "a number for each ?, or jax.export of the function" in text


def test_text_with_numbers_for_its_sizes_compiles():
    found = aotc.inspect(aotc.compile(UNNAMED.replace("?", "8")))
    assert found.mesh == "data=4"
