"""Steps of random programs that move elements."""

from __future__ import annotations

from hypothesis import strategies as st

from support.programs.values import MOST_ELEMENTS, SMALL, Program, Size, elements, size, tup


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
