"""Symbols that several emitters of one kernel declare or define."""

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.loop.forms.fft import Transform
from aotc.kernels import back_end
from aotc.kernels.emit.vector.fft import FftFunction
from aotc.kernels.llvm_types import F32, F64, I64, VOID, KernelModule
from aotc.kernels.symbol_table import TextModule, declaration_text, declare_function, symbol_texts
from aotc.targets import TARGETS

pytestmark = pytest.mark.ir
TARGET = TARGETS["cpu:x86-64-v4"]


def test_a_function_is_declared_once():
    module = ir.Module("kernel")
    first = declare_function(module, "llvm.fabs.f32", ir.FunctionType(F32, [F32]))
    assert declare_function(module, "llvm.fabs.f32", ir.FunctionType(F32, [F32])) is first
    assert str(module).count("declare") == 1


def test_a_symbol_of_another_type_is_refused():
    module = ir.Module("kernel")
    declare_function(module, "f", ir.FunctionType(F32, [F32]))
    ir.GlobalVariable(module, I64, "g")
    for name in ("f", "g"):
        with pytest.raises(InternalError, match=f"uses @{name} as double"):
            declare_function(module, name, ir.FunctionType(F64, [F64]))


def test_equal_symbols_are_merged_and_unequal_ones_refused():
    module = TextModule("x86_64-unknown-linux-gnu", "")
    one, other = (declaration_text("llvm.umin.i64", "i64", ["i64"] * n) for n in (2, 3))
    module.add({"llvm.umin.i64": one})
    module.add({"llvm.umin.i64": one})
    assert str(module).count("declare") == 1
    with pytest.raises(InternalError, match=r"two emitters define @llvm\.umin\.i64"):
        module.add({"llvm.umin.i64": other})


def test_functions_that_refer_to_metadata_are_refused():
    module = KernelModule("tile", TARGET)
    module.add_metadata([ir.Constant(I64, 1)])
    with pytest.raises(InternalError, match="functions of tile refer to metadata"):
        symbol_texts(module)


def test_a_declaration_of_llvmlite_has_the_form_of_a_text():
    module = KernelModule("tile", TARGET)
    declare_function(module, "llvm.umin.i64", ir.FunctionType(I64, [I64, I64]))
    declare_function(module, "nothing", ir.FunctionType(VOID, []))
    assert symbol_texts(module) == {
        "llvm.umin.i64": declaration_text("llvm.umin.i64", "i64", ["i64", "i64"]),
        "nothing": 'declare void @"nothing"()',
    }


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_transforms_that_call_the_same_functions_make_one_module(dtype):
    module = TextModule(TARGET.triple, back_end.data_layout(TARGET))
    for radices in ((4, 3), (5, 3, 2), (8, 8, 8), (97,), (2, 2)):
        module.add(FftFunction(Transform(dtype, radices, False, 1.0), 64, True).symbols())
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    assert sum(not f.is_declaration for f in parsed.functions) == 5
