"""Convert emitted LLVM modules to the dialect of libNVVM.

For GPUs before compute capability 10, libNVVM is based on LLVM 7: pointers are typed, there is no ``fneg``, and later
intrinsics do not exist. Newer GPUs accept the same text. ::

    %y = load float, ptr %x      ->  %p = bitcast i8* %x to float*
                                     %y = load float, float* %p
    %z = fneg float %y           ->  %z = fsub float -0.0, %y

Halves are converted by intrinsics. With bit casts of integers, the optimizer of libNVVM fails with "unsupported
operation" after it has unrolled loops over a thread-local array of halves.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from llvmlite.ir import instructions as instr

from aotc.kernels.cuda.later_intrinsics import add_intrinsic_body
from aotc.kernels.llvm_types import F32, HALF, I16
from aotc.kernels.symbol_table import declare_function

TRIPLE = "nvptx64-nvidia-cuda"
DATA_LAYOUT = (
    "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-"
    "v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
)
IR_VERSION = (2, 0, 3, 2)
BYTES = ir.IntType(8).as_pointer()
"""The type that replaces opaque pointers."""


def convert_to_nvvm_dialect(module: ir.Module) -> str:
    """Return the text of ``module`` in libNVVM's dialect; the module is modified and must not be used again."""
    module.triple, module.data_layout = TRIPLE, DATA_LAYOUT
    for function in list(module.functions):
        if function.is_declaration:
            add_intrinsic_body(function)
    for function in module.functions:
        _retype_pointers(function)
    for function in module.functions:
        for block in function.blocks:
            block.instructions[:] = [i for old in block.instructions for i in _insert_pointer_casts(block, old)]
    version = module.add_metadata([ir.Constant(ir.IntType(32), n) for n in IR_VERSION])
    module.add_named_metadata("nvvmir.version", version)
    return str(module)


def _typed_pointer_type(kind: ir.Type) -> ir.Type:
    return BYTES if kind.is_pointer and kind.is_opaque else kind


def _retype_pointers(function: ir.Function) -> None:
    """Replace all opaque pointer types in ``function`` by typed pointers."""
    kind = function.ftype
    function.ftype = ir.FunctionType(
        _typed_pointer_type(kind.return_type), [_typed_pointer_type(a) for a in kind.args], kind.var_arg
    )
    function.type = function.ftype.as_pointer()
    for value in (*function.args, function.return_value):
        value.type = _typed_pointer_type(value.type)
    for block in function.blocks:
        for i in block.instructions:
            match i:
                case instr.AllocaInstr():
                    i.type = i.allocated_type.as_pointer()
                case instr.GEPInstr(indices=[_]):
                    i.source_etype = _typed_pointer_type(i.source_etype)
                    i.type = i.source_etype.as_pointer()
                case instr.CastInstr(opname="addrspacecast"):
                    i.type = i.operands[0].type.pointee.as_pointer()
                case _:
                    i.type = _typed_pointer_type(i.type)


def _half_conversion_intrinsic(block: ir.Block, value: ir.Value) -> instr.CallInstr:
    """Create the call of an intrinsic that converts the bits of an f16 to f32, or an f32 to the bits of an f16."""
    name, result = ("from", F32) if value.type == I16 else ("to", I16)
    name = f"llvm.convert.{name}.fp16.f32"
    function = declare_function(block.module, name, ir.FunctionType(result, [value.type]))
    return instr.CallInstr(block, function, [value])


def _insert_pointer_casts(block: ir.Block, i: instr.Instruction) -> Iterator[instr.Instruction]:
    """Yield the pointer casts that instruction ``i`` needs before it, and then ``i`` itself."""
    match i:
        case instr.LoadInstr():
            wanted = [i.type.as_pointer()]
        case instr.StoreInstr():
            value = _typed_pointer_type(i.operands[0].type)
            wanted = [value, value.as_pointer()]
        case instr.AtomicRMW():
            wanted = [i.type.as_pointer(), i.type]
        case instr.GEPInstr(indices=[_]):
            wanted = [i.source_etype.as_pointer(), *(x.type for x in i.indices)]
        case instr.CallInstr():
            wanted = [i.callee.type, *(_typed_pointer_type(a) for a in i.callee.function_type.args)]
        case instr.Instruction(opname="fneg"):
            i.opname, i.operands = "fsub", [ir.Constant(i.type, -0.0), *i.operands]
            wanted = [i.type, i.type]
        case instr.CastInstr(operands=[instr.CastInstr() as half]) if half.type == HALF:
            yield (number := _half_conversion_intrinsic(block, half.operands[0]))
            i.opname, i.operands, wanted = "bitcast", [number], [number.type]
        case _:
            wanted = [x.type for x in i.operands]
    for number, (operand, kind) in enumerate(zip(i.operands, wanted, strict=True)):
        if operand.type.is_pointer and str(operand.type) != str(kind):
            cast = instr.CastInstr(block, "bitcast", operand, kind)
            i.operands[number] = cast
            yield cast
    if isinstance(i, instr.GEPInstr):
        i.pointer = i.operands[0]
    yield i
