"""Movement, indexing, windows, sorting and random bits, beside ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, check, integers, normal

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.ir.loop.printer import print_kernel
from aotc.ir.semantics.run import interpret
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

lax = jax.lax
X = normal(4, 5, 6)


def pool(operator, init, window, strides, padding):
    return lambda x: lax.reduce_window(x, init, operator, window, strides, padding)


def scattered(kind, **options):
    return lambda x, i, u: getattr(x.at[i], kind)(u, **options)


def max_pool(x):
    return pool(lax.max, -jnp.inf, (1, 3, 2), (1, 2, 1), "SAME")(x)


def turned(x, times):
    for _ in range(times):
        x = x.T.reshape(48, 12).T.reshape(24, 24)
    return x


def padded(x, times):
    for _ in range(times):
        x = jnp.pad(x, 1).T
    return x


MOVEMENT = {
    "transpose": (lambda x: (x.T, x.transpose(1, 0, 2), x.transpose(2, 0, 1) + 1, x.swapaxes(1, 2).copy()), [X]),
    "reshape": (lambda x: (x.reshape(20, 6), x.reshape(-1) * 2, x.T.reshape(8, 15), x.reshape(2, 2, 5, 1, 6)), [X]),
    "slice": (lambda x: (x[1:3], x[:, ::2], x[..., ::-1], x[3, 4, 5], x[::3, 1::2, 4:0:-2] + 1, x[2:2]), [X]),
    "pad": (lambda x: (lax.pad(x, 1.5, [(1, 2, 0), (0, 0, 2), (-1, -2, 0)]), lax.pad(x, 0.0, [(-1, 3, 1)] * 3),
                       lax.pad(x, 0.0, [(-2, -2, 0), (2, -1, 3), (0, 0, 0)]), jnp.pad(x, 2, mode="edge"),
                       jnp.pad(x, 2, mode="reflect")), [X]),
    "pad-all": (lambda x: lax.pad(x, 2.0, [(-2, -2, 0), (1, 1, 0), (0, 0, 0)]), [X]),
    "pad-empty": (lambda x: lax.pad(x, 2.0, [(2, 1, 0), (1, 1, 0)]), [normal(0, 3)]),
    "concatenate": (lambda x, y: (jnp.concatenate([x, y], 1), jnp.concatenate([x * 2, x, y[:, :1]], 1),
                                  jnp.stack([x, x], 1), jnp.concatenate([x.T, x.T])), [X, normal(4, 2, 6)]),
    "reverse": (lambda x: (x[::-1], jnp.flip(x), jnp.roll(x, 3, 1), jnp.rot90(x)), [X]),
    "tile": (lambda x: (jnp.tile(x, (2, 1, 3)), jnp.repeat(x, 3, 1), jnp.broadcast_to(x[:1], (3, 5, 6))), [X]),
    "diag": (lambda x: (jnp.diag(x[0, :, :5]), jnp.tril(x), jnp.triu(x, 1), jnp.trace(x), jnp.eye(4) + x[0, 0, 0]), [X]),  # noqa: E501
    "bool-i8": (lambda x: (x > 0).T.astype(jnp.int8)[1:, ::2], [X]),
    "split": (lambda x: tuple(p * n for n, p in enumerate(jnp.split(x, 3, -1))), [X]),
    "take": (lambda x, i: (x[i], x[:, i % 5], jnp.take(x, i, 2, mode="clip"), jnp.take(x, i, 0, mode="fill"), x[i, i]),
             [X, integers(7, low=-6, high=7)]),
    "take-along": (lambda x, i: (jnp.take_along_axis(x, i, 1), jnp.take_along_axis(x, i, 2)),
                   [X, integers(4, 5, 6, low=0, high=5)]),
    "gather-nd": (lambda x, i: (x[i[:, 0], :, i[:, 1]], x[i[:, 0], i[:, 1], i[:, 2]]), [X, integers(7, 3, low=0, high=4)]),  # noqa: E501
    "gather-u8": (lambda x, i: x[i] * 2, [X, integers(3, low=0, high=4, dtype="uint8")]),
    "one-hot": (lambda i: (jax.nn.one_hot(i, 7), jax.nn.one_hot(i, 7) @ jnp.ones((7, 2))), [integers(9, low=-2, high=9)]),  # noqa: E501
    "vmap-slice": (lambda x, i: jax.vmap(lambda a, k: lax.dynamic_slice(a, (k, 0), (2, 6)))(x, i),
                   [X, integers(4, low=-3, high=8)]),
    "dynamic-slice": (lambda x, i: (lax.dynamic_slice(x, (i[0], i[1], i[2]), (2, 3, 6)), lax.dynamic_index_in_dim(x, i[0])),  # noqa: E501
                      [X, integers(3, low=-3, high=8)]),
    "dynamic-update": (lambda x, u, i: (lax.dynamic_update_slice(x, u, (i[0], i[1], i[2])), x * 2,
                                        lax.dynamic_update_slice(x * 3, u + 1, (i[2], i[1], i[0]))),
                       [X, normal(2, 3, 4), integers(3, low=-3, high=8)]),
    "update-whole": (lambda x, i: lax.dynamic_update_slice(x, x * 2, (i, i, i)), [X, np.int32(3)]),
    **{f"scatter-{kind}": (scattered(kind), [X, integers(9, low=-4, high=7), normal(9, 5, 6, seed=2)])
       for kind in ("add", "set", "max", "min", "mul")},
    "gather-many-rows": (lambda x, i: (x[i] * 2, jnp.sin(x)[i], x[i[:7], :1]), [normal(300, 5), integers(3001, low=0, high=300)]),  # noqa: E501
    **{f"scatter-wide-{kind}": (scattered(kind, mode="drop"), [normal(40, 3, 130), integers(50, low=-60, high=60),
                                                               normal(50, 3, 130, seed=2)])
       for kind in ("add", "max", "set")},
    "scatter-drop": (scattered("add", mode="clip"), [X, integers(9, low=-9, high=12), normal(9, 5, 6, seed=2)]),
    "scatter-nd": (lambda x, i, u: x.at[i[:, 0], :, i[:, 1]].add(u), [X, integers(7, 2, low=0, high=4), normal(7, 5)]),
    "scatter-int": (lambda x, i: x.at[i].add(1), [np.zeros(8, "int32"), integers(50, low=0, high=9)]),
    "scatter-apply": (lambda x, i: x.at[i].apply(jnp.sin), [X, integers(2, low=0, high=4)]),
    "scatter-wide": (lambda x, i, u: x.at[i].add(u), [normal(6, 300), integers(9, low=0, high=6), normal(9, 300, seed=2)]),  # noqa: E501
    "segment-sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), [normal(12, 3), integers(12, low=0, high=4)]),
    "take-grad": (lambda x, i: jax.grad(lambda t: (t[i] ** 2).sum())(x), [X, integers(7, low=0, high=4)]),
    "max-pool": (lambda x: (max_pool(x), pool(lax.max, -jnp.inf, (2, 2, 2), (2, 2, 2), "VALID")(x)), [X]),
    "avg-pool": (lambda x: pool(lax.add, 0.0, (1, 3, 3), (1, 2, 3), "SAME")(x) / 9, [X]),
    "pool-dilated": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 2), [(0, 0), (2, 1), (0, 3)],
                                                 (1, 2, 1), (1, 2, 3)), [X]),
    "pool-int": (lambda x: pool(lax.max, np.int32(-100), (2, 2), (1, 1), "VALID")(x), [integers(7, 8)]),
    "avg-pool-grad": (jax.grad(lambda x: (pool(lax.add, 0.0, (1, 3, 3), (1, 2, 2), "SAME")(x) ** 2).sum()), [X]),
    "max-pool-grad": (jax.grad(lambda x: (max_pool(x) ** 2).sum()), [X]),
    "max-pool-grad-ties": (jax.grad(lambda x: (max_pool(x) * jnp.arange(6)).sum()), [np.ones((4, 5, 6), "float32")]),
    "turned": (lambda x: (turned(x, 10), turned(jnp.tanh(x @ x), 10), turned(x + x.sum(0), 10)), [normal(24, 24)]),
    "padded": (lambda x: (padded(x, 20), padded(jnp.tanh(x @ x.T), 20)), [normal(6, 7)]),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.sort(x, 1), jnp.sort(x, -1), jnp.sort(x, descending=True)), [X]),
    "sort-nan": (lambda x: jnp.sort(x), [np.array([3, np.nan, -0.0, 0.0, -np.inf, np.inf, 1, -2], "float32")]),
    "argsort": (lambda x: (jnp.argsort(x, 0), jnp.argsort(x, -1), lax.sort((x, x + 1), num_keys=1)), [integers(6, 40)]),
    "sort-long": (lambda x: (jnp.sort(x), jnp.argsort(x), jnp.median(x)), [normal(1500)]),
    "top-k": (lambda x: (*lax.top_k(x, 3), *lax.top_k(x[0], 1)), [X]),
    "top-k-ties": (lambda x: lax.top_k(x, 4), [integers(5, 20, low=0, high=3).astype("float32")]),
    "random-bits": (lambda k: (jax.random.bits(k, (7,)), jax.random.normal(k, (5,)), jax.random.uniform(k, (3, 3)),
                               jax.random.randint(k, (9,), 0, 50), jax.random.split(k)), [np.array([1, 2], "uint32")]),
    "scatter-into-nothing": (lambda x, i, u: x.at[i].add(u), [normal(0, 4), np.int32([0, -1, 2]), normal(3, 4)]),
    "rng-bit-generator": (lambda k: lax.rng_bit_generator(k, (13,)), [np.array([1, 2, 3, 4], "uint32")]),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MOVEMENT)
def test_movement_and_indexing_match_jax_at_every_level(name, level):
    function, args = MOVEMENT[name]
    check(function, args, level, 4)


STATE = """func.func @main(%s: tensor<@S>) -> (tensor<@S>, tensor<3x5xui32>) {
  %0, %1 = stablehlo.rng_bit_generator %s, algorithm = @A : (tensor<@S>) -> (tensor<@S>, tensor<3x5xui32>)
  return %0, %1 : tensor<@S>, tensor<3x5xui32>
}"""


@pytest.mark.parametrize("algorithm", ["DEFAULT", "THREE_FRY", "PHILOX"])
@pytest.mark.parametrize(("state", "dtype"), [("4xui32", "uint32"), ("4xi32", "int32"), ("2xi64", "int64")])
def test_a_random_state_of_another_integer_dtype_gives_the_same_bits(algorithm, state, dtype):
    held = np.array([1, 2, 3, 2**32 - 1], np.uint32)
    text = STATE.replace("@A", algorithm)
    got = aotc.load(aotc.compile(text.replace("@S", state))).invoke("main", held.view(dtype))
    device = jax.devices("cpu")[0]
    with jax.enable_x64(True):
        program = device.client.compile_and_load(text.replace("@S", "2xui64"), [device])
        after, bits = map(np.asarray, program.execute([jax.device_put(held.view(np.uint64), device)]))
    assert got[0].dtype == dtype
    np.testing.assert_array_equal(got[0].view(np.uint64), after)
    np.testing.assert_array_equal(got[1], bits)


@pytest.mark.parametrize("bits", ["1xui32", "3xui32", "1x3xui32", "5x3xui32", "3xui64", "0xui32"])
def test_random_bits_of_fewer_bits_than_a_counter_match_xla(bits):
    """Places of the last counter's words that are behind the array are not in the kernel."""
    text = STATE.replace("@A", "PHILOX").replace("@S", "3xui64").replace("3x5xui32", bits)
    held = np.uint64([1, 2, 3])
    got = aotc.load(aotc.compile(text, verify_each=True)).invoke("main", held)
    for one, other in zip(got, run_xla(fetch(text), [held]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_scalar_random_state_is_refused():
    with pytest.raises(CompileError, match=r"<model>:2:\d+: error: .*state"):
        aotc.compile(STATE.replace("@A", "DEFAULT").replace("@Sx", "").replace("tensor<@S>", "tensor<ui32>"))


@pytest.mark.parametrize(("algorithm", "state"), [("THREE_FRY", "3xui64"), ("PHILOX", "1xui64"), ("DEFAULT", "2xui32")])
def test_a_random_state_of_the_wrong_size_is_refused(algorithm, state):
    with pytest.raises(CompileError, match=r"the state is u64\[\d\], expected u64\[2\]|a state of \d words, expected"):
        aotc.compile(STATE.replace("@A", algorithm).replace("@S", state))


INDEXED = """func.func @main(%x: tensor<4x5xf32>, %k: tensor<6x1xui64>, %i: tensor<ui64>)
    -> (tensor<6x5xf32>, tensor<4x5xf32>, tensor<2x2xf32>, tensor<4x5xf32>) {
  %0 = "stablehlo.gather"(%x, %k) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],
    collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 5>}>
    : (tensor<4x5xf32>, tensor<6x1xui64>) -> tensor<6x5xf32>
  %1 = "stablehlo.scatter"(%x, %k, %0) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1],
    inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<4x5xf32>, tensor<6x1xui64>, tensor<6x5xf32>) -> tensor<4x5xf32>
  %2 = stablehlo.dynamic_slice %x, %i, %i, sizes = [2, 2]
    : (tensor<4x5xf32>, tensor<ui64>, tensor<ui64>) -> tensor<2x2xf32>
  %3 = stablehlo.dynamic_update_slice %x, %2, %i, %i
    : (tensor<4x5xf32>, tensor<2x2xf32>, tensor<ui64>, tensor<ui64>) -> tensor<4x5xf32>
  return %0, %1, %2, %3 : tensor<6x5xf32>, tensor<4x5xf32>, tensor<2x2xf32>, tensor<4x5xf32>
}"""


@pytest.mark.parametrize("start", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_u64_indices_above_the_i64_range_match_xla(start):
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    k = np.array([[2**63], [2**64 - 1], [1], [3], [2**63 + 1], [0]], np.uint64)
    args = [x, k, np.array(start, np.uint64)]
    device = jax.devices("cpu")[0]
    with jax.enable_x64(True):
        program = device.client.compile_and_load(INDEXED, [device])
        want = [np.asarray(r) for r in program.execute([jax.device_put(a, device) for a in args])]
    for found in (interpret(import_model(INDEXED), *args), aotc.load(aotc.compile(INDEXED)).invoke("main", *args)):
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("shape", "order", "near"), [
    ((40, 7, 32), (1, 0, 2), True),  # rows as they lie, of each its pieces
    ((2, 40, 7, 32), (0, 2, 1, 3), True),
    ((40, 7, 32), (0, 1, 2), False),
    ((40, 7, 32), (0, 2, 1), False),
])  # fmt: skip
def test_transposes_read_neighbouring_row_pieces_together(shape, order, near):
    """Neighbouring items read what lies side by side: pieces of some rows, then the next pieces of these."""
    options = Options(target="cpu:x86-64-v4")
    function = jax.jit(lambda x: x.transpose(order) * 2)
    exported = jax.export.export(function, platforms=["cpu"])(jax.ShapeDtypeStruct(shape, "float32"))
    module = run_passes(import_model(exported), options)
    (kernel,) = lower(module, TARGETS[options.target], options).kernels
    assert (", (p % 7), " in print_kernel(kernel)) == near
    check(function, [normal(*shape)], 2)
