"""The text of modules of kernels says what llvmlite's own says, as LLVM reads both."""

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from aotc.kernels.llvm_text import Distinct
from aotc.kernels.llvm_types import F32, F64, I1, I8, I32, I64, PTR, VOID, KernelModule, broadcast_register, i32, i64
from aotc.targets import TARGETS

TARGET = TARGETS["cpu:x86-64-v3"]
_VALUE = re.compile(r"%[-\w.]+")
_LABEL = re.compile(r"^([-\w.]+):.*$", re.MULTILINE)


def arithmetic(builder, pointer, n, x):
    """Numbers, flags, comparisons, conversions and constants."""
    y = builder.fadd(x, ir.Constant(F32, 1.5), flags=("reassoc", "nsz"))
    less = builder.fcmp_ordered("<", builder.fneg(y), x, flags=("nnan",))
    m = builder.add(builder.mul(n, i64(-3), flags=("nsw",)), builder.sext(builder.fptosi(y, I32), I64))
    builder.store(builder.select(builder.and_(less, builder.icmp_unsigned(">=", m, n)), x, y), pointer)


def memory(builder, pointer, n, x):
    """Addresses, alignments, places on the stack, and what other threads see."""
    local = builder.alloca(I64, size=4, name="local")
    local.align = 64
    place = builder.gep(local, [builder.urem(n, i64(4))], inbounds=True, source_etype=I64)
    builder.store(n, place, align=8)
    old = builder.atomic_rmw("add", builder.bitcast(place, PTR), n, "seq_cst")
    seen = builder.cmpxchg(place, old, builder.load(place, typ=I64, align=8), "acq_rel", "monotonic")
    builder.store_atomic(builder.extract_value(seen, 0), place, "release", 8)
    builder.store(builder.uitofp(builder.load_atomic(place, "acquire", 8, typ=I64), F32), pointer)


def vectors(builder, pointer, n, x):
    """Vectors and structures."""
    many = broadcast_register(builder, x, 4)
    transposed = builder.shuffle_vector(many, many, ir.Constant(ir.VectorType(I32, 4), [3, 2, 1, 0]))
    kind = ir.LiteralStructType([F32, I1])
    both = builder.insert_value(ir.Constant(kind, ir.Undefined), builder.extract_element(transposed, i32(2)), 0)
    builder.store(builder.extract_value(both, 0), pointer)


def branches(builder, pointer, n, x):
    """Blocks with names and without, values of several blocks, weights."""
    before, some, none, after = builder.block, *(builder.append_basic_block(w) for w in ("some", "", "after"))
    builder.cbranch(builder.icmp_signed("<", n, i64(9), name="few"), some, none).set_weights([1, 1000])
    builder.position_at_end(none)
    cases = builder.switch(n, after)
    cases.add_case(i64(12), some)
    builder.position_at_end(some)
    came = builder.phi(I64, name="came")
    came.add_incoming(n, before)
    came.add_incoming(i64(12), none)
    builder.branch(after)
    builder.position_at_end(after)
    found = builder.phi(F32)
    found.add_incoming(x, none)
    found.add_incoming(ir.Constant(F32, 2.0), some)
    builder.store(found, pointer)


def calls(builder, pointer, n, x):
    """Calls by name and by address, with facts of the arithmetic, and instructions as text."""
    module = builder.module
    root = ir.Function(module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
    y = builder.call(root, [x], fastmath=("nnan", "contract"), tail=True, name="root")
    function = builder.inttoptr(n, ir.FunctionType(F64, [PTR]).as_pointer())
    z = builder.call(function, [pointer], attrs=("nounwind",))
    same = builder.asm(ir.FunctionType(F32, [F32]), "", "=x,0", [y], side_effect=True)
    builder.store(builder.fadd(same, builder.fptrunc(z, F32)), pointer)


def metadata(builder, pointer, n, x):
    """What loads and calls say of themselves, twice the same; a variable with a value."""
    table = ir.GlobalVariable(builder.module, ir.ArrayType(I8, 2), "table")
    table.initializer, table.linkage = ir.Constant(table.value_type, bytearray(b"ab")), "internal"
    first, second = (builder.load(pointer, typ=F32) for _ in range(2))
    for load in (first, second):
        load.set_metadata("invariant.load", builder.module.add_metadata([]))
    builder.store(builder.fsub(first, second), pointer)


def built(module, write):
    """Return ``module`` with a function that ``write`` fills."""
    module.triple = TARGET.triple
    function = ir.Function(module, ir.FunctionType(VOID, [PTR, I64, F32]), "f")
    function.attributes.add("nounwind")
    function.args[0].add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    write(builder, *function.args)
    builder.ret_void()
    return module


def as_read(text):
    """Return what LLVM reads in ``text``, with names and numbers of values counted anew in each function."""
    module = llvm.parse_assembly(text)
    module.verify()
    module.name = "m"
    return [_counted(part) for part in re.split(r"(?m)^(?=define|declare)", str(module))]


def _counted(text):
    names = {}
    text = _LABEL.sub(lambda found: f"%{found[1]}:", re.sub(r"; preds = .*", "", text))
    return _VALUE.sub(lambda found: names.setdefault(found[0], f"%{len(names)}"), text)


@pytest.mark.parametrize("write", [arithmetic, memory, vectors, branches, calls, metadata])
def test_text_equals_llvmlites(write):
    ours = str(built(KernelModule("m", TARGET), write))
    assert as_read(ours) == as_read(str(built(ir.Module("m"), write)))


def test_named_values_and_blocks_keep_their_names():
    text = str(built(KernelModule("m", TARGET), branches))
    assert '%"few" = icmp slt' in text
    assert '"some":' in text
    assert "%0 = phi float" in text


def test_distinct_metadata_nodes_are_not_merged():
    """Of one operand each, and of none: equal nodes are one, distinct ones name themselves."""
    module = KernelModule("m", TARGET)
    fact = module.add_metadata(["llvm.loop.unroll.disable"])
    groups, loops = [Distinct(module) for _ in range(2)], [Distinct(module, [fact]) for _ in range(2)]
    assert module.add_metadata(["llvm.loop.unroll.disable"]) is fact
    assert [str(x) for x in (*groups, *loops)] == [
        "!1 = distinct !{}", "!2 = distinct !{}", "!3 = distinct !{!3, !0}", "!4 = distinct !{!4, !0}",
    ]  # fmt: skip
    assert len({*groups, *loops}) == 4
