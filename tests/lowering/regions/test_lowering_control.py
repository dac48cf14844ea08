"""Loops, branches and symbolic sizes, beside ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, check, close, integers, normal

import aotc

pytestmark = pytest.mark.cpu

lax = jax.lax
SMALL, LARGE = normal(3), normal(70, 90, scale=0.1)


def swap(x):
    return lax.fori_loop(0, 3, lambda i, s: (s[1], s[0], s[2] + s[0]), (x, x + 1, x * 0))


def rotate(x):
    return lax.fori_loop(0, 5, lambda i, s: (s[1], s[2], s[0] * 0.5), (x, x + 1, x + 2))


def unused(x):
    return lax.fori_loop(0, 4, lambda i, s: (s[0] * 1.5, s[1], x), (x, x + 1, x * 0))


def constants(x):
    return lax.fori_loop(0, 4, lambda i, s: (jnp.ones_like(x), s[0] + s[1]), (x, x * 0))


def collatz(n):
    step = lambda s: (lax.cond(s[0] % 2 == 0, lambda a: a // 2, lambda a: 3 * a + 1, s[0]), s[1] + 1)
    return lax.while_loop(lambda s: s[0] != 1, step, (n, 0))


def nested(x):
    def outer(i, s):
        def inner(j, t):
            return t * 0.9 + x * j

        return lax.fori_loop(0, i, inner, s) + s

    return lax.fori_loop(0, 4, outer, x)


def switch(i, x):
    return lax.switch(i, [lambda v: (v, v * 2), lambda v: (v * 3, v), lambda v: (v.T.T, jnp.sin(v))], x)


def scan_cells(x):
    def cell(c, row):
        c = jnp.tanh(c * 0.5 + row)
        return c, (c.sum(), c[0], row * 2)

    return lax.scan(cell, x[0] * 0, x)


def scan_matrix(x):
    w = jnp.asarray(normal(x.shape[1], x.shape[1], scale=0.05))
    return lax.scan(lambda c, r: ((c @ w + r), c[:5]), x[0], x)


def scan_reverse(x):
    return lax.scan(lambda c, r: (c + r, c * r), x[0] * 0, x, reverse=True)


def update_loop(x):
    return lax.fori_loop(0, x.shape[0], lambda i, s: s.at[i].set(s[i] * 2 + s[(i + 1) % x.shape[0]]), x)


def old_and_new(x):
    """The old state is read after the new one is made."""

    def step(i, s):
        a, b = s
        new = a * 2 + b
        return new, (new - a) * 0.25

    return lax.fori_loop(0, 4, step, (x, x + 1))


def search(x):
    body = lambda s: (s[0] + 1, s[1] + x[s[0]])
    return lax.while_loop(lambda s: (s[0] < x.shape[0] - 1) & (s[1] < 0.3), body, (0, jnp.float32(0)))


def loop_in_cond(x):
    return lax.cond(x.sum() > 0, lambda v: lax.fori_loop(0, 3, lambda i, s: s * 2 + v, v), lambda v: v - 1, x)


def cond_in_loop(x):
    return lax.fori_loop(0, 5, lambda i, s: lax.cond(i % 2 == 0, lambda v: v + x, lambda v: v * 0.5, s), x)


def map_rows(x):
    return lax.map(lambda r: (jnp.sort(r) if False else r / r.max(), r.argmax()), x)


def same_twice(x):
    return lax.fori_loop(0, 3, lambda i, s: (s[0] + s[1], s[0] + s[1], s[2] + 1), (x, x, x))


def zero_trips(x):
    return lax.fori_loop(0, 0, lambda i, s: (s[1], s[0] * 2), (x, x + 1)), lax.fori_loop(5, 2, lambda i, s: s * 2, x)


def argument_result(x):
    return x, lax.fori_loop(0, 2, lambda i, s: s + x, x), x


STATES = [swap, rotate, unused, constants, nested, scan_cells, scan_matrix, scan_reverse, update_loop, old_and_new,
          loop_in_cond, cond_in_loop, map_rows, same_twice, zero_trips, argument_result]  # fmt: skip
CASES = {
    **{f"{f.__name__}-large": (f, [LARGE]) for f in STATES},
    **{f"{f.__name__}-small": (f, [normal(4, 5, scale=0.5)]) for f in STATES},
    "collatz": (collatz, [np.int32(27)]),
    "search": (search, [np.abs(normal(50, scale=0.02))]),
    **{f"switch{i}": (switch, [np.int32(i), SMALL]) for i in (-3, 0, 1, 2, 9)},
    "switch-large": (switch, [np.int32(1), LARGE]),
    "cond-scalar": (lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), [np.bool_(True), np.float32(0.5)]),
    "vmap-while": (jax.vmap(collatz), [np.arange(1, 9, dtype="int32")]),
    "grad-scan": (jax.grad(lambda x: (scan_cells(x)[0] ** 2).sum()), [normal(6, 4)]),
    "grad-scan-large": (jax.grad(lambda x: (scan_matrix(x)[0] ** 2).sum()), [LARGE]),
    "int-loop": (lambda x: lax.fori_loop(0, 10, lambda i, s: s * 3 + i, x), [integers(9)]),
    "fixed-point": (lambda x: lax.while_loop(lambda s: jnp.abs(s * s - x).max() > 1e-3, lambda s: 0.5 * (s + x / s), x + 1),  # noqa: E501
                    [np.abs(normal(6)) + 1]),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_control_flow_matches_jax_at_every_level(name, level):
    function, args = CASES[name]
    check(function, args, level, 20)


W, U = normal(12, 8, scale=0.3), normal(8, 8, seed=1, scale=0.3)

SYMBOLIC = {
    "elementwise": (lambda x: (jnp.sin(x) + 1, x.T, x[:, ::-1], x * x.shape[0]), ("b, 12",)),
    "reduce": (lambda x: (x.sum(0), x.sum(1), x.sum(), jax.nn.softmax(x), jax.nn.softmax(x, 0)), ("b, 12",)),
    "dense": (lambda x: jax.nn.relu(x @ W) @ U, ("b, 12",)),
    "gram": (lambda x: (x @ x.T, x.T @ x), ("b, 12",)),
    "two": (lambda x, y: (x[:, None] * y[None]).sum(1), ("b, 12", "c, 12")),
    "concat": (lambda x, y: jnp.concatenate([x, y * 2]), ("b, 12", "c, 12")),
    "scan": (lambda x: lax.scan(lambda c, r: (jnp.tanh(c @ U + r), c), jnp.zeros((x.shape[1], 8)), x), ("9, b, 8",)),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda i, s: (s[1] + x, s[0]), (x, x * 2)), ("b, 12",)),
    "flatten": (lambda x: x.reshape(-1, 6) + x.reshape(-1)[:6], ("b, 12",)),
    "take": (lambda x, i: (x[i], x.at[i].add(1)), ("b, 12", "c,")),
    "conv": (lambda x: lax.conv_general_dilated(x, jnp.asarray(normal(3, 3, 3, 4)), (1, 1), "SAME",
                                                dimension_numbers=("NHWC", "HWIO", "NHWC")), ("b, 8, 8, 3",)),
    "update": (lambda x: lax.dynamic_update_slice(x, x[:1] * 2, (x.shape[0] - 1, 0)), ("b, 12",)),
}  # fmt: skip


def symbolic(name, level, sizes):
    function, shapes = SYMBOLIC[name]
    scope = jax.export.SymbolicScope()
    kinds = ["int32" if name == "take" and n == 1 else "float32" for n in range(len(shapes))]
    args = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), k) for s, k in zip(shapes, kinds, strict=True)
    ]
    data = aotc.compile(jax.export.export(jax.jit(function))(*args), opt_level=level, verify_each=True)
    for b, c in sizes:
        known = {"b": b, "c": c}
        shaped = [[known.get(d.strip()) or int(d) for d in s.split(",") if d.strip()] for s in shapes]
        values = [normal(*s, seed=n) if k == "float32" else integers(*s, low=0, high=max(b, 1))
                  for n, (s, k) in enumerate(zip(shaped, kinds, strict=True))]  # fmt: skip
        got = [aotc.load(data, threads=n).invoke("main", *values) for n in (1, 2)]
        close(got[1], jax.jit(function)(*values), 20)
        assert all(p.tobytes() == q.tobytes() for p, q in zip(*got, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_programs_of_symbolic_sizes_match_jax(name, level):
    symbolic(name, level, [(1, 1), (2, 3), (33, 7), (130, 2)])


def test_empty_batches_match_jax():
    """A batch of at least 1 leaves none after its first row is dropped."""
    function = lambda x: (jnp.sin(x[1:]), jax.nn.relu(x[1:] @ W) @ U, x[1:].sum(0), jax.nn.softmax(x[1:], 0), x[1:].sum())  # noqa: E501
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 12"), "float32")
    module = aotc.load(aotc.compile(jax.export.export(jax.jit(function))(shape)))
    for size in (1, 2):
        close(module.invoke("main", normal(size, 12)), jax.jit(function)(normal(size, 12)), 20)
