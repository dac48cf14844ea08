"""Programs whose loops become one kernel: recurrences over sequences, filters, steps of simulations and of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs.models import integers, normal

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def cells() -> Iterator[tuple[str, Program]]:
    """Yield recurrent networks of a few units."""

    def gru(h: Any, xs: Any, w: Any, u: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            r, z, n = jnp.split(x @ w, 3)
            a, b, c = jnp.split(h @ u, 3)
            z = jax.nn.sigmoid(z + b)
            h = z * h + (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + a) * c)
            return h, h

        return lax.scan(step, h, xs)

    def lstm(h: Any, c: Any, xs: Any, w: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return lax.scan(step, (h, c), xs)[1]

    for units in (4, 8, 32):
        args = (normal(units), normal(50, units), normal(units, 3 * units), normal(units, 3 * units, seed=1))
        yield f"gru {units}", (gru, args)
    for rows, units in ((1, 8), (8, 8), (4, 32)):
        state = (normal(rows, units), normal(rows, units, seed=1))
        yield f"lstm {rows} x {units}", (lstm, (*state, normal(30, rows, units), normal(2 * units, 4 * units)))

    def mlp(x: Any, w: Any, v: Any) -> Any:
        return lax.scan(lambda x, _: (x + 0.1 * jnp.tanh(jnp.tanh(x @ w) @ v), None), x, length=40)[0]

    yield "mlp 4 x 16", (mlp, (normal(4), normal(4, 16), normal(16, 4)))
    yield "mlp 8 rows 6 x 24", (mlp, (normal(8, 6), normal(6, 24), normal(24, 6)))

    def complex_cell(h: Any, xs: Any, w: Any, u: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = x @ w + h @ u
            h = h / (1 + jnp.abs(h))
            return h, h.real

        return lax.scan(step, h, xs)[1]

    def c64(*shape: int, seed: int = 0) -> np.ndarray:
        return (normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 9)).astype("complex64")

    yield "complex rnn 4 x 8", (complex_cell, (c64(4, 8), c64(20, 4, 8), c64(8, 8), c64(8, 8, seed=1)))


def sequences() -> Iterator[tuple[str, Program]]:
    """Yield dynamic programs over sequences."""

    def edit_distance(a: Any, b: Any) -> Any:
        def row(before: Any, x: Any) -> Any:
            first, i = before[0] + 1, None
            costs = jnp.minimum(before[1:] + 1, before[:-1] + (b != x))
            cell = lambda left, cost: (jnp.minimum(left + 1, cost),) * 2
            _, rest = lax.scan(cell, first, costs)
            return jnp.concatenate([first[None], rest]), i

        return lax.scan(row, jnp.arange(len(b) + 1), a)[0][-1]

    a, b = integers(4, 8, 40).astype("int32"), integers(4, 8, 48).astype("int32")
    yield "edit distance", (edit_distance, (a[0], b[1]))
    yield "edit distance of 8", (jax.vmap(edit_distance), (a, b))

    def smith_waterman(a: Any, b: Any) -> Any:
        def row(before: Any, x: Any) -> Any:
            matched = jnp.where(b == x, 2.0, -1.0)

            def cell(left: Any, seen: Any) -> Any:
                above, corner, score = seen
                value = jnp.maximum(jnp.maximum(left - 1, above - 1), jnp.maximum(corner + score, 0))
                return value, value

            _, now = lax.scan(cell, jnp.float32(0), (before[1:], before[:-1], matched))
            return jnp.concatenate([jnp.zeros(1), now]), now.max()

        return lax.scan(row, jnp.zeros(len(b) + 1), a)[1].max()

    yield "smith-waterman of 8", (jax.vmap(smith_waterman), (a, b))

    def smith_waterman_by_diagonals(a: Any, b: Any) -> Any:
        n, m = len(a), len(b)
        places = jnp.arange(n)

        def diagonal(state: Any, k: Any) -> Any:
            before, last, best = state
            j = k - places
            inside = (j >= 0) & (j < m)
            score = jnp.where(a == b[jnp.clip(j, 0, m - 1)], 2.0, -1.0)
            above, corner = jnp.roll(last, 1).at[0].set(0.0), jnp.roll(before, 1).at[0].set(0.0)
            now = jnp.maximum(jnp.maximum(last - 1, above - 1), jnp.maximum(corner + score, 0.0))
            now = jnp.where(inside, now, 0.0)
            return (last, now, jnp.maximum(best, now.max())), None

        zero = jnp.zeros(n)
        return lax.scan(diagonal, (zero, zero, jnp.float32(0)), jnp.arange(n + m - 1))[0][2]

    yield "smith-waterman by diagonals of 8", (jax.vmap(smith_waterman_by_diagonals), (a, b))

    def forward(start: Any, move: Any, seen: Any) -> Any:
        step = lambda a, row: (jax.nn.logsumexp(a[:, None] + move, 0) + row, None)
        return jax.nn.logsumexp(lax.scan(step, start, seen)[0])

    def viterbi(start: Any, move: Any, seen: Any) -> Any:
        def step(best: Any, row: Any) -> Any:
            scores = best[:, None] + move
            return scores.max(0) + row, scores.argmax(0)

        best, back = lax.scan(step, start, seen)
        return lax.scan(lambda state, row: (row[state], state), best.argmax(), back, reverse=True)

    for states in (5, 8, 24):
        args = (normal(states), normal(states, states), normal(40, states))
        yield f"hmm forward {states}", (forward, args)
        yield f"viterbi {states}", (viterbi, args)


def simulations() -> Iterator[tuple[str, Program]]:
    """Yield filters, equations of motion, solvers and a roll-out of a policy with its advantages."""

    def kalman(observed: Any, f: Any, h: Any) -> Any:
        n, m = h.shape[1], h.shape[0]

        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = f @ x, f @ p @ f.T + 0.1 * jnp.eye(n)
            gain = p @ h.T @ jnp.linalg.inv(h @ p @ h.T + jnp.eye(m))
            x = x + gain @ (z - h @ x)
            return (x, p - gain @ h @ p), x

        return lax.scan(step, (jnp.zeros(n), jnp.eye(n)), observed)[1]

    for n, m in ((4, 2), (8, 3)):
        yield f"kalman {n} {m}", (kalman, (normal(50, m), np.eye(n, dtype="float32"), normal(m, n)))

    def runge_kutta(slope: Callable[[Any], Any], state: Any) -> Any:
        def step(s: Any, _: Any) -> Any:
            a = slope(s)
            b = slope(s + 0.005 * a)
            c = slope(s + 0.005 * b)
            d = slope(s + 0.01 * c)
            new = s + 0.01 / 6 * (a + 2 * b + 2 * c + d)
            return new, new

        return lax.scan(step, state, length=200)

    def lorenz(s: Any) -> Any:
        x, y, z = s
        return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def pendulum(s: Any) -> Any:
        return jnp.concatenate([s[4:], -jnp.sin(s[:4]) + 0.1 * (jnp.roll(s[:4], 1) - s[:4])])

    def bodies(s: Any) -> Any:
        d = s[0][None] - s[0][:, None]
        return jnp.stack([s[1], (d * (1e-2 + (d**2).sum(-1, keepdims=True)) ** -1.5).sum(1)])

    yield "rk4 lorenz", (lambda s: runge_kutta(lorenz, s), (np.ones(3, "float32"),))
    yield "rk4 pendulums", (lambda s: runge_kutta(pendulum, s), (normal(8),))
    yield "rk4 bodies", (lambda s: runge_kutta(bodies, s), (normal(2, 5, 3),))

    def newton(x: Any) -> Any:
        step = lambda s: (s[0] - (s[0] ** 3 - 2 * s[0] - 5) / (3 * s[0] ** 2 - 2), s[1] + 1)
        return lax.while_loop(lambda s: (jnp.abs(s[0] ** 3 - 2 * s[0] - 5).max() > 1e-4) & (s[1] < 50), step, (x, 0))

    yield "newton", (newton, (np.linspace(2, 3, 6, dtype="float32"),))

    def sinkhorn(cost: Any) -> Any:
        def body(_: Any, uv: Any) -> Any:
            u = -jax.nn.logsumexp(-cost * 5 + uv[1][None], 1)
            return u, -jax.nn.logsumexp(-cost * 5 + u[:, None], 0)

        return lax.fori_loop(0, 30, body, (jnp.zeros(cost.shape[0]), jnp.zeros(cost.shape[1])))

    yield "sinkhorn 8 x 12", (sinkhorn, (np.abs(normal(8, 12)),))

    def episodes(state: Any, w: Any, v: Any, key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            s = carry
            hidden = jnp.tanh(s @ w)
            logits, value = hidden @ v[:, :2], hidden @ v[:, 2]
            action = jax.random.categorical(key, logits)
            force = jnp.where(action == 1, 10.0, -10.0)
            x, dx, t, dt = s.T
            sin, cos = jnp.sin(t), jnp.cos(t)
            push = (force + 0.05 * dt**2 * sin) / 1.1
            turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
            new = jnp.stack([x + 0.02 * dx, dx + 0.02 * push, t + 0.02 * dt, dt + 0.02 * turn], 1)
            over = (jnp.abs(new[:, 0]) > 2.4) | (jnp.abs(new[:, 2]) > 0.2)
            new = jnp.where(over[:, None], 0.0, new)
            return new, (value, 1.0 - over, jax.nn.log_softmax(logits)[jnp.arange(len(s)), action])

        _, (values, going, log_p) = lax.scan(step, state, jax.random.split(key, 32))

        def advantage(later: Any, row: Any) -> Any:
            value, go, after = row
            now = 1 + 0.99 * after * go - value + 0.99 * 0.95 * go * later
            return now, now

        rows = (values[:-1], going[:-1], values[1:])
        return lax.scan(advantage, jnp.zeros(len(state)), rows, reverse=True)[1], log_p

    key = np.array([0, 7], "uint32")
    yield "ppo roll-out of 8", (episodes, (normal(8, 4, scale=0.05), normal(4, 16), normal(16, 3), key))


def programs() -> dict[str, Program]:
    """Return the programs by name."""
    return {name: program for family in (cells, sequences, simulations) for name, program in family()}
