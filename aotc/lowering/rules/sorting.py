"""sort and top_k: one grid item a row of the sorted dim."""

from __future__ import annotations

from collections.abc import Callable

from aotc.diagnostics import CompileError
from aotc.frontend.dims import Dim, maximum, minimum, product, sym
from aotc.frontend.tensor_ir import Function, Op
from aotc.lowering.elemental import Elements
from aotc.lowering.index_maps import Index, delinearize
from aotc.lowering.loop_ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    For,
    If,
    Kernel,
    Load,
    Scalar,
    Space,
    Stmt,
    Store,
    Var,
    While,
)  # fmt: skip
from aotc.lowering.loop_ir import Index as IndexScalar
from aotc.lowering.region import RegionBuilder
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, kind_of, size_of
from aotc.vmfb.float_formats import SMALL_FLOATS, FloatFormat

PRIVATE_BYTES = 2048

Place = Callable[[Dim], Index]
Run = list[tuple[Buffer, Place]]


def _rows(shape: tuple[Dim, ...], dim: int) -> tuple[Dim, Place]:
    """Return the number of rows along ``dim`` and the index of an element of row ``p``."""
    others = [d for d in range(len(shape)) if d != dim]
    rows = product(shape[d] for d in others)
    at = delinearize(sym("p", 0, rows) if rows != 1 else 0, [shape[d] for d in others])
    return rows, lambda k: (*at[:dim], k, *at[dim:])


def _over_rows(rows: Dim, body: list[Stmt]) -> tuple[Stmt, ...]:
    return tuple(body) if rows == 1 else (For("p", 0, rows, tuple(body), "parallel"),)


def integer(value: int) -> Const:
    """Return an i64 literal."""
    return Const(value, "i64")


def lower_sort(function: Function, target: Target) -> Kernel:
    """Stable merge sort from the bottom up: runs of 1, 2, 4... between the result and a second buffer.

    Raises
    ------
    CompileError
        If the length of the sorted dim is not known, or too long for one CUDA thread.
    """
    op = next(op for op in function.body.ops if op.name == "sort")
    b = RegionBuilder(function, target)
    dim = op.attrs["dim"]
    shape = op.results[0].type.shape or (1,)
    n = shape[dim]
    bytes_ = n * sum(size_of(v.type.dtype) for v in op.results)
    small = isinstance(bytes_, int) and bytes_ <= PRIVATE_BYTES
    if target.kind == "cuda" and not small:
        raise CompileError.at(op.loc, f"sort of {n} elements is not supported on target {target.name}")
    rows, place = _rows(shape, dim)
    scalar = op.results[0].type.rank == 0
    own: Run = [(out, (lambda k: ()) if scalar else place) for out in b.outputs]
    space: Space = "private" if small else "scratch"
    spare = [Buffer(b.fresh("run"), v.type.dtype, (maximum(n, 1),), space) for v in op.results]
    other: Run = [(buffer, lambda k: (k,)) for buffer in spare]
    passes = max(n - 1, 0).bit_length() if isinstance(n, int) else 2
    e = b.elements()
    body: list[Stmt] = [Alloc(buffer) for buffer in spare] if passes else []
    source, target_run = (own, other) if passes % 2 == 0 else (other, own)
    copied: list[Stmt] = []
    e.enter(copied)
    k = b.fresh("k")
    at = sym(k, 0, n)
    values = [e.at(v, () if scalar else place(at)) for v in op.operands]
    copied += [Store(buffer, where(at), v) for (buffer, where), v in zip(source, values, strict=True)]
    body.append(For(k, 0, n, tuple(copied)))
    if not isinstance(n, int):
        _merge_until_sorted(b, e, op, (own, other), n, body)
        return b.kernel(rows, _over_rows(rows, body), product(shape) * 128)
    for step in range(passes):
        _merge_pass(b, e, op, (source, target_run), n, 1 << step, body)
        source, target_run = target_run, source
    return b.kernel(rows, _over_rows(rows, body), product(shape) * max(passes, 1) * 8)


def _merge_until_sorted(
    b: RegionBuilder, e: Elements, op: Op, runs: tuple[Run, Run], n: Dim, block: list[Stmt]
) -> None:
    """Merge there and back, four times as far each turn, until one run is all; what is sorted is only copied."""
    width = Buffer(b.fresh("width"), "i64", (), "private")
    turn: list[Stmt] = []
    e.enter(turn)
    own = e.bind(Load(width, ()), "w")
    reach = sym(own.name, 1)
    _merge_pass(b, e, op, runs, n, reach, turn)
    _merge_pass(b, e, op, runs[::-1], n, reach * 2, turn)
    turn.append(Store(width, (), Apply("mul", (own, integer(4)), "i64")))
    more = Apply("lt", (Load(width, ()), IndexScalar(n)), "i1")
    block += [Alloc(width), Store(width, (), integer(1)), While((), more, tuple(turn))]


def _merge_pass(
    b: RegionBuilder, e: Elements, op: Op, runs: tuple[Run, Run], n: Dim, width: Dim, block: list[Stmt]
) -> None:
    """Merge neighbouring runs of ``width`` elements; equal ones come from the left run first."""
    left, right = (Buffer(b.fresh("at"), "i64", (), "private") for _ in range(2))
    r, k = b.fresh("r"), b.fresh("k")
    number = -(-n // (2 * width))
    begin = sym(r, 0, number) * (2 * width)
    middle, end = minimum(begin + width, n), minimum(begin + 2 * width, n)
    inner: list[Stmt] = []
    e.enter(inner)
    i, j = e.bind(Load(left, ()), "n"), e.bind(Load(right, ()), "n")
    last = IndexScalar(n - 1)
    read = [sym(e.bind(Apply("min", (at, last), "i64"), "n").name, 0, n) for at in (i, j)]
    x, y = ([e.bind(Load(buffer, where(at))) for buffer, where in runs[0]] for at in read)
    (less,) = e.region(op.regions[0], tuple(s for pair in zip(y, x, strict=True) for s in pair))
    spent = Apply("ge", (i, IndexScalar(middle)), "i1")
    more = Apply("lt", (j, IndexScalar(end)), "i1")
    take = e.bind(Apply("and", (more, Apply("or", (spent, less), "i1")), "i1"))
    for (buffer, where), a, c in zip(runs[1], x, y, strict=True):
        inner.append(Store(buffer, where(sym(k, 0, n)), Apply("select", (take, c, a), a.dtype)))
    for at, old, steps in ((left, i, (0, 1)), (right, j, (1, 0))):
        step = Apply("select", (take, integer(steps[0]), integer(steps[1])), "i64")
        inner.append(Store(at, (), Apply("add", (old, step), "i64")))
    block += [Alloc(left), Alloc(right)]
    heads = Store(left, (), IndexScalar(begin)), Store(right, (), IndexScalar(middle))
    block.append(For(r, 0, number, (*heads, For(k, begin, end, tuple(inner)))))


def _order_key(e: Elements, x: Scalar) -> Scalar:
    """Return an integer that orders like ``x``; floats in total order, so NaN is the largest."""
    match kind_of(x.dtype):
        case "b":
            return e.bind(Apply("convert", (x,), "i8"))
        case "f" if x.dtype in SMALL_FLOATS:
            return _order_key_of_codes(e, x, SMALL_FLOATS[x.dtype])
        case "f":
            kind = f"i{DTYPES[x.dtype].bits}"
            bits = e.bind(Apply("bitcast", (x,), kind))
            flipped = Apply("xor", (bits, Const((1 << (DTYPES[x.dtype].bits - 1)) - 1, kind)), kind)
            negative = Apply("lt", (bits, Const(0, kind)), "i1")
            return e.bind(Apply("select", (negative, flipped, bits), kind))
    return x


def _order_key_of_codes(e: Elements, x: Scalar, form: FloatFormat) -> Scalar:
    """Return the key of a float of up to 8 bits; the one NaN of ``fnuz``, in place of -0, is the least."""
    code = e.bind(Apply("convert", (Apply("bitcast", (x,), "u8"),), "i16"))
    if form.special == "power":
        return code
    below: Scalar = e.bind(Apply("sub", (Const(form.sign - (form.special != "fnuz"), "i16"), code), "i16"))
    if form.special == "fnuz":
        below = Apply("select", (Apply("eq", (below, Const(0, "i16")), "i1"), Const(-form.sign, "i16"), below), "i16")
    return e.bind(Apply("select", (Apply("ge", (code, Const(form.sign, "i16")), "i1"), below, code), "i16"))


def lower_top_k(function: Function, target: Target) -> Kernel:
    """Insert each element into the k largest so far; one that is not among them costs one comparison."""
    op = next(op for op in function.body.ops if op.name == "top_k")
    (x,) = op.operands
    b = RegionBuilder(function, target)
    e = b.elements()
    n, top = x.type.shape[-1], op.attrs["k"]
    rows, place = _rows(x.type.shape, x.type.rank - 1)
    values, numbers = b.outputs
    hole = Buffer("hole", "i64", (), "private")
    i = sym("i", 0, n)
    each: list[Stmt] = []
    e.enter(each)
    own = e.bind(e.at(x, place(i)))
    key = _order_key(e, own)
    each.append(Store(hole, (), IndexScalar(minimum(i, top))))
    test: list[Stmt] = []
    e.enter(test)
    q, before = _hole(e, hole, top)
    smaller = Apply("gt", (key, _order_key(e, e.bind(Load(values, place(before))))), "i1")
    moves = e.bind(Apply("and", (Apply("gt", (q, integer(0)), "i1"), smaller), "i1"))
    shift: list[Stmt] = []
    e.enter(shift)
    q, before = _hole(e, hole, top)
    inside = Apply("lt", (q, IndexScalar(top)), "i1")
    at = place(sym(q.name, 0, top))
    shift.append(If(inside, tuple(Store(out, at, Load(out, place(before))) for out in (values, numbers))))
    shift.append(Store(hole, (), Apply("sub", (q, integer(1)), "i64")))
    each.append(While(tuple(test), moves, tuple(shift)))
    e.enter(each)
    q = e.bind(Load(hole, ()), "n")
    at = place(sym(q.name, 0, top))
    kept = Store(values, at, own), Store(numbers, at, IndexScalar(i, "i32"))
    each.append(If(Apply("lt", (q, IndexScalar(top)), "i1"), kept))
    body: list[Stmt] = [Alloc(hole), For("i", 0, n if top != 0 else 0, tuple(each))]
    return b.kernel(rows, _over_rows(rows, body), product(x.type.shape) * 4)


def _hole(e: Elements, hole: Buffer, top: Dim) -> tuple[Var, Dim]:
    """Bind the place where the new element would go, and the place before it (or 0)."""
    q = e.bind(Load(hole, ()), "n")
    less = Apply("max", (Apply("sub", (q, integer(1)), "i64"), integer(0)), "i64")
    return q, sym(e.bind(less, "n").name, 0, top)
