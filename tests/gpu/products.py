"""Products of matrices as kernels with a tiling, and what their templates' Python makes of them."""

from functools import cache, partial

import ml_dtypes
import numpy as np

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.forms.matmul import read_product, row_major_offset
from aotc.ir.loop.forms.tiling import stored_dtypes
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda import block
from aotc.kernels.cuda.templates.gemm import mma as gemm_mma
from aotc.kernels.cuda.templates.gemm import wgmma as gemm_wgmma
from aotc.kernels.cuda.templates.gemm.launch import gemm_launch, gemm_tiles
from aotc.kernels.cuda.templates.gemm.tiles import WarpTiles
from aotc.kernels.cuda.templates.steps import COORDINATE, ELEMENT, PITCH, SIZES, START, STORE
from aotc.vmfb.devices.cuda.tensor_map import im2col_corners
from aotc.vmfb.verify.kernel_interface import evaluate_size as evaluate_entry

STORED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "f32": np.float32, "i8": np.int8}
STORED |= {"f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2}
STORED |= {"i32": np.int32, "f64": np.float64}
SUMS = {"i8": "i32", "f64": "f64"}
"""What products of operands are added up in, if not in f32."""
GELU = (
    "t = {x} + bias[col]",
    "u = f32(0.7978845608028654) * (t + (f32(0.044715) * (t * (t * t))))",
    "o[{at}] = {r}((f32(0.5) * t) * (f32(1.0) + tanh(u)))",
)
RELU = ("t = {x} + bias[col]", "o[{at}] = {r}(max(t, f32(0.0)))")
SHIFTED = ('t = {x} + convert(bias[col], "f64")', "o[{at}] = {r}(max(t, f64(0.0)))")
PLAIN = ("o[{at}] = {r}({x})",)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


MEANING = {PLAIN: lambda x, b: x, RELU: lambda x, b: np.maximum(x + b, 0), SHIFTED: lambda x, b: np.maximum(x + b, 0)}
MEANING |= {GELU: lambda x, b: gelu(x + b)}


def product_text(
    tiling, operands, result, sizes=("m", "n", "d"), a="row, k", b="k, col", out="row, col", epilogue=PLAIN, batch=0
):
    """Return a product; ``a``, ``b`` and ``out`` are the orders in which arrays have their dims, ``z`` the batch."""
    m, n, d = sizes
    extent = {"z": batch, "row": m, "col": n, "k": d}
    extent |= {f"{name} + {size}*z": f"{batch}*{size}" for name, size in (("row", m), ("col", n), ("k", d))}
    extent |= {f"{name} + 16": f"{extent[name]} + 32" for name in ("row", "col", "k")} | {"z + 1": batch + 2}
    a, b, out = (order.format(m=m, n=n, d=d) for order in (a, b, out))
    dims = [s for s in sizes if isinstance(s, str)]
    shapes = {name: ", ".join(str(extent[d]) for d in order.split(", ")) for name, order in zip("abo", (a, b, out))}
    stored, sum_ = stored_dtypes(operands), SUMS.get(operands, "f32")
    taken = {"tf32": "reduce_precision({x}, i32(8), i32(10))", "f64": "{x}"}.get(operands, 'convert({x}, "{sum_}")')
    left, right = (taken.format(x=x, sum_=sum_) for x in (f"a[{a}]", f"b[{b}]"))
    head = (
        f'def gemm(a: "{stored[0]}[{shapes["a"]}]", b: "{stored[1]}[{shapes["b"]}]", bias: "f32[{sizes[1]}]", /, '
        f'o: "{result}[{shapes["o"]}]", *, {"".join(d + ": " + repr("dim") + ", " for d in dims)}grid: "1", '
        f'tiling: "{tiling}"):'
    )
    loops = [f"for {name} in range(0, {extent[name]}):" for name in (["z"] if batch else []) + ["row", "col"]]
    lines = [head, *("    " * (n + 1) + loop for n, loop in enumerate(loops))]
    indent = "    " * (len(loops) + 1)
    rounded = (lambda x: x) if result == sum_ else (lambda x: f'convert({x}, "{result}")')
    body = [f'total = private("{sum_}[]")', f"total[()] = {sum_}({'0' if sum_ == 'i32' else '0.0'})"]
    body += [f"for k in range(0, {sizes[2]}):", f"    total[()] += {left} * {right}"]
    for line in epilogue:
        line = line.replace("{x}", "total[()]").replace("{at}", out)
        begin, call, inner = line.partition("{r}")
        body.append(begin + rounded(inner.strip("()") if inner == "(total[()])" else inner[1:-1]) if call else line)
    return "\n".join([*lines, *(indent + line for line in body)]) + "\n"


def strided(array, row, dims=()):
    """Return the view of an array that a tensor map of the manifest describes, which must lie inside it."""
    sizes, strides = ([evaluate_entry(x, dims) for x in row[key]] for key in ("sizes", "strides"))
    array = array.view(np.uint8) if array.itemsize == 1 else array  # NumPy has no view by steps of floats of 8 bits
    flat = array.reshape(-1)[evaluate_entry(row["offset"], dims) // array.itemsize :]
    last = sum((n - 1) * step for n, step in zip(sizes, (array.itemsize, *strides)))
    assert last < flat.nbytes or not array.size, f"the tensor map {row} is beyond its array of {array.shape}"
    shown = np.lib.stride_tricks.as_strided(flat, sizes[::-1], [*strides[::-1], array.itemsize])
    if "window" in row:
        low, high = im2col_corners(row["window"], sizes)
        return block.SimulatedPatches(
            shown, tuple(row["box"]), tuple(low), tuple(high), tuple(row["window"]["strides"])
        )
    return block.SimulatedTensorMap(shown, tuple(row["box"][:2]))


def simulate(text, arrays, elements=(None, None), store=None, dims=()):
    """Run the template of a product as Python on ``arrays``; sums are stored as they are.

    ``elements`` are functions of product, row or column, and term, of operands that are computed; ``store`` is one of
    product, row, column and sum, of a result that is not stored in lines.
    """
    kernel = parse_kernel(text)
    product, tiles, entry = read_product(kernel), gemm_tiles(kernel), gemm_launch(kernel)
    names = [name or "z" for name, _ in (product.batch, product.row, product.col)]
    values = dict(zip(kernel.dims, dims))

    @cache
    def at(e, *place):
        return evaluate(e, dict(zip(names, place)) | values)

    extents = {"batch": product.batch, "rows": product.row, "cols": product.col, "depth": product.k}
    functions = {SIZES[name]: partial(at, extent) for name, (_, extent) in extents.items()}
    if kernel.tiling.window is not None:
        functions[SIZES["depth"]] = partial(int, kernel.tiling.window.slices(tiles.depth) * tiles.depth)

    def put(z, row, col, value):
        out = row_major_offset(product.epilogue[-1])
        arrays[-1].reshape(-1)[at(out, z, row, col)] = value

    functions[STORE] = store or put
    for n in range(2):
        view = product.view(right=bool(n))
        functions[ELEMENT[n]] = elements[n]
        if view is not None and kernel.tiling.window is None:
            functions |= {START[n]: partial(at, view.start), PITCH[n]: partial(at, view.pitch)}
            _, coordinates = view.coordinates(*product.batch)
            functions |= {f"{COORDINATE[n]}{c}": partial(at, value) for c, (value, _, _) in enumerate(coordinates)}
    blocks = evaluate_entry(entry["blocks"][0], dims)
    blocks = min(blocks, 3) if entry["resident"] else blocks
    given = (tuple(arrays), tuple(dims), 1)
    if isinstance(tiles, WarpTiles):
        module, kernel_of_tiles = gemm_mma, gemm_mma._mma_gemm_kernel
    else:
        module, kernel_of_tiles = gemm_wgmma, gemm_wgmma._wgmma_gemm_kernel
        given = (tuple(strided(arrays[m["buffer"]], m, dims) for m in entry["maps"]), *given)
    block.simulate_kernel(
        module, partial(kernel_of_tiles, tiles), blocks, tiles.threads, tiles.shared, given, functions
    )
