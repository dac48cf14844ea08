"""Functions exported by jax with symbolic dims of every kind, beside what the export itself gives and raises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.errors import CallError

CASES = {}
QUICK = frozenset(
    [
        "elementwise",
        "2b",
        "b+1",
        "floordiv",
        "max",
        "eq12",
        "matmul",
        "conv",
        "reduce_window",
        "sort",
        "cumsum1",
        "scan_rnn",
        "attention",
        "roll",
        "ceildiv",
        "dus",
    ]
)


def case(name, fn, specs, sizes, constraints=()):
    CASES[name] = (fn, specs, sizes, constraints)


B1 = [{"b": n} for n in (1, 2, 3, 7, 64)]
B2 = [{"b": n} for n in (2, 4, 8, 12)]
case("elementwise", lambda x, y: jnp.tanh(x) * y + 1, ["b, 4", "b, 4"], B1)
case("2b", lambda x: (x * 2).reshape(2, -1), ["2*b, 3"], B1)
case("b+1", lambda x: x[1:] - x[:-1], ["b+1, 3"], B1)
case("floordiv", lambda x, y: x[: y.shape[0]] * y, ["b", "floordiv(b,2)"], B2)
case("mod", lambda x: jnp.concatenate([x, jnp.ones(x.shape[0] % 4)]), ["b"], B1)
case("max", lambda x: jnp.ones(jax.core.max_dim(x.shape[0], 4)) * x.sum(), ["b"], B1)
case("min", lambda x: jnp.ones(jax.core.min_dim(x.shape[0], 4)) * x.sum(), ["b"], B1)
case("product", lambda x: x.reshape(-1) * 2, ["a, b, 3"], [{"a": 2, "b": 3}, {"a": 5, "b": 1}])
case("product2", lambda x, y: x.reshape(-1) + y, ["a, b", "a*b"], [{"a": 2, "b": 3}, {"a": 5, "b": 1}])
case("eq12", lambda x: x.reshape(12) * 2, ["a, b"], [{"a": 3, "b": 4}, {"a": 6, "b": 2}], ["a*b == 12"])
case("ge2", lambda x: x[:2], ["b"], B2, ["b >= 2"])
case(
    "matmul",
    lambda x, y: x @ y,
    ["m, k", "k, n"],
    [{"m": 3, "k": 5, "n": 7}, {"m": 1, "k": 1, "n": 1}, {"m": 33, "k": 17, "n": 65}],
)
case(
    "bmm",
    lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
    ["b, m, k", "b, k, 8"],
    [{"b": 3, "m": 3, "k": 5}, {"b": 1, "m": 16, "k": 9}],
)
case(
    "conv",
    lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    ["b, h, w, 3", "3, 3, 3, 4"],
    [{"b": 1, "h": 5, "w": 7}, {"b": 2, "h": 8, "w": 3}],
)
case(
    "conv_stride",
    lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    ["b, h, h, 3", "3, 3, 3, 4"],
    [{"b": 1, "h": 5}, {"b": 2, "h": 8}],
    ["h >= 3"],
)
case("reduce", lambda x: (x.sum(0), x.max(1), x.mean()), ["b, n"], [{"b": 3, "n": 5}, {"b": 1, "n": 1}])
case("softmax", lambda x: jax.nn.softmax(x), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case(
    "reduce_window",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 2), "SAME"),
    ["b, n"],
    [{"b": 3, "n": 5}, {"b": 2, "n": 40}],
)
case(
    "avgpool",
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    ["b, 2*n"],
    [{"b": 3, "n": 5}, {"b": 2, "n": 40}],
)
case("sort", lambda x: jnp.sort(x, axis=-1), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("sort0", lambda x: jnp.sort(x, axis=0), ["b, n"], [{"b": 3, "n": 5}, {"b": 20, "n": 4}])
case("argsort", lambda x: jnp.argsort(x), ["b"], B1)
case("top_k", lambda x: lax.top_k(x, 2), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}], ["n >= 2"])
case("argmax", lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1)), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("gather", lambda x: x[jnp.array([0, 1, 0])], ["b, 3"], B2)
case(
    "take", lambda x, y: jnp.take(x, (y * 3).astype(int), axis=0), ["b, 3", "n"], [{"b": 9, "n": 5}, {"b": 12, "n": 4}]
)
case("scatter", lambda x, y: x.at[(y * 2).astype(int)].add(y), ["b", "n"], [{"b": 9, "n": 5}, {"b": 12, "n": 4}])
case("segment", lambda x: jax.ops.segment_sum(x, jnp.arange(x.shape[0]) % 3, 3), ["b"], B1)
case("cumsum", lambda x: jnp.cumsum(x), ["b"], B1)
case("cumsum1", lambda x: jnp.cumsum(x, axis=1), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("cummax", lambda x: lax.cummax(x, axis=0), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("concat", lambda x, y: jnp.concatenate([x, y, x]), ["a, 3", "b, 3"], [{"a": 3, "b": 5}, {"a": 1, "b": 2}])
case("pad", lambda x: jnp.pad(x, ((1, 2), (0, x.shape[0]))), ["b, 3"], B1)
case("reshape_split", lambda x: x.reshape(x.shape[0] // 2 if False else -1, 2, 3).sum(1), ["2*b, 3"], B1)
case("flatten", lambda x: x.reshape(x.shape[0], -1) @ jnp.ones((12, 5), jnp.float32), ["b, 3, 4"], B1)
case("scan", lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(3, jnp.float32), x), ["b, 3"], B1)
case(
    "scan_rnn",
    lambda x, w: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c.sum(-1)), jnp.zeros((x.shape[1], 4), jnp.float32), x),
    ["t, b, 4", "4, 4"],
    [{"t": 3, "b": 2}, {"t": 8, "b": 1}],
)
case("fori", lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + x[i], jnp.zeros(3, jnp.float32)), ["b, 3"], B1)
case("while", lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 1, x), ["b"], B1)
case(
    "dus",
    lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
    ["b, 3", "n, 3"],
    [{"b": 5, "n": 2}, {"b": 7, "n": 7}],
    ["b >= n"],
)
case(
    "ds",
    lambda x, y: lax.dynamic_slice(x, (y.astype(int).sum(), 0), (y.shape[0], 3)),
    ["b, 3", "n"],
    [{"b": 5, "n": 2}, {"b": 7, "n": 7}],
    ["b >= n"],
)
case("random", lambda x: jax.random.normal(jax.random.key(0), x.shape) + x, ["b, 3"], B1)
case("random_bits", lambda x: jax.random.bits(jax.random.key(1), (x.shape[0], 5)), ["b"], B1)


def attn(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    m = jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1])
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(m, s, -1e9)), v)


case("attention", attn, ["b, t, 2, 8"] * 3, [{"b": 1, "t": 5}, {"b": 2, "t": 16}])
case("iota", lambda x: jnp.arange(x.shape[0]) * 2 + x, ["b"], B1)
case("tri", lambda x: jnp.tril(x), ["b, b"], B1)
case("roll", lambda x: jnp.roll(x, 1), ["b"], B1)
case("flip_T", lambda x: x[::-1].T, ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("strided", lambda x: x[::2], ["b"], B1)
case("repeat", lambda x: jnp.repeat(x, 3, axis=0), ["b, 2"], B1)
case("tile", lambda x: jnp.tile(x, (2, x.shape[0])), ["b, 2"], B1)
case("outer_size", lambda x: x / x.shape[0] + jnp.sqrt(jnp.float32(x.shape[0])), ["b"], B1)
case("var", lambda x: jnp.var(x, axis=0), ["b, 3"], B1)
case("grad", jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("vmap_dot", jax.vmap(jnp.dot), ["b, n", "b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("median", lambda x: jnp.median(x, axis=0), ["b, 3"], B1)
case("onehot", lambda x: jax.nn.one_hot((x * 3).astype(int), x.shape[0]), ["b"], B1)
case("linspace", lambda x: jnp.linspace(0, 1, x.shape[0]) * x, ["b"], [{"b": 3}, {"b": 9}], ["b >= 2"])
case("where", lambda x: jnp.where(x > 1, x, 0.0).sum(0), ["b, n"], [{"b": 3, "n": 5}, {"b": 2, "n": 40}])
case("cond", lambda x: lax.cond(x.sum() > 2, lambda v: v * 2, lambda v: v - 1, x), ["b"], B1)
case("diag", lambda x: jnp.diagonal(x), ["b, b"], B1)
case("cumprod", lambda x: jnp.cumprod(x), ["b"], B1)
case("logcumsumexp", lambda x: lax.cumlogsumexp(x), ["b"], B1)
case("cholesky", lambda x: jnp.linalg.cholesky(x @ x.swapaxes(-1, -2) + 4 * jnp.eye(3)), ["b, 3, 3"], B1)
case("fft", lambda x: jnp.abs(jnp.fft.rfft(x)), ["b, 8"], B1)
case("ceildiv", lambda x: jnp.ones(-(-x.shape[0] // 3)) * x.sum(), ["b"], B1)
case("complexdims", lambda x, y: jnp.concatenate([x[: (y.shape[0] * 2) // 3], y]), ["b", "b"], B1)


def exported(fn, specs, constraints=()):
    """Return the export of ``fn`` for f32 arguments of symbolic shapes that share one scope."""
    scope = export.SymbolicScope(constraints)
    shapes = [export.symbolic_shape(s, scope=scope) for s in specs]
    return export.export(jax.jit(fn))(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes))


def numbers(specs, sizes, seed):
    rng = np.random.default_rng(seed)
    known = {**sizes, "floordiv": lambda a, b: a // b}
    return [rng.uniform(0.1, 2, eval(f"({s},)", known)).astype(np.float32) for s in specs]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_every_kind_of_dim_agrees_with_jax(name):
    fn, specs, sizes, constraints = CASES[name]
    original = exported(fn, specs, constraints)
    module = aotc.load(aotc.compile(original))
    for seed, one in enumerate(sizes):
        arguments = numbers(specs, one, seed)
        wanted, found = jax.tree.leaves(original.call(*arguments)), jax.tree.leaves(module(*arguments))
        for a, b in zip(wanted, found, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), one
            np.testing.assert_allclose(b, np.asarray(a), rtol=2e-5, atol=2e-5, err_msg=str(one))


WRONG = {
    "two arguments share b": (lambda x, y: x + y, ["b", "b"], (), [(3,), (4,)]),
    "not a multiple": (lambda x: x * 2, ["2*b"], (), [(3,)]),
    "below one": (lambda x: x[1:], ["b + 1"], (), [(1,)]),
    "none": (lambda x: x * 2, ["b"], (), [(0,)]),
    "none of a multiple": (lambda x: x * 2, ["2*b"], (), [(0,)]),
    "none before a constraint": (lambda x: x * 2, ["b"], ["b >= 4"], [(0,)]),
    "none of the second": (lambda x, y: (x * 2, y), ["b", "c"], (), [(3,), (0,)]),
    "none of a sum": (lambda x, y: (x * 2, y), ["b", "b + c"], (), [(3,), (3,)]),
    "at least two": (lambda x: x[:2], ["b"], ["b >= 2"], [(1,)]),
    "at most four": (lambda x: x * 2, ["b"], ["b <= 4"], [(5,)]),
    "a product": (lambda x: x.reshape(12), ["a, b"], ["a*b == 12"], [(3, 5)]),
    "a remainder": (lambda x: x * 2, ["b"], ["mod(b, 4) == 0"], [(6,)]),
    "a computed size": (lambda x, y: (x.sum(), y), ["b", "floordiv(b, 2)"], (), [(6,), (4,)]),
    "max": (lambda x, y: (x.sum(), y), ["b", "max(b, 4)"], (), [(3,), (3,)]),
    "order of two": (lambda x, y: x[: y.shape[0]] + y, ["a", "b"], ["a >= b"], [(3,), (4,)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_failed_shape_checks_have_the_message_of_jax(name):
    fn, specs, constraints, shapes = WRONG[name]
    original = exported(fn, specs, constraints)
    module = aotc.load(aotc.compile(original))
    arguments = [np.ones(s, np.float32) for s in shapes]
    with pytest.raises(ValueError, match="Input shapes do not match") as wanted:
        original.call(*arguments)
    with pytest.raises(CallError) as found:
        module(*arguments)
    assert str(found.value).endswith(str(wanted.value))


def test_shape_checks_run_once_per_tuple_of_shapes():
    """Later calls replay a plan: no program is interpreted that loads what an assertion computed."""
    module = aotc.load(aotc.compile(exported(lambda x: x + 1, ["2*b, n"], ["b >= 2"])))
    for n in (2, 3, 2):
        module(np.ones((4, n), np.float32))
    assert len(module._functions["main"]._plans) == 2


def test_calls_use_specialized_copies_for_their_sizes():
    original = exported(lambda x, w: jnp.tanh(x @ w).sum(0), ["2*b, n", "n, 8"])
    data = aotc.compile(original, specialize={"b": (1, 8), "n": (4,)})
    module = aotc.load(data)
    submitted = {}
    for b, n in ((1, 4), (8, 4), (3, 4), (1, 5)):
        x, w = numbers(["2*b, n", "n, 8"], {"b": b, "n": n}, b)
        np.testing.assert_allclose(module(x, w), original.call(x, w), rtol=1e-5)
        plan, *_ = module._functions["main"]._plans[(x.shape, w.shape)]
        submitted[b, n] = plan.submissions[0][0]
    assert len({submitted[1, 4], submitted[8, 4], submitted[3, 4]}) == 3
    assert submitted[3, 4] == submitted[1, 5]
    assert list(module.functions) == ["main"]
    with pytest.raises(CallError, match="Division had remainder 1"):
        module(np.ones((3, 4), np.float32), np.ones((4, 8), np.float32))


@pytest.mark.parametrize(
    ("specialize", "message"),
    [
        ({"c": (1,)}, "no dim is called c"), ({"b": (-1,)}, "integers from 0 on"),
        ({"b": tuple(range(65))}, "65 combinations of sizes"),
    ],
)  # fmt: skip
def test_invalid_specializations_are_refused(specialize, message):
    with pytest.raises(aotc.CompileError, match=message):
        aotc.compile(exported(lambda x: x + 1, ["b"]), specialize=specialize)


@pytest.mark.parametrize("name", ["t", "i0", "a0", "k", "k_dim", "o0"])
def test_dims_may_be_named_like_loop_variables(name):
    original = exported(lambda x, w: (jax.nn.softmax(x @ w), jnp.cumsum(x, 0)), [f"b, {name}", f"{name}, 5"])
    x, w = numbers([f"b, {name}", f"{name}, 5"], {"b": 3, name: 4}, 0)
    for found, wanted in zip(aotc.load(aotc.compile(original))(x, w), original.call(x, w), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["RNG_PHILOX", "RNG_THREE_FRY"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
def test_random_bits_of_symbolic_shape_match_jax(algorithm, dtype):
    """The words, and the state after them, which also a generator of no words hands on."""

    def bits(key, x):
        shape = (2 * x.shape[0] - 2, 3)
        return lax.rng_bit_generator(key, shape, dtype=dtype, algorithm=lax.RandomAlgorithm[algorithm])

    with jax.enable_x64(True):
        key, x = jax.ShapeDtypeStruct((2,), "uint64"), jax.ShapeDtypeStruct(export.symbolic_shape("n"), "float32")
        module = aotc.load(aotc.compile(export.export(jax.jit(bits))(key, x)))
        seed = np.array([5, 2**32 - 3], np.uint64)
        for n in (1, 2, 3, 8, 101):
            for a, b in zip(module(seed, np.zeros(n, "f")), jax.jit(bits)(seed, np.zeros(n, "f")), strict=True):
                np.testing.assert_array_equal(a, b)


def test_random_bits_of_unknown_parity_are_refused():
    def bits(key, x):
        return lax.rng_bit_generator(key, (x.shape[0], 3), algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)

    with jax.enable_x64(True):
        key, x = jax.ShapeDtypeStruct((2,), "uint64"), jax.ShapeDtypeStruct(export.symbolic_shape("n"), "float32")
        exported_bits = export.export(jax.jit(bits))(key, x)
    with pytest.raises(CompileError, match="whether n is even"):
        aotc.compile(exported_bits)


def _reshape_of_unknown_size(x):
    return x.reshape(-1, 2)


def _branch_on_a_size(x):
    return x if x.shape[0] > 3 else x + 1


@pytest.mark.parametrize("options", [{}, {"specialize": {"b": (2, 8)}}], ids=["plain", "specialize"])
@pytest.mark.parametrize("function", [_reshape_of_unknown_size, _branch_on_a_size])
def test_an_undecided_size_is_reported_at_the_users_line(function, options):
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), "float32")
    with pytest.raises(CompileError, match="InconclusiveDimensionOperation") as caught:
        aotc.compile(function, x, **options)
    (finding,) = caught.value.findings
    assert (finding.loc.path, finding.loc.line) == (__file__, function.__code__.co_firstlineno + 1)
    assert "several devices" not in str(caught.value)
    assert "constraints=" in finding.hint
    assert type(caught.value.__cause__).__name__ == "InconclusiveDimensionOperation"


@pytest.mark.parametrize(("shape", "message", "symbols"), [
    ((None, 3), "dim 0 of argument x is None", "'b, 3'"),
    (("rows", 3), "dim 0 of argument x is 'rows'", "'rows, 3'"),
    ((3, -1), "dim 1 of argument x is -1", "'3, b'"),
    ((None,), "dim 0 of argument x is None", "'b,'"),
    ((None, *export.symbolic_shape("b,")), "dim 0 of argument x is None", "'n, b'"),
])  # fmt: skip
def test_a_dim_that_is_not_a_size_is_refused_with_its_argument(shape, message, symbols):
    with pytest.raises(CompileError, match=message) as caught:
        aotc.compile(lambda x: x + 1, jax.ShapeDtypeStruct(shape, "float32"))
    assert f"jax.export.symbolic_shape({symbols})" in str(caught.value)


def test_a_dim_that_is_not_a_size_is_named_within_a_pytree():
    params = {"w": jax.ShapeDtypeStruct((3, None), "float32")}
    with pytest.raises(CompileError, match=r"dim 1 of argument params\['w'\] is None"):
        aotc.compile(lambda x, params: x @ params["w"], np.zeros((2, 3), "f"), kwargs={"params": params})
