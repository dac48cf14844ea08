"""Products read their own operands alone: all other bytes, and other products of a batch, are NaN, in every form."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.poisoned import between_nans, check_margins, poison
from gpu.products import STORED, SUMS, product_text, simulate

from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.forms.tiling import Mma, Tiling, Wgmma
from aotc.ir.loop.parser import parse_kernel

pytestmark = pytest.mark.cudasim

NT, TT = {"b": "col, k"}, {"a": "k, row", "b": "col, k"}
# Tiling, operands, and in which order these have their dims.
TEMPLATES = {
    "bf16": (Tiling(Wgmma(), 64, 64, 2), "bf16", {}),
    "bf16, A by rows": (Tiling(Wgmma(), 64, 64, 2), "bf16", TT),
    "in turn": (Tiling(Wgmma(ping_pong=True), 64, 64, 2), "f16", NT),
    "tf32": (Tiling(Wgmma(), 64, 64, 2), "tf32", NT),
    "tf32 turned": (Tiling(Wgmma(transposed=True), 32, 64, 2), "tf32", {}),
    "f8": (Tiling(Wgmma(), 64, 64, 2), "e4m3.e5m2", NT),
    "i8": (Tiling(Wgmma(), 64, 64, 2), "i8", NT),
    "warps": (Tiling(Mma(), 64, 64, 3), "bf16", {}),
    "warps, computed": (Tiling(Mma(), 64, 64, 3), "tf32", {}),
    "warps of i8, computed": (Tiling(Mma(), 64, 64, 3), "i8", {}),
    "warps of f64": (Tiling(Mma(), 64, 64, 2), "f64", NT),
}
IN_CI = ("bf16", "tf32 turned", "warps", "warps, computed")
BATCH = {"row": "row + {m}*z", "col": "col + {n}*z", "k": "k"}
SLICE = {"row": "row + 16", "col": "col + 16", "k": "k + 16"}
# What stands for the dims of A and of B, and before them.
FORMS = {
    "merged": (BATCH, ""),
    "sliced": (SLICE, "z + 1, "),
    "merged terms": ({"row": "row", "col": "col", "k": "k + {d}*z"}, ""),
}
SIZES = (80, 48, 80)  # no tile, and no slice of the terms, is whole


def orders_of(template, form):
    dims, first = FORMS[form]
    given = {"a": "row, k", "b": "k, col"} | TEMPLATES[template][2]
    return {x: first + ", ".join(dims[d] for d in order.split(", ")) for x, order in given.items()}


def place_of(order, entry):
    """Return the index of the elements that one product of the batch has of an operand, in the order outer, term."""
    m, n, d = SIZES
    outer, term = np.ix_(np.arange(m if "row" in order else n), np.arange(d))
    names = {"z": np.array(entry), "row": outer, "col": outer, "k": term}
    return tuple(eval(i, {}, names) for i in order.format(m=m, n=n, d=d).split(", "))


def check(template, form, entry, symbolic=False):
    """Compare one product of a batch where everything that is not an element of its operands is NaN."""
    tiling, dtype, _ = TEMPLATES[template]
    orders = orders_of(template, form)
    sizes, dims = (("m", "n", SIZES[2]), SIZES[:2]) if symbolic else (SIZES, ())
    text = product_text(tiling, dtype, SUMS.get(dtype, "f32"), sizes, out="z, row, col", batch=2, **orders)
    kernel, random = parse_kernel(text), np.random.default_rng(0)
    buffers, values = (*kernel.inputs, *kernel.outputs), dict(zip(kernel.dims, dims))
    shapes = [tuple(evaluate(n, values) for n in b.shape) for b in buffers]
    arrays = [between_nans(random.integers(-3, 4, s).astype(STORED[b.dtype])) for s, b in zip(shapes, buffers)]
    own = [place_of(orders[x], entry) for x in "ab"]
    left, right = (x[place].astype("f8") for x, place in zip(arrays, own))
    for array, place in zip(arrays, own):
        keep = np.zeros(array.shape, bool)
        keep[place] = True
        poison(array, keep)

    def store(z, row, col, value):
        arrays[-1][z, row, col] = value

    simulate(text, arrays, [reader(x, orders[name]) for x, name in zip(arrays, "ab")], store, dims)
    np.testing.assert_array_equal(arrays[-1][entry], left @ right.T)
    for array in arrays:
        check_margins(array)


def reader(array, order):
    """Return the function of product, row or column, and term that is an element of an operand."""
    m, n, d = SIZES
    index = eval(f"lambda z, i, k: ({order.format(m=m, n=n, d=d).replace('row', 'i').replace('col', 'i')},)")
    return lambda z, i, k: array[index(z, i, k)]


def some(names, in_ci):
    """Return parameters, of which CI runs some."""
    return [pytest.param(n, marks=() if n in in_ci else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("entry", some((0, 1), (0,)))
@pytest.mark.parametrize("form", some(FORMS, ("merged", "sliced")))
@pytest.mark.parametrize("template", some(TEMPLATES, IN_CI))
def test_products_read_their_own_elements(template, form, entry):
    check(template, form, entry)


@pytest.mark.parametrize("template", some([t for t in TEMPLATES if TEMPLATES[t][2] is not TT], ("bf16", "warps")))
def test_symbolic_sizes(template):
    check(template, "merged", 0, symbolic=True)
