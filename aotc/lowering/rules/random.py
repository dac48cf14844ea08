"""rng_bit_generator: one grid item a counter of ThreeFry or Philox."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.diagnostics import CompileError
from aotc.frontend.dims import Dim, is_static, product, static, sym
from aotc.frontend.tensor_ir import Function
from aotc.lowering.elemental import Elements, test_index
from aotc.lowering.index_maps import Index, delinearize
from aotc.lowering.loop_ir import Apply, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.lowering.loop_ir import Index as IndexScalar
from aotc.lowering.region import RegionBuilder
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class _Words:
    """Arithmetic on u32 scalars, each bound to a name."""

    def __init__(self, e: Elements) -> None:
        self.e = e

    def __call__(self, fn: str, a: Scalar, b: Scalar | int) -> Scalar:
        other = Const(b, a.dtype) if isinstance(b, int) else b
        return self.e.bind(Apply(fn, (a, other), a.dtype))

    def to(self, a: Scalar, dtype: str) -> Scalar:
        return self.e.bind(Apply("convert", (a,), dtype))

    def split(self, a: Scalar) -> tuple[Scalar, Scalar]:
        return self.to(a, "u32"), self.to(self("shr_logic", a, 32), "u32")

    def join(self, low: Scalar, high: Scalar) -> Scalar:
        return self("or", self.to(low, "u64"), self("shl", self.to(high, "u64"), 32))


def _threefry(w: _Words, key: tuple[Scalar, Scalar], counter: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
    """Threefry-2x32 with 20 rounds."""
    keys = [*key, w("xor", w("xor", key[0], key[1]), 0x1BD11BDA)]
    x0, x1 = w("add", counter[0], keys[0]), w("add", counter[1], keys[1])
    for block in range(5):
        for by in _ROTATIONS[block % 2]:
            x0 = w("add", x0, x1)
            x1 = w("xor", w("or", w("shl", x1, by), w("shr_logic", x1, 32 - by)), x0)
        x0 = w("add", x0, keys[(block + 1) % 3])
        x1 = w("add", w("add", x1, keys[(block + 2) % 3]), block + 1)
    return x0, x1


def _philox(w: _Words, key: tuple[Scalar, Scalar], counter: Sequence[Scalar]) -> list[Scalar]:
    """Philox-4x32 with 10 rounds."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        low0, high0 = w.split(w("mul", w.to(c[0], "u64"), 0xD2511F53))
        low1, high1 = w.split(w("mul", w.to(c[2], "u64"), 0xCD9E8D57))
        c = [w("xor", w("xor", high1, c[1]), k0), low1, w("xor", w("xor", high0, c[3]), k1), low0]
        k0, k1 = w("add", k0, 0x9E3779B9), w("add", k1, 0xBB67AE85)
    return c


def lower_rng_bit_generator(function: Function, target: Target) -> Kernel:
    """Write the words of one counter; item 0 also writes the new state."""
    op = next(op for op in function.body.ops if op.name == "rng_bit_generator")
    (state,) = op.operands
    b = RegionBuilder(function, target)
    dtype, dims = op.results[1].type.dtype, op.results[1].type.shape
    if not is_static(dims):
        raise CompileError.at(op.loc, f"random bits of unknown shape {dims}", hint="give the shape static sizes")
    shape = tuple(static(d) for d in dims)
    wide = DTYPES[dtype].bits == 64
    three_fry = op.attrs["algorithm"] == "THREE_FRY"
    half, per = _layout(shape, wide, three_fry)
    count = static(product(half)) if three_fry else -(-static(product(shape)) // per)
    p: Dim = sym("p", 0, count) if count > 1 else 0
    body: list[Stmt] = []
    e = b.elements()
    e.enter(body)
    w = _Words(e)
    key = w.split(e.bind(e.at(state, (0,))))
    start = e.bind(e.at(state, (1,)))
    counter = w.split(w("add", start, IndexScalar(p, "u64")))
    if three_fry:
        words = list(_threefry(w, key, counter))
    else:
        extra = e.bind(e.at(state, (2 if static(state.type.shape[0]) > 2 else 0,)))
        words = _philox(w, key, [*counter, *w.split(extra)])
    values = [w.join(*words[n : n + 2]) for n in range(0, len(words), 2)] if wide else words
    for value, (index, tests) in zip(values, _places(shape, half, per, p, three_fry), strict=False):
        store: Stmt = Store(b.outputs[1], index, _as(value, dtype))
        for t in tests:
            store = If(t, (store,))
        body.append(store)
    body += _new_state(b, count, p)
    wrapped = tuple(body) if count <= 1 else (For("p", 0, count, tuple(body), "parallel"),)
    return b.kernel(max(count, 1), wrapped, count * 150)


def _layout(shape: tuple[int, ...], wide: bool, three_fry: bool) -> tuple[tuple[int, ...], int]:
    """Return the shape of the counters and the words of each.

    ThreeFry's two 32-bit words lie side by side along one dim, as XLA has them:
    the first even one, or else the first of the largest.
    """
    if not three_fry:
        return shape, 2 if wide else 4
    if wide or not shape:
        return shape, 1
    dim = _paired(shape)
    return tuple((n + 1) // 2 if d == dim else n for d, n in enumerate(shape)), 2


def _paired(shape: tuple[int, ...]) -> int:
    even = [d for d, n in enumerate(shape) if n % 2 == 0]
    return even[0] if even else shape.index(max(shape))


def _places(
    shape: tuple[int, ...], half: tuple[int, ...], per: int, p: Dim, three_fry: bool
) -> list[tuple[Index, list[Scalar]]]:
    """Return where the words of counter ``p`` go, and what must hold for that."""
    size = static(product(shape))
    if size == 0:
        return []
    if not three_fry:
        flats = [p * per + n for n in range(per)]
        return [
            (delinearize(f, shape), [t for t in test_index(f, size, "lt") if not (isinstance(t, Const) and t.value)])
            for f in flats
        ]
    index = delinearize(p, half)
    if per == 1:
        return [(index, [])]
    dim = _paired(shape)
    found = []
    for n in range(2):
        at = index[dim] * 2 + n
        tests = [t for t in test_index(at, shape[dim], "lt") if not (isinstance(t, Const) and t.value)]
        found.append(((*index[:dim], at, *index[dim + 1 :]), tests))
    return found


def _as(value: Scalar, dtype: str) -> Scalar:
    unsigned = f"u{DTYPES[dtype].bits}"
    narrowed = value if value.dtype == unsigned else Apply("convert", (value,), unsigned)
    return narrowed if dtype == unsigned else Apply("bitcast", (narrowed,), dtype)


def _new_state(b: RegionBuilder, count: int, p: Dim) -> list[Stmt]:
    out, old = b.outputs[0], b.inputs[0]
    stores: list[Stmt] = []
    for n in range(static(out.shape[0])):
        value: Scalar = Load(old, (n,))
        if n == 1:
            value = Apply("add", (value, Const(count, "u64")), "u64")
        stores.append(Store(out, (n,), value))
    if p == 0:
        return stores
    return [If(Apply("eq", (IndexScalar(p), Const(0, "i64")), "i1"), tuple(stores))]
