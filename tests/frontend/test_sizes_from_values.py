"""Sizes that are values of integer arguments, and sizes of different arguments that an op wants equal."""

import numpy as np
import pytest
from support.growing import GROWING, check_growing

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.semantics.run import interpret
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu


def both(text, *args, level=2):
    """Return the compiled program's results; the reference must give the same."""
    found = aotc.load(aotc.compile(text.encode(), opt_level=level, verify_each=True)).invoke("main", *args)
    for a, b in zip(found, interpret(import_model(text.encode()), *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return found


ROWS = """
func.func @main(%n: tensor<i64>, %x: tensor<?x4xf32>) -> (tensor<?x?x4xf32>, tensor<?xi32>) {
  %two = stablehlo.constant dense<2> : tensor<i64>
  %m = stablehlo.multiply %n, %two : tensor<i64>
  %a = stablehlo.reshape %n : (tensor<i64>) -> tensor<1xi64>
  %b = stablehlo.reshape %m : (tensor<i64>) -> tensor<1xi64>
  %c = stablehlo.constant dense<4> : tensor<1xi64>
  %s = stablehlo.concatenate %b, %a, %c, dim = 0 : (tensor<1xi64>, tensor<1xi64>, tensor<1xi64>) -> tensor<3xi64>
  %y = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [1, 2] : (tensor<?x4xf32>, tensor<3xi64>) -> tensor<?x?x4xf32>
  %i = stablehlo.dynamic_iota %b, dim = 0 : (tensor<1xi64>) -> tensor<?xi32>
  return %y, %i : tensor<?x?x4xf32>, tensor<?xi32>
}
"""


@pytest.mark.parametrize("level", [0, 2])
def test_sizes_computed_from_a_scalar_argument_match_numpy(level):
    for n in (1, 5, 0):
        x = np.random.default_rng(n).normal(size=(n, 4)).astype("float32")
        y, i = both(ROWS, np.int64(n), x, level=level)
        np.testing.assert_array_equal(y, np.broadcast_to(x, (2 * n, n, 4)))
        np.testing.assert_array_equal(i, np.arange(2 * n))


def test_mismatched_size_values_are_reported_before_any_work():
    module = aotc.load(aotc.compile(ROWS.encode()))
    with pytest.raises(CallError, match="broadcast of size 3 to size 2"):
        module.invoke("main", np.int64(2), np.zeros((3, 4), np.float32))
    with pytest.raises(CallError, match="a size is negative: arg0 is -1"):
        module.invoke("main", np.int64(-1), np.zeros((3, 4), np.float32))
    with pytest.raises(AssertionFailed, match="broadcast of size 3 to size 2"):
        interpret(import_model(ROWS.encode()), np.int64(2), np.zeros((3, 4), np.float32))


RESHAPE = """
func.func @main(%s: tensor<2xi32>, %x: tensor<?xf32>) -> tensor<?x?xf32> {
  %y = stablehlo.dynamic_reshape %x, %s : (tensor<?xf32>, tensor<2xi32>) -> tensor<?x?xf32>
  %z = stablehlo.negate %y : tensor<?x?xf32>
  return %z : tensor<?x?xf32>
}
"""


def test_a_shape_argument_decides_the_result_shape():
    x = np.arange(12, dtype=np.float32)
    for shape in ((3, 4), (12, 1), (2, 6)):
        np.testing.assert_array_equal(both(RESHAPE, np.int32(shape), x)[0], -x.reshape(shape))
    with pytest.raises(CallError, match="reshape of 12 elements to 15"):
        aotc.load(aotc.compile(RESHAPE.encode())).invoke("main", np.int32([3, 5]), x)


SLICE = """
func.func @main(%a: tensor<1xi32>, %b: tensor<1xi32>, %x: tensor<10xf32>) -> tensor<?xf32> {
  %one = stablehlo.constant dense<1> : tensor<1xi32>
  %y = stablehlo.real_dynamic_slice %x, %a, %b, %one
    : (tensor<10xf32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<?xf32>
  return %y : tensor<?xf32>
}
"""


def test_slices_between_two_scalar_arguments_match_numpy():
    x = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(both(SLICE, np.int32([2]), np.int32([7]), x)[0], x[2:7])
    module = aotc.load(aotc.compile(SLICE.encode()))
    assert module.invoke("main", np.int32([3]), np.int32([3]), x)[0].shape == (0,)
    for a, b, message in ((0, 11, "a slice of 11 elements from 10"), (5, 2, "a slice of -3 elements")):
        with pytest.raises(CallError, match=message):
            module.invoke("main", np.int32([a]), np.int32([b]), x)


PAIRS = {
    "add": "%z = stablehlo.add %x, %y : tensor<?x3xf32>",
    "concatenate": "%z = stablehlo.concatenate %x, %y, dim = 1 : (tensor<?x3xf32>, tensor<?x3xf32>) -> tensor<?x6xf32>",
}


@pytest.mark.parametrize("name", PAIRS)
def test_unknown_sizes_of_two_arguments_must_agree(name):
    out = PAIRS[name].rsplit("-> ")[-1].rsplit(": ")[-1]
    head = f"func.func @main(%x: tensor<?x3xf32>, %y: tensor<?x3xf32>) -> {out}"
    text = f"{head} {{\n{PAIRS[name]}\nreturn %z : {out}\n}}"
    x, y = (np.random.default_rng(k).normal(size=(4, 3)).astype("float32") for k in range(2))
    both(text, x, y)
    told = r"sizes must be equal: 2 and 4 \(dimension 0 of arg1 is 2, dimension 0 of arg0 is 4\)"
    with pytest.raises(CallError, match=told):
        aotc.load(aotc.compile(text.encode())).invoke("main", x, y[:2])


@pytest.mark.parametrize("level", [0, 2])
def test_sorts_along_a_symbolic_dim_match_numpy(level):
    import jax
    import jax.numpy as jnp

    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 0), jax.lax.sort_key_val(x, -x)))
    module = aotc.load(aotc.compile(f, jax.ShapeDtypeStruct((3, n), "float32"), opt_level=level))
    g = jax.jit(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 0), jax.lax.sort_key_val(x, -x)))
    for size in (1, 2, 3, 4, 5, 17, 64, 100):
        x = np.random.default_rng(size).integers(0, 9, (3, size)).astype("float32")
        for a, b in zip(module.invoke("main", x), jax.tree.leaves(g(x)), strict=True):
            np.testing.assert_array_equal(a, b)


COMPRESSED = """
func.func @main(%x: tensor<?xf32>, %t: tensor<f32>) -> (tensor<?xf32>, tensor<?xi32>, tensor<f32>, tensor<i32>) {
  %d = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %s = stablehlo.reshape %d : (tensor<i32>) -> tensor<1xi32>
  %w = stablehlo.dynamic_broadcast_in_dim %t, %s, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>
  %m = stablehlo.compare GT, %x, %w : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xi1>
  %i = stablehlo.convert %m : (tensor<?xi1>) -> tensor<?xi32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %n = stablehlo.reduce(%i init: %z) applies stablehlo.add across dimensions = [0] : (tensor<?xi32>, tensor<i32>)
    -> tensor<i32>
  %o = "stablehlo.sort"(%x) <{dimension = 0 : i64}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %g = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %g : tensor<i1>
  }) : (tensor<?xf32>) -> tensor<?xf32>
  %e = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
  %c0 = stablehlo.constant dense<0> : tensor<1xi32>
  %c1 = stablehlo.constant dense<1> : tensor<1xi32>
  %y = stablehlo.real_dynamic_slice %o, %c0, %e, %c1
    : (tensor<?xf32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<?xf32>
  %q = stablehlo.exponential %y : tensor<?xf32>
  %f = stablehlo.constant dense<0.0> : tensor<f32>
  %u = stablehlo.reduce(%q init: %f) applies stablehlo.add across dimensions = [0] : (tensor<?xf32>, tensor<f32>)
    -> tensor<f32>
  %v = stablehlo.convert %u : (tensor<f32>) -> tensor<i32>
  %h = stablehlo.reshape %v : (tensor<i32>) -> tensor<1xi32>
  %j = stablehlo.dynamic_iota %h, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
  return %q, %j, %u, %n : tensor<?xf32>, tensor<?xi32>, tensor<f32>, tensor<i32>
}
"""


@pytest.mark.parametrize("level", range(4))
def test_sizes_that_kernels_compute_match_numpy(level):
    """The second size depends on arrays whose size is the first one."""
    for size, limit in ((7, 0.0), (64, 0.5), (5, 9.0), (0, 0.0), (1, -9.0)):
        x = np.random.default_rng(size).normal(size=size).astype("float32")
        q, j, u, n = both(COMPRESSED, x, np.float32(limit), level=level)
        kept = np.sort(x[x > np.float32(limit)])[::-1]
        np.testing.assert_allclose(q, np.exp(kept), rtol=1e-6)
        np.testing.assert_array_equal(j, np.arange(int(u)))
        assert n == len(kept)


def test_computed_sizes_that_do_not_match_fail():
    text = """func.func @main(%x: tensor<4xf32>, %v: tensor<9xi32>) -> tensor<?xf32> {
      %n = stablehlo.slice %v [4:5] : (tensor<9xi32>) -> tensor<1xi32>
      %y = stablehlo.dynamic_reshape %x, %n : (tensor<4xf32>, tensor<1xi32>) -> tensor<?xf32>
      return %y : tensor<?xf32>
    }"""
    x, sizes = np.arange(4, dtype=np.float32), np.full(9, 4, np.int32)
    np.testing.assert_array_equal(both(text, x, sizes)[0], x)
    module = aotc.load(aotc.compile(text.encode()))
    for wrong, message in ((5, "reshape of 4 elements to 5"), (-1, "a size is negative: -1")):
        with pytest.raises(CallError, match=message):
            module.invoke("main", x, np.full(9, wrong, np.int32))


def test_computed_slices_and_counts_stay_in_bounds():
    text = """func.func @main(%x: tensor<8xf32>, %v: tensor<9xi32>) -> (tensor<?xf32>, tensor<?xf32>) {
      %a = stablehlo.slice %v [0:1] : (tensor<9xi32>) -> tensor<1xi32>
      %b = stablehlo.slice %v [1:2] : (tensor<9xi32>) -> tensor<1xi32>
      %s = stablehlo.slice %v [2:3] : (tensor<9xi32>) -> tensor<1xi32>
      %y = stablehlo.real_dynamic_slice %x, %a, %b, %s
        : (tensor<8xf32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<?xf32>
      %k = stablehlo.slice %v [3:4] : (tensor<9xi32>) -> tensor<1xi32>
      %n = stablehlo.reshape %k : (tensor<1xi32>) -> tensor<i32>
      %t, %i = stablehlo.custom_call @stablehlo.dynamic_top_k(%x, %n)
        : (tensor<8xf32>, tensor<i32>) -> (tensor<?xf32>, tensor<?xi32>)
      return %y, %t : tensor<?xf32>, tensor<?xf32>
    }"""
    x = np.random.default_rng(0).normal(size=8).astype("float32")
    for a, b, s, k in ((1, 7, 2, 3), (0, 8, 3, 8), (4, 4, 1, 0)):
        y, t = both(text, x, np.int32([a, b, s, k, 0, 0, 0, 0, 0]))
        np.testing.assert_array_equal(y, x[a:b:s])
        np.testing.assert_array_equal(t, np.sort(x)[::-1][:k])
    # a slice that would end beyond is moved back, as XLA does it
    np.testing.assert_array_equal(both(text, x, np.int32([5, 9, 1, 1, 0, 0, 0, 0, 0]))[0], x[4:8])
    module = aotc.load(aotc.compile(text.encode()))
    wrong = {
        (0, 9, 1, 1): "a slice of 9 elements from 8",
        (3, 1, 1, 1): "a slice of -2 elements",
        (0, 8, 1, 9): "the largest 9 of 8 elements",
    }
    for values, message in wrong.items():
        given = np.int32([*values, 0, 0, 0, 0, 0])
        with pytest.raises(CallError, match=message):
            module.invoke("main", x, given)
        with pytest.raises(AssertionFailed, match=message):
            interpret(import_model(text.encode()), x, given)


def test_a_slice_with_constant_bounds_has_the_stated_size():
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<2xf32> {
      %a = stablehlo.constant dense<0> : tensor<1xi64>
      %b = stablehlo.constant dense<4> : tensor<1xi64>
      %s = stablehlo.constant dense<STRIDE> : tensor<1xi64>
      %y = stablehlo.real_dynamic_slice %x, %a, %b, %s
        : (tensor<4xf32>, tensor<1xi64>, tensor<1xi64>, tensor<1xi64>) -> tensor<2xf32>
      return %y : tensor<2xf32>
    }"""
    x = np.float32([1, 2, 3, 4])
    (y,) = both(text.replace("STRIDE", "3"), x)
    np.testing.assert_array_equal(y, [1, 4])
    for stride in (4, 2**63 - 1):
        with pytest.raises(CompileError, match="a size of 1 in its result, which is stated as 2"):
            aotc.compile(text.replace("STRIDE", str(stride)))


def test_computed_sizes_round_trip_as_text_and_specialize():
    from aotc.ir.semantics.verify import verify
    from aotc.ir.tensor.text import parse_module, print_module

    module = import_model(COMPRESSED.encode())
    again = parse_module(print_module(module))
    assert print_module(again) == print_module(module)
    assert "bind_dim" in print_module(module)
    assert not verify(again)
    x = np.random.default_rng(3).normal(size=9).astype("float32")
    for a, b in zip(interpret(module, x, np.float32(0)), interpret(again, x, np.float32(0)), strict=True):
        np.testing.assert_array_equal(a, b)
    copies = aotc.load(aotc.compile(COMPRESSED.encode(), specialize={"d0": (9,)}))
    for size in (9, 5):
        found = copies.invoke("main", x[:size], np.float32(0))
        for a, b in zip(found, interpret(module, x[:size], np.float32(0)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_verifier_finds_a_size_read_before_it_is_computed():
    from aotc.ir.semantics.verify import verify
    from aotc.ir.tensor.text import parse_module

    text = """module @m {
    func public @main(%n: i32[]) {
      %0 = iota {dim = 0} : i32[s]
      bind_dim %n {dim = s}
      return %0
    }
    }
    """
    assert [f.message for f in verify(parse_module(text))] == ["iota: dims ['s'] come from no parameter of @main"]




@pytest.mark.parametrize("threads", [1, 2])
def test_arrays_survive_growth_of_the_arena(threads):
    """The arena grows when the size is known; what is in it already is read afterwards."""
    check_growing(aotc.load(aotc.compile(GROWING.encode()), threads=threads))




NEGATIVE = """func.func @main(%x: tensor<?xf32>, %n: tensor<i32>) -> (tensor<i32>, tensor<i32>, tensor<i32>) {
  %z = stablehlo.constant dense<0> : tensor<i32>
  %a = stablehlo.compare LT, %n, %z : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %m = stablehlo.maximum %n, %z : tensor<i32>
  %b = stablehlo.compare EQ, %m, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %p = stablehlo.abs %n : tensor<i32>
  %c = stablehlo.compare EQ, %p, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %0 = "stablehlo.if"(%a) ({ stablehlo.return %z : tensor<i32> }, { stablehlo.return %n : tensor<i32> })
      : (tensor<i1>) -> tensor<i32>
  %1 = "stablehlo.if"(%b) ({ stablehlo.return %z : tensor<i32> }, { stablehlo.return %n : tensor<i32> })
      : (tensor<i1>) -> tensor<i32>
  %2 = "stablehlo.if"(%c) ({ stablehlo.return %z : tensor<i32> }, { stablehlo.return %n : tensor<i32> })
      : (tensor<i1>) -> tensor<i32>
  return %0, %1, %2 : tensor<i32>, tensor<i32>, tensor<i32>
}"""


def test_a_branch_on_a_negative_argument_is_not_decided_by_its_use_as_a_size():
    module = aotc.load(aotc.compile(NEGATIVE))
    x = np.ones(3, np.float32)
    assert [int(v) for v in module(x, np.int32(-5))] == [0, -5, -5]
    assert [int(v) for v in module(x, np.int32(5))] == [5, 0, 0]
