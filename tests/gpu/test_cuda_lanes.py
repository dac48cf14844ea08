"""Loops of kind ``lanes`` and shuffles as instructions: vectors, wide loads through the read-only path, ``shfl``."""

import re

import pytest

from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.targets import resolve_targets

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

PTX = resolve_targets("cuda:compute_80")[0]


def instructions(text):
    """The names of all accesses of memory, shuffles and divisions in the PTX of a kernel."""
    from aotc.kernels.cuda.compile import kernel_ptx

    kernel = parse_kernel(text)
    assert verify_kernel(kernel) == []
    names = r"(?:ld|st)\.(?:global|local|shared)[.\w]*|shfl\.sync\.\w+|(?:div|rem)\.[us]\d+"
    return re.findall(names, kernel_ptx(kernel, PTX))


def loop(dtype, body, count=4, size=4096):
    return f'''def k(a: "{dtype}[{size}]", i: "i32[{size}]", /, o: "{dtype}[{size}]", *, grid: "{size // count}"):
    for p in parallel(0, {size // count}):
        for u in lanes(0, {count}):
            {body}
'''


VECTORS = {
    "f32": ("f32", "o[4*p + u] = -a[4*p + u]", 4, ["ld.global.nc.v4.f32", "st.global.v4.f32"]),
    "bf16": ("bf16", "o[8*p + u] = -a[8*p + u]", 8, ["ld.global.nc.v4.u32", "st.global.v4.u32"]),
    "bytes": ("i8", "o[4*p + u] = -a[4*p + u]", 4, ["ld.global.nc.u32", "st.global.u32"]),
    "two vectors": ("f64", "o[4*p + u] = -a[4*p + u]", 4, ["ld.global.nc.v2.f64"] * 2 + ["st.global.v2.f64"] * 2),
    "complex": ("c64", "o[2*p + u] = a[2*p + u]", 2, ["ld.global.nc.v4.f32", "st.global.v4.f32"]),
    "loads before stores": ("f32", "o[p + 1024*u] = -a[p + 1024*u]", 4,
                            ["ld.global.nc.f32"] * 4 + ["st.global.f32"] * 4),
    "not at a multiple": ("f32", "o[4*p + u] = -a[min(4*p + u + 1, 4095)]", 4,
                          ["ld.global.nc.f32"] * 4 + ["st.global.v4.f32"]),
    "a division for all": ("f32", "o[4*p + u] = -a[(4*p + u) // 12]", 4, None),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_neighbours_are_vectors(name):
    dtype, body, count, expected = VECTORS[name]
    found = instructions(loop(dtype, body, count))
    assert found == expected if expected else "div.s64" not in found and "div.u64" not in found


def test_loads_at_computed_indices_are_not_vectorised():
    """The index that each lane loads has one name, and other values."""
    body = "n = let(i[4*p + u], lo=0, extent=4096)\n            o[4*p + u] = a[n]"
    found = instructions(loop("f32", body))
    assert found.count("ld.global.nc.v4.u32") == found.count("st.global.v4.f32") == 1
    assert found.count("ld.global.nc.f32") == 4


@pytest.mark.parametrize(("pitch", "wanted"), [(20, ["ld.shared.v4.f32", "st.shared.v4.f32"]),
                                               (17, ["ld.shared.f32"] * 4 + ["st.shared.f32"] * 4)])  # fmt: skip
def test_neighbours_in_shared_memory_are_vectors(pitch, wanted):
    """Where rows of an array begin at multiples of a vector."""
    text = f'''def k(i: "i32[64]", /, o: "f32[64, 4]", *, grid: "1"):
    w = shared("f32[64, {pitch}]")
    for t in thread(0, 64):
        n = let(i[t], lo=0, extent=64)
        for u in lanes(0, 4):
            w[t, 4 + u] = -w[n, 8 + u]
    barrier()
    for t in thread(0, 64):
        for u in range(0, 4):
            o[t, u] = w[63 - t, 4 + u]
'''
    assert [x for x in instructions(text) if "shared" in x][: len(wanted)] == wanted


def test_inverse_roots_are_an_instruction_and_a_step():
    from aotc.kernels.cuda.compile import kernel_ptx

    text = kernel_ptx(parse_kernel(loop("f32", "o[p] = rsqrt(a[p])", 1)), PTX)
    assert ("rsqrt.approx.f32" in text, "sqrt.rn.f32" in text, "div.rn.f32" in text) == (True, False, False)
    text = kernel_ptx(parse_kernel(loop("f64", "o[p] = rsqrt(a[p])", 1)), PTX)
    assert "sqrt.rn.f64" in text


@pytest.mark.parametrize(("dtype", "words"), [("f32", 1), ("bf16", 1), ("f64", 2), ("c64", 2), ("i8", 1)])
def test_shuffles_move_words(dtype, words):
    text = f'''def k(a: "{dtype}[64]", /, o: "{dtype}[64]", *, grid: "1"):
    x = private("{dtype}[64]")
    y = private("{dtype}[64]")
    for t in thread(0, 64):
        x[t] = a[t]
    shuffle(y, x, mask=16)
    for t in thread(0, 64):
        o[t] = y[t]
'''
    found = instructions(text)
    assert found.count("shfl.sync.bfly") == words
    assert not [name for name in found if ".local" in name]


# Of eight lanes: how many sums and products of two elements, of one, and how many roundings, of two or of one.
PAIRS = {
    "of what memory holds": ("o[8*p + u] = (a[8*p + u] * a[8*p + u]) + a[8*p + u]", (8, 0, 0)),
    "a difference": ("o[8*p + u] = a[8*p + u] - b[8*p + u]", (4, 0, 0)),
    "rounded, to be stored": ('o[8*p + u] = convert(f[8*p + u] * f[8*p + u], "bf16")', (0, 0, 4)),
    "rounded, to be added": ('o[8*p + u] = a[8*p + u] + convert(f[8*p + u], "bf16")', (4, 0, 4)),
    "with one for all": ("o[8*p + u] = a[8*p + u] + b[p]", (4, 0, 0)),
    "not stored": ('w[8*p + u] = convert(convert(f[8*p + u], "bf16"), "f32")', (0, 0, 8)),
    "of functions": ('w[8*p + u] = convert(tanh(a[8*p + u]) + tanh(b[8*p + u]), "f32")', (0, 8, 16)),
    "of functions, stored": ("o[8*p + u] = tanh(a[8*p + u]) + tanh(b[8*p + u])", (4, 0, 16)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_elements_of_bf16_are_one_instruction(name):
    from aotc.kernels.cuda.compile import kernel_ptx

    body, wanted = PAIRS[name]
    buffers = 'a: "bf16[64]", b: "bf16[64]", f: "f32[64]", /, o: "bf16[64]", w: "f32[64]"'
    kernel = parse_kernel(f'''def k({buffers}, *, grid: "8"):
    for p in parallel(0, 8):
        for u in lanes(0, 8):
            {body}
''')
    text = kernel_ptx(kernel, PTX)
    assert tuple(map(text.count, ("fma.rn.bf16x2 ", "fma.rn.bf16 ", "cvt.rn.bf16"))) == wanted


def test_loops_of_one_element_of_bf16_have_an_instruction_for_each():
    from aotc.kernels.cuda.compile import kernel_ptx

    text = kernel_ptx(parse_kernel(loop("bf16", "o[p] = (a[p] * a[p]) + a[p]", 1)), PTX)
    assert (text.count("fma.rn.bf16 "), text.count("fma.rn.bf16x2")) == (2, 0)


@pytest.mark.parametrize(("size", "read", "threads"), [(1 << 20, 4, 256), (1 << 20, 1 << 20, 128), (1 << 12, 4, 128)])
def test_kernels_that_only_write_have_larger_blocks(size, read, threads):
    from aotc.kernels.cuda.compile import kernel_ptx
    from aotc.kernels.cuda.flat import block_threads_of_flat_kernel

    kernel = parse_kernel(f'''def k(a: "f32[{read}]", /, o: "f32[{size}]", *, grid: "{size // 4}"):
    for p in parallel(0, {size // 4}):
        for u in lanes(0, 4):
            o[4*p + u] = a[0]
''')
    assert block_threads_of_flat_kernel(kernel) == threads
    assert f".maxntid {threads}" in kernel_ptx(kernel, PTX)


@pytest.mark.parametrize(("rows", "row", "index", "threads"), [
    (1024, 1024, "p // 256, n", 1024), (1024, 1024, "n, p % 1024", 128), (1024, 1024, "n, n", 128),
    (32, 1 << 15, "p // 8192, n", 128), (1 << 14, 64, "p // 16, n", 128), (16, 1024, "p // 256, n", 128),
])  # fmt: skip
def test_kernels_that_read_anywhere_in_rows_have_large_blocks(rows, row, index, threads):
    from aotc.kernels.cuda.compile import kernel_ptx
    from aotc.kernels.cuda.flat import block_threads_of_flat_kernel

    size = rows * row
    buffers = f'a: "f32[{rows}, {row}]", i: "i32[{size}]", /, o: "f32[{size}]"'
    kernel = parse_kernel(f'''def k({buffers}, *, grid: "{size // 4}"):
    for p in parallel(0, {size // 4}):
        for u in lanes(0, 4):
            n = let(i[4*p + u], lo=0, extent={min(rows, row)})
            o[4*p + u] = a[{index}]
''')
    assert block_threads_of_flat_kernel(kernel) == threads
    assert f".maxntid {threads}" in kernel_ptx(kernel, PTX)
