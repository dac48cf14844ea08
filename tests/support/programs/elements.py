"""Elementwise steps of random programs."""

from __future__ import annotations

from hypothesis import strategies as st

from support.programs.values import EPS, FLOATS, INTEGERS, SMALL, Program, Val, like, numeric, tup


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


def special(p: Program) -> None:
    """Put a NaN or an infinity into floats; XLA loses some in 16 bits."""
    found = p.some(lambda v: v.dtype in ("float32", "float64") and v.rank > 0 and v.exact)
    if found:
        v = p.choose(found)
        value = f"{v.name}.dtype.type({p.choose(('np.nan', 'np.inf', '-np.inf', '-0.0'))})"
        at = f"lax.broadcasted_iota(jnp.int32, {v.name}.shape, {p.draw(st.integers(0, v.rank - 1))}) == 1"
        p.add(f"jnp.where({at}, {value}, {v.name})", v.shape, v.dtype, v.exact, 100.0)  # not for smooth ops


def iota(p: Program) -> None:
    shape = [p.choose([3, 1, 8, *(("a", "b") if p.symbolic else ())]) for _ in range(p.draw(st.integers(1, 2)))]
    dim, dtype = p.draw(st.integers(0, len(shape) - 1)), p.choose(("int32", "float32", "uint8"))
    p.add(f"lax.broadcasted_iota(jnp.{dtype}, {tup(shape)}, {dim})", shape, dtype)
