"""What LLVM makes of the loops of a kernel: as many turns as they have, their addresses as they are."""

import gc
import os
import re
import threading

import numpy as np
import pytest
from llvmlite import ir

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import compile_kernel, kernel_assembly, optimized_kernel_module, unoptimized_kernel_module
from aotc.kernels.emit.metadata import constants_fill_registers
from aotc.kernels.loop_addresses import loop_addresses, with_fixed_addresses
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def no_direct_vectors(monkeypatch):
    """Leave all loops to LLVM: plain maps are otherwise emitted as vectors."""
    monkeypatch.setattr("aotc.kernels.cpu.compile.vector_loops", lambda *_: None)


X86, ARM = TARGETS["cpu:x86-64-v4"], TARGETS["cpu:aarch64"]


def share(iterations, begin="64*p", last=""):
    """The text of a kernel each of whose items goes through ``iterations`` elements of its own."""
    return f"""def kernel(a0: "f32[2048]", /, o0: "f32[2048]", *, grid: "16", flops: "2048", bytes: "16384"):
    for p in parallel(0, 16):
        for j in range({begin}, {begin} + {iterations}, extent=2048):
            o0[j{last}] = a0[j{last}] * f32(3.0)
"""


DEAR = share(128).replace("a0[j] * f32(3.0)", "tanh(a0[j])")
NARROW = DEAR.replace('"f32[2048]", *', '"bf16[2048]", *').replace("tanh(a0[j])", 'convert(tanh(a0[j]), "bf16")')


@pytest.mark.parametrize("iterations", [64, 128])
def test_a_loop_that_begins_anywhere_has_its_number_of_turns(iterations):
    """Vectors alone, and no code for turns that fill none: LLVM does not see it in two bounds."""
    module = str(optimized_kernel_module(parse_kernel(share(iterations)), X86))
    assert re.search(r"fmul .*<\d+ x float>", module)
    assert not re.search(r"fmul [a-z ]*float ", module)


def test_a_loop_without_a_known_number_of_turns_has_code_for_the_rest():
    module = str(optimized_kernel_module(parse_kernel(share("min(64, p)")), X86))
    assert re.search(r"fmul .*float", module)
    assert "icmp" in module


def test_the_loop_over_items_is_not_written_out_several_times():
    module = str(unoptimized_kernel_module(parse_kernel(share(64)), X86))
    (fact,) = re.findall(r"br i1 %more, label %turn, label %done, !llvm.loop (!\d+)", module)
    (node,) = re.findall(rf"^{fact} = distinct !{{{fact}, (!\d+)}}", module, re.MULTILINE)
    assert f'{node} = !{{!"llvm.loop.unroll.disable"}}' in module


def panel(last):
    """The text of a kernel that copies rows of 64 to an array with a last axis of ``last``."""
    return f"""def kernel(a0: "f32[16, 64]", /, o0: "f32[16, 64, {last}]", *, grid: "16"):
    for p in parallel(0, 16):
        for j in range(0, 64):
            o0[p, j, 0] = a0[p, j]
"""


@pytest.mark.parametrize(("last", "kept"), [(1, True), (2, False)])
def test_a_loop_along_an_array_is_kept_for_vectors_whatever_stands_behind_its_axis(last, kept):
    """Panels of weights have a last axis of 1: LLVM took ten times as long when it unrolled their 64 turns."""
    text = str(unoptimized_kernel_module(parse_kernel(panel(last)), X86))
    assert ("%j, label %after_j, !llvm.loop" in text) is kept


DIVIDED = """def kernel(a0: "f32[64*m]", /, o0: "f32[8*n, 16]", *, n: "dim(lo={lo})", m: "dim", grid: "8*n"):
    for p in parallel(0, 8*n):
        for j in range(0, m):
            for i in range(0, 16):
                o0[p, i] = a0[(p // n) + (j % n) + i]
"""


@pytest.mark.parametrize(("lo", "before"), [(1, True), (0, False)])
def test_divisions_that_no_turn_changes_stand_before_the_loop(lo, before):
    """LLVM moves none whose divisor is no constant, and a loop without turns may be one that divides by 0."""
    text = str(unoptimized_kernel_module(parse_kernel(DIVIDED.format(lo=lo)), X86))
    body = text[text.index("@aotc_body") :]
    outside, inner = body.split("\nj:", 1)[0], body.split("\ni:", 1)[1]
    assert outside.count("udiv") == before
    assert inner.count("udiv") == (not before)
    assert inner.count("urem") == (not before)


STRIDED = """
define void @walk(ptr %a, ptr %b, i64 %n, i64 %stride) {
entry:
  br label %turn
turn:
  %i = phi i64 [ 0, %entry ], [ %next, %turn ]
  %at = mul i64 %i, %stride
  %from = getelementptr float, ptr %a, i64 %at
  %to = getelementptr float, ptr %b, i64 %at
  %x = load float, ptr %from
  store float %x, ptr %to
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %turn, label %done
done:
  ret void
}
"""


def code(target):
    return back_end.parse_assembly_for_target(STRIDED, target).get_asm_str()


def test_addresses_are_kept_within_and_llvm_is_the_same_afterwards():
    before = code(X86)
    with loop_addresses(True):
        inside = code(X86)
    assert "imul" in inside
    assert "imul" not in before
    assert code(X86) == before
    with pytest.raises(ValueError, match="within"), loop_addresses(True):
        raise ValueError("within")
    assert code(X86) == before
    compile_kernel(parse_kernel(share(64)), X86)
    assert code(X86) == before


def test_the_option_stays_between_kernels_and_goes_with_the_last():
    before = code(X86)
    with with_fixed_addresses():
        with loop_addresses(True):
            inside = code(X86)
        assert code(X86) == inside
        with loop_addresses(False):
            assert code(X86) == before
        with with_fixed_addresses(), loop_addresses(True):
            pass
        assert code(X86) == inside
    assert code(X86) == before != inside


def test_emitted_ir_is_freed_without_the_garbage_collector():
    """No search for garbage need find it: blocks name their instructions, which name their block."""

    def count():  # by type: isinstance asks what a weak proxy stood for, which may be gone
        return sum(issubclass(type(x), (ir.Block, ir.Instruction)) for x in gc.get_objects())

    compile_kernel(parse_kernel(share(64)), X86)
    gc.collect()
    gc.disable()
    try:
        before = count()
        compile_kernel(parse_kernel(share("min(64, p)")), X86)
        assert count() == before
    finally:
        gc.enable()


def test_code_of_other_machines_is_as_it_was():
    before = compile_kernel(parse_kernel(share("min(64, p)")), ARM)
    with loop_addresses(False):
        assert compile_kernel(parse_kernel(share("min(64, p)")), ARM) == before


def test_threads_wait_for_those_that_make_code_the_other_way():
    order, inside, go_on = [], threading.Event(), threading.Event()

    def first():
        with loop_addresses(True):
            inside.set()
            go_on.wait(60)
            order.append("first")

    def other():
        with loop_addresses(False):
            order.append("other")

    def alike():
        with loop_addresses(True):
            order.append("alike")

    threads = [threading.Thread(target=call) for call in (first, other, alike)]
    threads[0].start()
    inside.wait(60)
    threads[1].start()
    threads[2].start()
    threads[2].join(60)
    assert order == ["alike"]
    go_on.set()
    for t in threads:
        t.join(60)
    assert order == ["alike", "first", "other"]


def test_code_is_the_same_whatever_other_threads_make():
    plain, dear = parse_kernel(share("min(64, p)")), parse_kernel(NARROW)
    assert constants_fill_registers(dear)
    want, wanted = compile_kernel(plain, X86), compile_kernel(dear, X86)
    found = []
    calls = [
        lambda: found.append(compile_kernel(plain, X86) == want),
        lambda: found.append(compile_kernel(dear, X86) == wanted),
    ]
    threads = [threading.Thread(target=call) for call in calls * 4]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [True] * 8


def test_a_child_of_a_fork_begins_again():
    with loop_addresses(True):
        child = os.fork()
        if child == 0:
            with loop_addresses(False):
                os._exit(7)
        assert os.waitpid(child, 0)[1] >> 8 == 7


def test_the_assembly_that_is_shown_is_that_of_the_object():
    kernel = parse_kernel(share("min(64, p)"))
    with loop_addresses(True):
        inside = back_end.codegen_for(X86).machine.emit_assembly(optimized_kernel_module(kernel, X86))
    assert kernel_assembly(kernel, X86) == inside


def test_dear_loops_of_converted_floats_have_no_register_for_an_index():
    """Their constants would be copied in each turn: half as many instructions again for a gelu of bf16."""
    dear, narrow = DEAR, parse_kernel(NARROW)
    for kernel, kept in ((narrow, True), (parse_kernel(dear), False), (parse_kernel(share(128)), False)):
        assert constants_fill_registers(kernel) == kept
    counted = back_end.codegen_for(X86).machine.emit_assembly(optimized_kernel_module(narrow, X86))
    assert kernel_assembly(narrow, X86) == counted


@pytest.mark.parametrize("size", [7, 1000, 4096, 10_000, 65_537])
def test_shares_of_all_sizes_are_right(size):
    x = np.random.default_rng(size).normal(size=(3, size)).astype("float32")
    module = aotc.load(aotc.compile(lambda x: (x * 2 + x[:, ::-1]).astype("bfloat16").astype("float32"), x), threads=3)
    expected = (x * 2 + x[:, ::-1]).astype(np.float32)
    np.testing.assert_allclose(module.invoke("main", x)[0], expected, rtol=2**-8, atol=2**-8)


PICKED = """def kernel(a0: "f16[2, 4096]", /, o0: "f16[4096]", *, grid: "1"):
    for j in range(0, 4096):
        acc = private("f16[]")
        acc[()] = f16(-inf)
        for w in unroll(0, 2):
            acc[()] = reduce_{fn}(acc[()], a0[w, j])
        o0[j] = acc[()]
"""


@pytest.mark.parametrize("fn", ["max", "min"])
@pytest.mark.parametrize("target", [X86, TARGETS["cpu:x86-64-v3"], ARM], ids=lambda t: t.name)
def test_the_largest_of_halfs_is_picked_in_vectors(fn, target):
    """Of what LLVM narrows to ``llvm.maximum.f16`` it makes no vectors: no target has the instruction."""
    text = str(optimized_kernel_module(parse_kernel(PICKED.format(fn=fn)), target))
    assert re.search(rf"call .*llvm\.{fn}imum\.v\d+f32", text)
    assert not re.search(rf"llvm\.{fn}imum\.[v0-9]*f16", text)
