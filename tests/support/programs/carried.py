"""Random programs of loops and branches over carried arrays: as a JAX function, and in NumPy.

A program is a list of statements over named integer arrays of one length and a counter. NumPy runs the statements one
after the other on copies, which defines the results; JAX traces them to ``while``, ``case`` and updates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

NAMES = ("a", "b", "c")
Env: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Set:
    """Statement ``name[place] = source[other] * factor + i``, or ``+=``."""

    name: str
    source: str
    place: int
    other: int
    factor: int
    adds: bool


@dataclass(frozen=True)
class Assign:
    """Simultaneous assignment of arrays to names; ``saved`` refers to an array that an earlier ``Assign`` saved."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Combine:
    """Statement ``name = left * factor + right``."""

    name: str
    left: str
    right: str
    factor: int


@dataclass(frozen=True)
class Choose:
    """One of several lists of statements, by the counter or by an element; ``selected`` computes both sides."""

    by: str
    ways: tuple[tuple[Statement, ...], ...]
    selected: bool = False


@dataclass(frozen=True)
class Repeat:
    """Loop that carries ``names``, for ``count`` iterations or until the array ``until`` has a large element."""

    count: int
    names: tuple[str, ...]
    body: tuple[Statement, ...]
    until: str = ""


Statement: TypeAlias = Set | Assign | Combine | Choose | Repeat


@dataclass
class Carried:
    """A program: its statements, and the arrays that it returns."""

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    donated: tuple[int, ...] = ()
    constants: tuple[str, ...] = ()
    arguments: tuple[str, ...] = field(default=NAMES)

    def function(self) -> Callable[..., Any]:
        """Return the program as a function for JAX to trace."""
        names = [name for name in self.arguments if name not in self.constants]

        def f(*arrays: Any) -> tuple[Any, ...]:
            size = arrays[0].shape[0]
            env = {name: jnp.arange(size, dtype=jnp.int32) for name in self.constants}
            env |= dict(zip(names, arrays, strict=True))
            env = traced(self.statements, {**env, "saved": env["a"]}, env["a"][2] & 3)
            return tuple(env[name] for name in self.results)

        return f

    def meaning(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return the program's results as NumPy computes them."""
        names = [name for name in self.arguments if name not in self.constants]
        env = {name: np.arange(len(arrays[0]), dtype=np.int32) for name in self.constants}
        env |= dict(zip(names, arrays, strict=True))
        with np.errstate(over="ignore"):
            env = run(self.statements, {**env, "saved": env["a"]}, env["a"][2] & np.int32(3))
        return [env[name] for name in self.results]


# ---------------------------------------------------------------- NumPy


def run(statements: tuple[Statement, ...], env: Env, i: np.int32) -> Env:
    """Return the arrays after some statements in NumPy; no array is modified in place."""
    for s in statements:
        match s:
            case Set():
                made = env[s.name].copy()
                size = len(made)
                new = env[s.source][(s.other + int(i)) % size] * np.int32(s.factor) + i
                place = (s.place + int(i)) % size
                made[place] = made[place] + new if s.adds else new
                env = {**env, s.name: made}
            case Assign(pairs):
                env = {**env, **{new: env[old] for new, old in pairs}}
            case Combine():
                env = {**env, s.name: env[s.left] * np.int32(s.factor) + env[s.right]}
            case Choose(by, ways):
                test = i if by == "i" else env[by][0] & 7
                env = run(ways[int(min(max(test % 4, 0), len(ways) - 1))], env, i)
            case Repeat():
                env = _repeated(s, env, i)
    return env


def _repeated(s: Repeat, env: Env, i: np.int32) -> Env:
    n = np.int32(0)
    while n < s.count and (not s.until or env[s.until][1] < 1000):
        after = run(s.body, env, n + i)
        env = {**env, **{name: after[name] for name in s.names}}
        n = n + np.int32(1)
    return env


# ---------------------------------------------------------------- JAX


def traced(statements: tuple[Statement, ...], env: Env, i: Any) -> Env:
    """Return the arrays after some statements in JAX's trace."""
    for s in statements:
        match s:
            case Set():
                old = env[s.name]
                size = old.shape[0]
                place = (s.place + i) % size
                new = env[s.source][(s.other + i) % size] * s.factor + i
                env = {**env, s.name: old.at[place].add(new) if s.adds else old.at[place].set(new)}
            case Assign(pairs):
                env = {**env, **{new: env[old] for new, old in pairs}}
            case Combine():
                env = {**env, s.name: env[s.left] * s.factor + env[s.right]}
            case Choose():
                env = _chosen(s, env, i)
            case Repeat():
                env = _looped(s, env, i)
    return env


def _chosen(s: Choose, env: Env, i: Any) -> Env:
    test = i if s.by == "i" else env[s.by][0] & 7
    index = jnp.clip(test % 4, 0, len(s.ways) - 1)
    names = sorted({name for way in s.ways for name in changed(way)})
    if s.selected and len(s.ways) == 2:
        both = [traced(way, env, i) for way in s.ways]
        return {**env, **{name: jnp.where(index == 0, *(side[name] for side in both)) for name in names}}

    def branch(way: tuple[Statement, ...]) -> Callable[[], list[Any]]:
        def made() -> list[Any]:
            after = traced(way, env, i)
            return [after[name] for name in names]

        return made

    return {**env, **dict(zip(names, lax.switch(index, [branch(way) for way in s.ways])))}


def _looped(s: Repeat, env: Env, i: Any) -> Env:
    names = s.names

    def continue_while(state: Any) -> Any:
        now = {**env, **dict(zip(names, state[1]))}
        return (state[0] < s.count) & (now[s.until][1] < 1000 if s.until else True)

    def body(state: Any) -> Any:
        n, arrays = state
        after = traced(s.body, {**env, **dict(zip(names, arrays))}, n + i)
        return n + 1, [after[name] for name in names]

    _, arrays = lax.while_loop(continue_while, body, (jnp.int32(0), [env[name] for name in names]))
    return {**env, **dict(zip(names, arrays))}


def changed(statements: tuple[Statement, ...]) -> set[str]:
    """Return the names that statements assign."""
    found: set[str] = set()
    for s in statements:
        match s:
            case Set(name=name) | Combine(name=name):
                found.add(name)
            case Assign(pairs):
                found.update(new for new, _ in pairs)
            case Choose(_, ways):
                found.update(name for way in ways for name in changed(way))
            case Repeat(names=names):
                found.update(names)
    return found


# ---------------------------------------------------------------- random programs


def random_program(seed: int) -> Carried:
    """Return the random program of ``seed``."""
    r = random.Random(seed)
    statements = _statements(r, 3, r.randint(2, 4))
    if not any(isinstance(s, Repeat) for s in statements):
        statements = (*statements, _repeat(r, 2))
    results = tuple(r.choice((*NAMES, "saved")) for _ in range(r.randint(1, 3)))
    constants = tuple(name for name in ("b", "c") if r.random() < 0.2)
    count = len(NAMES) - len(constants)
    donated = tuple(n for n in range(count) if r.random() < 0.4)
    return Carried(statements, results, donated, constants)


def _statements(r: random.Random, depth: int, count: int) -> tuple[Statement, ...]:
    return tuple(_statement(r, depth) for _ in range(count))


def _statement(r: random.Random, depth: int) -> Statement:
    kind = r.choice(("set", "set", "set", "assign", "combine", "choose", "choose", "repeat", "repeat"))
    every = (*NAMES, "saved")
    if kind == "choose" and depth:
        ways = tuple(_statements(r, depth - 1, r.randint(0, 2)) for _ in range(r.choice((2, 2, 3))))
        return Choose(r.choice(("i", *NAMES)), ways, r.random() < 0.3)
    if kind == "repeat" and depth:
        return _repeat(r, depth)
    if kind == "assign":
        if r.random() < 0.4:
            one, other = r.sample(NAMES, 2)
            return Assign(((one, other), (other, one)))
        return Assign(((r.choice(every), r.choice(every)),))
    if kind == "combine":
        return Combine(r.choice(NAMES), r.choice(every), r.choice(every), r.choice((1, 2, -1)))
    return Set(
        r.choice(NAMES), r.choice(every), r.randint(0, 4), r.randint(0, 4), r.choice((1, 2, 3)), r.random() < 0.4
    )


def _repeat(r: random.Random, depth: int) -> Repeat:
    names = tuple(name for name in (*NAMES, "saved") if r.random() < 0.6) or ("a",)
    body = _statements(r, depth - 1, r.randint(1, 3))
    until = r.choice(("", "", r.choice(names)))
    return Repeat(r.choice((3, 2, 1, 0, 4)), names, body, until)


def arrays_for(program: Carried, size: int, seed: int = 0) -> list[np.ndarray]:
    """Return arguments of ``size`` elements for a program."""
    generator = np.random.default_rng(seed)
    count = len(program.arguments) - len(program.constants)
    return [generator.integers(-9, 10, size).astype(np.int32) for _ in range(count)]
