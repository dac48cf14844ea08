"""Register tiles whose right operand is not packed but in the model's layout.

In a tile of dot products the terms of both operands are contiguous. Each pair of row and column has a vector of partial
sums. At the end these vectors are reduced together, as a binary tree: two vectors are added half by half into one,
whose halves then belong to different products, and so on. Reducing as many products as a vector has lanes takes one
addition each. The order of additions within a product does not depend on the size of the tile. Terms that do not fill a
vector are padded with zeros.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS
from aotc.kernels.cpu.tiles.micro_kernel import NARROW, State, TileWriter, innermost_unroll_factor
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.limits import HALF_REGISTER
from aotc.kernels.llvm_types import I16, I32, i64, zero_vector
from aotc.vmfb.dtypes import size_of


class DotTileWriter(TileWriter):
    """Writer of a tile of dot products of f64, f32, or narrow elements.

    Narrow elements are widened to f32, or multiplied as bf16 pairs by an instruction.
    """

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        self.pairs = shape.form == BF16_PAIRS
        extent = self.levels[-1][0]
        has_form = "bf16" in shape.isa if self.pairs else shape.form.group == 1 and not shape.form.scaled
        if len(self.levels) != 1 or not isinstance(extent, ir.Constant) or not has_form:
            raise InternalError(f"tile: cannot emit dot products of {shape.form.name}, {shape.levels}")
        self.terms = extent.constant
        column = function.args[-1] if shape.b_column is None else i64(shape.b_column)
        self.column_offsets = [self.mul_const(column, j) for j in range(shape.vectors)]

    def write(self) -> None:
        """Emit the whole function."""
        state, a, panel = [zero_vector(self.vector)] * self.accumulators, self.a, self.panel
        whole, rest = divmod(self.terms, self.shape.lanes)
        _, a_step, b_step = self.levels[-1]
        steps = (self.mul_const(a_step, self.shape.lanes), self.mul_const(b_step, self.shape.lanes))
        by = innermost_unroll_factor(self.accumulators)
        for count, each in ((whole // by, by), (whole % by, 1)):
            state, a, panel = self.emit_loop(i64(count), state, a, panel, (*steps, each), self.emit_step)
        state = self.add_partial_products(state, a, panel, rest) if rest else state
        for first in range(0, self.accumulators, self.shape.lanes):
            self.store_sums(first, state[first : first + self.shape.lanes])
        self.b.ret_void()

    # --- products ---

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of a vector of terms; return the new partial sums."""
        return self.add_partial_products(state, a, panel, self.shape.lanes)

    def add_partial_products(self, state: State, a: ir.Value, panel: ir.Value, count: int) -> State:
        """Emit the products of ``count`` terms (or pairs), at most a vector of them; return the new partial sums."""
        kind, size = (I32, 2) if self.pairs else NARROW.get(self.shape.form, (self.element, self.size))
        narrow = [self.load_terms(self.advance(panel, x), kind, size, count) for x in self.column_offsets]
        left_kind = (I32, 2) if self.pairs else (self.element, self.size)
        left = [self.load_terms(self.advance(a, x), *left_kind, count) for x in self.row_offsets]
        if self.pairs:
            return self.add_bf16_pair_products(state, left, narrow)
        return self.add_outer_product(state, left, [self.widen_to_f32(x) for x in narrow])

    def load_terms(self, pointer: ir.Value, kind: ir.Type, size: int, count: int) -> ir.Value:
        """Emit the load of a vector of ``count`` elements, padded with zeros."""
        some = self.load(pointer, ir.VectorType(kind, count), size)
        if count == self.shape.lanes:
            return some
        places = [min(n, count) for n in range(self.shape.lanes)]
        return self.shuffle(some, zero_vector(some.type), places)

    # --- sums ---

    def store_sums(self, first: int, vectors: State) -> None:
        """Emit the horizontal sums of ``vectors``, and their stores as results ``first``, ``first + 1`` and so on."""
        total, places = self.reduce_vectors(vectors)
        last, cols = first + len(vectors), self.shape.vectors
        for row in range(first // cols, (last - 1) // cols + 1):
            numbers = range(max(row * cols, first), min(row * cols + cols, last))
            some = self.shuffle(total, total, [places.index(n - first) for n in numbers])
            to = self.advance(self.out, self.mul_const(self.out_row, row))
            self.store(some, self.advance(to, i64((numbers[0] - row * cols) * self.size)))

    def reduce_vectors(self, vectors: State) -> tuple[ir.Value, list[int]]:
        """Emit the horizontal reduction of several vectors to one; return it and the index of each lane's source."""
        lanes = self.shape.lanes
        labels = [[n] * lanes for n in range(len(vectors))]
        parts = lanes  # lanes of a partial sum in a vector
        while parts > 1:
            low, high = self.half_shuffle_masks(parts)
            if len(vectors) == 1:
                low, high = ([x % lanes for x in places] for places in (low, high))
            middle = (len(vectors) + 1) // 2
            pairs = [(n, min(n + middle, len(vectors) - 1)) for n in range(middle)]
            labels = [[(labels[x] + labels[y])[place] for place in low] for x, y in pairs]
            vectors = [
                self.b.fadd(*(self.shuffle(vectors[x], vectors[y], places) for places in (low, high))) for x, y in pairs
            ]
            parts //= 2
        return vectors[0], labels[0]

    def half_shuffle_masks(self, parts: int) -> tuple[list[int], list[int]]:
        """Return two shuffle masks that select the first and the second half of each run of ``parts`` lanes."""
        lanes, within = self.shape.lanes, HALF_REGISTER // self.size
        span = max(parts, within)
        starts = [x + n for x in (0, lanes) for n in range(0, lanes, span)]
        if parts <= within:
            starts.sort(key=lambda x: x % lanes)  # alternate the parts of both vectors
        low = [s + n + p for s in starts for n in range(0, span, parts) for p in range(parts // 2)]
        return low, [x + parts // 2 for x in low]


class ZippedTileWriter(TileWriter):
    """Writer of a ``bf16`` tile whose terms are rows in memory, for an even number of vectors of columns.

    Two rows are interleaved into pairs in registers. The shuffles stay within 128-bit lanes, so the columns of the
    accumulators are permuted; :meth:`in_storage_order` restores their order.
    """

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        if shape.form != BF16_PAIRS or shape.a_dtype != "bf16" or "bf16" not in shape.isa or shape.vectors % 2:
            raise InternalError(f"tile: cannot pair {shape.a_dtype} from rows of {shape.form.name} in {shape.vectors}")
        self.b_inner = function.args[-1] if shape.b_inner is None else i64(shape.b_inner)
        part = HALF_REGISTER // size_of("bf16")
        begins = (range(first, 2 * shape.lanes, part) for first in (0, part // 2))
        halves = [[x + n for x in begin for n in range(part // 2)] for begin in begins]
        self.zips = [[n + row for n in half for row in (0, 2 * shape.lanes)] for half in halves]
        sums = part // 2  # neighbours of one vector; as many of the other follow
        starts = [x + start for start in range(0, shape.lanes, sums) for x in (0, shape.lanes)]
        places = [start + n for start in starts for n in range(sums)]
        self.ordered = [places[: shape.lanes], places[shape.lanes :]]

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of a pair of terms; return the new accumulators."""
        rows = ir.VectorType(I16, 2 * self.shape.lanes)
        pairs = []
        for j in range(0, self.shape.vectors, 2):
            first = self.vector_pointer(panel, j, size_of("bf16"))
            places = (first, self.advance(first, self.b_inner))
            for place in places:
                self.emit_prefetch(self.advance(place, i64(self.shape.prefetch)))
            x, y = (self.load(place, rows, size_of("bf16")) for place in places)
            pairs += [self.shuffle(x, y, places) for places in self.zips]
        rows = [self.load_bf16_pair(self.advance(a, x)) for x in self.row_offsets]
        return self.add_broadcast_pair_products(state, rows, pairs)

    def in_storage_order(self, state: State) -> State:
        """Return the accumulators in the order of their columns."""
        return [self.shuffle(x, y, places) for x, y in zip(state[::2], state[1::2]) for places in self.ordered]
