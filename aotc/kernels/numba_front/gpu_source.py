"""Print a kernel for a GPU as a Python function for numba.cuda.

Each thread runs its own item of the grid, or a block of threads runs an item together::

    def k0(x: "f32[3, 64]", o: "f32[3]", items):
        i = i64(cuda.blockIdx.x)
        sums = cuda.shared.array((64,), f32)
        t = i64(cuda.threadIdx.x)
        if t < 64:
            sums[t] = x[i, t]
        cuda.syncthreads()
        ...

The parameters are the arrays, the kernel's dims, and the items of the grid.
"""

from __future__ import annotations

import keyword
from functools import partial

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import (
    DEVICE_CALL,
    Alloc,
    Barrier,
    Buffer,
    ExternalCall,
    For,
    GridBarrier,
    Kernel,
    Shuffle,
    Stmt,
    Store,
    WarpMatch,
    thread_count,
)
from aotc.kernels.cuda.shared_memory import dynamic_shared_bytes, shared_layout
from aotc.kernels.numba_front.scalars import numba_storage_dtype, strip_parens
from aotc.kernels.numba_front.source import (
    NumbaSource,
    SourcePrinter,
    buffer_type_text,
    grid_loop,
    print_without_name_clashes,
)
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, real_of

_WARP = "0xFFFFFFFF"  # the threads of a warp that exchange values: all
_DYNAMIC = "shared_memory"


def gpu_source(kernel: Kernel, target: Target) -> NumbaSource:
    """Return ``kernel`` as a Python function for numba.cuda, as it is launched on ``target``."""
    return print_without_name_clashes(partial(_GpuPrinter, kernel, target))


class _GpuPrinter(SourcePrinter):
    """Printer of the function of one thread."""

    def __init__(self, kernel: Kernel, target: Target, reserved: frozenset[str]) -> None:
        super().__init__(kernel, reserved | {_DYNAMIC})
        self.threads = thread_count(kernel)
        self.dynamic = shared_layout(kernel)[0] if dynamic_shared_bytes(kernel, target) else {}
        self.parts: set[str] = set()  # private buffers of which a thread has one element of the first dim
        self.inside = False  # a loop over threads?

    def print_function(self) -> str:
        """Return the text of the whole function: header, item number and body."""
        kernel, indent = self.kernel, "    "
        arrays = [f'{self.bind_buffer_name(b)}: "{buffer_type_text(b)}"' for b in (*kernel.inputs, *kernel.outputs)]
        dims = [f'{self.bind_local_name(name, "i64")}: "dim"' for name in kernel.dims]
        loop = grid_loop(kernel)
        var = self.bind_local_name(loop.var, "i64")
        plain = (loop.begin, loop.step) == (0, 1)
        item = var if plain else self.bind_local_name("item_number", "i64")
        number = "cuda.blockIdx.x" if self.threads else "cuda.grid(1)"
        self.lines.append(f"{indent}{item} = {self.scalars.cast(number, 'i64')}")
        if not self.threads:
            self.lines.append(f"{indent}if {item} < items:")
            indent += "    "
        if not plain:
            self.lines.append(f"{indent}{var} = {self.dim_text(loop.begin)} + {item} * {loop.step}")
        if self.dynamic:
            memory = f"cuda.shared.array(0, {self.scalars.name('u8')})"
            self.lines.append(f"{indent}{_DYNAMIC} = {memory}  # its size is a parameter of the launch")
        self.print_block(loop.body, indent)
        header = f"def {kernel.name}({', '.join([*arrays, *dims, 'items'])}):"
        return "\n".join([header, *self.lines]) + "\n"

    # --- buffers ---

    def bind_buffer_name(self, buffer: Buffer) -> str:
        rank = len(buffer.shape) - (buffer.name in self.parts)
        return self.bind_local_name(buffer.name, f"{numba_storage_dtype(buffer.dtype)}_{max(rank, 1)}")

    def element_text(self, buffer: Buffer, index: tuple[Dim, ...]) -> str:
        return super().element_text(buffer, index[1:] if buffer.name in self.parts else index)

    def _print_allocation(self, buffer: Buffer) -> str:
        kind, shape = self.scalars.name(numba_storage_dtype(buffer.dtype)), buffer.shape
        if buffer.space == "shared":
            if buffer.name in self.dynamic:
                at = str(self.dynamic[buffer.name])
                text = self.scalars.call("scratch_at", _DYNAMIC, at, self.shape_text(shape), kind)
            else:
                text = f"cuda.shared.array({self.shape_text(shape)}, {kind})"
            return f"{self.bind_buffer_name(buffer)} = {text}"
        if not self.inside and self.threads and shape and shape[0] == self.threads:
            self.parts.add(buffer.name)
            shape = shape[1:]
        return f"{self.bind_buffer_name(buffer)} = cuda.local.array({self.shape_text(shape)}, {kind})"

    # --- statements ---

    def print_statement(self, stmt: Stmt, indent: str) -> None:
        match stmt:
            case For(kind="thread"):
                self._print_thread_loop(stmt, indent)
            case For(kind="blocks"):
                own, count = (self.scalars.cast(f"cuda.{n}.x", "i64") for n in ("blockIdx", "gridDim"))
                begin = f"{self.dim_text(stmt.begin)} + {own}" if stmt.begin != 0 else own
                bounds = f"{begin}, {self.dim_text(stmt.end)}, {count}"
                self.lines.append(f"{indent}for {self.bind_local_name(stmt.var, 'i64')} in range({bounds}):")
                self.print_block(stmt.body, indent + "    ")
            case Alloc(buffer):
                self.lines.append(indent + self._print_allocation(buffer))
            case Barrier(warp=warp):
                self.lines.append(f"{indent}cuda.{'syncwarp' if warp else 'syncthreads'}()")
            case GridBarrier(counter):
                self.lines.append(indent + self.scalars.call("grid_barrier", self.buffer_text(counter)))
            case Shuffle(to, source, mask):
                old, new = (f"{self.buffer_text(b)}[0]" for b in (source, to))
                self.lines.append(
                    f"{indent}{new} = {self._warp_exchange_text(old, numba_storage_dtype(to.dtype), mask)}"
                )
            case WarpMatch(to, source, bits):
                word = self.scalars.cast(f"{self.buffer_text(source)}[0] & {(1 << bits) - 1}", "i32")
                same = self.scalars.cast(f"cuda.match_any_sync({_WARP}, {word})", "u32")
                self.lines.append(f"{indent}{self.buffer_text(to)}[0] = {same}")
            case Store(buffer, index, value, reduce, atomic=True):
                name = f"{reduce}_" if keyword.iskeyword(reduce) else reduce
                at = f"({self.index_text(index)})" if len(index) > 1 else self.index_text(index)
                operand = strip_parens(self.scalar_text(value))
                self.lines.append(f"{indent}cuda.atomic.{name}({self.buffer_text(buffer)}, {at}, {operand})")
            case ExternalCall(str(function), args) if function.startswith(DEVICE_CALL):
                texts = [self._passed_argument_text(function, buffer, index) for buffer, index in args]
                self.lines.append(f"{indent}{function}({', '.join(texts)})")
            case _:
                super().print_statement(stmt, indent)

    def _passed_argument_text(self, function: str, buffer: Buffer, index: tuple[Dim, ...]) -> str:
        """Return an argument of a user's function: an element, a row, or a whole array."""
        if function.startswith(f"{DEVICE_CALL}launch_"):
            return self.buffer_text(buffer)
        if function.startswith(f"{DEVICE_CALL}element_"):
            return self._memory_from_element(buffer, index)
        begin, row = self.element_offset_text(buffer, index), self.shape_text(buffer.shape[-1:])
        return self.scalars.call("view", self.buffer_text(buffer), begin, row)

    def _print_thread_loop(self, loop: For, indent: str) -> None:
        """Print a loop whose iterations the threads of the block run, one each."""
        var, own = self.bind_local_name(loop.var, "i64"), self.scalars.cast("cuda.threadIdx.x", "i64")
        self.lines.append(f"{indent}{var} = {f'{self.dim_text(loop.begin)} + ' if loop.begin != 0 else ''}{own}")
        if (loop.begin, loop.end) != (0, self.threads):
            self.lines.append(f"{indent}if {var} < {self.dim_text(loop.end)}:")
            indent += "    "
        self.inside = True
        self.print_block(loop.body, indent)
        self.inside = False

    def _warp_exchange_text(self, value: str, dtype: str, mask: int) -> str:
        """Return the text that reads ``value`` of the warp's thread ``t ^ mask``.

        Numba.cuda exchanges 32 and 64 bits.
        """
        row = DTYPES[dtype]
        if row.kind == "c":
            real = self._warp_exchange_text(f"{value}.real", real_of(dtype), mask)
            imag = self._warp_exchange_text(f"{value}.imag", real_of(dtype), mask)
            return self.scalars.cast(f"complex({real}, {imag})", dtype)
        carrier = dtype if row.kind == "f" else "i64" if row.bits == 64 else "i32"
        given = value if carrier == dtype else self.scalars.cast(value, carrier)
        moved = f"cuda.shfl_xor_sync({_WARP}, {given}, {mask})"
        return moved if carrier == dtype else self.scalars.cast(moved, dtype)
