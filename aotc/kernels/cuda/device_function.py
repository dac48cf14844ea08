"""Expressions of the loop IR as device functions, which templates call: the epilogue of a product, its sizes.

A function has the parameters of its kernel, a pointer to each buffer and each dim, and then its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from aotc.ir.loop_ir import Kernel, Scalar, Stmt
from aotc.kernels.cuda.dialect import nvvm_text
from aotc.kernels.cuda.emit import CudaEmitter
from aotc.kernels.cuda.tile import emit_tile
from aotc.kernels.emit.metadata import Metadata
from aotc.kernels.emit.rare_calls import define_scalars
from aotc.kernels.llvm_types import KernelModule, register_type
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """A value of the loop IR that depends on a kernel's buffers and dims, and on parameters.

    Attributes
    ----------
    name : str
        As templates call it.
    parameters : tuple of (str, str)
        Name and dtype of each; integers may stand in indices.
    value : Scalar
        What it returns, in a register of its dtype.
    body : tuple of Stmt
        What is done before.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    value: Scalar
    body: tuple[Stmt, ...] = ()


class _FunctionEmitter(CudaEmitter):
    """Emits a value in place of a kernel's statements."""

    def returned(self, function: DeviceFunction) -> ir.Value:
        """Return the register of the function's value."""
        self._parts, self._count, self._inside = set(), 0, False
        self._metadata = Metadata(self.builder.module, self.kernel, self.target, ())
        for (name, dtype), register in zip(function.parameters, self.bind_kernel(), strict=True):
            self._scalars[-1][name] = register
            if DTYPES[dtype].kind in "iu":
                self._indices.bind(name, register)
        for stmt in function.body:
            self._statement(stmt)
        return self.scalar(function.value)


def functions_text(functions: Sequence[DeviceFunction], kernel: Kernel, target: Target) -> str:
    """Return the IR of functions that belong to ``kernel``."""
    module = KernelModule(kernel.name, target)
    for function in functions:
        own = [register_type(dtype) for _, dtype in function.parameters]
        kind = ir.FunctionType(register_type(function.value.dtype), [*CudaEmitter.parameters(kernel)[:-1], *own])
        made = ir.Function(module, kind, function.name)
        made.linkage = "linkonce_odr"
        made.attributes.add("alwaysinline")
        made.attributes.add("nounwind")
        emitter = _FunctionEmitter(ir.IRBuilder(made.append_basic_block("entry")), kernel, target, emit_tile)
        value = emitter.returned(function)
        emitter.builder.ret(value)
    define_scalars(module)
    return nvvm_text(module)
