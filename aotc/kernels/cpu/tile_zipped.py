"""Register tiles of pairs of bf16 whose terms lie apart, in two rows of ``b``: they are put side by side in registers.

Of two rows each part of a register (16 bytes) gives the pairs of its first columns, and of its last ones: one shuffle
for each vector of sums. So sums of columns are as far out of order as that, and are put in order in the end.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.kernels.cpu.tile_function import REGISTER_PART, State, TileWriter
from aotc.kernels.cpu.tile_shape import Shape
from aotc.kernels.llvm_types import I16, I64

_BYTES = 2  # of bf16


class ZippedTileWriter(TileWriter):
    """Writes a tile of the form ``bf16``, of an even number of vectors of columns."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        if shape.form != "bf16" or shape.a_dtype != "bf16" or "+bf16" not in shape.isa or shape.vectors % 2:
            raise InternalError(f"tile: no pairs of {shape.a_dtype} from rows of {shape.form}, {shape.vectors} vectors")
        self.b_inner = function.args[-1] if shape.b_inner is None else ir.Constant(I64, shape.b_inner)
        part = REGISTER_PART // _BYTES
        begins = (range(first, 2 * shape.lanes, part) for first in (0, part // 2))
        halves = [[x + n for x in begin for n in range(part // 2)] for begin in begins]
        self.zips = [[n + row for n in half for row in (0, 2 * shape.lanes)] for half in halves]
        sums = part // 2  # of one vector, beside which as many of the other belong
        starts = [x + start for start in range(0, shape.lanes, sums) for x in (0, shape.lanes)]
        places = [start + n for start in starts for n in range(sums)]
        self.ordered = [places[: shape.lanes], places[shape.lanes :]]

    def step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Return the sums after a pair of terms."""
        rows = ir.VectorType(I16, 2 * self.shape.lanes)
        pairs = []
        for j in range(0, self.shape.vectors, 2):
            first = self.vector_at(panel, j, _BYTES)
            places = (first, self.at(first, self.b_inner))
            for place in places:
                self.fetch(self.at(place, ir.Constant(I64, self.shape.prefetch)))
            x, y = (self.load(place, rows, _BYTES) for place in places)
            pairs += [self.taken(x, y, places) for places in self.zips]
        return self.pairs_of_bf16(state, [self.pair(self.at(a, x)) for x in self.row_offsets], pairs)

    def finished(self, state: State) -> State:
        """Return the sums in the order of their columns."""
        return [self.taken(x, y, places) for x, y in zip(state[::2], state[1::2]) for places in self.ordered]
