"""Random programs for the fuzz tests: Hypothesis draws the lines of a Python function over ``jax.lax``.

Each value carries its shape, dtype and whether it is *exact*: the same on every machine, because it was made by
integer ops, by movement, or by sums and products of small whole numbers. Ops that jump (comparisons, sorts, indices,
conversions to integers) take exact values only, so that results may be compared: exact ones bit by bit, others within
the rounding that their ``bound`` (the largest absolute value possible) allows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax import export, lax

Size = int | str  # a number, or an expression over the symbols a and b

INTEGERS = ("int8", "uint8", "int16", "int32", "uint32", "int64")
FLOATS = ("float32", "float64", "float16", "bfloat16")
SMALL = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")  # converted, moved and compared only
WHOLE = {"float32": 2.0**24, "float64": 2.0**53, "float16": 2.0**11, "bfloat16": 2.0**8}
EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
MOST_ELEMENTS = 6000


@dataclass(frozen=True, slots=True)
class Val:
    """One value of a program."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    exact: bool = True
    bound: float = 8.0

    @property
    def rank(self) -> int:
        return len(self.shape)


class Program:
    """A function in the making: its arguments, lines and results."""

    def __init__(self, draw: Callable[[Any], Any], symbolic: bool) -> None:
        self.draw, self.symbolic = draw, symbolic
        self.arguments: list[Val] = []
        self.values: list[Val] = []
        self.lines: list[str] = []
        self.results: tuple[Val, ...] = ()
        self.seed = 0

    @property
    def source(self) -> str:
        """Return the function's text."""
        names = ", ".join(v.name for v in self.arguments)
        known = {d: f"{v.name}.shape[{n}]" for v in self.arguments for n, d in enumerate(v.shape) if d in ("a", "b")}
        sizes = [f"    {d} = {text}" for d, text in sorted(known.items(), key=lambda pair: str(pair[0]))]
        body = [f"    {line}" for line in self.lines]
        returned = ", ".join(v.name for v in self.results)
        return "\n".join([f"def f({names}):", *sizes, *body, f"    return ({returned},)"])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{v.name}: {v.dtype}[{', '.join(map(str, v.shape))}]" for v in self.arguments)
        return f"# {shapes}; seed {self.seed}\n{self.source}"

    def function(self) -> Callable[..., Any]:
        """Return the function itself."""
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
        exec(self.source, space)
        return space["f"]

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments' types, with symbols where sizes are symbolic."""
        scope = export.SymbolicScope()
        return [
            jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(map(str, v.shape)), scope=scope), jnp.dtype(v.dtype))
            for v in self.arguments
        ]

    def arrays(self, sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Return arguments: whole numbers for floats, some extreme ones for integers."""
        generator = np.random.default_rng(self.seed)
        return [array(generator, tuple(size(d, sizes) for d in v.shape), v.dtype) for v in self.arguments]

    def choose(self, options: Sequence[Any]) -> Any:
        """Draw one of ``options``; the first is the simplest."""
        return self.draw(st.sampled_from(list(options)))

    def some(self, condition: Callable[[Val], bool]) -> list[Val]:
        """Return the values that satisfy ``condition``, the latest first."""
        return [v for v in reversed(self.values) if condition(v)]

    def add(self, text: str, shape: Sequence[Size], dtype: str, exact: bool = True, bound: float = 8.0) -> Val:
        """Append ``name = text`` and return its value."""
        if dtype in WHOLE and (not exact or bound > WHOLE[dtype]):
            exact = False
        made = Val(f"v{len(self.values)}", tuple(shape), dtype, exact, bound)
        self.values.append(made)
        self.lines.append(f"{made.name} = {text}")
        return made


def size(d: Size, sizes: Mapping[str, int]) -> int:
    """Return the number that ``d`` is."""
    return d if isinstance(d, int) else int(eval(d, {"__builtins__": {}}, dict(sizes)))


LARGEST = {"a": 7, "b": 5}


def elements(shape: Sequence[Size]) -> int:
    """Return the number of elements at the largest sizes."""
    return math.prod(size(d, LARGEST) for d in shape)


def array(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return values for an argument."""
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        low, high = (0, 10) if info.min == 0 else (-9, 10)
        values = generator.integers(low, high, shape).astype(dtype)
        extreme = generator.random(shape) < 0.1
        return np.where(extreme, generator.choice([info.min, info.max, info.max - 1], shape).astype(dtype), values)
    if dtype in ("int4", "uint4"):
        return generator.integers(0, 8, shape).astype(getattr(ml_dtypes, dtype))
    return generator.integers(-8, 9, shape).astype(jnp.dtype(dtype))


def tup(items: Sequence[Any]) -> str:
    """Return a tuple's text."""
    return "(" + "".join(f"{x}, " for x in items) + ")"


# --- steps: each appends a line, or does nothing where no value fits ---


def numeric(v: Val) -> bool:
    return v.dtype in INTEGERS or v.dtype in FLOATS


def like(p: Program, v: Val) -> Val:
    """Return a value of the shape and dtype of ``v``."""
    return p.choose(p.some(lambda w: w.shape == v.shape and w.dtype == v.dtype))


def unary(p: Program) -> None:
    v = p.choose(p.some(lambda v: numeric(v) or v.dtype == "bool"))
    if v.dtype == "bool":
        p.add(f"lax.bitwise_not({v.name})", v.shape, v.dtype)
    elif v.dtype in FLOATS:
        jumps = ("floor", "ceil", "round", "sign", "is_finite") if v.exact else ()
        name = p.choose(("neg", "abs", *jumps))
        dtype = "bool" if name == "is_finite" else v.dtype
        p.add(f"lax.{name}({v.name})", v.shape, dtype, v.exact, v.bound)
    else:
        names = ("neg", "abs", "sign", "bitwise_not", "population_count", "clz")
        names = names[3:] if v.dtype.startswith("u") else names
        p.add(f"lax.{p.choose(names)}({v.name})", v.shape, v.dtype)


def smooth(p: Program) -> None:
    found = p.some(lambda v: v.dtype in FLOATS and v.bound <= 64)
    if found:
        v = p.choose(found)
        name, bound = p.choose((("tanh", 1.0), ("sin", 1.0), ("cos", 1.0), ("logistic", 1.0), ("sqrt(lax.abs", 8.0)))
        p.add(f"lax.{name}({v.name})" + (")" if "(" in name else ""), v.shape, v.dtype, False, bound)


def binary(p: Program) -> None:
    v = p.choose(p.some(lambda v: numeric(v) or v.dtype == "bool"))
    w = like(p, v)
    if v.dtype == "bool":
        p.add(f"lax.{p.choose(('bitwise_and', 'bitwise_or', 'bitwise_xor'))}({v.name}, {w.name})", v.shape, v.dtype)
        return
    exact, total = v.exact and w.exact, v.bound + w.bound
    rows = [("add", total), ("sub", total), ("mul", v.bound * w.bound), ("max", total), ("min", total)]
    if v.dtype in INTEGERS:
        rows += [(name, 8.0) for name in ("div", "rem", "bitwise_and", "bitwise_xor", "shift_left")]
        rows += [(name, 8.0) for name in ("shift_right_arithmetic", "shift_right_logical")]
    name, bound = p.choose(rows)
    if bound <= 1e4 or v.dtype in INTEGERS:
        p.add(f"lax.{name}({v.name}, {w.name})", v.shape, v.dtype, exact, bound)


def compare(p: Program) -> None:
    v = p.choose(p.some(lambda v: v.exact))
    w = p.choose(p.some(lambda w: w.exact and w.shape == v.shape and w.dtype == v.dtype))
    p.add(f"lax.{p.choose(('lt', 'eq', 'ge', 'ne'))}({v.name}, {w.name})", v.shape, "bool")


def select(p: Program) -> None:
    found = p.some(lambda v: v.dtype == "bool")
    if found:
        test = p.choose(found)
        fits = p.some(lambda v: v.shape == test.shape)
        v = p.choose(fits)
        w = like(p, v)
        bound = max(v.bound, w.bound)
        p.add(f"lax.select({test.name}, {v.name}, {w.name})", v.shape, v.dtype, v.exact and w.exact, bound)


def convert(p: Program) -> None:
    v = p.choose(p.values[::-1])
    # XLA may leave out a rounding to a narrow type that is widened again
    rounded = [t for t in FLOATS if EPS[t] >= EPS.get(v.dtype, 1.0)]
    targets = [t for t in ((*INTEGERS, *FLOATS, *SMALL, "bool") if v.exact else rounded) if t != v.dtype]
    if not targets:
        return
    target = p.choose(targets)
    if v.dtype in INTEGERS and target in (*FLOATS, *SMALL):
        small = f"lax.clamp({low(v)}, {v.name}, {v.name}.dtype.type(7))"
        p.add(f"lax.convert_element_type({small}, jnp.{jnp_name(target)})", v.shape, target)
    elif not (v.dtype in FLOATS and target in SMALL and v.bound > 8):
        p.add(f"lax.convert_element_type({v.name}, jnp.{jnp_name(target)})", v.shape, target, v.exact, v.bound)


def low(v: Val) -> str:
    return f"{v.name}.dtype.type({0 if v.dtype.startswith('u') else -7})"


def jnp_name(dtype: str) -> str:
    return "bool_" if dtype == "bool" else dtype


def bitcast(p: Program) -> None:
    pairs = {"int32": "uint32", "uint32": "int32", "int8": "uint8", "uint8": "int8", "float32": "int32"}
    found = p.some(lambda v: v.dtype in pairs and v.exact)
    if found:
        v = p.choose(found)
        source = f"lax.abs({v.name})" if v.dtype == "float32" else v.name  # the sign of a zero is nobody's promise
        p.add(f"lax.bitcast_convert_type({source}, jnp.{pairs[v.dtype]})", v.shape, pairs[v.dtype])


def broadcast(p: Program) -> None:
    v = p.choose(p.some(lambda v: v.rank < 3))
    at = p.draw(st.integers(0, v.rank))
    d = p.choose([2, 1, 3, 5, 0, *(("a", "b") if p.symbolic else ())])
    shape = (*v.shape[:at], d, *v.shape[at:])
    kept = [n for n in range(v.rank + 1) if n != at]
    if elements(shape) <= MOST_ELEMENTS:
        p.add(f"lax.broadcast_in_dim({v.name}, {tup(shape)}, {tup(kept)})", shape, v.dtype, v.exact, v.bound)


def spread(p: Program) -> None:
    """Grow a dim of size 1."""
    found = p.some(lambda v: 1 in v.shape)
    if found:
        v = p.choose(found)
        d = p.choose([3, 2, 8, *(("a", "b") if p.symbolic else ())])
        shape = tuple(d if n == v.shape.index(1) else s for n, s in enumerate(v.shape))
        if elements(shape) <= MOST_ELEMENTS:
            dims = tup(range(v.rank))
            p.add(f"lax.broadcast_in_dim({v.name}, {tup(shape)}, {dims})", shape, v.dtype, v.exact, v.bound)


def reshape(p: Program) -> None:
    v = p.choose(p.values[::-1])
    options: list[tuple[Size, ...]] = [(*v.shape, 1), (1, *v.shape)] if v.rank < 3 else []
    for n in range(v.rank - 1):
        merged = f"({v.shape[n]}*{v.shape[n + 1]})"
        both = all(isinstance(d, int) for d in v.shape[n : n + 2])
        options.append((*v.shape[:n], eval(merged) if both else merged, *v.shape[n + 2 :]))
    for n, d in enumerate(v.shape):
        if isinstance(d, int) and v.rank < 4:
            options += [(*v.shape[:n], q, d // q, *v.shape[n + 1 :]) for q in (2, 3, 4) if d and d % q == 0]
        if d == 1 and v.rank > 1:
            options.append((*v.shape[:n], *v.shape[n + 1 :]))
    if options:
        shape = p.choose(options)
        p.add(f"lax.reshape({v.name}, {tup(shape)})", shape, v.dtype, v.exact, v.bound)


def transpose(p: Program) -> None:
    found = p.some(lambda v: v.rank > 1)
    if found:
        v = p.choose(found)
        perm = p.draw(st.permutations(range(v.rank)))
        shape = [v.shape[n] for n in perm]
        p.add(f"lax.transpose({v.name}, {tup(perm)})", shape, v.dtype, v.exact, v.bound)


def reverse(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0)
    if found:
        v = p.choose(found)
        dim = p.draw(st.integers(0, v.rank - 1))
        p.add(f"lax.rev({v.name}, ({dim},))", v.shape, v.dtype, v.exact, v.bound)


def sliced(p: Program) -> None:
    found = p.some(lambda v: any(isinstance(d, int) and d for d in v.shape))
    if found:
        v = p.choose(found)
        dim = p.choose([n for n, d in enumerate(v.shape) if isinstance(d, int) and d])
        n = int(v.shape[dim])
        start = p.draw(st.integers(0, n - 1))
        limit, stride = p.draw(st.integers(start, n)), p.choose([1, 2, 3])
        shape = (*v.shape[:dim], -(-(limit - start) // stride), *v.shape[dim + 1 :])
        text = f"lax.slice_in_dim({v.name}, {start}, {limit}, {stride}, {dim})"
        p.add(text, shape, v.dtype, v.exact, v.bound)


def pad(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and v.dtype not in SMALL)
    if found:
        v = p.choose(found)
        rows, shape = [], []
        for d in v.shape:
            least = size(d, {"a": 1, "b": 1})
            before, after = (p.draw(st.integers(-1 if least > 2 else 0, 2)) for _ in range(2))
            between = p.draw(st.integers(0, 1)) if isinstance(d, int) else 0
            if isinstance(d, int):
                shape.append(before + after + d + max(d - 1, 0) * between)
            else:
                shape.append(f"({d}+{before + after})" if before + after else d)
            rows.append((before, after, between))
        value = f"{v.name}.dtype.type({p.choose([0, 1])})"
        if all(size(d, {"a": 1, "b": 1}) >= 0 for d in shape) and elements(shape) <= MOST_ELEMENTS:
            p.add(f"lax.pad({v.name}, {value}, {tup(rows)})", shape, v.dtype, v.exact, v.bound)


def concatenate(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0)
    if found:
        v = p.choose(found)
        dim = p.draw(st.integers(0, v.rank - 1))
        w = p.choose(p.some(lambda w: w.dtype == v.dtype and w.rank == v.rank and all(
            n == dim or a == b for n, (a, b) in enumerate(zip(v.shape, w.shape)))))  # fmt: skip
        both = isinstance(v.shape[dim], int) and isinstance(w.shape[dim], int)
        joined = f"({v.shape[dim]}+{w.shape[dim]})"
        shape = (*v.shape[:dim], eval(joined) if both else joined, *v.shape[dim + 1 :])
        if elements(shape) <= MOST_ELEMENTS:
            text = f"lax.concatenate([{v.name}, {w.name}], {dim})"
            p.add(text, shape, v.dtype, v.exact and w.exact, max(v.bound, w.bound))


def reduce(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and (numeric(v) or v.dtype == "bool"))
    if found:
        v = p.choose(found)
        dims = sorted(p.draw(st.sets(st.integers(0, v.rank - 1), min_size=1)))
        shape = [d for n, d in enumerate(v.shape) if n not in dims]
        count = max(elements([v.shape[n] for n in dims]), 1)
        names = ("reduce_or", "reduce_and") if v.dtype == "bool" else ("reduce_sum", "reduce_max", "reduce_min")
        name = p.choose(names)
        infinite = v.dtype in FLOATS and name != "reduce_sum"
        if (
            not infinite
            or count == math.prod(max(size(v.shape[n], {"a": 1, "b": 1}), 0) or 9 for n in dims)
            or all(size(v.shape[n], {"a": 1, "b": 1}) > 0 for n in dims)
        ):
            p.add(f"lax.{name}({v.name}, {tup(dims)})", shape, v.dtype, v.exact, v.bound * count)


def argument_of_extreme(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and numeric(v) and v.exact)
    if found:
        v = p.choose(found)
        dim = p.draw(st.integers(0, v.rank - 1))
        if size(v.shape[dim], {"a": 1, "b": 1}) > 0:
            shape = (*v.shape[:dim], *v.shape[dim + 1 :])
            p.add(f"lax.{p.choose(('argmax', 'argmin'))}({v.name}, {dim}, jnp.int32)", shape, "int32")


def reduce_pair(p: Program) -> None:
    """Reduce two operands at once by a combiner of several ops."""
    found = p.some(lambda v: v.rank > 0 and v.dtype in ("int32", "int64", "int8") and v.exact)
    if found:
        v = p.choose(found)
        w = like(p, v)
        dim = p.draw(st.integers(0, v.rank - 1))
        shape = (*v.shape[:dim], *v.shape[dim + 1 :])
        combine = "lambda x, y: (lax.max(x[0], y[0]), x[1] + y[1])"
        start = f"{v.name}.dtype.type({np.iinfo(v.dtype).min}), {v.name}.dtype.type(0)"
        text = f"lax.reduce(({v.name}, {w.name}), ({start}), {combine}, ({dim},))[{p.choose([0, 1])}]"
        p.add(text, shape, v.dtype)


def scan(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and numeric(v))
    if found:
        v = p.choose(found)
        dim = p.draw(st.integers(0, v.rank - 1))
        name, back = p.choose(("cumsum", "cummax", "cummin")), p.draw(st.booleans())
        bound = v.bound * (max(size(v.shape[dim], LARGEST), 1) if name == "cumsum" else 1)
        p.add(f"lax.{name}({v.name}, {dim}, reverse={back})", v.shape, v.dtype, v.exact, bound)


def window(p: Program) -> None:
    padded = {line.partition(" = ")[0] for line in p.lines if "lax.pad(" in line}  # XLA gets windows over crops wrong
    found = p.some(lambda v: v.rank > 0 and v.dtype in ("int32", *FLOATS) and all(isinstance(d, int) for d in v.shape)
                   and v.name not in padded)  # fmt: skip
    if found:
        v = p.choose(found)
        sizes = [p.draw(st.integers(1, 3)) for _ in v.shape]
        strides = [p.draw(st.integers(1, 2)) for _ in v.shape]
        pads = [(p.draw(st.integers(0, 1)), p.draw(st.integers(0, 1))) for _ in v.shape]
        shape = [max((int(d) + sum(q) - s) // t + 1, 0) for d, q, s, t in zip(v.shape, pads, sizes, strides)]
        zero = f"{v.name}.dtype.type(0)"
        name = p.choose(("add", "max"))
        bound = v.bound * (math.prod(sizes) if name == "add" else 1)
        text = f"lax.reduce_window({v.name}, {zero}, lax.{name}, {tup(sizes)}, {tup(strides)}, {tup(pads)})"
        if all(int(d) + sum(q) >= s for d, q, s in zip(v.shape, pads, sizes)):
            p.add(text, shape, v.dtype, v.exact, bound)


def dot(p: Program) -> None:
    found = p.some(lambda v: 1 <= v.rank <= 3 and (v.dtype in ("float32", "float64", "int32", "bfloat16", "int8")))
    if found:
        v = p.choose(found)
        k = p.draw(st.integers(0, v.rank - 1))
        pairs = [
            (w, m) for w in p.some(lambda w: w.dtype == v.dtype and 1 <= w.rank <= 3)
            for m in range(w.rank) if w.shape[m] == v.shape[k]
        ]  # fmt: skip
        w, m = p.choose(pairs)
        batch = [
            (n, q) for n in range(v.rank) for q in range(w.rank) if n != k and q != m and v.shape[n] == w.shape[q]
        ]  # fmt: skip
        taken = [p.choose(batch)] if batch and p.draw(st.booleans()) else []
        left, right = [n for n, _ in taken], [q for _, q in taken]
        shape = [v.shape[n] for n in left]
        shape += [d for n, d in enumerate(v.shape) if n not in (k, *left)]
        shape += [d for n, d in enumerate(w.shape) if n not in (m, *right)]
        bound = v.bound * w.bound * max(size(v.shape[k], LARGEST), 1)
        if elements(shape) <= MOST_ELEMENTS and len(shape) <= 4 and bound <= 1e6:
            dims = f"((({k},), ({m},)), ({tup(left)}, {tup(right)}))"
            p.add(f"lax.dot_general({v.name}, {w.name}, {dims})", shape, v.dtype, v.exact and w.exact, bound)


def convolution(p: Program) -> None:
    found = p.some(lambda v: v.rank == 3 and v.dtype == "float32" and all(isinstance(d, int) and d for d in v.shape))
    if found:
        v = p.choose(found)
        channels, wide = int(v.shape[1]), int(v.shape[2])
        fits = p.some(lambda w: w.rank == 3 and w.dtype == v.dtype and w.shape[1] == channels and w.shape[0] != 0
                      and isinstance(w.shape[0], int) and isinstance(w.shape[2], int) and w.shape[2] > 0)  # fmt: skip
        w = p.choose(fits)
        stride, before, after = p.choose([1, 2]), p.draw(st.integers(0, 2)), p.draw(st.integers(0, 2))
        dilation = p.choose([1, 2])
        reach = (int(w.shape[2]) - 1) * dilation + 1
        out = (wide + before + after - reach) // stride + 1
        if out > 0:
            bound = v.bound * w.bound * channels * int(w.shape[2])
            window = f"({stride},), [({before}, {after})], rhs_dilation=({dilation},)"
            p.add(f"lax.conv_general_dilated({v.name}, {w.name}, {window})", (v.shape[0], w.shape[0], out), v.dtype,
                  v.exact and w.exact, bound)  # fmt: skip


def gather(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and size(v.shape[0], {"a": 1, "b": 1}) > 0)
    indices = p.some(lambda v: v.dtype in ("int32", "int64", "uint8", "int8") and v.rank <= 2)
    if found and indices:
        v, at = p.choose(found), p.choose(indices)
        dim = p.choose([n for n, d in enumerate(v.shape) if size(d, {"a": 1, "b": 1}) > 0])
        shape = (*v.shape[:dim], *at.shape, *v.shape[dim + 1 :])
        if len(shape) <= 4 and elements(shape) <= MOST_ELEMENTS:
            modes = (
                "clip",
                *(() if v.dtype in SMALL else ("fill",)),
                *(("wrap",) if isinstance(v.shape[dim], int) and at.dtype in ("int32", "int64") else ()),
            )
            mode = p.choose(modes)
            fill = ", fill_value=1" if mode == "fill" else ""
            text = f'jnp.take({v.name}, {at.name}, {dim}, mode="{mode}"{fill})'
            p.add(text, shape, v.dtype, v.exact, v.bound)


def scatter(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and numeric(v))
    indices = p.some(lambda v: v.dtype in ("int32", "int64") and v.rank == 1)
    if found and indices:
        v, at = p.choose(found), p.choose(indices)
        count = max(elements(at.shape), 1)
        name, mode = p.choose(("add", "max", "min")), p.choose(("drop", "clip"))
        fits = p.some(lambda w: w.dtype == v.dtype and w.shape == (*at.shape, *v.shape[1:]))
        update = p.choose(fits).name if fits and p.draw(st.booleans()) else f"{v.name}.dtype.type(3)"
        bound = v.bound + 16 * v.bound * count + 3 * count
        if bound <= 1e6 and size(v.shape[0], {"a": 1, "b": 1}) > 0:
            exact = v.exact and all(w.exact for w in fits)
            p.add(f'{v.name}.at[{at.name}].{name}({update}, mode="{mode}")', v.shape, v.dtype, exact, bound)


def scalar_index(p: Program) -> str:
    """Return the text of an integer scalar, which may lie out of range."""
    found = p.some(lambda v: v.dtype == "int32" and v.rank == 0)
    texts = ["jnp.int32(1)", "jnp.int32(-1)", "jnp.int32(100)", *(v.name for v in found)]
    return str(p.choose(texts))


def dynamic_slice(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0)
    if found:
        v = p.choose(found)
        sizes = [p.draw(st.integers(0, min(size(d, {"a": 1, "b": 1}), 4))) for d in v.shape]
        starts = [scalar_index(p) for _ in v.shape]
        text = f"lax.dynamic_slice({v.name}, ({', '.join(starts)},), {tup(sizes)})"
        p.add(text, sizes, v.dtype, v.exact, v.bound)


def dynamic_update_slice(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0)
    if found:
        v = p.choose(found)
        fits = p.some(lambda w: w.dtype == v.dtype and w.rank == v.rank and all(
            a == b or (isinstance(a, int) and a <= size(b, {"a": 1, "b": 1})) for a, b in zip(w.shape, v.shape)
        ))  # fmt: skip
        w = p.choose(fits)
        starts = [scalar_index(p) for _ in v.shape]
        text = f"lax.dynamic_update_slice({v.name}, {w.name}, ({', '.join(starts)},))"
        p.add(text, v.shape, v.dtype, v.exact and w.exact, max(v.bound, w.bound))


def sort(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and numeric(v) and v.exact)
    if found:
        v = p.choose(found)
        dim = p.draw(st.integers(0, v.rank - 1))
        fits = p.some(lambda w: w.shape == v.shape and w.dtype not in SMALL)
        if p.draw(st.booleans()):
            w = p.choose(fits)
            p.add(f"lax.sort(({v.name}, {w.name}), {dim}, num_keys=1)[1]", v.shape, w.dtype, w.exact, w.bound)
        else:
            p.add(f"lax.sort({v.name}, {dim})", v.shape, v.dtype, v.exact, v.bound)


def top_k(p: Program) -> None:
    found = p.some(lambda v: v.rank > 0 and numeric(v) and v.exact and isinstance(v.shape[-1], int) and v.shape[-1])
    if found:
        v = p.choose(found)
        k = p.draw(st.integers(1, int(v.shape[-1])))
        which = p.choose([0, 1])
        p.add(f"lax.top_k({v.name}, {k})[{which}]", (*v.shape[:-1], k), ["", "int32"][which] or v.dtype, True, v.bound)


def iota(p: Program) -> None:
    shape = [p.choose([3, 1, 8, *(("a", "b") if p.symbolic else ())]) for _ in range(p.draw(st.integers(1, 2)))]
    dim, dtype = p.draw(st.integers(0, len(shape) - 1)), p.choose(("int32", "float32", "uint8"))
    p.add(f"lax.broadcasted_iota(jnp.{dtype}, {tup(shape)}, {dim})", shape, dtype)


def loop(p: Program) -> None:
    """A loop over a carried value and what it reads from outside."""
    found = p.some(lambda v: v.dtype in ("int32", "uint8", "int64"))
    if found:
        v = p.choose(found)
        w = like(p, v)
        if p.draw(st.booleans()):
            largest = f"jnp.max(c[1], initial=0) < {p.choose([3, 50])}"
            inner = p.choose(
                (f"lax.rev(c[1], {tup(range(v.rank))}) + 2", f"lax.max(c[1], {w.name}) + 5", "c[1] * c[1]")
            )
            text = f"lax.while_loop(lambda c: (c[0] < 4) & ({largest}), lambda c: (c[0] + 1, {inner}), (0, {v.name}))"
            p.add(f"{text}[1]", v.shape, v.dtype)
            return
        step = f"i.astype({v.name}.dtype)"
        bodies = [f"c + {w.name}", f"c * {step} - {w.name}", f"lax.max(c, {w.name} + {step})"]
        if v.rank:
            bodies += ["lax.rev(c, (0,)) + c", f"lax.dynamic_update_index_in_dim(c, c[0] + {step}, i, 0)"]
            bodies = bodies if size(v.shape[0], {"a": 1, "b": 1}) > 0 else bodies[:-1]
        count = p.choose([3, 0, 1, "lax.rem(lax.abs(" + scalar_index(p) + "), jnp.int32(5))"])
        p.add(f"lax.fori_loop(0, {count}, lambda i, c: {p.choose(bodies)}, {v.name})", v.shape, v.dtype)


def scan_rows(p: Program) -> None:
    """A scan over rows that carries their sum and gives each partial sum."""
    found = p.some(lambda v: v.rank > 1 and v.dtype in ("int32", "uint8", "float32"))
    if found:
        v = p.choose(found)
        bound = v.bound * max(size(v.shape[0], LARGEST), 1)
        if bound < 1e6:
            text = f"lax.scan(lambda c, x: (c + x, c - x), jnp.zeros({v.name}.shape[1:], {v.name}.dtype), {v.name})[1]"
            p.add(text, v.shape, v.dtype, v.exact, 2 * bound)


def branch(p: Program) -> None:
    found = p.some(lambda v: numeric(v))
    tests = p.some(lambda v: v.dtype == "bool")
    if found and tests:
        v, test = p.choose(found), p.choose(tests)
        w = like(p, v)
        ways = (f"{w.name} + {v.name}", f"lax.neg({v.name})", w.name, f"{v.name} * {v.name}")
        one, other = p.choose(ways), p.choose(ways)
        bound = max(v.bound, w.bound)
        bound = max(2 * bound, bound * bound)
        if bound < 1e6 or v.dtype in INTEGERS:
            text = f"lax.cond(jnp.any({test.name}), lambda: {one}, lambda: {other})"
            p.add(text, v.shape, v.dtype, v.exact and w.exact, bound)


def special(p: Program) -> None:
    """Put a NaN or an infinity into floats; XLA loses some in 16 bits."""
    found = p.some(lambda v: v.dtype in ("float32", "float64") and v.rank > 0 and v.exact)
    if found:
        v = p.choose(found)
        value = f"{v.name}.dtype.type({p.choose(('np.nan', 'np.inf', '-np.inf', '-0.0'))})"
        at = f"lax.broadcasted_iota(jnp.int32, {v.name}.shape, {p.draw(st.integers(0, v.rank - 1))}) == 1"
        p.add(f"jnp.where({at}, {value}, {v.name})", v.shape, v.dtype, v.exact, 100.0)  # not for smooth ops


def advanced_index(p: Program) -> None:
    """Gather single elements, or add to them, by two index vectors."""
    found = p.some(lambda v: v.rank >= 2 and numeric(v) and all(size(d, {"a": 1, "b": 1}) > 0 for d in v.shape[:2]))
    indices = p.some(lambda v: v.dtype == "int32" and v.rank <= 1)
    if found and indices:
        v, at = p.choose(found), p.choose(indices)
        mode = p.choose(("clip", "fill", "drop"))
        if mode == "drop":
            bound = v.bound + max(elements(at.shape), 1)
            text = f'{v.name}.at[{at.name}, {at.name}].add({v.name}.dtype.type(1), mode="drop")'
            p.add(text, v.shape, v.dtype, v.exact, bound)
        else:
            shape = (*at.shape, *v.shape[2:])
            fill = ", fill_value=2" if mode == "fill" else ""
            text = f'{v.name}.at[{at.name}, {at.name}].get(mode="{mode}"{fill})'
            p.add(text, shape, v.dtype, v.exact, v.bound)


def mapped(p: Program) -> None:
    """Map a function over the leading dim: batch dims, and branches that become selections."""
    found = p.some(lambda v: v.rank >= 2 and v.dtype in ("int32", "float32", "uint8") and v.exact
                   and size(v.shape[1], {"a": 1, "b": 1}) > 1 and elements(v.shape) > 0)  # fmt: skip
    if found:
        v = p.choose(found)
        row = v.shape[1:]
        start = "x.reshape(-1)[0].astype(jnp.int32)"
        bodies = [
            ("lax.sort(x, 0)", row, 1.0),
            (f"lax.dynamic_slice_in_dim(x, {start}, 2, 0)", (2, *row[1:]), 1.0),
            (f"lax.dynamic_update_slice_in_dim(x, x[1:2], {start}, 0)", row, 1.0),
            (f"lax.cond({start} > 0, lambda: x + x, lambda: lax.rev(x, (0,)))", row, 2.0),
            (f"lax.fori_loop(0, {start} % 3, lambda i, c: lax.max(c, c[:1]) , x)", row, 1.0),
        ]
        body, shape, factor = p.choose(bodies)
        p.add(f"jax.vmap(lambda x: {body})({v.name})", (v.shape[0], *shape), v.dtype, v.exact, v.bound * factor)


def several_carried(p: Program) -> None:
    """A loop that carries a counter and two arrays, and swaps them."""
    found = p.some(lambda v: v.dtype in ("int32", "uint8", "float32") and v.exact)
    if found:
        v = p.choose(found)
        w = like(p, v)
        count = p.choose([2, 3, 1, 0])
        step = p.choose(("lax.max(c[0], c[1])", "lax.min(c[1], c[0])", "c[1]"))
        text = f"lax.fori_loop(0, {count}, lambda i, c: ({step}, c[0]), ({v.name}, {w.name}))"
        p.add(f"{text}[{p.choose([0, 1])}]", v.shape, v.dtype, v.exact and w.exact, max(v.bound, w.bound))


STEPS: tuple[Callable[[Program], None], ...] = (
    unary, binary, compare, select, convert, broadcast, reshape, transpose, reduce, sliced, pad, concatenate, smooth,
    dot, gather, scatter, dynamic_slice, dynamic_update_slice, sort, scan, loop, branch, spread, reverse, bitcast,
    argument_of_extreme, reduce_pair, window, convolution, top_k, iota, scan_rows, special, advanced_index, mapped,
    several_carried,
)  # fmt: skip


@st.composite
def programs(draw: Any, symbolic: bool = False, most: int = 10) -> Program:
    """Draw a program of up to ``most`` steps."""
    p = Program(draw, symbolic)
    sizes: list[Size] = ["a", 3, "b", 1, 8] if symbolic else [3, 1, 2, 4, 8, 0, 17, 33, 130]
    shapes = [("a", "b")] if symbolic else []
    shapes += [tuple(p.choose(sizes) for _ in range(draw(st.integers(1, 3)))), (p.choose(sizes),), ()]
    for n, shape in enumerate(shapes):
        dtype = p.choose(("float32", "int32", "bool", *INTEGERS, *FLOATS) if n < len(shapes) - 2 else ("int32", "int8"))
        if elements(shape) <= MOST_ELEMENTS:
            p.values.append(Val(f"v{len(p.values)}", shape, dtype))
    p.arguments = list(p.values)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=most // 2, max_size=most)):
        if any_fits(p):
            step(p)
    made = p.values[len(p.arguments) :] or p.values
    text = "\n".join(line.partition(" = ")[2] for line in p.lines)
    unread = [v for v in made if not re.search(rf"\b{v.name}\b", text)]
    p.results = tuple(dict.fromkeys([*unread, *draw(st.lists(st.sampled_from(made), max_size=2))]))
    p.seed = draw(st.integers(0, 1000))
    return p


def any_fits(p: Program) -> bool:
    """Are there the values that every step needs?"""
    return any(numeric(v) for v in p.values) and any(v.exact for v in p.values) and any(v.rank < 3 for v in p.values)
