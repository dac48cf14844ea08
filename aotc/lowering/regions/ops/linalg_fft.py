"""``dft``: one grid item transforms one signal, or a block of neighbouring ones, in scratch memory.

Stockham's form sorts itself: stage by stage ``y[p, k, q] = w**(p k) * sum_j x[j, p, q] * root**(j k)``, where ``q``
runs over what earlier stages have made and over the signals of the block. Between the stages real and imaginary
parts lie apart, so that the inner loop reads and writes whole vectors.
"""

from __future__ import annotations

from aotc.ir.dims import Dim, product, static, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.cost import DFT_ELEMENTS, DFT_LANES, DFT_SIDE_BY_SIDE
from aotc.lowering.analysis.costs.work import DFT_WORK
from aotc.lowering.regions.butterflies import Butterfly, Pair
from aotc.lowering.regions.elemental import Elements
from aotc.lowering.regions.ops.linalg_fft_cuda import BlockDft, fits_a_block
from aotc.lowering.regions.ops.linalg_fft_stages import FftStage, stages
from aotc.lowering.regions.region import RegionBuilder, nest
from aotc.lowering.regions.rows import RowBlocks
from aotc.targets import Target


def _whole_vectors(extent: Dim) -> list[tuple[int, Dim]]:
    """Cut a loop so that what is left after whole vectors fills half and quarter vectors, not single steps."""
    if not isinstance(extent, int):
        return [(0, extent)]
    cuts: list[tuple[int, Dim]] = []
    begin = 0
    for lanes in (DFT_LANES.value, DFT_LANES.value // 2, DFT_LANES.value // 4, 1):
        end = begin + (extent - begin) // lanes * lanes
        if end > begin:
            cuts.append((begin, end))
        begin = end
    return cuts


def lower_dft(function: Function, target: Target) -> Kernel:
    """Lower a ``dft`` region."""
    b = RegionBuilder(function, target)
    if target.kind == "cuda" and fits_a_block(b, target):
        return BlockDft(b).kernel()
    return _Dft(b).kernel()


class _Dft:
    """Writes the passes over the signals of one grid item."""

    def __init__(self, b: RegionBuilder) -> None:
        self.b, self.attrs = b, b.the_op("dft").attrs
        (self.x, self.table), (self.out,) = b.inputs, b.outputs
        self.n = static(self.x.shape[self.attrs["axis"]])
        most = max(DFT_LANES.value, DFT_ELEMENTS.value // self.n)
        self.rows = RowBlocks(self.x.shape, self.attrs["axis"], most)
        part = self.table.dtype
        self.scratch = [
            tuple(Buffer(f"{name}_{half}", part, (self.n * self.rows.block,), "scratch") for half in ("re", "im"))
            for name in ("u", "v")
        ]

    def kernel(self) -> Kernel:
        steps = stages(self.attrs["radices"])
        body: list[Stmt] = []
        for pair in self.scratch[: min(len(steps) - 1, 2)]:
            body += [Alloc(buffer) for buffer in pair]
        for number, stage in enumerate(steps):
            body += self._stage(stage, number, number == len(steps) - 1)
        work = product(self.x.shape) * DFT_WORK.value * max(self.n.bit_length() - 1, 1)
        return self.b.grid(self.rows.items, body, work)

    def _stage(self, stage: FftStage, number: int, last: bool) -> list[Stmt]:
        """Loop over ``t``, ``q`` and the block; the longest of them that lies side by side is innermost."""
        loops: list[tuple[str, Dim]] = [("t", stage.m), ("q", stage.s), ("v", self.rows.width)]
        if self.rows.block == 1 and DFT_SIDE_BY_SIDE.holds(stage.s):
            loops = [("q", stage.s), ("t", stage.m), ("v", self.rows.width)]
        if self.rows.block == 1:
            loops = [loops[2], *loops[:2]]
        name, extent = loops.pop()
        inner: list[Stmt] = []
        e = self.b.elements()
        for begin, end in _whole_vectors(extent):
            at = {n: sym(n, 0, size) for n, size in loops} | {name: sym(name, begin, end)}
            block = e.new_block()
            self._butterfly(e, stage, number, last, (at["t"], at["q"], at["v"]))
            inner.append(For(name, begin, end, tuple(block)))
        return nest(loops, inner)

    def _butterfly(self, e: Elements, stage: FftStage, number: int, last: bool, at: tuple[Dim, Dim, Dim]) -> None:
        t, q, v = at
        make = Butterfly(e.bind, self.table.dtype, 1 if self.attrs["inverse"] else -1)
        inputs = [self._read(e, number, q + stage.s * (t + stage.m * j), v) for j in range(stage.radix)]
        results = make.transform(inputs)
        for k, value in enumerate(results):
            if k and stage.m > 1:
                value = make.times(value, self._twiddle(e, stage, k, t))
            self._write(e, number, last, q + stage.s * (stage.radix * t + k), v, value)

    def _twiddle(self, e: Elements, stage: FftStage, k: int, t: Dim) -> Pair:
        place = stage.table + (k - 1) * stage.m + t
        return e.bind(Load(self.table, (0, place))), e.bind(Load(self.table, (1, place)))

    def _read(self, e: Elements, number: int, position: Dim, v: Dim) -> Pair:
        part = self.table.dtype
        if number == 0:
            whole = Load(self.x, self.rows.place(position, v))
            return e.bind(Apply("real", (whole,), part)), e.bind(Apply("imag", (whole,), part))
        re, im = self.scratch[(number - 1) % 2]
        place = (position * self.rows.block + v,)
        return e.bind(Load(re, place)), e.bind(Load(im, place))

    def _write(self, e: Elements, number: int, last: bool, position: Dim, v: Dim, value: Pair) -> None:
        if last:
            whole = Apply("complex", tuple(self._scaled(part) for part in value), self.out.dtype)
            e.block.append(Store(self.out, self.rows.place(position, v), whole))
            return
        for buffer, part in zip(self.scratch[number % 2], value):
            e.block.append(Store(buffer, (position * self.rows.block + v,), part))

    def _scaled(self, part: Scalar) -> Scalar:
        scale = self.attrs["scale"]
        return part if scale == 1 else Apply("mul", (part, Const(scale, part.dtype)), part.dtype)
