"""What jax does not emit of control and communication: tuples, tokens, collectives alone, ``rng``, refusals."""

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.text import parse_module, print_module

pytestmark = pytest.mark.cpu

X = np.arange(8, dtype=np.float32).reshape(2, 4)
GROUPS = "replica_groups = dense<[[0]]> : tensor<1x1xi64>"
ADD = """({ ^bb0(%p: tensor<f32>, %q: tensor<f32>):
 %s = stablehlo.add %p, %q : tensor<f32>
 stablehlo.return %s : tensor<f32>
})"""
SAME = "(tensor<2x4xf32>) -> tensor<2x4xf32>"


def run(text, *args, level=2):
    return aotc.load(aotc.compile(text.encode(), opt_level=level, verify_each=True)).invoke("main", *args)


def unary(line, result="tensor<2x4xf32>"):
    return f"func.func @main(%x: tensor<2x4xf32>) -> {result} {{\n {line}\n return %y : {result}\n}}"


COLLECTIVES = {
    "all_gather": f'%y = "stablehlo.all_gather"(%x) {{all_gather_dim = 1 : i64, {GROUPS}}} : {SAME}',
    "all_reduce": f'%y = "stablehlo.all_reduce"(%x) {ADD} {{{GROUPS}}} : {SAME}',
    "reduce_scatter": f'%y = "stablehlo.reduce_scatter"(%x) {ADD} {{scatter_dimension = 0 : i64, {GROUPS}}} : {SAME}',
    "all_to_all": f'%y = "stablehlo.all_to_all"(%x) {{split_dimension = 0 : i64, concat_dimension = 1 : i64, '
    f"split_count = 1 : i64, {GROUPS}}} : {SAME}",
    "collective_broadcast": f'%y = "stablehlo.collective_broadcast"(%x) {{{GROUPS}, '
    f"channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>}} : {SAME}",
    "collective_permute": '%y = "stablehlo.collective_permute"(%x) '
    f"{{source_target_pairs = dense<[[0, 0]]> : tensor<1x2xi64>}} : {SAME}",
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_one_process_returns_its_operand(name):
    text = unary(COLLECTIVES[name])
    module = import_model(text.encode())
    assert name in print_module(module)
    assert print_module(parse_module(print_module(module))) == print_module(module)
    np.testing.assert_array_equal(interpret(module, X)[0], X)
    for level in (0, 2):
        np.testing.assert_array_equal(run(text, X, level=level)[0], X)


def replaced(name, old, new, **module):
    """Return the program of a collective with a part of its line replaced, in a module of replicas and partitions."""
    assert old in COLLECTIVES[name]
    counts = ", ".join(f"mhlo.num_{n} = {count} : i32" for n, count in module.items())
    function = unary(COLLECTIVES[name].replace(old, new))
    return f"module attributes {{{counts}}} {{\n{function}\n}}" if counts else function


def groups(*rows):
    return f"replica_groups = dense<{[*map(list, rows)]}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def pairs(*rows):
    return f"dense<{[*map(list, rows)] or ''}> : tensor<{len(rows)}x2xi64>"


PAIR = "dense<[[0, 0]]> : tensor<1x2xi64>"
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
GLOBAL = f"{GROUPS}, use_global_device_ids, {CHANNEL}"
EMPTY = "replica_groups = dense<> : tensor<0x0xi64>"
GROUPED = [name for name in COLLECTIVES if name != "collective_permute"]
ALONE = {
    **{f"{name} in two groups of one": (name, GROUPS, groups([0], [1])) for name in GROUPED},
    **{f"{name} on a channel": (name, GROUPS, f"{GROUPS}, {CHANNEL}") for name in GROUPED[:4]},
    **{f"{name} by global ids": (name, GROUPS, GLOBAL) for name in GROUPED[:3]},
    "all_reduce without groups": ("all_reduce", GROUPS, EMPTY),
    "a permutation on a channel": ("collective_permute", PAIR, f"{PAIR}, {CHANNEL}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_one_process_alone_receives_its_operand(name):
    np.testing.assert_array_equal(run(replaced(*ALONE[name]), X)[0], X)


def test_a_permutation_without_pairs_gives_zeros():
    np.testing.assert_array_equal(run(replaced("collective_permute", PAIR, pairs()), X)[0], np.zeros_like(X))


OTHERS = {
    **{f"pairs {rows}": (replaced("collective_permute", PAIR, pairs(*rows)), "collective_permute exchanges between 2")
       for rows in ([(0, 1), (1, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(0, 0), (1, 1)])},
    **{f"{name} in a group of two": (replaced(name, GROUPS, groups([0, 1])), f"{name} exchanges between 2 processes")
       for name in ("all_reduce", "collective_broadcast")},
    "a group without process 0": (replaced("collective_broadcast", GROUPS, groups([1])), "no group with process 0"),
    "a broadcast to nobody": (replaced("collective_broadcast", GROUPS, EMPTY), "no replica_groups"),
    "no groups, two replicas": (replaced("all_reduce", GROUPS, EMPTY, replicas=2), "exchanges between 2 processes"),
    "a module of two partitions": (
        replaced("collective_permute", PAIR, f"{PAIR}, {CHANNEL}", partitions=2), "needs several devices: it is for 2",
    ),
    "a permutation of two replicas": (
        replaced("collective_permute", PAIR, PAIR, replicas=2), "collective_permute exchanges between 2 processes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_collective_between_processes_is_refused(name):
    text, message = OTHERS[name]
    with pytest.raises(CompileError, match=message) as caught:
        aotc.compile(text.encode())
    assert "<model>:" in str(caught.value) or "partitions" in name
    assert "try: " in str(caught.value)


def test_groups_without_processes_are_refused():
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        text = replaced(name, GROUPS, "replica_groups = dense<> : tensor<1x0xi64>")
        with pytest.raises(CompileError, match="replica_groups has a group without processes"):
            aotc.compile(text)


def test_an_id_of_several_replicas_is_refused():
    text = """module attributes {mhlo.num_replicas = 2 : i32} {
    func.func @main() -> tensor<ui32> { %y = stablehlo.replica_id : tensor<ui32> return %y : tensor<ui32> } }"""
    with pytest.raises(CompileError, match="replica_id asks which of 2 processes this is"):
        aotc.compile(text.encode())


def test_asynchronous_collectives_between_processes_are_refused():
    """XLA's all-gather-start and -done, as StableHLO's async_start and async_done."""
    body = COLLECTIVES["all_reduce"].replace(GROUPS, groups([0, 1])).replace("%x", "%z")
    start = f"""%f = "stablehlo.async_start"(%x) ({{
    ^bb0(%z: tensor<2x4xf32>):
      {body}
      stablehlo.return %y : tensor<2x4xf32>
    }}) : (tensor<2x4xf32>) -> !stablehlo.future<tensor<2x4xf32>>
    %y = "stablehlo.async_done"(%f) : (!stablehlo.future<tensor<2x4xf32>>) -> tensor<2x4xf32>"""
    with pytest.raises(CompileError, match="all_reduce exchanges between 2 processes"):
        aotc.compile(unary(start).encode())
    np.testing.assert_array_equal(run(unary(start.replace(groups([0, 1]), GROUPS)), X)[0], X)


def test_ids_of_the_only_device_are_zero():
    text = (
        "func.func @main() -> (tensor<ui32>, tensor<ui32>) {\n"
        "%p = stablehlo.partition_id : tensor<ui32>\n%r = stablehlo.replica_id : tensor<ui32>\n"
        "return %p, %r : tensor<ui32>, tensor<ui32>\n}"
    )
    assert [int(v) for v in run(text)] == [0, 0]


TUPLES = """
func.func public @main(%a: tuple<tensor<2xf32>, tuple<tensor<i32>>>, %tok: !stablehlo.token, %n: tensor<i32>)
    -> (tuple<tensor<i32>, tensor<2xf32>>, !stablehlo.token) {
  %0 = stablehlo.get_tuple_element %a[1] : (tuple<tensor<2xf32>, tuple<tensor<i32>>>) -> tuple<tensor<i32>>
  %1 = stablehlo.get_tuple_element %0[0] : (tuple<tensor<i32>>) -> tensor<i32>
  %2 = stablehlo.get_tuple_element %a[0] : (tuple<tensor<2xf32>, tuple<tensor<i32>>>) -> tensor<2xf32>
  %t = stablehlo.after_all %tok, %tok : !stablehlo.token
  %r:4 = stablehlo.while(%c = %t, %g0 = %1, %g1 = %2, %k = %n)
      : !stablehlo.token, tensor<i32>, tensor<2xf32>, tensor<i32>
   cond {
    %z = stablehlo.constant dense<0> : tensor<i32>
    %q = stablehlo.compare GT, %k, %z : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %q : tensor<i1>
  } do {
    %o = stablehlo.constant dense<1> : tensor<i32>
    %k2 = stablehlo.subtract %k, %o : tensor<i32>
    %h0 = stablehlo.add %g0, %o : tensor<i32>
    %h1 = stablehlo.add %g1, %g1 : tensor<2xf32>
    %cc = stablehlo.optimization_barrier %c : !stablehlo.token
    stablehlo.return %cc, %h0, %h1, %k2 : !stablehlo.token, tensor<i32>, tensor<2xf32>, tensor<i32>
  }
  %y = stablehlo.tuple %r#1, %r#2 : tuple<tensor<i32>, tensor<2xf32>>
  return %y, %r#0 : tuple<tensor<i32>, tensor<2xf32>>, !stablehlo.token
}
"""


@pytest.mark.parametrize("level", [0, 2])
def test_tuples_are_flattened_and_tokens_removed(level):
    """A tuple is its tensors, at the interface too; a token is nothing."""
    module = aotc.load(aotc.compile(TUPLES.encode(), opt_level=level))
    count, doubled = module((np.float32([1, 2]), (np.int32(5),)), np.int32(3))
    assert count == 8
    np.testing.assert_array_equal(doubled, [8, 16])
    assert [a.tolist() for a in module.invoke("main", np.float32([1, 2]), np.int32(5), np.int32(3))] == [8, [8, 16]]


RNG = """
func.func @main(%a: tensor<{t}>, %b: tensor<{t}>) -> (tensor<40x50x{t}>, tensor<40x50x{t}>) {{
  %s = stablehlo.constant dense<[40, 50]> : tensor<2xi64>
  %0 = stablehlo.rng %a, %b, %s, distribution = {d} : (tensor<{t}>, tensor<{t}>, tensor<2xi64>) -> tensor<40x50x{t}>
  %1 = stablehlo.rng %a, %b, %s, distribution = {d} : (tensor<{t}>, tensor<{t}>, tensor<2xi64>) -> tensor<40x50x{t}>
  return %0, %1 : tensor<40x50x{t}>, tensor<40x50x{t}>
}}
"""


@pytest.mark.parametrize(("t", "numpy"), [("f32", "f4"), ("f64", "f8"), ("f16", "f2"), ("i32", "i4"), ("ui8", "u1")])
def test_rng_uniform_is_within_bounds_with_the_right_mean(t, numpy):
    low, high = (np.array(v, numpy) for v in (2, 12))
    first, second = run(RNG.format(t=t, d="UNIFORM"), low, high)
    assert (first != second).mean() > 0.8
    for found in (first, second):
        assert found.min() >= 2
        assert found.max() <= 12 if t == "f16" else found.max() < 12
        assert abs(found.astype("f8").mean() - (7 if numpy[0] == "f" else 6.5)) < 0.3


def test_rng_normal_has_the_right_mean_and_deviation():
    found = run(RNG.format(t="f32", d="NORMAL"), np.float32(3), np.float32(2))[0]
    assert abs(found.mean() - 3) < 0.15
    assert abs(found.std() - 2) < 0.15


@pytest.mark.parametrize("name", ["infeed", "outfeed", "send", "recv"])
def test_infeed_outfeed_send_and_recv_are_refused(name):
    lines = {
        "infeed": '%y:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)',
        "outfeed": '%y = "stablehlo.outfeed"(%x, %t) : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token',
        "send": '%y = "stablehlo.send"(%x, %t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 2>, '
        "is_host_transfer = true} : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token",
        "recv": '%y:2 = "stablehlo.recv"(%t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>, '
        "is_host_transfer = true} : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)",
    }
    text = (
        "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n %t = stablehlo.create_token : !stablehlo.token\n "
        f"{lines[name]}\n return %x : tensor<2xf32>\n}}"
    )
    message = f"<model>:3:[0-9]+: error: stablehlo.{name} on .*a bundle runs alone"
    with pytest.raises(CompileError, match=message) as caught:
        aotc.compile(text.encode())
    instead = "an argument" if name in ("infeed", "recv") else "a result"
    assert f"try: make the value {instead} of the function" in str(caught.value)


@pytest.mark.parametrize("level", [0, 2])
def test_bitcasts_of_booleans_pack_the_lowest_bit_first(level):
    """64 booleans are the bits of one integer, the lowest first."""
    text = (
        "func.func @main(%x: tensor<64xi1>, %n: tensor<ui16>) -> (tensor<ui64>, tensor<16xi1>) {\n"
        "%y = stablehlo.bitcast_convert %x : (tensor<64xi1>) -> tensor<ui64>\n"
        "%z = stablehlo.bitcast_convert %n : (tensor<ui16>) -> tensor<16xi1>\n"
        "return %y, %z : tensor<ui64>, tensor<16xi1>\n}"
    )
    word = np.uint64(0xF00DFACE12345677)
    bits = (int(word) >> np.arange(64, dtype=object)) & 1
    packed, unpacked = run(text, bits.astype(bool), np.uint16(0xBEEF), level=level)
    assert packed == word
    np.testing.assert_array_equal(unpacked, (0xBEEF >> np.arange(16)) & 1)


TOP_K = """
func.func @main(%x: tensor<2x4xf32>) -> (tensor<2x3xf32>, tensor<2x3xi32>) {{
  %v, %i = stablehlo.custom_call @{target}(%x) {{{attrs}}} : (tensor<2x4xf32>) -> (tensor<2x3xf32>, tensor<2x3xi32>)
  return %v, %i : tensor<2x3xf32>, tensor<2x3xi32>
}}
"""


@pytest.mark.parametrize(
    ("target", "attrs", "largest"),
    [("TopK", "", True), ("mhlo.topk", "mhlo.attributes = {k = 3 : i64, largest = true}", True),
     ("mhlo.topk", "mhlo.attributes = {k = 3 : i64, largest = false}", False)],
)  # fmt: skip
def test_top_k_calls_of_other_front_ends_match_numpy(target, attrs, largest):
    x = np.float32([[3, 1, 3, 2], [np.inf, -0.0, 0.0, -np.inf]])
    values, places = run(TOP_K.format(target=target, attrs=attrs), x)
    expected = [[0, 2, 3], [0, 2, 1]] if largest else [[1, 3, 0], [3, 1, 2]]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.array(expected), 1))


@pytest.mark.parametrize("aggregate", [True, False])
def test_approximate_top_k_is_exact(aggregate):
    import jax

    x = np.random.default_rng(0).normal(size=(3, 100)).astype("float32")
    f = jax.jit(lambda x: jax.lax.approx_min_k(x, 5, aggregate_to_topk=aggregate))
    for got, want in zip(aotc.load(aotc.compile(f, x)).invoke("main", x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_annotations_and_buffer_calls_do_not_change_values():
    """What places, pins or shards values leaves them as they are; an empty buffer has zeros."""
    text = unary(
        f"%a = stablehlo.custom_call @Sharding(%x) : {SAME}\n"
        "%b = stablehlo.custom_call @Pin(%a) : (tensor<2x4xf32>) -> memref<2x4xf32>\n"
        "%c = stablehlo.custom_call @Unpin(%b) : (memref<2x4xf32>) -> tensor<2x4xf32>\n"
        "%d = stablehlo.custom_call @AllocateBuffer() : () -> tensor<2x4xf32>\n"
        "stablehlo.custom_call @dce_sink(%c) {has_side_effect = true} : (tensor<2x4xf32>) -> ()\n"
        "%e = stablehlo.custom_call @mhlo.erf(%c) {mhlo.attributes = {}} : (tensor<2x4xf32>) -> tensor<2x4xf32>\n"
        "%y = stablehlo.add %e, %d : tensor<2x4xf32>"
    )  # fmt: skip
    import math

    np.testing.assert_allclose(run(text, X)[0], np.vectorize(math.erf)(X), rtol=1e-6)
