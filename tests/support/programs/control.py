"""Steps of random programs with loops, branches and maps."""

from __future__ import annotations

from hypothesis import strategies as st

from support.programs.indexing import scalar_index
from support.programs.values import INTEGERS, LARGEST, Program, elements, like, numeric, size, tup


def loop(p: Program) -> None:
    """Add a loop over a carried value with values from outside."""
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
    """Add a scan over rows that carries their sum and returns each partial sum."""
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
    """Add a loop that carries a counter and two arrays, and swaps these."""
    found = p.some(lambda v: v.dtype in ("int32", "uint8", "float32") and v.exact)
    if found:
        v = p.choose(found)
        w = like(p, v)
        count = p.choose([2, 3, 1, 0])
        step = p.choose(("lax.max(c[0], c[1])", "lax.min(c[1], c[0])", "c[1]"))
        text = f"lax.fori_loop(0, {count}, lambda i, c: ({step}, c[0]), ({v.name}, {w.name}))"
        p.add(f"{text}[{p.choose([0, 1])}]", v.shape, v.dtype, v.exact and w.exact, max(v.bound, w.bound))
