"""Lower ``dft``: one grid item transforms one signal, or a block of neighbouring ones.

On a CPU the item calls the transform's library function (:mod:`aotc.ir.loop.forms.fft`), which a few numbers define
completely, so kernels do not contain its loops.

On a GPU a block of threads transforms one signal in shared memory, or one thread transforms several. Each thread
computes a few butterflies of a stage in registers. A barrier separates the reads of a stage from its writes, so one
shared buffer is enough. The first stage reads the signal, the last one writes the result.
"""

from __future__ import annotations

from math import prod

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.loop.forms.butterflies import Butterfly, Pair
from aotc.ir.loop.forms.fft import FftStage, Transform, fft_stages
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.thresholds import BANKS
from aotc.lowering.cost_model.work import DFT_WORK
from aotc.lowering.elements.builder import RegionBuilder, serial_nest
from aotc.lowering.elements.elements import Elements, conjunction_of_tests, test_index
from aotc.lowering.elements.row_axis import RowBlocks, rows_along_dim
from aotc.lowering.plans.linalg.dft import BlockDftPlan, CalledDftPlan, ThreadDftPlan
from aotc.lowering.regions.common.bank_padding import bank_padded_index
from aotc.lowering.regions.common.library_call import LibraryCall


def lower_block_dft(b: RegionBuilder, plan: BlockDftPlan) -> Kernel:
    """Lower a ``dft`` to one block of GPU threads per signal."""
    return _BlockDft(b, plan).block_dft_kernel()


def lower_thread_dft(b: RegionBuilder, plan: ThreadDftPlan) -> Kernel:
    """Lower a ``dft`` to one GPU thread per group of neighbouring signals."""
    return _ThreadDft(b, plan).thread_dft_kernel()


class _Dft:
    """Base of both emitters of a ``dft``: operands, operation count and twiddle factors of a stage."""

    def __init__(self, b: RegionBuilder) -> None:
        """Read the length, the stages and the operation count of the transform."""
        self.b, self.attrs = b, b.region_root_op("dft").attrs
        (self.x, self.table), (self.out,) = b.inputs, b.outputs
        self.n = static(self.x.shape[self.attrs["axis"]])
        self.steps = fft_stages(self.attrs["radices"])
        self.work = product(self.x.shape) * DFT_WORK.value * max(self.n.bit_length() - 1, 1)

    def _emit_butterflies(self, e: Elements) -> Butterfly:
        return Butterfly(e.bind, self.table.dtype, 1 if self.attrs["inverse"] else -1)

    def _multiply_by_twiddle(self, e: Elements, stage: FftStage, k: int, p: Dim) -> Pair:
        place = stage.table + (k - 1) * stage.m + p
        return e.bind(Load(self.table, (0, place))), e.bind(Load(self.table, (1, place)))

    def _load_complex_parts(self, e: Elements, place: Index) -> Pair:
        """Return the real and imaginary part of an element of the signal."""
        whole, part = e.bind(Load(self.x, place)), self.table.dtype
        return e.bind(Apply("real", (whole,), part)), e.bind(Apply("imag", (whole,), part))

    def _scaled_result_element(self, value: Pair) -> Scalar:
        """Return a scaled element of the result."""
        scale, (re, im) = self.attrs["scale"], value
        if scale != 1:
            re, im = (Apply("mul", (part, Const(scale, part.dtype)), part.dtype) for part in value)
        return Apply("complex", (re, im), self.out.dtype)


class _BlockDft(_Dft):
    """Emit the stages of a transform that a block of threads computes."""

    def __init__(self, b: RegionBuilder, plan: BlockDftPlan) -> None:
        """Name the signal in shared memory, padded so that threads access different banks."""
        super().__init__(b)
        self.rows, self.place = rows_along_dim(self.x.shape, self.attrs["axis"])
        self.threads = plan.threads
        part, size = self.table.dtype, self.n + self.n // BANKS
        self.held = [Buffer(f"held_{half}", part, (size,), "shared") for half in ("re", "im")]

    def block_dft_kernel(self) -> Kernel:
        """Return the kernel with one thread block per signal."""
        last = len(self.steps) - 1
        body: list[Stmt] = [Alloc(x) for x in self.held] if last else []
        for number, stage in enumerate(self.steps):
            body += self._block_dft_stage(stage, number == 0, number == last)
        return self.b.grid(self.rows, body, self.work)

    def _block_dft_stage(self, stage: FftStage, first: bool, last: bool) -> list[Stmt]:
        """Return the statements of a stage: butterflies in registers, a barrier, and the stores to shared memory."""
        count = stage.m * stage.s
        each = -(-count // self.threads)
        shape = (self.threads, each * stage.radix)
        own = [Buffer(self.b.fresh("own"), self.table.dtype, shape, "private") for _ in self.held]
        t = sym("t", 0, self.threads)
        computed: list[Stmt] = []
        written: list[Stmt] = []
        for u in range(each):
            f = t + u * self.threads
            at = (f // stage.s, f % stage.s) if stage.s != 1 else (f, 0)
            tests = test_index(f, count, "lt")
            block, stores = self._block_butterfly(stage, (t, u), at, own, first, last)
            computed += [If(conjunction_of_tests(tests), tuple(block))] if tests else block
            written += [If(conjunction_of_tests(tests), tuple(stores))] if tests else stores
        one = For("t", 0, self.threads, tuple(computed), "thread")
        if last:
            return [one]
        allocs: list[Stmt] = [Alloc(x) for x in own]
        return [*allocs, one, Barrier(), For("t", 0, self.threads, tuple(written), "thread"), Barrier()]

    def _block_butterfly(
        self, stage: FftStage, thread: tuple[Dim, int], at: tuple[Dim, Dim], own: list[Buffer], first: bool, last: bool
    ) -> tuple[list[Stmt], list[Stmt]]:
        """Return the statements that compute a butterfly, and those that later store it to shared memory."""
        e = self.b.elements()
        block = e.new_block()
        make = self._emit_butterflies(e)
        (t, u), (p, q) = thread, at
        inputs = [self._read_stage_input(e, first, q + stage.s * (p + stage.m * j)) for j in range(stage.radix)]
        stores: list[Stmt] = []
        for k, value in enumerate(make.transform(inputs)):
            if k and stage.m > 1:
                value = make.times(value, self._multiply_by_twiddle(e, stage, k, p))
            to = q + stage.s * (stage.radix * p + k)
            if last:
                block.append(Store(self.out, self.place(to), self._scaled_result_element(value)))
                continue
            for part, mine, cell in zip(value, own, self.held, strict=True):
                slot = (t, u * stage.radix + k)
                block.append(Store(mine, slot, part))
                stores.append(Store(cell, (bank_padded_index(to),), Load(mine, slot)))
        return block, stores

    def _read_stage_input(self, e: Elements, first: bool, position: Dim) -> Pair:
        """Return an element of the signal: from the operand in the first stage, else from shared memory."""
        if first:
            return self._load_complex_parts(e, self.place(position))
        re, im = (e.bind(Load(cell, (bank_padded_index(position),))) for cell in self.held)
        return re, im


class _ThreadDft(_Dft):
    """Emit the stages by which one thread transforms the signals of a grid item in scratch memory."""

    def __init__(self, b: RegionBuilder, plan: ThreadDftPlan) -> None:
        """Name two scratch buffers of complex signals, between which the stages alternate."""
        super().__init__(b)
        self.rows, part = RowBlocks(self.x.shape, self.attrs["axis"], plan.most), self.table.dtype
        self.scratch = [
            tuple(Buffer(f"{name}_{half}", part, (self.n * self.rows.block,), "scratch") for half in ("re", "im"))
            for name in ("u", "v")
        ]

    def thread_dft_kernel(self) -> Kernel:
        """Return the kernel with one thread per group of signals."""
        last = len(self.steps) - 1
        body: list[Stmt] = []
        for pair in self.scratch[: min(last, 2)]:
            body += [Alloc(buffer) for buffer in pair]
        for number, stage in enumerate(self.steps):
            body += self._thread_dft_stage(stage, number, number == last)
        return self.b.grid(self.rows.items, body, self.work)

    def _thread_dft_stage(self, stage: FftStage, number: int, last: bool) -> list[Stmt]:
        """Return the loops of one stage over the butterflies of all signals of an item."""
        loops: list[tuple[str, Dim]] = [("t", stage.m), ("q", stage.s), ("v", self.rows.width)]
        t, q, v = (sym(name, 0, size) for name, size in loops)
        e = self.b.elements()
        block = e.new_block()
        self._thread_butterfly(e, stage, number, last, (t, q, v))
        return serial_nest(loops, block)

    def _thread_butterfly(
        self, e: Elements, stage: FftStage, number: int, last: bool, at: tuple[Dim, Dim, Dim]
    ) -> None:
        """Emit butterfly ``at`` of a stage for one signal: loads, transform, twiddle factors, stores."""
        t, q, v = at
        make = self._emit_butterflies(e)
        inputs = [self._read_signal(e, number, q + stage.s * (t + stage.m * j), v) for j in range(stage.radix)]
        results = make.transform(inputs)
        for k, value in enumerate(results):
            if k and stage.m > 1:
                value = make.times(value, self._multiply_by_twiddle(e, stage, k, t))
            self._write_signal(e, number, last, q + stage.s * (stage.radix * t + k), v, value)

    def _read_signal(self, e: Elements, number: int, position: Dim, v: Dim) -> Pair:
        """Return an element that stage ``number`` reads: of the operand, or of the last stage's result."""
        if number == 0:
            return self._load_complex_parts(e, self.rows.element_index(position, v))
        re, im = self.scratch[(number - 1) % 2]
        place = (position * self.rows.block + v,)
        return e.bind(Load(re, place)), e.bind(Load(im, place))

    def _write_signal(self, e: Elements, number: int, last: bool, position: Dim, v: Dim, value: Pair) -> None:
        """Emit the store of an element: scaled to the result in the last stage, else to scratch memory."""
        if last:
            e.block.append(Store(self.out, self.rows.element_index(position, v), self._scaled_result_element(value)))
            return
        for buffer, part in zip(self.scratch[number % 2], value):
            e.block.append(Store(buffer, (position * self.rows.block + v,), part))


def lower_called_dft(b: RegionBuilder, plan: CalledDftPlan) -> Kernel:
    """Lower a ``dft`` to calls of a vectorized FFT function on the CPU."""
    attrs, (x, table), (out,) = b.region_root_op("dft").attrs, b.inputs, b.outputs
    n, stride = prod(attrs["radices"]), product(x.shape[attrs["axis"] + 1 :])
    rows = RowBlocks(x.shape, attrs["axis"], plan.most)
    pitch, width = plan.pitch, 0
    if pitch:
        even = isinstance(stride, int) and stride % rows.block == 0
        width = rows.block if even else rows.width if isinstance(rows.width, int) else 0
    across = stride if pitch and isinstance(stride, int) else 0
    transform = Transform(
        table.dtype, attrs["radices"], attrs["inverse"], float(attrs["scale"]), attrs["real"], pitch, width, across
    )
    call = LibraryCall(b)
    call.args += [(x, rows.element_index(0, 0)), (table, (0, 0)), (out, rows.element_index(0, 0))]
    if transform.work:
        call.args.append((call.allocate_workspace(table.dtype, (transform.work,)), (0,)))
    numbers: list[tuple[int, Dim]] = [(width, rows.width), (across, stride)] if pitch else []
    for static_value, value in numbers:
        if not static_value:
            call.add_integer(value)
    work = product(x.shape) * DFT_WORK.value * max(n.bit_length() - 1, 1)
    return b.grid(rows.items, call.call_statements(transform), work)
