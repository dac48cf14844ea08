"""LLVM IR as libNVVM reads it: pointers that have types, and intrinsics that it does not know as functions."""

import re

import pytest

pytest.importorskip("numba_cuda")

import jax
from llvmlite import ir
from support.scalar_kernels import converting, every_op, one_kernel, sources_of

import aotc
from aotc.ir.dims.algebra import sym
from aotc.ir.loop.ir import Apply, Buffer, For, Kernel, Load, Store
from aotc.kernels.cuda import compile as compile_cuda
from aotc.kernels.cuda import nvvm
from aotc.kernels.cuda.compile import link_cubin, resources_in_linker_log
from aotc.kernels.cuda.dialect import convert_to_nvvm_dialect
from aotc.kernels.cuda.later_intrinsics import BODIES
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import F32, I32, I64, PTR, VOID
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import DTYPES

pytestmark = pytest.mark.cudasim

INTEGER_EXTREMES = ("smax", "smin", "umax", "umin")
SM_90 = TARGETS["cuda:sm_90a"]


def function(result, *parameters):
    """Return a module, a function of it, and a builder at its beginning."""
    module = ir.Module("m")
    module.has_nan_extremes = True
    made = ir.Function(module, ir.FunctionType(result, parameters), "f")
    return module, made, ir.IRBuilder(made.append_basic_block("entry"))


def body_of(text):
    """Return the lines of the only function, without the names of values."""
    lines = text.split("entry:\n")[1].split("\n}")[0].splitlines()
    return [re.sub(r'%"[.\d]+"', "%", line.strip()) for line in lines]


def test_opaque_pointers_become_typed():
    module, f, b = function(VOID, PTR, I64)
    place = b.gep(f.args[0], [f.args[1]], inbounds=True, source_etype=F32)
    b.store(b.fneg(b.load(place, typ=F32)), f.args[0])
    b.ret_void()
    text = convert_to_nvvm_dialect(module)
    assert 'define void @"f"(i8* %".1", i64 %".2")' in text
    assert body_of(text) == [
        "% = bitcast i8* % to float*",
        "% = getelementptr inbounds float, float* %, i64 %",
        "% = load float, float* %",
        "% = fsub float 0x8000000000000000, %",
        "% = bitcast i8* % to float*",
        "store float %, float* %",
        "ret void",
    ]


def test_arrays_of_a_thread_and_a_block_become_typed():
    module, _, b = function(VOID)
    shape = ir.ArrayType(F32, 4)
    own = b.alloca(shape)
    own.type = PTR
    shared = ir.GlobalVariable(module, shape, "shared", addrspace=3)
    shared.linkage, shared.initializer = "internal", ir.Constant(shape, ir.Undefined)
    b.store(b.load(b.addrspacecast(shared, PTR), typ=F32), own)
    b.ret_void()
    text = convert_to_nvvm_dialect(module)
    assert "ptr" not in text
    assert 'addrspacecast [4 x float] addrspace(3)* @"shared" to [4 x float]*' in text
    assert 'store float %".4", float*' in text
    assert nvvm.nvvm_ltoir([text], "sm_80")


def test_pointers_to_pointers_and_of_calls():
    module, f, b = function(PTR, PTR, ir.IntType(1))
    callee = ir.Function(module, ir.FunctionType(PTR, [PTR]), "g")
    first = b.load(b.gep(f.args[0], [ir.Constant(I64, 1)], source_etype=PTR), typ=PTR)
    b.ret(b.select(f.args[1], first, b.call(callee, [first])))
    text = convert_to_nvvm_dialect(module)
    assert 'declare i8* @"g"(i8* %".1")' in text
    assert nvvm.nvvm_ltoir([text], "sm_80")


@pytest.mark.parametrize("name", BODIES)
def test_every_row_is_a_function_that_libnvvm_takes(name):
    exact = re.search(r"\.i(\d+)$", name)
    kinds = [ir.IntType(int(exact[1]))] if exact else [I32, I64] if name[5:] in INTEGER_EXTREMES else [F32]
    for kind in kinds:
        to = ir.IntType(8) if "fpto" in name else kind
        module, f, b = function(to, kind)
        full = name if exact else f"{name}.i8.f32" if "fpto" in name else f"{name}.{'f32' if kind == F32 else kind}"
        twice = name.endswith(("max", "min", "maximum", "minimum"))
        extra = [f.args[0]] if twice else [ir.Constant(ir.IntType(1), 0)] if "ctlz" in name else []
        b.ret(call_intrinsic(b, full, to, [f.args[0], *extra]))
        text = convert_to_nvvm_dialect(module)
        assert f'@"aotc.{full}"' in text
        assert ".extern" not in nvvm.nvvm_ptx([text], "compute_80")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if list(every_op(d))])
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_100", marks=pytest.mark.slow)])
def test_every_scalar_op_is_code_without_calls_of_others(dtype, arch):
    kernel = one_kernel(f"ops_{dtype}", dtype, list(every_op(dtype)), 8)
    assert ".extern" not in compile_cuda.kernel_ptx(kernel, TARGETS[f"cuda:{arch}"])


@pytest.mark.parametrize("to", DTYPES)
def test_every_conversion_is_code_without_calls_of_others(to):
    assert ".extern" not in compile_cuda.kernel_ptx(converting(to, sources_of(to), 8), SM_90)


def lto_ptx(ltoir):
    """Return the PTX that nvJitLink would make machine code of, with the options that it gets."""
    from cuda.bindings import nvjitlink

    from aotc.kernels.cuda.compile import _OPTIONS

    options = ["-arch=sm_90", *_OPTIONS, "-ptx"]
    handle = nvjitlink.create(len(options), options)
    nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "k")
    nvjitlink.complete(handle)
    text = bytearray(nvjitlink.get_linked_ptx_size(handle))
    nvjitlink.get_linked_ptx(handle, text)
    nvjitlink.destroy(handle)
    return text.decode()


@pytest.mark.parametrize("exact", [False, True])
def test_only_products_of_the_program_are_contracted(exact):
    """A product and a sum of the program may become one operation; those of a formula, which says when, may not."""
    a, b = Buffer("a", "f32", (8,)), Buffer("o", "f32", (8,))
    i = (sym("i", 0, 8),)
    square = Apply("mul", (Load(a, i), Load(a, i)), "f32")
    kernel = Kernel("k", (a,), (b,), (), 8, (
        For("i", 0, 8, (Store(b, i, Apply("add", (square, Load(a, i)), "f32")),), "parallel"),
    ))  # fmt: skip
    texts = compile_cuda.kernel_texts(kernel, SM_90)
    assert "contract" in texts[1]
    if exact:
        texts[1] = texts[1].replace(" contract", "")
    for text in (nvvm.nvvm_ptx(texts, "sm_90"), lto_ptx(nvvm.nvvm_ltoir(texts, "sm_90"))):
        assert ("fma.rn.f32" in text) is not exact


def test_resources_are_read_from_the_linker_log():
    log = "info : Used 24 registers, used 1 barriers, 1040 bytes smem\n 16 bytes stack frame, 8 bytes spill stores"
    assert resources_in_linker_log(log) == {"registers": 24, "shared": 1040, "stack": 16, "spills": 8}
    assert resources_in_linker_log("") == {"registers": 0, "shared": 0, "stack": 0, "spills": 0}


def test_refusals_have_the_log():
    with pytest.raises(Exception, match="parse expected"):
        nvvm.nvvm_ltoir(["nonsense"], "sm_80")
    with pytest.raises(Exception, match="kernel k: "):
        link_cubin(b"nonsense", "sm_80", "k")


def test_sorted_halves_of_a_thread():
    """The optimizer of libNVVM gave up on the runs that ``top_k`` merges in an array of halves of its own."""
    keys = jax.ShapeDtypeStruct((32,), "float16")
    smallest = jax.jit(lambda x: jax.lax.approx_min_k(x, 5))
    assert open_bundle(aotc.compile(smallest, keys, target="cuda:sm_80,cuda:sm_90")).manifest["variants"]
