"""Loops for SVE of a known length: vectors in its registers, for every function that a kernel brings along."""

import re

import pytest

from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cpu.compile import kernel_assembly, optimized_kernel_module, unoptimized_kernel_module
from aotc.kernels.emit.vector.sve import with_vector_length
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu
SVE = [TARGETS[f"cpu:aarch64-sve{bits}"] for bits in (256, 512)]
NEON = TARGETS["cpu:aarch64-bf16"]
ELEMENTWISE = """
def k(a0: "f32[4000]", a1: "f32[4000]", /, o0: "f32[4000]", *, grid: "1", flops: "1", bytes: "1"):
    for i in range(0, 4000, 1):
        o0[i] = add(mul(a0[i], a1[i]), a0[i])
"""
SINE = ELEMENTWISE.replace("mul(a0[i], a1[i])", "sin(a1[i])")


def vector_loops(text):
    """Return the basic blocks that end with a branch to themselves and store or add vectors of SVE."""
    found = []
    for label, block in re.findall(r"^\.(LBB\d+_\d+):.*\n((?:\t.*\n|\s*//.*\n)+)", text, re.MULTILINE):
        if re.search(rf"\tb\.\w+\t\.{label}$", block, re.MULTILINE) and re.search(r"\tz\d+\.", block):
            found.append(block)
    return found


@pytest.mark.parametrize("target", SVE, ids=lambda t: t.name)
def test_an_elementwise_loop(target):
    (loop,) = vector_loops(kernel_assembly(parse_kernel(ELEMENTWISE), target))
    assert re.search(r"\tfm(ad|la)\tz\d+\.s, p\d/m", loop)
    assert re.search(r"\tld1w\t\{ z|\tldr\tz", loop)
    assert re.search(r"\tst1w\t\{ z|\tstr\tz", loop)
    assert not re.search(r"\tv\d+\.", loop)


@pytest.mark.parametrize("target", SVE, ids=lambda t: t.name)
def test_functions_for_rare_arguments_come_along(target):
    text = kernel_assembly(parse_kernel(SINE), target)
    assert len(re.findall(r"\tfm(?:ad|la)\tz\d+\.", text)) > 8
    for function in optimized_kernel_module(parse_kernel(SINE), target).functions:
        if not function.is_declaration:
            known = b" ".join(function.attributes)
            assert f"vscale_range({target.sve_length},{target.sve_length})".encode() in known, function.name


def test_other_targets_are_told_nothing():
    text = str(unoptimized_kernel_module(parse_kernel(SINE), NEON))
    assert "vscale" not in text
    assert not re.search(r"\tz\d+\.", kernel_assembly(parse_kernel(SINE), NEON))
    assert with_vector_length(text, NEON) is text


def test_every_definition_says_how_long_vectors_are():
    text = 'define void @"a"()\n{\n}\ndeclare void @b()\ndefine i32 @c(i32 %x) nounwind {\n  ret i32 %x\n}\n'
    said = with_vector_length(text, SVE[0])
    assert 'define void @"a"() vscale_range(2,2)\n{' in said
    assert "define i32 @c(i32 %x) nounwind vscale_range(2,2) {" in said
    assert said.count("vscale_range") == 2
    pair = "define internal {i32, i32} @d() {\nentry:\n"
    assert with_vector_length(pair, SVE[1]).strip() == pair.strip().replace("() {", "() vscale_range(4,4) {")
