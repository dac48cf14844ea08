"""Device functions that templates call, emitted from expressions of the loop IR, such as epilogues and sizes.

The parameters of a device function are those of its kernel (a pointer to each buffer, then each dim), followed by
its additional parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from aotc.ir.dims.algebra import static
from aotc.ir.loop.ir import Kernel, Let, Load, Scalar, Stmt, Var
from aotc.kernels.cuda.dialect import convert_to_nvvm_dialect
from aotc.kernels.cuda.emit import CudaEmitter
from aotc.kernels.cuda.lanes import LoopLane
from aotc.kernels.cuda.tile import emit_tile
from aotc.kernels.emit.metadata import LoopMetadata
from aotc.kernels.emit.rare_calls import define_scalar_rare_functions
from aotc.kernels.llvm_types import KernelModule, Register, register_type
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """A device function that returns a loop-IR value, which may depend on the kernel's buffers and dims.

    Attributes
    ----------
    name : str
        Name by which templates call the function.
    parameters : tuple of (str, str)
        Name and dtype of each additional parameter; integers may occur in indices.
    value : Scalar
        The result, in a register of its dtype.
    body : tuple of Stmt
        Statements before the result.
    vectors : tuple of (str, str, int)
        Further parameters, each of several registers: name, dtype and count. Loads from a buffer of that name read the
        registers.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    value: Scalar
    body: tuple[Stmt, ...] = ()
    vectors: tuple[tuple[str, str, int], ...] = ()

    @property
    def types(self) -> list[ir.Type]:
        """Return the LLVM types of the parameters that follow the kernel's own."""
        vectors = [register_type(dtype) for _, dtype, count in self.vectors for _ in range(count)]
        return [*(register_type(dtype) for _, dtype in self.parameters), *vectors]

    @property
    def result(self) -> ir.Type:
        """Return the LLVM type of the returned value."""
        return register_type(self.value.dtype)


@dataclass(frozen=True, slots=True)
class LoadFunction:
    """A device function that returns several values for consecutive lanes, by vector loads where possible.

    Attributes
    ----------
    name, parameters
        As in :class:`DeviceFunction`.
    loads : tuple of (Scalar, int)
        The results, one after the other, each for a number of lanes.
    lane : str
        Name of the lane number in the indices of ``loads``.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    loads: tuple[tuple[Scalar, int], ...]
    lane: str

    @property
    def types(self) -> list[ir.Type]:
        """Return the LLVM types of the parameters that follow the kernel's own."""
        return [register_type(dtype) for _, dtype in self.parameters]

    @property
    def result(self) -> ir.Type:
        """Return the LLVM struct type of the loaded values."""
        return register_struct_type((load.dtype, count) for load, count in self.loads)


def register_struct_type(held: Iterable[tuple[str, int]]) -> ir.LiteralStructType:
    """Return the LLVM struct type of registers, given the dtype and count of each group of registers."""
    return ir.LiteralStructType([register_type(dtype) for dtype, count in held for _ in range(count)])


class _DeviceFunctionEmitter(CudaEmitter):
    """Emitter of a device function, which returns a value instead of running a kernel's statements."""

    _vectors: dict[str, list[ir.Value]] = {}  # noqa: RUF012  # replaced, never mutated

    def emit_function_result(self, function: DeviceFunction | LoadFunction) -> ir.Value:
        """Emit the computation of a device function; return the register of its result, or a struct of all results."""
        self._parts, self._count, self._inside = set(), 0, False
        self._metadata = LoopMetadata(self.builder.module, self.kernel, self.target, ())
        given = iter(self.bind_kernel())
        for name, dtype in function.parameters:
            self._scalars[-1][name] = register = next(given)
            if DTYPES[dtype].kind in "iu":
                self._indices.bind_name(name, register)
        if isinstance(function, LoadFunction):
            return self._emit_loads(function)
        self._vectors = {name: [next(given) for _ in range(count)] for name, _, count in function.vectors}
        for stmt in function.body:
            self._emit_statement(stmt)
        return self.scalar(function.value)

    def _emit_scalar_node(self, node: Scalar, done: dict[int, Register]) -> Register:
        if isinstance(node, Load) and node.buffer.name in self._vectors:
            return self._vectors[node.buffer.name][static(self._indices.fold_unrolled_variables(node.index[0]))]
        return super()._emit_scalar_node(node, done)

    def _emit_loads(self, function: LoadFunction) -> ir.Value:
        """Emit all loads of a function, and return the values as a struct."""
        found: ir.Value = ir.Constant(function.result, ir.Undefined)
        place = 0
        for load, count in function.loads:
            for register in self._load_lanes_of(load, function.lane, count):
                found = self.builder.insert_value(found, register, place)
                place += 1
        return found

    def _load_lanes_of(self, load: Scalar, var: str, count: int) -> list[Register]:
        """Emit the value of ``load`` for ``count`` lanes, by vector loads where their elements are contiguous."""
        if count == 1:
            return [self.scalar(load)]
        lanes = [LoopLane(n) for n in range(count)]
        held = self._load_neighbours(Let(Var("", load.dtype), load), var, lanes, {var})
        found = []
        for lane, registers in zip(lanes, held, strict=True):
            self._enter_lane(var, lane, registers)
            found.append(self.scalar(load))
            self._leave_lane(var, lane)
        return found


def device_functions_text(functions: Sequence[DeviceFunction | LoadFunction], kernel: Kernel, target: Target) -> str:
    """Emit device functions that belong to a kernel as LLVM IR in libNVVM's dialect."""
    module = KernelModule(kernel.name, target)
    for function in functions:
        kind = ir.FunctionType(function.result, [*CudaEmitter.parameters(kernel)[:-1], *function.types])
        made = ir.Function(module, kind, function.name)
        made.linkage = "linkonce_odr"
        made.attributes.add("alwaysinline")
        made.attributes.add("nounwind")
        emitter = _DeviceFunctionEmitter(ir.IRBuilder(made.append_basic_block("entry")), kernel, target, emit_tile)
        value = emitter.emit_function_result(function)
        emitter.builder.ret(value)
    define_scalar_rare_functions(module)
    return convert_to_nvvm_dialect(module)
