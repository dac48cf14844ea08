"""Attention as kernels with a tiling, and what their templates' Python makes of them."""

from functools import cache, partial

import ml_dtypes
import numpy as np
from gpu.poisoned import between_nans
from gpu.products import strided

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.forms.attention import read_attention
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda import block
from aotc.kernels.cuda.templates.attention import decode as attention_few
from aotc.kernels.cuda.templates.attention import mma as attention_mma
from aotc.kernels.cuda.templates.attention import wgmma as attention_wgmma
from aotc.kernels.cuda.templates.attention.launch import attention_launch, attention_tiles
from aotc.kernels.cuda.templates.attention.mma_steps import PITCH, QUERY, REST, START
from aotc.kernels.cuda.templates.attention.softmax_steps import BEGIN, COORDINATE, END, SCORE
from aotc.kernels.cuda.templates.attention.tiles import FewAttention, WarpgroupAttention
from aotc.kernels.cuda.templates.steps import EPILOGUE, PLACE, SIZES, STORE
from aotc.vmfb.verify.kernel_interface import evaluate_size as evaluate_entry

STORED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
PLAIN = ("score = total[()] * f32({scale})",)
BIAS = ("score = (total[()] * f32({scale})) + convert(bias[row, term], \"f32\")",)
BODY = """
            top = private("f32[]")
            whole = private("f32[]")
            sums = private("f32[{e}]")
            top[()] = f32(-inf)
            whole[()] = f32(0.0)
            for col in range(0, {e}):
                sums[col] = f32(0.0)
            for term in range(0, {end}):
                total = private("f32[]")
                total[()] = f32(0.0)
                for d in range(0, {d}):
                    total[()] += {qt} * {kt}
                {score}
                highest = max(top[()], score)
                base = select(highest == f32(-inf), f32(0.0), highest)
                kept = exp(top[()] - base)
                weight = exp(score - base)
                top[()] = highest
                whole[()] = (whole[()] * kept) + weight
                rounded = {wt}
                for col in range(0, {e}):
                    sums[col] = (sums[col] * kept) + (rounded * {vt})
            for col in range(0, {e}):
                mean = div(sums[col], whole[()])
                o[{o}] = {mean}
"""
HEADS = {"q": "z, row, d", "k": "z, term, d", "v": "z, term, col", "o": "z, row, col"}
TOKENS = {"q": "row, z, d", "k": "term, z, d", "v": "term, z, col", "o": "row, z, col"}
PROJECTED = {
    "q": "row + {m}*(z // 2), d + {d}*(z % 2)", "k": "term + {n}*(z // 2), d + {d}*(z % 2)",
    "v": "term + {n}*(z // 2), col + {e}*(z % 2)", "o": "z, row, col",
}  # fmt: skip
"""Operands that are results of matmuls: batch and tokens are one dim, and so are two heads and their elements."""
SLICED = {
    "q": "z + 1, row + 2, d + 8", "k": "z + 1, term + 2, d + 8", "v": "z + 1, term + 2, col + 8", "o": "z, row, col",
}  # fmt: skip
"""Operands that are slices of larger arrays in each dim."""
SHARED = {"q": "z, row, d", "k": "z // 2, term, d", "v": "z // 2, term, col", "o": "z, row, col"}


def attention_text(
    tiling, sizes, dtype="bf16", result=None, orders=HEADS, causal=None, score=PLAIN, scale=0.125,
):  # fmt: skip
    """Return attention of ``sizes``: heads, rows, terms, depth, width; ``causal`` is an offset."""
    z, m, n, d, e = sizes
    orders = {x: order.format(m=m, n=n, d=d, e=e) for x, order in orders.items()}
    shape = {x: ", ".join(map(str, _shape(order, sizes))) for x, order in orders.items()}
    result = result or dtype
    end = n if causal is None else f"min({n}, row + {causal + 1})"
    bias = f', bias: "{dtype}[{m}, {n}]"' if "bias" in "".join(score) else ""
    dims = "".join(f'{x}: "dim", ' for x in sizes if isinstance(x, str))
    head = (
        f'def attend(q: "{dtype}[{shape["q"]}]", k: "{dtype}[{shape["k"]}]", v: "{dtype}[{shape["v"]}]"{bias}, /, '
        f'o: "{result}[{shape["o"]}]", *, {dims}grid: "1", tiling: "{tiling}"):\n'
        f"    for z in range(0, {z}):\n        for row in range(0, {m}):"
    )
    mean = "mean" if result == "f32" else f'convert(mean, "{result}")'
    lines = ("\n" + " " * 16).join(score).format(scale=scale)
    takes = "reduce_precision({}, i32(8), i32(10))" if dtype == "f32" else 'convert({}, "f32")'
    taken = {f"{x}t": takes.format(f"{x}[{orders[x]}]") for x in "qkv"}
    weight = "weight" if dtype == "f32" else f'convert(weight, "{dtype}")'
    taken |= {"wt": takes.format(weight), "o": orders["o"]}
    return head + BODY.format(e=e, d=d, end=end, score=lines, mean=mean, **taken)


def _shape(order, sizes):
    """Return the dims of an operand: the loops' extents where an index is a loop's variable."""
    z, m, n, d, e = sizes
    extent = {"z": z, "row": m, "term": n, "d": d, "col": e, "z // 2": z // 2}
    extent |= {f"{line} + {size}*(z // 2)": f"{z // 2}*{size}" for line, size in (("row", m), ("term", n))}
    extent |= {f"{inner} + {size}*(z % 2)": 2 * size for inner, size in (("d", d), ("col", e))}
    extent |= {"z + 1": z + 2, "row + 2": f"{m} + 3", "term + 2": f"{n} + 3", "d + 8": d + 16, "col + 8": e + 16}
    return [extent[i] for i in order.split(", ")]


def elements_of(name, orders, sizes, heads=None):
    """Return the index of all elements that heads have of an operand, in the order head, line, inner."""
    z, m, n, d, e = sizes
    line, inner = {"q": (m, d), "k": (n, d), "v": (n, e)}[name]
    own, lines, within = np.ix_(np.arange(z) if heads is None else heads, np.arange(line), np.arange(inner))
    names = {"z": own, "row": lines, "term": lines, "d": within, "col": within}
    order = orders[name].format(m=m, n=n, d=d, e=e)
    return tuple(eval(i, {}, names) for i in order.split(", "))


def operands(text, seed=0, dims=()):
    """Return the kernel, random arrays for its inputs, and one of 99 for its result, all between NaN."""
    kernel, random = parse_kernel(text), np.random.default_rng(seed)
    values = dict(zip(kernel.dims, dims))
    shapes = [tuple(evaluate(n, values) for n in b.shape) for b in (*kernel.inputs, *kernel.outputs)]
    given = [random.standard_normal(s).astype(STORED[b.dtype]) for b, s in zip(kernel.inputs, shapes)]
    return kernel, [between_nans(x) for x in (*given, np.full(shapes[-1], 99, STORED[kernel.outputs[0].dtype]))]


def wanted(arrays, orders=HEADS, causal=None, bias=False, scale=0.125):
    """Return what f64 makes of it, in the order z, row, col."""
    q, k, v = (x.astype("f8") for x in arrays[:3])
    q, k, v = (np.moveaxis(x, orders[n].split(", ").index("z" if orders is not SHARED or n == "q" else "z // 2"), 0)
               for n, x in zip("qkv", (q, k, v)))  # fmt: skip
    if orders is SHARED:
        k, v = np.repeat(k, 2, 0), np.repeat(v, 2, 0)
    scores = q @ k.swapaxes(1, 2) * scale
    if bias:
        scores = scores + arrays[3].astype("f8")
    if causal is not None:
        rows, terms = np.indices(scores.shape[1:])
        scores = np.where(terms <= rows + causal, scores, -np.inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


def simulate(text, arrays, score=None, rest=None, dims=()):
    """Run the template of attention as Python on ``arrays``; means are stored as they are."""
    kernel = parse_kernel(text)
    values = dict(zip(kernel.dims, dims))
    found, tiles, entry = read_attention(kernel), attention_tiles(kernel), attention_launch(kernel)
    names = [found.batch[0], found.row[0], found.col[0]]

    @cache
    def at(e, *place):
        return evaluate(e, dict(zip(names, place)) | values)

    extents = {"batch": found.batch[1], "rows": found.row[1], "terms": found.terms}
    functions = {SIZES[name]: partial(at, extent) for name, extent in extents.items()}
    functions |= {EPILOGUE: lambda z, row, col, value: value, PLACE: partial(at, found.place), STORE: None}
    functions |= {END: partial(at, found.term[1]), SCORE: score}
    functions |= {BEGIN: partial(at, found.begin), REST: rest}

    def store(*place_and_mean):
        *place, mean = place_and_mean
        arrays[len(kernel.inputs)].reshape(-1)[at(found.place, *place)] = mean

    if isinstance(tiles, FewAttention):
        functions[STORE] = store
    for n, view in enumerate(found.views()):
        _, coordinates = view.coordinates(*found.batch)
        functions |= {f"{COORDINATE[n]}{c}": partial(at, value) for c, (value, _, _) in enumerate(coordinates)}
        if n:
            functions |= {START[n - 1]: partial(at, view.start), PITCH[n - 1]: partial(at, view.pitch)}
    names_of_query = found.batch[0], found.row[0], found.depth[0]

    @cache
    def query(*place):
        known = dict(zip(names_of_query, place)) | values
        return arrays[0][tuple(int(evaluate(i, known)) for i in found.queries.index)]

    functions[QUERY] = query
    blocks = evaluate_entry(entry["blocks"][0], dims)
    blocks = min(blocks, 2) if entry["resident"] else blocks
    given = (tuple(arrays), tuple(dims), 1)
    module, kernel_of_tiles = attention_mma, attention_mma._mma_attention_kernel
    if entry["maps"]:
        given = (tuple(strided(arrays[m["buffer"]], m, dims) for m in entry["maps"]), *given)
        module, kernel_of_tiles = attention_few, attention_few._decode_attention_kernel
    if isinstance(tiles, WarpgroupAttention):
        module, kernel_of_tiles = attention_wgmma, attention_wgmma._wgmma_attention_kernel
    make = partial(kernel_of_tiles, tiles)
    block.simulate_kernel(module, make, blocks, tiles.threads, tiles.shared, given, functions, entry["cluster"][0])
