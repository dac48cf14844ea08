"""The order of the passes: each pair that must be in it, with a model that shows why."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import checkify

from aotc import pipeline
from aotc.diagnostics import CompileError, InternalError
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import RawModel
from aotc.ir.tensor.ir import walk
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import MUST_PRECEDE, PASSES, run_passes
from aotc.targets import resolve_targets, variant_targets

pytestmark = pytest.mark.ir

TARGET = "cpu:x86-64-v3"
GPU = "cuda:sm_90"
TARGETS = {("parallelize_gpu", "fuse"): GPU, ("fuse", "mark_concurrent"): GPU}  # of pairs that others do not need
TARGETS |= {("set_precision", "pack_contractions"): "cpu:x86-64-v4-bf16"}
PRECISIONS = {("canonicalize_dot", "set_precision"): "bf16", ("set_precision", "pack_contractions"): "bf16"}
QUANTIZED = "quantize_weights"  # a pass that does something if it is asked to
BOUND = {"bind_weights", "split_weights"}  # passes for which the second argument is bound
DEVICES = {("mark_concurrent", "join_devices"): {"d1": GPU}}


def f32(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def i8(*shape):
    return (40 * f32(*shape)).astype("i1")


def symbolic(text):
    return jax.ShapeDtypeStruct(export.symbolic_shape(text), "float32")


LARGE = f32(256, 144)
W = f32(64, 64)
LONG = f32(1 << 17)

ALL_REDUCE = """func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}"""


OWN_PART = """module attributes {mhlo.num_partitions = 2 : i32} {
func.func public @main(%x: tensor<4xf32>) -> tensor<2xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
  %r = stablehlo.partition_id : tensor<ui32>
  %two = stablehlo.constant dense<2> : tensor<ui32>
  %start = stablehlo.multiply %r, %two : tensor<ui32>
  %1 = stablehlo.dynamic_slice %0, %start, sizes = [2] : (tensor<4xf32>, tensor<ui32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}}"""
RANKS = {"mesh": {"axes": [["x", 2]]}, "arguments": [[[]]], "results": [[["x"]]]}


def own_part(name):
    """Return the text of a sum of an argument over two ranks, and of the part that the rank's number selects."""
    return f"""
  %s{name} = "stablehlo.all_reduce"(%{name}) ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %t = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %t : tensor<f32>
  }}) {{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}} : (tensor<4xf32>) -> tensor<4xf32>
  %p{name} = stablehlo.dynamic_slice %s{name}, %start, sizes = [2] : (tensor<4xf32>, tensor<ui32>) -> tensor<2xf32>"""


OWN_PARTS = f"""module attributes {{mhlo.num_partitions = 2 : i32}} {{
func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<2xf32>, tensor<2xf32>) {{
  %r = stablehlo.partition_id : tensor<ui32>
  %two = stablehlo.constant dense<2> : tensor<ui32>
  %start = stablehlo.multiply %r, %two : tensor<ui32>
  {own_part("x")}
  {own_part("y")}
  return %px, %py : tensor<2xf32>, tensor<2xf32>
}}}}"""
TWICE = {"mesh": {"axes": [["x", 2]]}, "arguments": [[[]]] * 2, "results": [[["x"]]] * 2}


def one_exchange(module, count):
    """Is there one call of the runtime that exchanges data?"""
    ops = [op for f in module.functions.values() for op in walk(f.body) if op.name == "custom_call"]
    return len([op for op in ops if op.attrs["target"] != "aotc.partition_id"]) == 1


def calls_of_ranks(name):
    """Is this the only exchange in the program of a rank?"""

    def good(module, count):
        ops = [op for f in module.functions.values() for op in walk(f.body) if op.name == "custom_call"]
        return {op.attrs["target"] for op in ops} - {"aotc.partition_id"} == {f"aotc.{name}"}

    return good


TWO_DEVICES = """func.func public @main(%x: tensor<8x8xf32> {aotc.affinity = "d0"},
    %w: tensor<8x8xf32> {aotc.affinity = "d1"}) -> tensor<8x8xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.custom_call @aotc.transfer(%0) {aotc.to = "d1"} : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = stablehlo.multiply %1, %w : tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}"""

PRODUCTS_OVER_THERE = """func.func public @main(%x: tensor<64x64xf32> {aotc.affinity = "d0"},
    %a: tensor<64x64xf32> {aotc.affinity = "d1"}, %b: tensor<64x64xf32> {aotc.affinity = "d1"})
    -> (tensor<64x64xf32>, tensor<64x64xf32>) {
  %0 = stablehlo.custom_call @aotc.transfer(%x) {aotc.to = "d1"} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.dot_general %0, %a, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %2 = stablehlo.dot_general %0, %b, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %1, %2 : tensor<64x64xf32>, tensor<64x64xf32>
}"""

LOOP_OVER_DEVICES = """func.func public @main(%x: tensor<8xf32> {aotc.affinity = "d0"},
    %w: tensor<8xf32> {aotc.affinity = "d1"}, %n: tensor<i32> {aotc.affinity = "d0"}) -> tensor<8xf32> {
  %i = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%k = %i, %y = %x) : tensor<i32>, tensor<8xf32>
    cond {
      %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %k1 = stablehlo.add %k, %one : tensor<i32>
      %v = stablehlo.sine %w : tensor<8xf32>
      %t = stablehlo.custom_call @aotc.transfer(%v) {aotc.to = "d0"} : (tensor<8xf32>) -> tensor<8xf32>
      %z = stablehlo.add %y, %t : tensor<8xf32>
      stablehlo.return %k1, %z : tensor<i32>, tensor<8xf32>
    }
  return %r#1 : tensor<8xf32>
}"""


def sum_of_exp(x):
    return jnp.exp(x - x.max()).sum()


def convolution(x):
    return lax.conv_general_dilated(x, f32(3, 3, 16, 32), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME")
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def windows_over(*shape):
    """Are the windows over an array of this shape?"""

    def holds(module, count):
        ops = (op for f in module.functions.values() for op in walk(f.body))
        return {op.operands[0].type.shape for op in ops if op.name == "reduce_window"} == {shape}

    return holds


def invariant_call(x):
    return lax.fori_loop(0, 5, lambda i, c: c + jax.jit(jnp.sin)(x), x)


def steps(x, w):
    return lax.fori_loop(0, 5, lambda i, c: jnp.tanh(jnp.einsum("ij,kj->ik", c, w)), x)


def computed_weights(x):
    return x @ jax.jit(jnp.exp)(W)


def twice(x):
    return jnp.sin(x).sum(), jnp.sort(x) + jnp.sin(x), jnp.sort(x)


def dead_carry(x, y):
    def step(state):
        return state[0] + 1, jnp.cumsum(state[1]) + jnp.sin(state[0])

    return lax.while_loop(lambda s: s[0].sum() < 9, step, (x, y))[0]


def checked_call(x):
    def positive(y):
        checkify.check(y.sum() > 0, "negative")
        return y * 2

    return lax.fori_loop(0, 5, lambda i, c: jax.jit(positive)(c), x)


def judged_outside(module, count):
    """Is the assertion in no loop?"""
    return any(op.name == "assert" for op in module.functions["main"].body.ops)


def checked_loop(x):
    return jnp.exp(x), lax.fori_loop(0, 9, lambda i, c: checked_step(c), x[0])


def checked_step(c):
    checkify.check(c < 9, "large")
    return c * 2


def checked_sum(x):
    y = jnp.exp(jnp.sin(x))
    checkify.check(jnp.sin(x).sum() > 0, "negative")
    return y


def checked_first(module, count):
    """Is the exponential in no kernel that runs before the last assertion?"""
    ops = module.functions["main"].body.ops
    last = max(n for n, op in enumerate(ops) if op.name == "assert")
    early = (op.attrs["callee"] for op in ops[:last] if op.name == "dispatch")
    return not any(op.name == "exp" for name in early for op in walk(module.functions[name].body))


def lowers(module, count):
    return True


def kernels(number):
    return lambda module, count: sum(not f.public for f in module.functions.values()) == number


def rows_of_integers(x):
    return jnp.einsum("bij,jk->bik", x.astype("i4"), (100 * W).astype("i1").astype("i4"))


def convolved_integers(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x.astype("i4"), w.astype("i4"), (1, 1), "SAME", dimension_numbers=numbers)


def in_quads(module, count):
    """Are weights packed for tiles that multiply four terms of i8?"""
    return any(op.attrs.get("group") == 4 for f in module.functions.values() for op in walk(f.body))


def has(name, number=1):
    return lambda module, count: count[name] == number


def in_pairs(module, count):
    """Are weights packed for an instruction that multiplies two terms of bf16?"""
    return any(op.attrs.get("group") == 2 for f in module.functions.values() for op in walk(f.body))


def of_few_bits(module, count):
    """Are weights integers?"""
    return any("bits" in op.attrs for f in module.functions.values() for op in walk(f.body))


def outside_of_loops(name):
    """Is the only op of this name in a kernel that no loop dispatches?"""

    def holds(module, count):
        inner = (o for op in walk(module.functions["main"].body) for r in op.regions for o in walk(r))
        looped = {o.attrs["callee"] for o in inner if o.name == "dispatch"}
        return not any(o.name == name for f in looped for o in walk(module.functions[f].body))

    return holds


def no_transfer_in_a_loop(module, count):
    loops = (op for op in walk(module.functions["main"].body) if op.name == "while")
    return not any(op.name == "transfer" for loop in loops for r in loop.regions for op in walk(r))


def all_know_their_device(module, count):
    return all("device" in op.attrs for op in walk(module.functions["main"].body) if op.name == "dispatch")


def concurrent(number):
    """Are so many products marked as concurrent?"""
    return lambda module, count: [f.attrs.get("concurrent") for f in module.functions.values()].count(number) == number


def prepares_once(module, count):
    """Is there one function that computes what is bound, for all sizes?"""
    return sum("prepares" in f.attrs for f in module.functions.values()) == 1


# For each pair: a model, what is true of it after the passes in the table's order and not with the pair reversed.
REASONS = {
    ("inline", "licm"): (invariant_call, (f32(64),), {}, outside_of_loops("sin")),
    ("inline", "hoist_checks"): (checked_call, (f32(4),), {}, judged_outside),
    ("hoist_checks", "fuse"): (checked_call, (f32(4),), {}, judged_outside),
    ("hoist_checks", "advance_checks"): (checked_loop, (f32(4),), {}, checked_first),
    ("advance_checks", "fuse"): (checked_sum, (f32(4),), {}, checked_first),
    ("inline", "fuse"): (lambda x: jax.jit(jnp.sin)(x), (f32(4),), {}, lowers),
    ("specialize", "split_reductions"): (lambda x: x.sum(), (symbolic("b, 64"),), {"b": (4096,)}, kernels(3)),
    ("specialize", "fuse"): (lambda x: x.sum(), (symbolic("b, 64"),), {"b": (4,)}, lowers),
    ("lower_collectives", "fuse"): (ALL_REDUCE, (), {}, lowers),
    ("fold_reduce_scatter", "lower_collectives"): (
        RawModel(OWN_PART, metadata={"ranks": RANKS}), (), {}, calls_of_ranks("reduce_scatter")
    ),
    ("fold_reduce_scatter", "combine_collectives"): (
        RawModel(OWN_PARTS, metadata={"ranks": TWICE}), (), {}, calls_of_ranks("reduce_scatter")
    ),
    ("combine_collectives", "lower_collectives"): (
        RawModel(OWN_PARTS, metadata={"ranks": TWICE}), (), {}, one_exchange
    ),
    ("licm", "fuse"): (invariant_call, (f32(64),), {}, outside_of_loops("sin")),
    ("canonicalize_dot", "pack_contractions"): (lambda x: x @ W, (f32(64, 64),), {}, has("packed_matmul")),
    ("narrow_products", "canonicalize_dot"): (rows_of_integers, (i8(3, 64, 64),), {}, in_quads),
    ("narrow_products", "decompose_convolution"): (
        convolved_integers, (i8(1, 9, 9, 16), i8(3, 3, 16, 16)), {}, in_quads
    ),
    ("fuse_attention", "canonicalize_dot"): (
        lambda q: jax.nn.softmax(q @ q.T) @ q, (f32(32, 16),), {}, has("attention", 1)
    ),
    ("canonicalize_dot", "fuse"): (lambda x: x @ W, (f32(64, 64),), {}, lowers),
    ("decompose_convolution", "pack_contractions"): (convolution, (f32(2, 16, 16, 16),), {}, has("packed_conv")),
    ("decompose_convolution", "fuse"): (convolution, (f32(2, 16, 16, 16),), {}, lowers),
    ("decompose_fft", "fuse"): (jnp.fft.rfft, (f32(4, 16),), {}, lowers),
    ("canonicalize_dot", "set_precision"): (lambda x, y: x @ y, (f32(64, 1), f32(1, 64)), {}, has("convert", 0)),
    ("set_precision", "pack_contractions"): (lambda x: x @ W, (f32(64, 64),), {}, in_pairs),
    ("fold_constants", "pack_contractions"): (computed_weights, (f32(4, 64),), {}, has("packed_matmul")),
    ("fold_constants", QUANTIZED): (lambda x: x @ jnp.sin(LARGE), (f32(4, 256),), {}, of_few_bits),
    (QUANTIZED, "pack_contractions"): (lambda x: x @ LARGE, (f32(4, 256),), {}, of_few_bits),
    ("pack_contractions", "fold_constants"): (lambda x: x @ W, (f32(64, 64),), {}, kernels(1)),
    ("pack_contractions", "licm"): (steps, (f32(32, 64), f32(64, 64)), {}, outside_of_loops("transpose")),
    ("pack_contractions", "sink_transposes"): (
        pooled, (f32(1, 3, 64, 64), f32(2, 3, 3, 3)), {}, windows_over(1, 2, 64, 64)
    ),
    ("sink_transposes", "fuse"): (pooled, (f32(1, 16, 64, 64), f32(32, 16, 3, 3)), {}, windows_over(1, 64, 64, 32)),
    ("split_windows", "canonicalize"): (jnp.cumsum, (LONG,), {}, has("slice", 1)),
    ("split_windows", "fuse"): (jnp.cumsum, (LONG,), {}, kernels(4)),
    ("parallelize_gpu", "fuse"): (jnp.sort, (LONG,), {}, kernels(12)),
    ("vectorize_argmax", "split_reductions"): (lambda x: x.argmax(), (LONG,), {}, kernels(4)),
    ("split_rows", "split_reductions"): (sum_of_exp, (LONG,), {}, kernels(2)),
    ("split_rows", "fuse"): (sum_of_exp, (LONG,), {}, kernels(2)),
    ("split_reductions", "fuse"): (jnp.sum, (LONG,), {}, kernels(2)),
    ("specialize", "bind_weights"): (jnp.matmul, (symbolic("b, 64"), W), {"b": (4,)}, prepares_once),
    ("bind_weights", "pack_contractions"): (jnp.matmul, (f32(4, 64), W), {}, has("packed_matmul")),
    ("pack_contractions", "split_weights"): (jnp.matmul, (f32(4, 64), W), {}, prepares_once),
    ("split_weights", "fuse"): (lambda x, w: x + jnp.exp(w), (f32(64), f32(64)), {}, prepares_once),
    ("cse", "fuse"): (twice, (f32(64),), {}, kernels(2)),
    ("licm", "isolate_devices"): (LOOP_OVER_DEVICES, (), {}, no_transfer_in_a_loop),
    ("assign_devices", "isolate_devices"): (TWO_DEVICES, (), {}, all_know_their_device),
    ("isolate_devices", "canonicalize_dot"): (TWO_DEVICES, (), {}, all_know_their_device),
    ("isolate_devices", "fuse"): (TWO_DEVICES, (), {}, all_know_their_device),
    ("fuse", "join_devices"): (TWO_DEVICES, (), {}, all_know_their_device),
    ("fuse", "mark_concurrent"): (lambda x, a, b: (x @ a, x @ b), (f32(64, 64),) * 3, {}, concurrent(2)),
    ("mark_concurrent", "join_devices"): (PRODUCTS_OVER_THERE, (), {}, concurrent(2)),
    ("dce", "fuse"): (dead_carry, (f32(64), f32(64)), {}, kernels(2)),
}


def broken_pairs(names):
    """Return the pairs that an order of passes breaks: the last run of the second counts."""
    last = {name: n for n, name in enumerate(names)}
    pairs = [(a.__name__, b.__name__) for a, b, _ in MUST_PRECEDE]
    return [(a, b) for a, b in pairs if a not in names or b not in last or names.index(a) > last[b]]


def reversed_order(first, second):
    """Return the passes with ``first`` moved behind the last run of ``second``."""
    rest = [step for step in PASSES if step.run.__name__ != first]
    end = max(n for n, step in enumerate(rest) if step.run.__name__ == second) + 1
    return (*rest[:end], next(step for step in PASSES if step.run.__name__ == first), *rest[end:])


def names_of(passes):
    return [step.run.__name__ for step in passes]


def test_the_pass_table_respects_every_order_reason():
    assert broken_pairs(names_of(PASSES)) == []
    assert all(reason for *_, reason in MUST_PRECEDE)
    assert len({(a, b) for a, b, _ in MUST_PRECEDE}) == len(MUST_PRECEDE)


def test_every_order_reason_has_a_model():
    assert {(a.__name__, b.__name__) for a, b, _ in MUST_PRECEDE} == set(REASONS)


def test_every_required_pass_has_a_postcondition():
    assert all(step.required == (step.establishes is not None) for step in PASSES)


@pytest.mark.parametrize("pair", REASONS, ids=lambda pair: "-".join(pair))
def test_a_wrong_pass_order_fails_or_is_worse(pair, monkeypatch):
    model, arguments, sizes, good = REASONS[pair]
    module = import_model(model, *arguments)
    options = Options(target=TARGETS.get(pair, TARGET), specialize=sizes, devices=DEVICES.get(pair, {}))
    bound, precision = (1,) if BOUND & {*pair} else (), PRECISIONS.get(pair, "model")
    options = replace(options, bind=bound, matmul_precision=precision)
    options = replace(options, quantize_weights="int8" if QUANTIZED in pair else "none")
    assert _holds(module, good, options)
    order = reversed_order(*pair)
    assert pair in broken_pairs(names_of(order))
    monkeypatch.setattr(pipeline, "PASSES", order)
    assert not _holds(module, good, options)


def _holds(module, good, options):
    """Does ``module`` pass all passes and lowering, and is ``good`` true of what the passes make?"""
    try:
        fused = run_passes(module, options)
        lower(fused, variant_targets(resolve_targets(options.target), options.devices)[0], options)
    except (CompileError, InternalError):
        return False
    return good(fused, Counter(op.name for f in fused.functions.values() for op in walk(f.body)))
