"""Tiles by AArch64's instructions for pairs and quads: what is emitted, its meaning beside the loop IR's, its loops."""

import platform
import re

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.played.played_dots import HERE, run_played

from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cpu.compile import kernel_assembly
from aotc.kernels.cpu.tiles.micro_kernel import innermost_unroll_factor
from aotc.lowering.plans.cpu_tiles import best_tile
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.machine import cpu_features

pytestmark = [pytest.mark.cpu]
can_play = platform.machine() == "x86_64" and cpu_features() >= set(HERE.features)
OLD, DOTS, PAIRS, SVE, LONG = (TARGETS[f"cpu:aarch64{x}"] for x in ("", "-dotprod", "-bf16", "-sve256", "-sve512"))
CASES = [  # the target, the form, the dtype on the left, the instruction of the inner loop
    (DOTS, "i8", "i8", "sdot"),
    (DOTS, "i8", "u8", "sdot"),
    (PAIRS, "i8", "i8", "smmla"),
    (PAIRS, "i8", "u8", "usmmla"),
    (PAIRS, "bf16", "bf16", "bfmmla"),
    (SVE, "i8", "i8", "smmla"),
    (SVE, "i8", "u8", "usmmla"),
    (SVE, "bf16", "bf16", "bfmmla"),
    (LONG, "i8", "i8", "sdot"),
    (LONG, "i8", "u8", "sdot"),
]
OF_ONE_ROW = {"smmla": "sdot", "usmmla": "usdot", "bfmmla": "bfdot"}
each_case = pytest.mark.parametrize(
    ("target", "form", "dtype", "instruction"), CASES, ids=lambda x: getattr(x, "name", x)
)


def kernel_of(form, dtype, rows, cols, k):
    group = FORMS[form].group
    right = FORMS[form].right
    head = f'def k(a0: "{dtype}[{rows}, {k}]", a1: "{right}[{k // group}, {cols * group}]", /, '
    head += f'o0: "{FORMS[form].out}[{rows}, {cols}]", *, grid: "1", flops: "1", bytes: "1"):'
    said = f"rows={rows}, cols={cols}, out_base=0, out_row={cols}, a_base=0, a_row={k}, b_base=0"
    levels = f"levels=[({k // group}, {group}, {cols * group})]"
    return parse_kernel(f"{head}\n    tile(o0, a0, a1, {said}, {levels}, form={FORMS[form]})\n")


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype in ("i8", "u8"):
        info = np.iinfo(to_numpy(dtype))
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(to_numpy(dtype))
    return rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)  # sums are exact in any order


def arrays_of(kernel):
    """Return random inputs, what the loop IR makes of them, and where to put the answer."""
    inputs = [values(x.shape, x.dtype, n) for n, x in enumerate(kernel.inputs)]
    want, got = (np.full(kernel.outputs[0].shape, 7, to_numpy(kernel.outputs[0].dtype)) for _ in range(2))
    run_kernel(kernel, [*inputs, want], {})
    return inputs, want, got


@pytest.mark.skipif(not can_play, reason="the instructions are played by an x86 processor")
@each_case
@pytest.mark.parametrize(("rows", "vectors", "k"), [(1, 8, 36), (2, 3, 20), (3, 2, 12), (5, 1, 4), (12, 2, 64)])
def test_the_instruction_means_the_tile(target, form, dtype, instruction, rows, vectors, k):
    kernel = kernel_of(form, dtype, rows, target.vector_bytes // 4 * vectors, k)
    inputs, want, got = arrays_of(kernel)
    used = OF_ONE_ROW.get(instruction, instruction) if rows == 1 else instruction
    assert run_played(kernel, target, [*inputs, got]) == {used}
    np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(not can_play, reason="the instructions are played by an x86 processor")
@each_case
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8])
def test_terms_that_only_a_call_knows(target, form, dtype, instruction, steps):
    group = FORMS[form].group
    text = f'''def k(a0: "{dtype}[3, {group}*n]", a1: "{FORMS[form].right}[n, {16 * group}]", /,
      o0: "{FORMS[form].out}[3, 16]", *, n: "dim", grid: "1", flops: "1", bytes: "1"):
    tile(o0, a0, a1, rows=3, cols=16, out_base=0, out_row=16, a_base=0, a_row={group}*n, b_base=0,
         levels=[(n, {group}, {16 * group})], form={FORMS[form]})
'''
    kernel = parse_kernel(text)
    inputs = [values((3, group * steps), dtype, 0), values((steps, 16 * group), form, 1)]
    want, got = (np.full((3, 16), 7, to_numpy(FORMS[form].out)) for _ in range(2))
    run_kernel(kernel, [*inputs, want], {"n": steps})
    assert run_played(kernel, target, [*inputs, got], [steps]) == {instruction}
    np.testing.assert_array_equal(got, want)


@pytest.mark.emulated
@each_case
def test_under_qemu(target, form, dtype, instruction):
    if emulated.missing(target.name):
        pytest.skip(f"needs qemu: {emulated.missing(target.name)}")
    for rows in (12, 5, 1):
        kernel = kernel_of(form, dtype, rows, 32, 68)
        inputs, want, got = arrays_of(kernel)
        emulated.run_kernel(kernel, [*inputs, got], 1, target)
        np.testing.assert_array_equal(got, want)


def inner_loop(text, instruction):
    """Return the lines of the basic block that has an instruction, without what comes behind its branch."""
    blocks = re.split(r"^\.LBB\d+_\d+:.*$", text, flags=re.MULTILINE)
    (inner,) = (x for x in blocks if f"\t{instruction}\t" in x)
    return re.split(r"^\tb\.", inner, flags=re.MULTILINE)[0].splitlines()


@each_case
def test_the_inner_loop(target, form, dtype, instruction):
    """A large product's tile: the instruction for all sums, loads and addresses; nothing is spilled or widened."""
    rows, cols = best_tile(66, 64, 1024, FORMS[form], target)
    squares, lanes = instruction in OF_ONE_ROW, target.vector_bytes // 4
    sums = (20 if target.sve_length else 24) if squares else 22
    assert rows * cols // lanes == sums
    lines = inner_loop(kernel_assembly(kernel_of(form, dtype, rows, cols, 1024), target), instruction)
    names = [x.split()[0] for x in lines if x.startswith("\t")]
    shifted = (target in (DOTS, LONG), dtype) == (True, "u8")
    assert names.count(instruction) == innermost_unroll_factor(sums) * (sums + (2 if shifted else 0))
    assert names.count("eor") == (innermost_unroll_factor(22) * rows if shifted else 0) >= names.count("dup")
    others = {"zip1", "zip2"} if squares else {"eor", "dup"}
    assert {x for x in names if not x.startswith(("ld", "add", "cmp", "mov"))} <= {instruction, *others}
    assert names.count("zip1") == names.count("zip2") == (cols // lanes if squares else 0)
    assert not any("[sp" in x for x in lines)
    register = "z" if target.sve_length else "v"
    assert all(re.match(rf"\t{instruction}\t{register}\d", x) for x in lines if f"\t{instruction}\t" in x)


@pytest.mark.parametrize(("form", "instruction"), [("bf16", "bfdot"), ("i8", "sdot")])
def test_one_row_of_long_vectors(form, instruction):
    """No word is brought through memory to be pairs or quads."""
    rows, cols = best_tile(1, 256, 1024, FORMS[form], SVE)
    lines = inner_loop(kernel_assembly(kernel_of(form, form, rows, cols, 1024), SVE), instruction)
    assert sum(f"\t{instruction}\tz" in x for x in lines) == innermost_unroll_factor(cols // 8) * cols // 8
    assert not any("[sp" in x for x in lines)


@pytest.mark.parametrize("form", ["f32", "f64", "f32_bf16", "f32_f16", "bf16"])
def test_no_sum_leaves_the_registers(form):
    left = FORMS[form].left
    for target in (OLD, DOTS, *([] if form == "bf16" else [SVE, LONG])):
        rows, cols = best_tile(66, 64, 1024, FORMS[form], target)
        lines = inner_loop(kernel_assembly(kernel_of(form, left, rows, cols, 1024), target), "fmla")
        assert sum("\tfmla\t" in x for x in lines) >= innermost_unroll_factor(rows * 2) * rows * 2
        assert not any("[sp" in x for x in lines)


def test_processors_without_them():
    for form, dtype in (("i8", "i8"), ("i8", "u8"), ("bf16", "bf16")):
        text = kernel_assembly(kernel_of(form, dtype, 4, 8, 64), OLD)
        assert not re.search(r"\t(sdot|usdot|bfdot)\t", text)
    assert "bfdot" not in kernel_assembly(kernel_of("bf16", "bf16", 4, 8, 64), DOTS)
    assert "bfdot" not in kernel_assembly(kernel_of("bf16", "f32", 4, 8, 64), PAIRS)
