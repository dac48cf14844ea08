"""Functions over a mesh of eight ranks, each with the equivalent function for one device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import aotc
from aotc.vmfb.ranks.threads import thread_links
from support.rank_cases import run_threads

GRID = {"data": 2, "model": 4}
LINE = {"data": 8}
RNG = np.random.default_rng(7)


def f32(*shape):
    return (RNG.standard_normal(shape) * 0.3).astype(np.float32)


@dataclass(frozen=True)
class Sharded:
    """A function, its arguments, mesh and shardings; ``whole`` is the equivalent for one device."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: dict[str, int] = field(default_factory=lambda: GRID)
    ins: Any = None
    outs: Any = None
    whole: Callable[..., Any] | None = None
    most: float = 2e-6

    def compile(self, **options):
        given = {"in_shardings": self.ins, "out_shardings": self.outs}
        shardings = {key: value for key, value in given.items() if value is not None}
        return aotc.compile(self.function, *self.args, mesh=self.mesh, **shardings, **options)

    def expected(self):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.whole or self.function)(*self.args))]


def over(mesh, ins, outs, **more):
    """Decorator of a function of shards, as ``jax.shard_map`` calls it."""
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    return lambda f: jax.jit(jax.shard_map(f, mesh=abstract, in_specs=ins, out_specs=outs, **more))


def rms(x, gain):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * gain


def layer(w, x):
    """Apply one layer of a transformer; heads are a dim of the weights."""
    h = rms(x, w["before"])
    q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bhqk,bhtk->bhqt", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqt,bhtk->bhqk", jax.nn.softmax(scores, -1), v)
    x = x + jnp.einsum("bhqk,hkd->bqd", mixed, w["out"])
    h = rms(x, w["after"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def layer_weights(d=32, heads=8, k=4, wide=64):
    shapes = dict.fromkeys(("query", "key", "value"), (d, heads, k)) | {"out": (heads, k, d)}
    shapes |= {"gate": (d, wide), "up": (d, wide), "down": (wide, d)}
    return {name: f32(*shape) for name, shape in shapes.items()} | {name: f32(d) + 1 for name in ("before", "after")}


LAYER = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "model")), "out": P("model"), "down": P("model"),
    "before": P(), "after": P(),
}  # fmt: skip


def first_dim_of_eight(x):
    dim = next((n for n, size in enumerate(x.shape) if size % 8 == 0), None)
    return P() if dim is None else P(*[None] * dim, "data")


def training(weights, momentum, x, y):
    def loss(weights):
        h = x
        for w in weights:
            h = layer(w, h)
        return jnp.mean(jnp.square(h - y))

    value, gradients = jax.value_and_grad(loss)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value


def training_case():
    weights = [layer_weights(), layer_weights()]
    cut = jax.tree.map(first_dim_of_eight, weights)
    zeros = jax.tree.map(np.zeros_like, weights)
    args = weights, zeros, f32(8, 8, 32), f32(8, 8, 32)
    return Sharded(training, args, LINE, (cut, cut, P("data"), P("data")), (cut, cut, P()), most=1e-5)


def stacked_case():
    weights = jax.tree.map(lambda *a: np.stack(a), *[layer_weights() for _ in range(3)])
    cut = {name: P(None, *spec) for name, spec in LAYER.items()}
    return Sharded(
        lambda w, x: lax.scan(lambda x, one: (layer(one, x), None), x, w)[0], (weights, f32(4, 8, 32)), GRID,
        (cut, P("data")), P("data"),
    )  # fmt: skip


def decode(w, cache, x, at):
    q, k, v = (jnp.einsum("bd,dhk->bhk", x, w[name]) for name in ("query", "key", "value"))
    keys = lax.dynamic_update_slice(cache["keys"], k[:, :, None], (0, 0, at, 0))
    values = lax.dynamic_update_slice(cache["values"], v[:, :, None], (0, 0, at, 0))
    scores = jnp.where(jnp.arange(keys.shape[2]) <= at, jnp.einsum("bhk,bhtk->bht", q, keys), -1e9)
    mixed = jnp.einsum("bht,bhtk->bhk", jax.nn.softmax(scores, -1), values)
    return x + jnp.einsum("bhk,hkd->bd", mixed, w["out"]), {"keys": keys, "values": values}


def decode_case():
    cache = {name: f32(2, 8, 16, 4) for name in ("keys", "values")}
    heads = dict.fromkeys(cache, P(None, "model"))
    cut = {**LAYER}
    return Sharded(
        jax.jit(decode, donate_argnums=1), (layer_weights(), cache, f32(2, 32), np.int32(5)),
        {"data": 1, "model": 8}, (cut, heads, P(), P()), (P(), heads),
    )  # fmt: skip


def ring(n):
    return [(k, (k + 1) % n) for k in range(n)]


@over(LINE, P("data"), (P("data"), P("data")))
def every_collective(x):
    number = lax.axis_index("data").astype(np.float32)
    everything = lax.all_gather(x, "data", axis=0, tiled=True)
    own = lax.psum_scatter(everything, "data", scatter_dimension=0, tiled=True)
    moved = lax.ppermute(x, "data", ring(8))
    return moved + own + number + lax.pmax(x, "data"), lax.all_to_all(x, "data", 1, 0, tiled=True)


def every_collective_whole(x):
    parts = x.reshape(8, -1, x.shape[1])
    own = parts * 8
    moved = jnp.roll(parts, 1, 0)
    numbers = jnp.arange(8, dtype=np.float32)[:, None, None]
    columns = x.reshape(8, 2, 8, 1, 2).transpose(2, 0, 1, 3, 4)
    return (moved + own + numbers + parts.max(0)).reshape(x.shape), columns.reshape(-1, 2)


@over(GRID, P("data", "model"), (P("data", None), P(None, "model"), P()))
def sums_over_axes(x):
    return lax.psum(x, "model"), lax.psum(x, "data"), lax.psum(x, ("data", "model"))


def sums_over_axes_whole(x):
    rows, cols = x.shape[0] // 2, x.shape[1] // 4
    parts = x.reshape(2, rows, 4, cols)
    return parts.sum(2).reshape(-1, cols), parts.sum(0).reshape(rows, -1), parts.sum((0, 2))


@over(LINE, (P("data"), P("data")), P("data"))
def ring_products(q, k):
    def body(_, state):
        total, k = state
        return total + q @ k.T, lax.ppermute(k, "data", ring(8))

    start = lax.pcast(jnp.zeros((q.shape[0], k.shape[0])), "data", to="varying")
    return lax.fori_loop(0, 8, body, (start, k))[0]


def ring_products_whole(q, k):
    return sum(q @ part.T for part in jnp.split(k, 8))


@over(LINE, (P("data"), P()), P("data"))
def pipeline(w, x):
    def step(state, t):
        y = lax.ppermute(jnp.tanh(state @ w[0]), "data", [(n, n + 1) for n in range(7)])
        return jnp.where(lax.axis_index("data") == 0, x[t % x.shape[0]], y), y

    return lax.scan(step, lax.pcast(x[0], "data", to="varying"), jnp.arange(10))[1]


def pipeline_whole(w, x):
    state, every = jnp.stack([x[0]] * 8), []
    for t in range(10):
        y = jnp.tanh(jnp.einsum("nbd,nde->nbe", state, w))
        y = jnp.concatenate([jnp.zeros_like(y[:1]), y[:-1]])
        every.append(y)
        state = jnp.concatenate([x[t % x.shape[0]][None], y[1:]])
    return jnp.concatenate(list(jnp.stack(every, 1)))


def mixture(experts, router, x):
    chances = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(chances, -1), 8)
    places = jax.nn.one_hot(jnp.cumsum(chosen, 0) * chosen - 1, 16) * chosen[..., None]
    sent = lax.with_sharding_constraint(jnp.einsum("tec,td->ecd", places, x), P("data"))
    made = jnp.einsum("ecd,edf->ecf", sent, experts)
    return jnp.einsum("tec,ecf->tf", places * jnp.max(chances, -1)[:, None, None], made)


def mixture_whole(experts, router, x):
    chances = jax.nn.softmax(x @ router)
    best = jnp.argmax(chances, -1)
    return jnp.einsum("td,tdf->tf", x, experts[best]) * jnp.max(chances, -1)[:, None]


def vocabulary_loss(table, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), y[:, None], 1))


def counted(x):
    return lax.while_loop(
        lambda c: (c[1] < 12) & (jnp.sum(c[0]) < 60.0), lambda c: (c[0] * 1.2 + 0.05, c[1] + 1), (x, 0)
    )


def convolved(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normed(x, w):
    y = convolved(x, w, 2)
    return (y - y.mean((0, 1, 2))) / jnp.sqrt(y.var((0, 1, 2)) + 1e-5)


def solved(x):
    return jnp.linalg.cholesky(x @ x.transpose(0, 2, 1) + 3 * jnp.eye(6))


def bf16(*shape):
    return f32(*shape).astype(jnp.bfloat16)


def mlp(w1, w2, x):
    return jax.nn.gelu(x @ w1) @ w2


def uneven(x, w):
    return jnp.sum(jnp.exp(lax.with_sharding_constraint(x, P("data")) @ w), 0)


def ids(*shape, most=64):
    return RNG.integers(0, most, shape).astype(np.int32)


BY_COLUMN = P(None, "model")
CASES = {
    "rows": Sharded(lambda w, x: jnp.tanh(x @ w), (f32(16, 32), f32(64, 16)), LINE, (P(), P("data")), P("data")),
    "mlp": Sharded(mlp, (f32(16, 64), f32(64, 16), f32(32, 16)), GRID, (BY_COLUMN, P("model"), P("data")), P("data")),
    "mlp_bf16": Sharded(mlp, (bf16(16, 64), bf16(64, 16), bf16(32, 16)), GRID,
                        (BY_COLUMN, P("model"), P("data")), P("data"), most=1e-2),
    "layer": Sharded(layer, (layer_weights(), f32(4, 8, 32)), GRID, (LAYER, P("data")), P("data")),
    "training": training_case(),
    "stacked_layers": stacked_case(),
    "decode": decode_case(),
    "sum": Sharded(over(LINE, P("data"), P())(lambda x: lax.psum(x, "data")), (f32(16, 4),), LINE,
                   whole=lambda x: x.reshape(8, 2, 4).sum(0)),
    "every_collective": Sharded(every_collective, (f32(16, 16),), LINE, whole=every_collective_whole),
    "sums_over_axes": Sharded(sums_over_axes, (f32(8, 16),), GRID, whole=sums_over_axes_whole),
    "ring": Sharded(ring_products, (f32(32, 8), f32(32, 8)), LINE, whole=ring_products_whole),
    "pipeline": Sharded(pipeline, (f32(8, 16, 16), f32(4, 2, 16)), LINE, whole=pipeline_whole),
    "manual_and_automatic": Sharded(
        over(GRID, (P(), P("data")), P(), axis_names={"data"})(lambda w, x: lax.psum(jnp.tanh(x @ w), "data")),
        (f32(16, 32), f32(2, 16)), GRID, (BY_COLUMN, P("data")),
        whole=lambda w, x: jnp.tanh(x @ w).sum(0, keepdims=True),
    ),
    "embedding": Sharded(lambda e, i: jnp.take(e, i, axis=0), (f32(64, 16), ids(8, 4)), GRID, (P("model"), P("data")),
                         P("data")),
    "vocabulary_loss": Sharded(jax.value_and_grad(vocabulary_loss), (f32(64, 16), f32(8, 16), ids(8)), GRID,
                               (P("model"), P("data"), P("data")), (P(), P("model"))),
    "rows_of_images": Sharded(convolved, (f32(1, 32, 16, 3), f32(3, 3, 3, 8)), LINE, (P(None, "data"), P()),
                              P(None, "data")),
    "batch_norm": Sharded(normed, (f32(16, 8, 8, 3), f32(3, 3, 3, 8)), LINE, (P("data"), P()), P("data"), most=1e-5),
    "sort": Sharded(lambda x: jnp.sort(x, 0), (f32(64, 3),), LINE, (P("data"),), P("data")),
    "running_sum": Sharded(lambda x: jnp.cumsum(x, 0), (f32(64, 3),), LINE, (P("data"),), P("data")),
    "largest": Sharded(lambda x: (jnp.argmax(x, 1), lax.top_k(x, 4)), (f32(4, 64),), LINE, (P(None, "data"),)),
    "reshaped": Sharded(lambda x: jnp.sin(x).reshape(4, 16, 8).transpose(1, 0, 2).reshape(16, 32), (f32(64, 8),), GRID,
                        (P("data", "model"),), P("model")),
    "joined": Sharded(lambda x, y: jnp.pad(jnp.concatenate([x, y], 0)[::-1], ((0, 8), (1, 1))),
                      (f32(16, 4), f32(24, 4)), LINE, (P("data"), P("data")), P("data")),
    "uneven": Sharded(uneven, (f32(30, 5), f32(5, 7)), LINE, whole=lambda x, w: jnp.sum(jnp.exp(x @ w), 0)),
    "sliced": Sharded(lambda x, i: (x[3:40], lax.dynamic_slice(x, (i, 0), (16, 4))), (f32(64, 4), np.int32(5)), LINE,
                      (P("data"), P())),
    "fourier": Sharded(lambda x: jnp.abs(jnp.fft.fft(x)), (f32(16, 32),), LINE, (P("data"),), P("data")),
    "cholesky": Sharded(solved, (f32(16, 6, 6),), LINE, (P("data"),), P("data")),
    "random": Sharded(lambda k: jax.random.normal(jax.random.wrap_key_data(k), (64, 8)), (np.array([1, 2], np.uint32),),
                      LINE, (P(),), P("data")),
    "mixture": Sharded(mixture, (f32(8, 16, 16), f32(16, 8), f32(64, 16)), LINE, (P("data"), P(), P("data")), P("data"),
                       whole=mixture_whole),
    "loop": Sharded(counted, (np.abs(f32(16, 4)),), LINE, (P("data"),)),
    "branch": Sharded(lambda p, x: lax.cond(p, lambda x: x @ x.T, lambda x: x @ x.T * 2, x),
                      (np.bool_(True), f32(8, 16)), LINE, (P(), P(None, "data"))),
    "scattered": Sharded(lambda x, i, u: x.at[i].add(u), (f32(64, 4), ids(12), f32(12, 4)), LINE,
                         (P("data"), P(), P()), P("data")),
}  # fmt: skip


def run_on_threads(data, args, size=8, **options):
    """Run all ranks on threads; return the whole results on each rank, as lists of arrays."""

    def work(link):
        with aotc.load(data, ranks=link, threads=1, **options) as module:
            results = module(*module.shard(*args))
            return [np.asarray(x) for x in jax.tree.leaves(module.gather(results))]

    results = run_threads(thread_links(size), work)
    for found in results:
        if isinstance(found, Exception):
            raise found
    return results


def check(case, results):
    """Assert that the results of all ranks agree with those of one device, and are equal to each other."""
    wanted = case.expected()
    for rank, found in enumerate(results):
        assert len(found) == len(wanted)
        for x, first, want in zip(found, results[0], wanted, strict=True):
            assert x.shape == want.shape, rank
            assert x.dtype == want.dtype, rank
            assert x.tobytes() == first.tobytes(), rank
            scale = max(1.0, float(np.abs(want.astype(np.float64)).max())) if want.size else 1.0
            np.testing.assert_allclose(x.astype(np.float64), want.astype(np.float64), rtol=1e-6, atol=case.most * scale)
