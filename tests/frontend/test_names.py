"""Names that a model brings (of functions, dims, loops) beside the names that aotc gives: neither hides the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.differential import LEVELS

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.text import parse_module, print_module
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def agree(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5)


# --- functions ---


def named(name, function):
    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


FUNCTIONS = (
    "clone", "import_block", "main", "kernel", "body", "shape_assertion", "k0_mul", "k1_sin", "aotc_table", "executor",
    "arg0", "d0", "i0", "call", "for", "None", "while", "add", "main.1", "<lambda>", "a b", 'a"b', "a/b",
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jitted_function_may_have_any_name(name):
    first = named(name, lambda a: jnp.sin(a) * 2 + a.sum())
    second = named(name, lambda a: a @ a.T + 1)
    decide = lambda a: jax.lax.cond(a.sum() > 0, first, lambda b: b, a)
    repeat = lambda a: jax.lax.fori_loop(0, 2, lambda _, b: first(b), a)
    model = lambda a: (first(a) + 1, second(a), first(first(a)), decide(a), repeat(a))
    agree(aotc.load(aotc.compile(named(name, model), X))(X), model(X))


def entry(name, op):
    return f"""func.func public @"{name}"(%a: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<3xf32>) {{
      %m = stablehlo.{op} %a, %a : tensor<2x3xf32>
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %r = stablehlo.reduce(%m init: %z) applies stablehlo.add across dimensions = [0]
        : (tensor<2x3xf32>, tensor<f32>) -> tensor<3xf32>
      return %m, %r : tensor<2x3xf32>, tensor<3xf32> }}"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["k0_mul", "k0_add", "k0_reduce", "k1_reduce", "clone"])
def test_an_entry_may_be_named_like_a_kernel(name, level):
    """A kernel that took the name of an entry would stand in its place."""
    text = f"module {{ {entry('main', 'multiply')} {entry(name, 'add')} }}"
    module = aotc.load(aotc.compile(text.encode(), opt_level=level))
    agree(module.invoke("main", X), [X * X, (X * X).sum(0)])
    agree(module.invoke(name, X), [X + X, (X + X).sum(0)])


def test_a_function_may_be_named_like_a_clone_of_another():
    """Clones of ``f`` for arguments of other values are ``f``, ``f.1``...; XLA numbers its own functions so too."""
    text = """module {
      func.func public @main(%x: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>, tensor<f32>) {
        %one = stablehlo.constant dense<1> : tensor<1xi32>
        %two = stablehlo.constant dense<2> : tensor<1xi32>
        %s = stablehlo.constant dense<3.0> : tensor<f32>
        %0 = func.call @f(%one) : (tensor<1xi32>) -> tensor<?xf32>
        %1 = func.call @f(%two) : (tensor<1xi32>) -> tensor<?xf32>
        %2 = func.call @f.1(%s) : (tensor<f32>) -> tensor<f32>
        return %0, %1, %2 : tensor<?xf32>, tensor<?xf32>, tensor<f32> }
      func.func private @f(%n: tensor<1xi32>) -> tensor<?xf32> {
        %0 = stablehlo.dynamic_iota %n, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>
        return %0 : tensor<?xf32> }
      func.func private @f.1(%x: tensor<f32>) -> tensor<f32> {
        %0 = stablehlo.add %x, %x : tensor<f32>
        return %0 : tensor<f32> } }"""
    module = aotc.load(aotc.compile(text.encode(), opt_level=0))
    agree(module.invoke("main", X[0]), [np.arange(1.0), np.arange(2.0), np.float32(6)])


def small_loop(name, op):
    return f"""func.func public @{name}(%a: tensor<3xf32>) -> tensor<3xf32> {{
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %r:2 = stablehlo.while(%i = %zero, %v = %a) : tensor<i32>, tensor<3xf32>
      cond {{
        %n = stablehlo.constant dense<3> : tensor<i32>
        %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        %one = stablehlo.constant dense<1> : tensor<i32>
        %j = stablehlo.add %i, %one : tensor<i32>
        %w = stablehlo.{op} %v, %v : tensor<3xf32>
        stablehlo.return %j, %w : tensor<i32>, tensor<3xf32>
      }}
      return %r#1 : tensor<3xf32> }}"""


@pytest.mark.parametrize("level", LEVELS)
def test_loop_kernels_of_two_entries_have_distinct_names(level):
    """Their values have the same names, from which those kernels are named."""
    text = f"module {{ {small_loop('main', 'add')} {small_loop('other', 'multiply')} }}"
    module = aotc.load(aotc.compile(text.encode(), opt_level=level))
    agree(module.invoke("main", X[0]), [X[0] * 8])
    agree(module.invoke("other", X[0]), [X[0] ** 8])


# --- dims ---

DIMS = (
    "b", "d0", "d1", "i0", "n1", "t3", "p", "value_0", "size_0_0", "size_0_1", "arg0", "arg1", "arg1_0", "k0", "kernel",
    "dim", "grid", "flops", "bytes", "aliases", "parallel", "range", "sin", "f32", "lo", "N", "for", "if", "in", "not",
    "None", "True", "lambda", "def", "match", "__debug__", "nan", "inf", "β",
)  # fmt: skip


def rows(a, n):
    y = jnp.concatenate([a, jnp.sin(a)], 1)
    grown = jax.lax.fori_loop(0, n, lambda _, c: c * 2 + y.sum(), jnp.float32(1))
    return y @ y.T + jnp.cumsum(y, 0)[:, :1], grown, jax.nn.softmax(a, axis=-1)


@pytest.mark.parametrize("name", DIMS)
def test_a_dim_may_have_any_name(name):
    shape = export.symbolic_shape(f"{name}, c")
    specs = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct((), np.int32)
    exported = export.export(jax.jit(rows), platforms=("cpu",))(*specs)
    text = print_module(import_model(exported))
    assert print_module(parse_module(text)) == text
    module = aotc.load(aotc.compile(exported))
    agree(module(X, np.int32(3)), rows(X, 3))


@pytest.mark.parametrize("shape", ["d1, d0", "size_0_1, size_0_0", "2*size_0_1, size_0_1", "d1, 2*d1", "for, for_dim"])
def test_sizes_of_arguments_are_distinct_from_dims_of_their_names(shape):
    spec = jax.ShapeDtypeStruct(export.symbolic_shape(shape), np.float32)
    function = lambda a: a.sum(0) * a.shape[0]
    module = aotc.load(aotc.compile(jax.jit(function), spec))
    tall, wide = np.ones((4, 2), np.float32), np.ones((2, 4), np.float32)
    for a in (tall, wide):
        if ("2*" in shape) and a is not (tall if shape.startswith("2*") else wide):
            with pytest.raises(CallError):
                module(a)
        else:
            agree(module(a), function(a))


def test_a_computed_size_is_distinct_from_a_dim_of_its_name():
    text = """module { func.func public @main(%x: tensor<?xf32>, %n: tensor<9xi32>) -> tensor<?xf32> {
      %b = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %r = func.call @inner(%b, %x, %n) : (tensor<i32>, tensor<?xf32>, tensor<9xi32>) -> tensor<?xf32>
      return %r : tensor<?xf32> }
    func.func private @inner(%b: tensor<i32> {jax.global_constant = "value_0"}, %x: tensor<?xf32>, %n: tensor<9xi32>)
        -> tensor<?xf32> { return %x : tensor<?xf32> }
    func.func public @second(%x: tensor<?xf32>, %n: tensor<9xi32>) -> (tensor<?xf32>, tensor<?xf32>) {
      %z = stablehlo.constant dense<0> : tensor<i32>
      %s = stablehlo.reduce(%n init: %z) applies stablehlo.add across dimensions = [0]
        : (tensor<9xi32>, tensor<i32>) -> tensor<i32>
      %b = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %r = func.call @inner(%b, %x, %n) : (tensor<i32>, tensor<?xf32>, tensor<9xi32>) -> tensor<?xf32>
      %one = stablehlo.reshape %s : (tensor<i32>) -> tensor<1xi32>
      %y = stablehlo.dynamic_iota %one, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>
      return %r, %y : tensor<?xf32>, tensor<?xf32> } }"""
    module = aotc.load(aotc.compile(text.encode()))
    x, n = X[0], np.array([1, 4, 0, 0, 0, 0, 0, 0, 0], np.int32)
    agree(module.invoke("second", x, n), [x, np.arange(5.0)])


@pytest.mark.parametrize("label", ["a-b", "1st", "two words", "max", "d1"])
def test_invalid_dim_labels_are_replaced(label):
    """JAX writes names; other writers of ``jax.global_constant`` may write anything, and leave dims without one."""
    text = f"""module {{
    func.func public @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>) {{
      %b = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %r = func.call @inner(%b, %x) : (tensor<i32>, tensor<?xf32>) -> tensor<?xf32>
      %s = stablehlo.add %y, %y : tensor<?xf32>
      return %r, %s : tensor<?xf32>, tensor<?xf32> }}
    func.func private @inner(%b: tensor<i32> {{jax.global_constant = "{label}"}}, %x: tensor<?xf32>) -> tensor<?xf32> {{
      %s = stablehlo.add %x, %x : tensor<?xf32>
      return %s : tensor<?xf32> }} }}"""
    module = aotc.load(aotc.compile(text.encode()))
    agree(module.invoke("main", X[0], X[0, :2]), [X[0] * 2, X[0, :2] * 2])
