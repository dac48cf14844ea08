"""Lower ``rng_bit_generator``: one grid item per counter of ThreeFry or Philox."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim, ceildiv, maximum, mod, product, static
from aotc.ir.loop.ir import Apply, Const, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.random import PARITY, ROTATIONS
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import Elements, test_index
from aotc.lowering.plans.single_ops import RandomWordsPlan
from aotc.lowering.threshold import Estimate
from aotc.vmfb.dtypes import DTYPES


class _RandomWords:
    """Arithmetic on u32 scalars; each result is bound to a name."""

    def __init__(self, e: Elements) -> None:
        self.e = e

    def __call__(self, fn: str, a: Scalar, b: Scalar | int) -> Scalar:
        other = Const(b, a.dtype) if isinstance(b, int) else b
        return self.e.bind(Apply(fn, (a, other), a.dtype))

    def convert_to(self, a: Scalar, dtype: str) -> Scalar:
        return self.e.bind(Apply("convert", (a,), dtype))

    def split_u64(self, a: Scalar) -> tuple[Scalar, Scalar]:
        return self.convert_to(a, "u32"), self.convert_to(self("shr_logic", a, 32), "u32")

    def join_u64(self, low: Scalar, high: Scalar) -> Scalar:
        return self("or", self.convert_to(low, "u64"), self("shl", self.convert_to(high, "u64"), 32))


def _threefry(w: _RandomWords, key: tuple[Scalar, Scalar], counter: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
    """Return the two words of Threefry-2x32 with 20 rounds."""
    keys = [*key, w("xor", w("xor", key[0], key[1]), PARITY)]
    x0, x1 = w("add", counter[0], keys[0]), w("add", counter[1], keys[1])
    for block in range(5):
        for by in ROTATIONS[block % 2]:
            x0 = w("add", x0, x1)
            x1 = w("xor", w("or", w("shl", x1, by), w("shr_logic", x1, 32 - by)), x0)
        x0 = w("add", x0, keys[(block + 1) % 3])
        x1 = w("add", w("add", x1, keys[(block + 2) % 3]), block + 1)
    return x0, x1


def _philox(w: _RandomWords, key: tuple[Scalar, Scalar], counter: Sequence[Scalar]) -> list[Scalar]:
    """Return the four words of Philox-4x32 with 10 rounds."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        low0, high0 = w.split_u64(w("mul", w.convert_to(c[0], "u64"), 0xD2511F53))
        low1, high1 = w.split_u64(w("mul", w.convert_to(c[2], "u64"), 0xCD9E8D57))
        c = [w("xor", w("xor", high1, c[1]), k0), low1, w("xor", w("xor", high0, c[3]), k1), low0]
        k0, k1 = w("add", k0, 0x9E3779B9), w("add", k1, 0xBB67AE85)
    return c


RANDOM_WORK = Estimate(150, "integer operations per random word")


def lower_random_words(b: RegionBuilder, plan: RandomWordsPlan) -> Kernel:
    """Lower ``rng_bit_generator``: a grid item stores the words of one counter, item 0 also the new state."""
    op = b.region_root_op("rng_bit_generator")
    (state,) = op.operands
    dtype, shape = op.results[1].type.dtype, op.results[1].type.shape
    wide = DTYPES[dtype].bits == 64
    three_fry = op.attrs["algorithm"] == "THREE_FRY"
    half, per = _counter_layout(op, shape, wide, three_fry)
    count = product(half) if three_fry else ceildiv(product(shape), per)
    grid = maximum(count, 1)  # one item must write the new state, even if there are no words
    p = grid_item(grid)
    body: list[Stmt] = []
    e = b.elements()
    e.enter(body)
    w = _RandomWords(e)
    key = w.split_u64(e.bind(e.at(state, (0,))))
    start = e.bind(e.at(state, (1,)))
    counter = w.split_u64(w("add", start, IndexScalar(p, "u64")))
    if three_fry:
        words = list(_threefry(w, key, counter))
    else:
        extra = e.bind(e.at(state, (2 if static(state.type.shape[0]) > 2 else 0,)))
        words = _philox(w, key, [*counter, *w.split_u64(extra)])
    values = [w.join_u64(*words[n : n + 2]) for n in range(0, len(words), 2)] if wide else words
    begun = _below_tests(p, count)
    for value, (index, tests) in zip(values, _word_indices_and_tests(op, shape, half, per, p, three_fry), strict=False):
        store: Stmt = Store(b.outputs[1], index, _convert_random_word(value, dtype))
        if any(isinstance(t, Const) for t in tests):  # the position is provably beyond the last one
            continue
        for t in (*tests, *begun):
            store = If(t, (store,))
        body.append(store)
    body += _next_generator_state(b, count, p)
    return b.grid(grid, body, count * RANDOM_WORK.value)


def _below_tests(a: Dim, limit: Dim) -> list[Scalar]:
    """Return the tests for ``a < limit`` at run time; a constant if it is never true."""
    return [t for t in test_index(a, limit, "lt") if not (isinstance(t, Const) and t.value)]


def _counter_layout(op: Op, shape: Sequence[Dim], wide: bool, three_fry: bool) -> tuple[tuple[Dim, ...], int]:
    """Return the shape of the counters, and the number of words of each.

    ThreeFry's two 32-bit words are adjacent along one dim, as in XLA: the first even one, or else the first of the
    largest.
    """
    if not three_fry:
        return tuple(shape), 2 if wide else 4
    if wide or not shape:
        return tuple(shape), 1
    dim = _paired_counters(op, shape)
    return tuple(ceildiv(n, 2) if d == dim else n for d, n in enumerate(shape)), 2


def _paired_counters(op: Op, shape: Sequence[Dim]) -> int:
    """Return the dim along which the two words of a ThreeFry counter are adjacent; its size should be even."""
    if len(shape) == 1:
        return 0
    for d, n in enumerate(shape):
        match mod(n, 2):
            case 0:
                return d
            case 1:
                continue
        sizes = ", ".join(map(str, shape))
        message = f"ThreeFry bits of shape ({sizes}) need to know whether {n} is even"
        raise CompileError.at(op.loc, message, hint="export an even size, such as 2*n, or a fixed size")
    return shape.index(max(static(n) for n in shape))


def _word_indices_and_tests(
    op: Op, shape: Sequence[Dim], half: Sequence[Dim], per: int, p: Dim, three_fry: bool
) -> list[tuple[Index, list[Scalar]]]:
    """Return the indices of the words of counter ``p``, and the tests under which they are stored."""
    size = product(shape)
    if size == 0:
        return []
    if not three_fry:
        flats = [p * per + n for n in range(per)]
        return [(delinearize(f, _nonzero_divisors(shape)), _below_tests(f, size)) for f in flats]
    index = delinearize(p, _nonzero_divisors(half))
    if per == 1:
        return [(index, [])]
    dim = _paired_counters(op, shape)
    sides = [index[dim] * 2 + n for n in range(2)]
    return [((*index[:dim], at, *index[dim + 1 :]), _below_tests(at, shape[dim])) for at in sides]


def _nonzero_divisors(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return sizes that are safe divisors; an array with a size of zero has no elements to store."""
    return tuple(maximum(n, 1) for n in shape)


def _convert_random_word(value: Scalar, dtype: str) -> Scalar:
    unsigned = f"u{DTYPES[dtype].bits}"
    narrowed = value if value.dtype == unsigned else Apply("convert", (value,), unsigned)
    return narrowed if dtype == unsigned else Apply("bitcast", (narrowed,), dtype)


def _next_generator_state(b: RegionBuilder, count: Dim, p: Dim) -> list[Stmt]:
    """Return the stores of the new state by item 0: the counter word grows by ``count``."""
    out, old = b.outputs[0], b.inputs[0]
    stores: list[Stmt] = []
    for n in range(static(out.shape[0])):
        value: Scalar = Load(old, (n,))
        if n == 1:
            value = Apply("add", (value, IndexScalar(count, "u64")), "u64")
        stores.append(Store(out, (n,), value))
    if p == 0:
        return stores
    return [If(Apply("eq", (IndexScalar(p), Const(0, "i64")), "i1"), tuple(stores))]
