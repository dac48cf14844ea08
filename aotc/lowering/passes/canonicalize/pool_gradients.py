"""Turn ``select_and_scatter`` into a gather: each element adds up the windows that selected it.

Before, in order because windows overlap::

    %y = select_and_scatter %x, %g, %zero {window = (3,), strides = (2,)} (ge, add)

After, with every element on its own (``%n`` numbers the elements)::

    %best, %place = reduce_window %x, %n, %zero, -1 {window = (3,), strides = (2,)} (the selected one and its number)
    %y = add (select (%place[n // 2 - 1] == %n, %g[n // 2 - 1], 0), select (%place[n // 2] == %n, %g[n // 2], 0))

An element is in at most ``ceil(window / stride)`` windows along a dim. Their terms are combined in window order, so
results have the same bits. On CPUs an op is left alone if windows overlap along a strided last dim: the reads of a
gather could not be vectorized there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.opset import SCALARS
from aotc.ir.opset.dim_attributes import dims_of, number_pairs_of, numbers_of, pairs_of
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.rewrite import Builder, append_region, lift_region
from aotc.lowering.threshold import Limit

WINDOWS_OF_ELEMENT = Limit(
    16,
    "windows that contain an element, whose gradients it then gathers and adds itself",
    "windows of 8 x 8 with strides of 2",
)


def gather_for_pool_gradient(op: Op, kind: str, b: Builder) -> Sequence[Value] | None:
    """Return the gather that replaces a ``select_and_scatter`` on a kind of target, or None to leave the op."""
    x, source, init = op.operands
    a = op.attrs
    sizes = (*x.type.shape, *source.type.shape, *dims_of(a, "window"), *(p for pair in pairs_of(a) for p in pair))
    plain = all(inner.name in SCALARS or inner.name == "constant" for r in op.regions for inner in r.ops)
    if not plain or not is_static(sizes) or 0 in x.type.shape or 0 in source.type.shape:
        return None
    if min((p for pair in number_pairs_of(a) for p in pair), default=0) < 0:
        return None
    covered = _max_windows_per_element(op)
    scalars = kind == "cpu" and covered[-1:] > [1] and a["strides"][-1] > 1
    if scalars or not WINDOWS_OF_ELEMENT.holds(prod(covered)):
        return None
    numbers = _element_numbers(op, b)
    nowhere = b.constant(-1, TensorType(numbers.type.dtype))
    places = _selected_element_numbers(op, numbers, nowhere, b)
    total = b.broadcast(init, (), x.type.shape)
    places, source = _pad_window_values(op, places, nowhere, b), _pad_window_values(op, source, init, b)
    for back in product(*(range(k - 1, -1, -1) for k in covered)):
        selected = ElementwiseBuilder(b)("eq", _window_value_per_element(op, places, back, b), numbers)
        (more,) = lift_region(op.regions[1], (total, _window_value_per_element(op, source, back, b)), b)
        total = ElementwiseBuilder(b).select(selected, more, total)
    return (total,)


def _element_numbers(op: Op, b: Builder) -> Value:
    """Return an array with the number of each element, in the order in which windows visit them."""
    a, shape = op.attrs, [static(s) for s in op.operands[0].type.shape]
    dims = [d for d in range(len(shape)) if dims_of(a, "window")[d] != 1 or a["strides"][d] != 1 or any(pairs_of(a)[d])]
    spanned = [shape[d] for d in dims]
    dtype = "i32" if prod(spanned) < 2**31 else "i64"
    count = b.make("iota", (), {"dim": 0}, TensorType(dtype, (prod(spanned),)))
    return b.broadcast(b.reshape(count, spanned), dims, shape)


def _selected_element_numbers(op: Op, numbers: Value, nowhere: Value, b: Builder) -> Value:
    """Return the number of the selected element of each window, or ``nowhere`` if it has none."""
    x, _, init = op.operands
    ones = (1,) * x.type.rank
    attrs = {**op.attrs, "base_dilations": ones, "window_dilations": ones}
    region = (_first_selected_combiner(op.regions[0], numbers.type.dtype, b),)
    _, places = b.append(b.op("reduce_window", (x, numbers, init, nowhere), attrs, hint="selected", regions=region))
    return places


def _first_selected_combiner(select: Region, dtype: str, b: Builder) -> Region:
    """Return the combiner that selects one of two (element, number) pairs by ``select``; number -1 loses."""
    types = [TensorType(t) for t in (select.params[0].type.dtype, dtype)] * 2
    x, m, y, n = (Value(b.names.fresh(hint), t) for hint, t in zip("xmyn", types, strict=True))
    inner = Builder(b.names, loc=b.loc)
    maths = ElementwiseBuilder(inner)
    (keep,) = append_region(select, (x, y), inner)
    other = maths("and", maths("ge", n, 0), maths("or", maths("lt", m, 0), maths("not", keep)))
    results = maths.select(other, y, x), maths.select(other, n, m)
    return Region((x, m, y, n), tuple(inner.ops), results)


def _pad_window_values(op: Op, windows: Value, outside: Value, b: Builder) -> Value:
    """Return the values of windows, padded with ``outside`` before and after for elements outside all windows."""
    low, high = {}, {}
    for d, (covered, last) in enumerate(zip(_max_windows_per_element(op), _last_containing_windows(op), strict=True)):
        low[d], high[d] = covered - 1, last + 1 - static(windows.type.shape[d])
    return b.pad(windows, outside, low, high)


def _window_value_per_element(op: Op, framed: Value, back: Sequence[int], b: Builder) -> Value:
    """Return, for each input element, the value of the window ``back`` windows before the last one that contains it."""
    a, shape = op.attrs, [static(s) for s in op.operands[0].type.shape]
    start = [covered - 1 - k for covered, k in zip(_max_windows_per_element(op), back, strict=True)]
    counts = [last + 1 for last in _last_containing_windows(op)]
    values = b.slice(framed, start, [first + count for first, count in zip(start, counts, strict=True)])
    wide: list[int] = []
    dims: list[int] = []
    for count, stride in zip(counts, a["strides"], strict=True):
        dims.append(len(wide))
        wide += [count] if stride == 1 else [count, stride]
    if len(wide) > len(shape):
        spread = [count * stride for count, stride in zip(counts, a["strides"], strict=True)]
        values = b.reshape(b.broadcast(values, dims, wide), spread)
    low = [low for low, _ in number_pairs_of(a)]
    return b.slice(values, low, [first + size for first, size in zip(low, shape, strict=True)])


def _max_windows_per_element(op: Op) -> list[int]:
    """Return the largest number of windows that contain an element, along each dim."""
    return [-(-w // s) for w, s in zip(numbers_of(op.attrs, "window"), op.attrs["strides"], strict=True)]


def _last_containing_windows(op: Op) -> list[int]:
    """Return, for each dim, the number of the last window that may contain the last element.

    Windows beyond the existing ones count, so that every element has equally many.
    """
    a, shape = op.attrs, op.operands[0].type.shape
    return [
        (static(size) - 1 + low) // stride
        for size, stride, (low, _) in zip(shape, a["strides"], number_pairs_of(a), strict=True)
    ]
