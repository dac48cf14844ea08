"""Emit one element of a fused value as a scalar expression: the core of every region's lowering.

:class:`Elements` turns "element ``index`` of value ``v``" into a scalar expression. It follows the ops of a region
backwards to loads of its inputs. Movement ops only change the index; elementwise ops apply a scalar function. Values
that a loop provides (accumulators, tiles, row buffers) are *anchored* by :meth:`Elements.anchor`. Subexpressions that
are used more than once, or that an index depends on, become :class:`Let` statements of the current block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim, bounds, maximum, minimum, sym
from aotc.ir.dims.compare import decide_relation
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, Let, Load, Scalar, Stmt, Store, Var, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import MOVES, SCALARS
from aotc.ir.opset.dim_attributes import dim_of, dims_of
from aotc.ir.tensor.ir import Op, Region, Value, captured_values
from aotc.lowering.analysis.index_maps import Index, clamped_inside, is_long_index, operand_index_of_movement
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import DTYPES, kind_of, real_of


def constant_scalar(value: np.generic | float, dtype: str) -> Const:
    """Return ``value`` as a literal of ``dtype``."""
    match kind_of(dtype):
        case "b":
            return Const(bool(value), dtype)
        case "i" | "u":
            return Const(int(value), dtype)
        case "c":
            return Const(complex(value), dtype)
    return Const(float(value), dtype)


def real_and_imaginary(x: Scalar) -> tuple[Scalar, Scalar]:
    """Return the parts of a complex scalar."""
    dtype = real_of(x.dtype)
    return Apply("real", (x,), dtype), Apply("imag", (x,), dtype)


Provide = Callable[[Index], Scalar | None]


def provide_scalar(scalar: Scalar, at: Index | None = None) -> Provide:
    """Return a function for :meth:`Elements.anchor` that returns ``scalar``, at any index or only at ``at``."""
    return lambda index: scalar if at is None or index == at else None


SCALAR_DEPTH = Limit(
    12,
    "nested scalar operations of an expression without a name; a deeper one is bound by a Let",
    "keeps the printed text readable and the recursion shallow",
)


class Elements:
    """Emitter of scalar expressions for the values of one region, written into a block.

    Parameters
    ----------
    ops : mapping of Value to Op
        The op that defines each value of the region.
    buffers : mapping of Value to Buffer
        The inputs of the region.
    names : callable
        ``names(prefix)`` returns a fresh identifier.
    results : sequence of Value
        The results of the region; the store of each counts as a further reader.
    """

    def __init__(
        self, ops: Mapping[Value, Op], buffers: Mapping[Value, Buffer], names: Callable[[str], str],
        results: Sequence[Value] = (),
    ) -> None:  # fmt: skip
        """Start with an empty block; ``names`` returns a fresh name from a prefix.

        ``results`` count as uses: a value that several ops or results read is computed once and bound to a name.
        """
        self.ops, self.buffers, self.names = ops, buffers, names
        self.known: Mapping[Value, str] = {}  # functions of the loop IR that replace the region's own
        self.block: list[Stmt] = []
        self.anchored: dict[Value, Provide] = {}
        self._cache: dict[tuple[Value, Index], tuple[Scalar, int]] = {}
        self._named: dict[Dim, Dim] = {}
        self.sources: dict[tuple[Value, Index], Index] = {}  # source indices that index arithmetic does not find
        self._starts: dict[Value, list[Dim]] = {}  # of slices, with names that all later blocks see
        read = [v for op in dict.fromkeys(ops.values()) for v in op.operands]
        self._uses = Counter([*read, *results])

    def enter(self, block: list[Stmt]) -> None:
        """Append to ``block`` from now on; expressions of the previous block are no longer reused."""
        self.block = block
        self._cache = {}
        self._named = {}

    def new_block(self) -> list[Stmt]:
        """Continue in a new block, and return it."""
        block: list[Stmt] = []
        self.enter(block)
        return block

    def anchor(self, value: Value, make: Provide) -> None:
        """Override how elements of ``value`` are read: by ``make(index)``; None restores the default."""
        self.anchored[value] = make
        self._cache = {}

    def at(self, value: Value, index: Index) -> Scalar:
        """Return element ``index`` of ``value`` as a scalar; append the statements that compute it."""
        return self._emit_or_reuse_element(value, index)[0]

    def _emit_or_reuse_element(self, value: Value, index: Index) -> tuple[Scalar, int]:
        """Return an element and the depth of its expression, from the block's cache if possible."""
        key = (value, index)
        emitted = self._cache.get(key)
        if emitted is None:
            anchored = self.anchored[value](index) if value in self.anchored else None
            scalar, depth = self._emit_element(value, index) if anchored is None else (anchored, 0)
            shared = self._uses[value] > 1 or not SCALAR_DEPTH.holds(depth)
            if isinstance(scalar, Apply | Load) and shared and anchored is None:
                scalar, depth = self.bind(scalar), 0
            emitted = self._cache[key] = (scalar, depth)
        return emitted

    def cache_element(self, value: Value, index: Index, scalar: Scalar) -> None:
        """Cache ``scalar`` as element ``index`` of ``value`` for the rest of the current block."""
        self._cache[value, index] = (scalar, 0)

    def bind(self, scalar: Scalar, prefix: str = "t") -> Var:
        """Append a statement that binds ``scalar`` to a new name; return the variable."""
        var = Var(self.names(prefix), scalar.dtype)
        self.block.append(Let(var, scalar))
        return var

    def clamp_index(self, scalar: Scalar, last: Dim) -> Dim:
        """Return the integer scalar clamped to ``[0, last]`` as an index expression."""
        if isinstance(scalar, Const) and isinstance(scalar.value, int) and isinstance(last, int):
            return min(max(scalar.value, 0), last)
        if isinstance(scalar, IndexScalar):
            return minimum(maximum(scalar.expr, 0), last)
        if last == 0:
            return 0
        if scalar.dtype == "u64":  # as i64 the upper half would be negative
            scalar = Apply("min", (scalar, IndexScalar(last, "u64")), "u64")
        wide: Scalar = scalar if scalar.dtype == "i64" else Apply("convert", (scalar,), "i64")
        wide = Apply("max", (wide, Const(0, "i64")), "i64")
        wide = Apply("min", (wide, IndexScalar(last)), "i64")
        return sym(self.bind(wide, "n").name, 0, last + 1)

    def precompute_slice_starts(self, values: Iterable[Value]) -> None:
        """Compute the start indices of dynamic slices of ``values`` once, for all nested blocks."""
        for v in values:
            while (op := self.ops.get(v)) is not None and (op.name in MOVES or op.name == "dynamic_slice"):
                if op.name == "dynamic_slice" and v not in self._starts:
                    self._starts[v] = _slice_starts_of(self, op)
                v = op.operands[0]

    def bind_long_index(self, i: Dim) -> Dim:
        """Return ``i``, bound to a variable if it is a long expression."""
        if not is_long_index(i):
            return i
        if i not in self._named:
            low, high = bounds(i)
            name = self.bind(IndexScalar(i), "n").name
            self._named[i] = sym(name, low or 0, None if high is None else high + 1)
        return self._named[i]

    def _emit_element(self, value: Value, index: Index) -> tuple[Scalar, int]:
        """Return an element and the depth of its expression: a load, or the op on its operands' elements."""
        if value in self.buffers:
            return Load(self.buffers[value], index), 0
        op = self.ops[value]
        if op.name in MOVES:
            source = self.sources.get((value, index)) or tuple(
                self.bind_long_index(i) for i in operand_index_of_movement(op, index)
            )
            return self._emit_or_reuse_element(op.operands[0], source)
        if op.name in _MAKERS:
            emitted = _MAKERS[op.name](self, op, index)
            return self._cache.get((value, index), emitted)
        if op.name not in SCALARS:
            raise CompileError.at(op.loc, f"{op.name} cannot be computed element by element")
        fn, parts = self.known.get(value, op.name), [self._emit_or_reuse_element(v, index) for v in op.operands]
        return Apply(fn, tuple(p[0] for p in parts), value.type.dtype), 1 + max(p[1] for p in parts)

    def inline_region(self, region: Region, arguments: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        """Emit a scalar region (combiner or comparator) on ``arguments``; return its results."""
        inner = Elements({v: op for op in region.ops for v in op.results}, self.buffers, self.names)
        inner.block = self.block
        inner.anchored.update({p: provide_scalar(s) for p, s in zip(region.params, arguments, strict=True)})
        for value, make in self.anchored.items():
            inner.anchored.setdefault(value, make)
        for value in captured_values(region):
            if value not in inner.anchored and value not in inner.buffers:
                scalar = self.at(value, ())
                inner.anchored[value] = provide_scalar(scalar)
        return tuple(inner.at(v, ()) for v in region.results)


def _constant_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    value = op.attrs["value"]
    if value.shape != () and value.size != 1:
        raise CompileError.at(op.loc, f"a constant of {value.size} elements must be a buffer")
    return constant_scalar(value.reshape(-1)[0], op.result.type.dtype), 0


def _iota_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    return _index_as_integer_scalar(index[op.attrs["dim"]], op.result.type.dtype), 0


def _dim_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    return _index_as_integer_scalar(dim_of(op.attrs, "expr"), op.result.type.dtype), 0


def _index_as_integer_scalar(expr: Dim, dtype: str) -> Scalar:
    if kind_of(dtype) in "iu":
        return Const(expr, dtype) if isinstance(expr, int) else IndexScalar(expr, dtype)
    return Apply("convert", (IndexScalar(expr, "i64"),), dtype)


def _reduce_precision_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    x, depth = self._emit_or_reuse_element(op.operands[0], index)
    bits = (Const(op.attrs["exponent_bits"], "i32"), Const(op.attrs["mantissa_bits"], "i32"))
    return Apply("reduce_precision", (x, *bits), op.result.type.dtype), depth + 1


def _bitcast_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    """Return an element of a bitcast; several narrow elements form one wide element, the least significant first."""
    source, target = op.operands[0].type, op.result.type
    if source.rank == target.rank:
        x, depth = self._emit_or_reuse_element(op.operands[0], index)
        return _reinterpret_bits(x, target.dtype), depth + 1
    if source.dtype == "c128":
        x, depth = self._emit_or_reuse_element(op.operands[0], index[:-1])
        second = Apply("ne", (_index_as_integer_scalar(index[-1], "i64"), Const(0, "i64")), "i1")
        half = Apply("select", (second, Apply("imag", (x,), "f64"), Apply("real", (x,), "f64")), "f64")
        return _complex_from_f64_bits(half), depth + 6
    if target.dtype == "c128":
        halves, depths = zip(*(self._emit_or_reuse_element(op.operands[0], (*index, k)) for k in range(2)))
        return Apply("complex", tuple(map(_f64_from_complex_bits, halves)), "c128"), max(depths) + 6
    bits, target_bits = DTYPES[source.dtype].bits, DTYPES[target.dtype].bits
    if bits > target_bits:
        x, depth = self._emit_or_reuse_element(op.operands[0], index[:-1])
        word = _reinterpret_bits(x, f"u{bits}")
        shifted = Apply("shr_logic", (word, _index_as_integer_scalar(index[-1] * target_bits, word.dtype)), word.dtype)
        return _low_bits_of_word(shifted, target_bits, target.dtype), depth + 4
    parts, depths = zip(*(self._emit_or_reuse_element(op.operands[0], (*index, k)) for k in range(target_bits // bits)))
    return _reinterpret_bits(_word_of_parts(parts, bits, target_bits), target.dtype), max(depths) + 4


def _complex_from_f64_bits(x: Scalar) -> Scalar:
    """Return the complex number whose two f32 parts are the bits of the f64 ``x``."""
    word = _reinterpret_bits(x, "u64")
    high = Apply("shr_logic", (word, Const(32, "u64")), "u64")
    return Apply("complex", (_low_bits_of_word(word, 32, "f32"), _low_bits_of_word(high, 32, "f32")), "c64")


def _f64_from_complex_bits(x: Scalar) -> Scalar:
    parts = [Apply("real", (x,), "f32"), Apply("imag", (x,), "f32")]
    return _reinterpret_bits(_word_of_parts(parts, 32, 64), "f64")


def _word_of_parts(parts: Sequence[Scalar], bits: int, size: int) -> Scalar:
    """Return ``parts`` of ``bits`` each as one unsigned number, the first the least significant."""
    wide = f"u{size}"
    total: Scalar = Const(0, wide)
    for k, x in enumerate(parts):
        part = Apply("convert", (x if bits == 1 else _reinterpret_bits(x, f"u{bits}"),), wide)
        total = Apply("or", (total, Apply("shl", (part, Const(k * bits, wide)), wide)), wide)
    return total


def _low_bits_of_word(word: Scalar, bits: int, dtype: str) -> Scalar:
    """Return the low ``bits`` of ``word`` as a value of ``dtype``."""
    if bits == 1:
        return Apply("ne", (Apply("and", (word, Const(1, word.dtype)), word.dtype), Const(0, word.dtype)), "i1")
    return _reinterpret_bits(Apply("convert", (word,), f"u{bits}"), dtype)


def _reinterpret_bits(x: Scalar, dtype: str) -> Scalar:
    return x if x.dtype == dtype else Apply("bitcast", (x,), dtype)


def _padded_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    """Return an element of a pad; an index that is provably inside (or outside) needs no test."""
    source = op.operands[0].type.shape
    tests: list[Scalar] = []
    inner: list[Dim] = []
    low, interior = dims_of(op.attrs, "low"), dims_of(op.attrs, "interior")
    for i, d, lo, gap in zip(index, source, low, interior, strict=True):
        at = i - lo
        if gap:
            tests += test_index(at % (gap + 1), 0, "eq")
            at = at // (gap + 1)
        tests += test_index(at, 0, "ge") + test_index(at, d, "lt")
        inner.append(self.bind_long_index(clamped_inside(at, d)))
    padding = self.at(op.operands[1], ())
    if any(isinstance(t, Const) and not t.value for t in tests) or any(d == 0 for d in source):
        return padding, 0
    tests = [t for t in tests if not isinstance(t, Const)]
    x, depth = self._emit_or_reuse_element(op.operands[0], tuple(inner))
    if not tests:
        return x, depth
    return Apply("select", (conjunction_of_tests(tests), x, padding), op.result.type.dtype), depth + 1


def conjunction_of_tests(tests: Sequence[Scalar]) -> Scalar:
    """Return the logical and of one or more scalar tests."""
    conjunction, *rest = tests
    for test in rest:
        conjunction = Apply("and", (conjunction, test), "i1")
    return conjunction


def test_index(a: Dim, b: Dim, fn: str) -> list[Scalar]:
    """Return the test ``a fn b`` as a list of zero or one scalars (none if it is proven true)."""
    proven = decide_relation(fn, a, b)
    if proven:
        return []
    if proven is False:
        return [Const(False, "i1")]
    return [Apply(fn, (IndexScalar(a), IndexScalar(b)), "i1")]


def _concatenated_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    """Return an element of a concatenation: selects between the operands that may contain it."""
    axis = op.attrs["dim"]
    ends = accumulate(v.type.shape[axis] for v in op.operands)
    chosen: Scalar | None = None
    depth = 0
    # Last operand first: each select tests the index against its operand and falls through to the operands behind it.
    for end, v in reversed([*zip(ends, op.operands, strict=True)]):
        extent = v.type.shape[axis]
        if extent == 0:
            continue
        begin = end - extent
        below = test_index(index[axis], begin, "ge")
        above = test_index(index[axis], end, "lt")
        if any(isinstance(t, Const) for t in (*below, *above)):
            continue
        at = clamped_inside(index[axis] - begin, extent)
        x, d = self._emit_or_reuse_element(v, (*index[:axis], at, *index[axis + 1 :]))
        if not below and not above:
            return x, d
        if chosen is None:
            chosen, depth = x, d
        else:
            test = above[0] if above else below[0]
            chosen = Apply("select", (test, x, chosen), op.result.type.dtype)
            depth = max(depth, d) + 1
    if chosen is None:  # all operands are empty, and so is the result: nothing reads this element
        return constant_scalar(0, op.result.type.dtype), 0
    return chosen, depth


def _slice_starts_of(self: Elements, op: Op) -> list[Dim]:
    source, sizes = op.operands[0].type.shape, dims_of(op.attrs, "sizes")
    return [self.clamp_index(self.at(v, ()), d - n) for v, d, n in zip(op.operands[1:], source, sizes, strict=True)]


def _dynamic_slice_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    starts = self._starts.get(op.result) or _slice_starts_of(self, op)
    return self._emit_or_reuse_element(op.operands[0], tuple(s + i for s, i in zip(starts, index, strict=True)))


def _gathered_element(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    """Return an element of a gather; as in StableHLO, start indices are clamped so that the slice is inside."""
    a = op.attrs
    operand, indices = op.operands
    offset = [index[d] for d in a["offset_dims"]]
    batch = [i for d, i in enumerate(index) if d not in a["offset_dims"]]
    skipped = {*a["collapsed_slice_dims"], *a["operand_batching_dims"]}
    offsets = iter(offset)
    at: list[Dim] = [0 if d in skipped else next(offsets) for d in range(operand.type.rank)]
    vector = a["index_vector_dim"]
    for k, d in enumerate(a["start_index_map"]):
        where = list(batch)
        if vector < indices.type.rank:
            where.insert(vector, k)
        start = self.at(indices, tuple(where))
        at[d] = at[d] + self.clamp_index(start, operand.type.shape[d] - dims_of(a, "slice_sizes")[d])
    for d, b in zip(a["operand_batching_dims"], a["start_indices_batching_dims"], strict=True):
        at[d] = batch[b if b < vector else b - 1]
    return self._emit_or_reuse_element(operand, tuple(at))


def _scalar_while(self: Elements, op: Op, index: Index) -> tuple[Scalar, int]:
    """Emit a loop over scalars, as combiners have, with its state in private buffers; return a result."""
    states = [Buffer(self.names("state"), v.type.dtype, (), "private") for v in op.results]
    for buffer, init in zip(states, op.operands, strict=True):
        start = self.at(init, ())
        self.block += [Alloc(buffer), Store(buffer, (), start)]
    outer, outer_cache = self.block, self._cache
    blocks: list[list[Stmt]] = [[], []]
    values: list[list[Scalar]] = []
    for region, block in zip(op.regions, blocks, strict=True):
        self.block, self._cache = block, dict(outer_cache)
        state = tuple(self.bind(Load(buffer, ())) for buffer in states)
        values.append([self.bind(x) for x in self.inline_region(region, state)])
    self.block, self._cache = outer, outer_cache
    (test,), after = values
    stores = [Store(buffer, (), x) for buffer, x in zip(states, after, strict=True)]
    self.block.append(While(tuple(blocks[0]), test, (*blocks[1], *stores)))
    for v, buffer in zip(op.results, states, strict=True):
        self.cache_element(v, (), self.bind(Load(buffer, ())))
    return self._cache[op.results[0], ()]


_MAKERS: dict[str, Callable[[Elements, Op, Index], tuple[Scalar, int]]] = {
    "constant": _constant_element,
    "iota": _iota_element,
    "dim": _dim_element,
    "reduce_precision": _reduce_precision_element,
    "bitcast": _bitcast_element,
    "pad": _padded_element,
    "concatenate": _concatenated_element,
    "dynamic_slice": _dynamic_slice_element,
    "gather": _gathered_element,
    "while": _scalar_while,
}
