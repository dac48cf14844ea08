"""Random convolutions, matmuls and attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from support.sizes.draw import FLOATS, MOST_ELEMENTS, MOST_FLOPS, Draw, Program, epilogue

LAYOUTS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NWC", "OIW", "NWC")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW")),
    3: (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
}


def convolution(d: Draw) -> Program:
    """Return a convolution of 1 to 3 dims: strides, dilations, groups, padding, 1 to 2048 channels."""
    rank, dtype = d.one(1, 1, 2, 2, 2, 3), d.one(*FLOATS)
    window = [d.one(1, 2, 3, 3, 3, 4, 5, 7) for _ in range(rank)]
    strides, gaps = ([d.one(1, 1, 1, 2, 2, 3) for _ in range(rank)] for _ in range(2))
    gaps = gaps if d.maybe(0.3) else [1] * rank
    spread = [d.one(1, 2, 3) for _ in range(rank)] if d.maybe(0.2) else [1] * rank
    lengths = [max(d.size({1: 4096, 2: 224, 3: 32}[rank]), (w - 1) * g + 1) for w, g in zip(window, gaps, strict=True)]
    batch = d.one(1, 1, 1, 2, 5)
    ins = d.size(max(min(2048, MOST_ELEMENTS // (batch * int(np.prod(lengths)))), 1))
    groups = d.one(*(g for g in (1, 1, 2, 4, ins) if ins % g == 0)) if d.maybe(0.3) else 1
    outputs = int(np.prod([n * s // t + 1 for n, s, t in zip(lengths, spread, strides, strict=True)])) * batch
    each = int(np.prod(window)) * (ins // groups)
    most = max(int(MOST_FLOPS / (2 * outputs * each)), 1)
    outs = groups * d.size(max(min(2048, most, MOST_ELEMENTS // each) // groups, 1))
    named = ("SAME", "VALID") if max(spread) == 1 else ()
    padding = d.one(*named, [(d.one(0, 1, 2), d.one(0, 1, 3)) for _ in range(rank)])
    layout = d.one(*LAYOUTS[rank])
    sizes = {"N": batch, "C": ins, "I": ins // groups, "O": outs}
    letters = "DHW"[3 - rank :]
    x = d.values(*(sizes.get(c) or lengths[letters.index(c)] for c in layout[0]), dtype=dtype)
    w = d.values(*(sizes.get(c) or window[letters.index(c)] for c in layout[1]), dtype=dtype, scale=each**-0.5)

    def product(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, strides, padding, spread, gaps, layout, groups)
        return jnp.moveaxis(y, layout[2].index("C"), -1)

    what, function, more = epilogue(d, product, outs, dtype)
    text = (
        f"conv{rank}d {dtype} {layout} x {x.shape} w {w.shape} strides {strides} padding {padding} "
        f"lhs_dilation {spread} rhs_dilation {gaps} groups {groups}, then {what}"
    )
    return Program(text, function, [x, w, *more], each, (1, 2) if d.maybe() else ())


def product(d: Draw) -> Program:
    """Return a matmul with sizes around powers of two, operands transposed or not, with batches."""
    dtype = d.one(*FLOATS, "int8")
    batch = (d.one(2, 3, 12),) if d.maybe(0.3) else ()
    m, k, n = (d.size(4096) for _ in range(3))
    while 2 * m * k * n * int(np.prod(batch)) > MOST_FLOPS or max(m * k, k * n, m * n) > 4 * MOST_ELEMENTS:
        m, k, n = (d.size(max(side // 2, 1)) if d.maybe() else side for side in (m, k, n))
    if d.maybe(0.4):
        m, k = d.size(128), d.one(16, 32, 48, 64, 65, 96, 128, 255, 256)
        n = k
    left, right = d.maybe(0.3), d.maybe(0.3)
    a = d.values(*batch, *((k, m) if left else (m, k)), dtype=dtype)
    shared = batch if d.maybe() else ()
    b = d.values(*shared, *((n, k) if right else (k, n)), dtype=dtype, scale=k**-0.5)
    integer = dtype == "int8"

    def dot(a: Any, b: Any) -> Any:
        a, b = jnp.swapaxes(a, -1, -2) if left else a, jnp.swapaxes(b, -1, -2) if right else b
        return jnp.matmul(a, b, preferred_element_type="int32" if integer else None)

    text = f"dot {dtype} a {a.shape}{'.T' * left} b {b.shape}{'.T' * right}"
    if not integer and k == n and d.maybe(0.7):

        def dot(a: Any, b: Any) -> Any:
            h = jnp.tanh(jnp.swapaxes(a, -1, -2) if left else a)
            b = jnp.swapaxes(b, -1, -2) if right else b
            h = h + h @ b
            return h + h @ b

        text = f"two residual blocks, {text}"
    what, function, more = ("none", dot, []) if integer else epilogue(d, dot, n, dtype)
    return Program(f"{text}, then {what}", function, [a, b, *more], 0 if integer else 2 * k, (1,) if d.maybe() else ())


def attention(d: Draw) -> Program:
    """Return attention: two matmuls with a softmax between them."""
    dtype = d.one("float32", "float32", "bfloat16", "float64")
    heads, width = d.one(1, 2, 8, 12), d.one(8, 16, 40, 64, 65, 128)
    rows, keys = d.size(512), d.size(512)
    q, k, v = (d.values(1, n, heads, width, dtype=dtype) for n in (rows, keys, keys))
    causal = d.maybe()

    def function(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
        if causal:
            s = jnp.where(jnp.arange(keys) <= jnp.arange(rows)[:, None], s, -1e4)
        s = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bhqk,bkhd->bqhd", s / s.sum(-1, keepdims=True), v)

    text = f"attention {dtype} q {q.shape} k, v {k.shape}{' causal' * causal}"
    return Program(text, function, [q, k, v], 4 * (width + keys))
