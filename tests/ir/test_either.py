"""``either`` of the loop IR: text, verifier, meaning, machine code."""

import re

import jax
import numpy as np
import pytest

import aotc
from aotc.ir.loop.access import accesses, may_overwrite
from aotc.ir.loop.ir import Either, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.kernels.cpu.compile import optimized_kernel_module
from aotc.targets import resolve_targets

TEXT = """\
def k(a0: "f32[3, 8]", a1: "i1[3]", a2: "f32[]", /, o0: "f32[3, 8]", *, grid: "3"):
    for p in parallel(0, 3):
        held = scratch("f32[8]")
        for i in range(0, 8):
            held[i] = a0[p, -i + 7]
        t = a1[p]
        row = either(t, held[0], a0[p, 0], "f32[8]")
        to = either(~t, held[0], o0[p, 0], "f32[8]")
        for j in range(0, 8):
            to[j] = row[j] + a2[()]
        if ~t:
            for m in range(0, 8):
                o0[p, m] = -held[m]
"""


def test_either_parses_back_from_its_text():
    kernel = parse_kernel(TEXT)
    assert print_kernel(kernel) == TEXT
    assert [type(s) for s in walk(kernel.body)].count(Either) == 2
    assert verify_kernel(kernel) == []


def test_either_selects_a_buffer_at_run_time():
    x, choice = np.arange(24, dtype="float32").reshape(3, 8), np.array([True, False, True])
    out = np.zeros_like(x)
    run_kernel(TEXT, [x, choice, np.float32(5) + np.zeros(()).astype("float32"), out])
    np.testing.assert_array_equal(out, np.where(choice[:, None], x[:, ::-1] + 5, -x - 5))


WRONG = {
    "of another dtype": ('a0[p, 0], "f32[8]")\n        to', 'a0[p, 0], "i32[8]")\n        to', "either for row"),
    "of another rank": ('row = either(t, held[0], a0[p, 0]', "row = either(t, held[0], a0[p]", "a0 has 2 dims"),
    "no condition": ("row = either(t,", "row = either(a2[()],", "i1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_verifier_refuses_invalid_either_statements(name):
    old, new, message = WRONG[name]
    assert old in TEXT
    assert any(message in finding for finding in verify_kernel(parse_kernel(TEXT.replace(old, new))))


def test_either_counts_as_access_to_both_whole_buffers():
    """So no output takes the memory of an input that it is chosen beside."""
    kernel = parse_kernel(TEXT)
    whole = {(a.buffer.name, a.write) for a in accesses(kernel.body) if a.index is None}
    assert whole == {(name, write) for name in ("held", "a0", "o0") for write in (True, False)}
    assert not may_overwrite(accesses(kernel.body), kernel.inputs[0], kernel.outputs[0])


def test_a_load_outside_either_is_hoisted_by_llvm():
    """LLVM is told that the scalar ``a2`` is none of the places, and takes its load out of the loop."""
    text = str(optimized_kernel_module(parse_kernel(TEXT), resolve_targets("cpu:x86-64-v3")[0]))
    table = re.search(r"(%\S+) = getelementptr inbounds nuw i8, ptr %buffers, i64 16\n", text)
    assert table
    (pointer,) = re.findall(rf"(%\S+) = load ptr, ptr {table[1]},", text)
    blocks = re.split(r"^\S+:", text, flags=re.MULTILINE)
    (own,) = (block for block in blocks if f"load float, ptr {pointer}," in block)
    assert "fadd" in text
    assert "fadd" not in own


@pytest.mark.cpu
@pytest.mark.parametrize("n", [300, 1000])
def test_compiled_sorts_end_in_the_result_from_either_buffer(n):
    """Sorts of one to four bytes that differ end in the result, from whichever buffer the first pass writes."""
    rng = np.random.default_rng(n)
    rows = np.stack([rng.integers(0, 256**k, n) << shift for k in range(5) for shift in (0, 8) if 8 * k + shift < 33])
    x = rows.astype("uint32")
    module = aotc.load(aotc.compile(lambda x: (jax.numpy.sort(x, 1), jax.numpy.argsort(x, 1)), x, verify_each=True))
    got = module.invoke("main", x)
    np.testing.assert_array_equal(got[0], np.sort(x, 1))
    np.testing.assert_array_equal(got[1], np.argsort(x, 1, kind="stable"))
