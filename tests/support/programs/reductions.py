"""Steps of random programs that combine elements: reductions, scans, windows, products."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from support.programs.values import FLOATS, LARGEST, MOST_ELEMENTS, Program, elements, like, numeric, size, tup


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
