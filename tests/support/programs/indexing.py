"""Steps of random programs with indices or sorts."""

from __future__ import annotations

from hypothesis import strategies as st

from support.programs.values import MOST_ELEMENTS, SMALL, Program, elements, numeric, size, tup


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
    """Return the text of an integer scalar, which may be out of range."""
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
