"""What JAX makes of a function, and functions with static arguments, keywords and partial application."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax import export

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.artifact import shortened_mlir_text
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import RawModel
from aotc.source.bytecode import is_portable
from aotc.source.restore import restore_source
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def compiled(model, *args, **options):
    return aotc.load(aotc.compile(model, *args, **options))


def scaled(x, n, *, mode="plus", unused=None):
    return {"y": x * n if mode == "times" else x + n}


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "n"}])
def test_static_arguments_are_compiled_in(static):
    module = compiled(jax.jit(scaled, **static), X, 3)
    np.testing.assert_array_equal(module(X)["y"], X + 3)


def test_static_keywords_are_compiled_in():
    function = jax.jit(scaled, static_argnames=("mode", "n"))
    module = compiled(function, X, kwargs={"n": 2, "mode": "times"})
    np.testing.assert_array_equal(module(X)["y"], X * 2)
    np.testing.assert_array_equal(compiled(function, X, 2, kwargs={"mode": "times"})(X)["y"], X * 2)


def test_each_form_of_static_arguments_is_compiled_in():
    function = jax.jit(lambda x, dtype, shape, f: f(x.astype(dtype).reshape(shape)), static_argnums=(1, 2, 3))
    module = compiled(function, X, jnp.int32, (3, 2), jnp.negative)
    np.testing.assert_array_equal(module(X), -X.astype(np.int32).reshape(3, 2))


def test_keyword_arguments_are_accepted_by_name():
    module = compiled(scaled, X, kwargs={"n": X, "unused": {"a": X, "b": None}})
    np.testing.assert_array_equal(module(X, n=X, unused={"a": X, "b": None})["y"], X + X)
    with pytest.raises(CompileError, match="unexpected keyword argument 'm'"):
        aotc.compile(scaled, X, kwargs={"m": X})


@pytest.mark.parametrize("function", [
    functools.partial(scaled, n=3, mode="times"),
    functools.partial(jax.jit(scaled, static_argnames="mode"), n=3, mode="times"),
    jax.jit(functools.partial(scaled, n=3, mode="times")), jax.tree_util.Partial(scaled, n=3, mode="times"),
    lambda x: jax.jit(scaled, static_argnames="mode")(x, 3, mode="times"),
])  # fmt: skip
def test_partial_functions_compile(function):
    np.testing.assert_array_equal(compiled(function, X)(X)["y"], X * 3)


def test_numbers_have_the_dtype_of_jax():
    module = compiled(lambda x, s: x * s, jnp.ones(3, jnp.bfloat16), 2.0)
    assert module.main.signature.results[0]["dtype"] == "bf16"
    assert compiled(lambda x, s: x * s, X, 2).main.signature.arguments[1]["dtype"] == "i32"


def unread(x, y, z):
    return (x + z["a"],)


STAGES = {
    "function": lambda f, *args: (f, *args),
    "traced": lambda f, *args: (jax.jit(f).trace(*args),),
    "lowered": lambda f, *args: (jax.jit(f).lower(*args),),
    "donated": lambda f, *args: (jax.jit(f, donate_argnums=0).trace(*args),),
    "exported": lambda f, *args: (export.export(jax.jit(f))(*args),),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_jax_stage_has_the_arguments_of_the_function(stage):
    args = X, np.int32(1), {"a": X, "b": np.ones(4, np.float32)}
    module = compiled(*STAGES[stage](unread, *args))
    (y,) = module(*args)
    np.testing.assert_array_equal(y, X + X)
    names = {argument["name"] for argument in module.main.signature.arguments}
    assert {"x", "z['a']"} <= names <= {"x", "y", "z['a']", "z['b']"}
    assert module.main.signature.arguments[0]["donatable"] == (stage == "donated")


def test_a_trace_preserves_symbolic_dims():
    spec = jax.ShapeDtypeStruct(export.symbolic_shape("n, 3"), np.float32)
    module = compiled(jax.jit(jnp.sin).trace(spec))
    np.testing.assert_allclose(module(X), np.sin(X), rtol=1e-6)
    with pytest.raises(CompileError, match=r"try: f.trace\(\*args\)"):
        aotc.compile(jax.jit(lambda x: x.reshape(-1)).lower(spec))


def test_a_stage_for_several_platforms_compiles_for_each():
    lowered = jax.jit(jnp.linalg.inv).trace(X[:, :2] + 1).lower(lowering_platforms=("cuda", "cpu"))
    np.testing.assert_allclose(compiled(lowered)(X[:, :2] + 1), np.linalg.inv(X[:, :2] + 1), rtol=1e-4)


def test_examples_for_stages_are_refused():
    for model in (jax.jit(jnp.sin).trace(X), jax.jit(jnp.sin).lower(X), export.export(jax.jit(jnp.sin))(X)):
        with pytest.raises(CompileError, match="already contains its arguments"):
            aotc.compile(model, X)
    with pytest.raises(CompileError, match="machine code of XLA"):
        aotc.compile(jax.jit(jnp.sin).lower(X).compile())


def raises(x):
    return x.reshape(5, 7)


@pytest.mark.parametrize("function", [raises, jax.jit(raises), functools.partial(raises)])
def test_an_error_while_tracing_is_at_the_users_line(function):
    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(CompileError, match=rf"test_stages.py:{line}: error: jax.export cannot export.*reshape"):
        aotc.compile(function, X)


SHARDED = """
import jax, numpy as np, aotc, sys, threading
from aotc.vmfb.ranks.threads import thread_links
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
x = np.arange(8, dtype=np.float32).reshape(4, 2)


def run(bundle, count):
    if count == 1:
        return bundle.load()(x)
    links, found = thread_links(count), [None] * count

    def one(rank):
        with aotc.load(bundle, ranks=links[rank]) as module:
            found[rank] = module.gather(module(*module.shard(x)))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    [t.start() for t in threads], [t.join() for t in threads]
    return found[1]


for count in (2, 1):
    where = NamedSharding(Mesh(jax.devices()[:count], "d"), P("d"))
    f = jax.jit(lambda x: x @ x.T, in_shardings=where, out_shardings=where)
    text = f.lower(x).as_text()
    for model in ((f, x), (f.trace(x),), (f.lower(x),), (jax.export.export(f)(x),), (text,)):
        print(count, np.array_equal(run(aotc.compile(*model), count), x @ x.T))
"""


def test_programs_for_several_devices_and_for_a_one_device_mesh_compile():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.splitlines() == ["2 True"] * 5 + ["1 True"] * 5


def test_a_partitioned_module_is_refused():
    text = "module attributes {mhlo.num_partitions = 4 : i32} { func.func @main(%x: tensor<f32>) -> tensor<f32> {\n"
    with pytest.raises(CompileError, match="the program needs several devices: it is for 4"):
        import_model(text + "return %x : tensor<f32> } }")


TEXT = "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }"


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "told"),
    [
        (scaled, (X,), {}, r"the function takes (x, n, *, mode='plus', unused=None)"),
        (jax.jit(scaled), (X, 2), {"scale": X}, r"kwargs={'name': y}); the function takes (x, n, *,"),
        (scaled, (X, 2), [X], "kwargs is a list\n  try: examples by name: kwargs={'scale': x}"),
        (scaled, (X, 2), X, "kwargs is a ndarray\n"),
        (TEXT, (X,), {}, "read already contains its arguments; found 1 more\n  try: aotc.compile(model)"),
        (TEXT.encode(), (), {"a": X}, "a model that is read already contains its arguments; found 1 more"),
    ],
)
def test_examples_without_an_argument_are_refused(model, args, kwargs, told):
    with pytest.raises(CompileError) as refused:
        aotc.compile(model, *args, kwargs=kwargs)
    assert told in str(refused.value)


SPECIAL = {
    "digamma": lambda x: jax.lax.digamma(x - 2.5),
    "lgamma": lambda x: jax.lax.lgamma(x - 2.5),
    "erf_inv": jax.lax.erf_inv,
    "erfc": lambda x: jax.lax.erfc(8 * x),
    "complex": lambda x: jnp.log(x - 1j),
    "zeta": lambda x: jax.lax.zeta(1 + x, 1 + x),  # has no importer: jaxlib expands it
    "several": lambda x: jax.lax.digamma(x - 2.5) + jax.lax.zeta(1 + x, 1 + x) + jax.lax.top_k(x, 2)[0].sum(),
    "inside": lambda x: jax.lax.cond(x[0] > 1, lambda y: y, jax.jit(jax.lax.lgamma), x - 2.5),
}


def batch():
    (b,) = export.symbolic_shape("b", constraints=["b >= 2"])
    return jax.ShapeDtypeStruct((b,), jnp.float32)


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("sizes", ["static", "symbolic"])
def test_a_lowered_function_preserves_special_functions(name, sizes):
    """An export writes expansions, whose last digits are others."""
    function, x = jax.jit(SPECIAL[name]), np.linspace(0.1, 0.9, 9, dtype=np.float32)
    wanted = compiled(function.lower(x))(x)
    got = compiled(function, x if sizes == "static" else batch())(x)
    np.testing.assert_array_equal(got, wanted)


def test_special_functions_are_accurate_next_to_zeros():
    x = np.float32([0.99999, 1.00001, 1.9999, 2.0001])
    with mpmath.workdps(30):
        wanted = np.float32([float(mpmath.loggamma(mpmath.mpf(float(v)))) for v in x])
    np.testing.assert_array_equal(compiled(jax.lax.lgamma, x)(x), wanted)


def test_special_functions_are_preserved_next_to_effects():
    """Of a program with an ordered effect JAX's export adds arguments."""

    def function(x):
        jax.debug.callback(lambda v: None, x[0], ordered=True)
        return jax.lax.digamma(x)

    x = np.linspace(0.1, 0.9, 9, dtype=np.float32)
    got = aotc.load(aotc.compile(function, x, callbacks="drop"))(x)
    np.testing.assert_array_equal(got, compiled(jax.lax.digamma, x)(x))


def test_compiling_does_not_change_jaxs_cached_lowering():
    function = jax.jit(SPECIAL["several"])
    text = function.lower(batch()).as_text()
    compiled(function, batch())
    assert function.lower(batch()).as_text() == text


def test_the_embedded_source_preserves_special_functions():
    data = aotc.compile(jax.lax.digamma, np.ones(3, np.float32))
    code = restore_source(open_bundle(data)).code
    assert is_portable(code)
    assert "chlo.digamma" in shortened_mlir_text(RawModel(code))
    assert aotc.upgrade(data) == data


@pytest.mark.parametrize(
    "target", ["chlo.foo", "chlo.next_after", "chlo.", "chlo.top_k", "chlo.scan", "chlo.digamma", "stablehlo.while"]
)
def test_invalid_calls_of_aotc_ops_are_refused(target):
    text = f"""func.func @main(%x: tensor<4xi32>) -> tensor<4xi32> {{
      %y = stablehlo.custom_call @aotc.{target}(%x) : (tensor<4xi32>) -> tensor<4xi32>
      return %y : tensor<4xi32> }}"""
    with pytest.raises(CompileError):
        import_model(text)
