"""Register tiles on the matrix unit of x86 CPUs (AMX): a function with up to eight tile registers for each shape.

A tile register has 16 rows of 64 bytes. It is used for 16 x 16 accumulators, for up to 16 rows of ``a`` with 16 steps
of k, or for 16 steps of ``b`` with 16 columns. A step of k is 2 bf16 or 4 i8, contiguous in ``a`` and in each column of
``b``, as in the forms ``bf16`` and ``i8`` of :mod:`aotc.ir.loop.forms.tile_forms`; so both are loaded without packing.
The remainder of k is copied to the stack and padded with zeros.

:func:`configure_amx_tiles` sets the rows of the registers. It zeroes them all and takes as long as about ten products,
so the code before a call first tests whether the current configuration fits.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.cpu.tiles.micro_kernel import LINE, State, TileWriter
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I1, I8, I32, I64, PTR, VOID, i32, i64
from aotc.kernels.symbol_table import declare_function

ROWS, WORDS, REGISTERS = 16, 16, 8
"""Rows of a tile register, 4-byte words in a row, and number of registers."""
_SUMS = REGISTERS // 2  # the others: one or two for ``a``, two or three for ``b``
_PRODUCTS = {"bf16": "tdpbf16ps", "i8": "tdpbssd", "u8": "tdpbusd"}  # by the dtype of ``a``
_NOW = "matrix_tiles_now"


def fits_matrix_unit(shape: Shape) -> bool:
    """Return True if the matrix unit supports a tile of this shape."""
    if not shape.levels or f"amx-{shape.form.dot_product_dtype}" not in shape.isa or shape.a_dtype not in _PRODUCTS:
        return False
    extent, a_step, b_step = shape.levels[-1]
    side_by_side = shape.a_inner == 4 // shape.form.group and a_step == 4 and b_step == LINE * shape.vectors
    few = shape.lanes == WORDS and shape.rows <= 2 * ROWS and _amx_row_bands(shape.rows) * shape.vectors <= _SUMS
    return extent is not None and side_by_side and few


def configure_amx_tiles(builder: ir.IRBuilder, shape: Shape) -> None:
    """Emit the configuration of the registers for a tile of ``shape``, unless it is current."""
    number = i64(shape.rows * _SUMS + shape.vectors)
    entry = builder.function.entry_basic_block
    now = next((x for x in entry.instructions if x.name == _NOW), None)
    if now is None:
        with builder.goto_entry_block():
            now = builder.alloca(I64, name=_NOW)
            builder.store(i64(0), now)
    other = builder.icmp_signed("!=", builder.load(now, typ=I64), number)
    with builder.if_then(other, likely=False):
        _call_amx_intrinsic(builder, "ldtilecfg", _amx_configuration(builder.module, shape))
        builder.store(number, now)


def amx_release_line(module: ir.Module) -> str:
    """Return assembly that releases the tile registers if ``module`` uses them.

    Released registers are not saved by thread switches.
    """
    if "llvm.x86.ldtilecfg" not in module.globals:
        return ""
    function = declare_function(module, "llvm.x86.tilerelease", ir.FunctionType(VOID, []))
    return f"  call void {function.get_reference()}()\n"


def _amx_configuration(module: ir.Module, shape: Shape) -> ir.GlobalVariable:
    """Add the 64-byte configuration to the module: number of rows, and bytes of a row, of each tile register."""
    name = f"matrix_tiles_{shape.rows}x{shape.vectors}"
    if name in module.globals:
        return module.globals[name]
    heights = _amx_band_heights(shape.rows)
    sums = [height for height in heights for _ in range(shape.vectors)]
    rows = [*sums, *heights, *[ROWS] * (REGISTERS - len(sums) - len(heights))]
    columns = [x for _ in range(REGISTERS) for x in (LINE, 0)]  # words of two bytes
    said = bytes([1, *[0] * 15, *columns, *[0] * 16, *rows, *[0] * 8])
    found = ir.GlobalVariable(module, ir.ArrayType(I8, len(said)), name)
    found.initializer = ir.Constant(found.value_type, bytearray(said))
    found.linkage, found.global_constant, found.align = "internal", True, LINE
    return found


def _amx_row_bands(rows: int) -> int:
    """Return the number of tile registers that cover ``rows`` rows."""
    return -(-rows // ROWS)


def _amx_band_heights(rows: int) -> list[int]:
    """Return the number of rows in each tile register that covers ``rows`` rows."""
    return [min(ROWS, rows - i) for i in range(0, rows, ROWS)]


def _call_amx_intrinsic(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    """Emit a call of the LLVM intrinsic of an AMX instruction."""
    call_intrinsic(builder, f"llvm.x86.{name}", VOID, list(args))


class MatrixTileWriter(TileWriter):
    """Writer of a tile's function for the matrix unit (AMX)."""

    def write(self) -> None:
        """Emit the whole function: the accumulation, then the stores to ``out``."""
        shape = self.shape
        self.heights, n = _amx_band_heights(shape.rows), shape.vectors
        self.first_a = len(self.heights) * n
        self.first_b = self.first_a + len(self.heights)
        self.prefetch_results()
        for number in range(self.first_a):
            self.emit_amx_instruction("tilezero", number)
        self.emit_loop_nest(0, [], self.a, self.panel)
        for number in range(self.first_a):
            row = self.advance(self.out, self.mul_const(self.out_row, number // n * ROWS))
            self.emit_amx_instruction("tilestored64", number, self.advance(row, i64(number % n * LINE)), self.out_row)
        self.b.ret_void()

    def prefetch_results(self) -> None:
        """Emit prefetches of the cache lines of the result, for which the stores would wait otherwise.

        Contiguous rows of whole lines are the tile's scratch memory, which is in the cache already.
        """
        if self.shape.out_row == LINE * self.shape.vectors:
            return
        for i in range(self.shape.rows):
            row = self.advance(self.out, self.mul_const(self.out_row, i))
            for j in range(self.shape.vectors):
                self.emit_prefetch(self.advance(row, i64(j * LINE)), write=1)

    def emit_prefetch(self, place: ir.Value, write: int = 0) -> None:
        """Emit a prefetch of a line into the first-level cache, for writing if ``write`` is 1."""
        self.call("llvm.prefetch.p0", VOID, place, *(i32(x) for x in (write, 3, 1)))

    def emit_amx_instruction(self, name: str, number: int, *args: ir.Value | int) -> None:
        """Emit an AMX instruction on tile register ``number``."""
        values = [ir.Constant(I8, x) if isinstance(x, int) else x for x in (number, *args)]
        _call_amx_intrinsic(self.b, name, *values)

    def emit_innermost_loop(self, extent: ir.Value, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit a loop over groups of 16 steps of k; a remainder is padded to one more group with zeros."""
        _, a_step, b_step = self.levels[-1]
        whole, rest = divmod(extent.constant, WORDS)
        by = (self.mul_const(a_step, WORDS), self.mul_const(b_step, WORDS), 1)

        def step(state: State, a: ir.Value, panel: ir.Value) -> State:
            self.prefetch_panel(panel, b_step)
            self.emit_tile_products(a, self.a_row, panel, b_step)
            return state

        state, a, panel = self.emit_loop(i64(whole), state, a, panel, by, step)
        if rest:
            left, right = self.pad_left_remainder(a, rest), self.pad_right_remainder(panel, b_step, rest)
            self.emit_tile_products(left, i64(LINE), right, i64(LINE * self.shape.vectors))
        return state

    def emit_tile_products(self, a: ir.Value, a_row: ir.Value, panel: ir.Value, b_row: ir.Value) -> None:
        """Emit the products of 16 steps of k; each register is loaded just before its first use."""
        n = self.shape.vectors
        spare = REGISTERS - self.first_b
        for j in range(n):
            right = self.first_b + j % spare
            self.emit_amx_instruction("tileloadd64", right, self.advance(panel, i64(j * LINE)), b_row)
            for i in range(len(self.heights)):
                if j == 0:
                    left = self.advance(a, self.mul_const(a_row, i * ROWS))
                    self.emit_amx_instruction("tileloadd64", self.first_a + i, left, a_row)
                self.emit_amx_instruction(_PRODUCTS[self.shape.a_dtype], i * n + j, self.first_a + i, right)

    def prefetch_panel(self, panel: ir.Value, b_step: ir.Value) -> None:
        """Emit prefetches of a later part of the panel, if memory bandwidth limits the tile."""
        if not self.shape.prefetch:
            return
        for line in range(WORDS * self.shape.vectors):
            self.emit_prefetch(self.advance(panel, i64(self.shape.prefetch + line * LINE)))

    def pad_left_remainder(self, a: ir.Value, rest: int) -> ir.Value:
        """Emit a copy of the last ``rest`` steps of each row of ``a``, padded with zeros; return its address."""
        copy = self.allocate_stack_lines(self.shape.rows)
        mask = ir.Constant(ir.VectorType(I1, WORDS), [i < rest for i in range(WORDS)])
        for i, row in enumerate(self.row_offsets):
            zero = ir.Constant(self.tile_row_type, None)
            x = self.call(f"llvm.masked.load.v{WORDS}i32.p0", self.tile_row_type, self.advance(a, row), mask, zero)
            self.b.store(x, self.advance(copy, i64(i * LINE)), align=LINE)
        return copy

    def pad_right_remainder(self, panel: ir.Value, b_step: ir.Value, rest: int) -> ir.Value:
        """Emit a copy of the last ``rest`` steps of the panel, padded with zeros; return its address.

        The zeros are written once, on entry to the function.
        """
        n = self.shape.vectors
        copy = self.allocate_stack_lines(WORDS * n)
        with self.b.goto_entry_block():
            for i in range(rest * n, WORDS * n):
                self.b.store(ir.Constant(self.tile_row_type, None), self.advance(copy, i64(i * LINE)), align=LINE)
        for i in range(rest * n):
            place = self.advance(self.advance(panel, self.mul_const(b_step, i // n)), i64(i % n * LINE))
            x = self.load(place, self.tile_row_type, 4)
            self.b.store(x, self.advance(copy, i64(i * LINE)), align=LINE)
        return copy

    @property
    def tile_row_type(self) -> ir.VectorType:
        """Return the LLVM type of a row of a tile register."""
        return ir.VectorType(I32, WORDS)

    def allocate_stack_lines(self, lines: int) -> ir.Value:
        """Allocate ``lines`` cache lines on the function's stack."""
        with self.b.goto_entry_block():
            memory = self.b.alloca(ir.ArrayType(I8, lines * LINE))
            memory.align, memory.type = LINE, PTR  # llvmlite's pointer is typed: it rejects other values
        return memory
