"""The register tile against NumPy: forms, strides, levels, targets."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from support.panels import pack_panels

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Buffer, Tile
from aotc.kernels.cpu.tiles.micro_kernel import UNROLL, UNROLLED_TILE
from aotc.kernels.cpu.tiles.tile import APART_PREFETCH_ROWS, PREFETCH_BYTES, PREFETCH_ROWS, emit_tile
from aotc.kernels.llvm_types import KernelModule
from aotc.kernels.symbol_table import TextModule, symbol_texts
from aotc.lowering.plans.cpu_tiles import best_tile, split_rows
from aotc.targets import TARGETS, Target
from aotc.vmfb.dtypes import size_of, to_numpy
from aotc.vmfb.host.machine import TILES, cpu_features, request_amx_tiles
from benchmarks.engines import load_module

pytestmark = pytest.mark.cpu

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()

RUNNABLE = [
    t
    for t in TARGETS.values()
    if t.kind == "cpu"
    and t.triple.startswith("x86_64")
    and cpu_features().issuperset(t.features)
    and (TILES not in t.features or request_amx_tiles())
]
WHOLE = [form for form, row in FORMS.items() if not row.scaled and not row.offset]  # others have their own tests
DTYPES = {form: (FORMS[form].left, FORMS[form].right) for form in WHOLE}


@dataclass
class Context:
    """A C function of three pointers; symbols are numbers known to the test only."""

    builder: ir.IRBuilder
    target: Target
    pointers: dict[str, ir.Value]
    values: dict[str, ir.Value]

    def index(self, dim: Dim) -> ir.Value:
        if isinstance(dim, int):
            return ir.Constant(ir.IntType(64), dim)
        total = ir.Constant(ir.IntType(64), dim.const)
        for monomial, factor in dim.terms:
            part: ir.Value = ir.Constant(ir.IntType(64), factor)
            for atom in monomial:
                part = self.builder.mul(part, self.values[str(atom)])
            total = self.builder.add(total, part)
        return total

    def address(self, buffer: Buffer, flat: Dim) -> ir.Value:
        offset = self.builder.mul(self.index(flat), ir.Constant(ir.IntType(64), size_of(buffer.dtype)))
        return self.builder.gep(self.pointers[buffer.name], [offset], source_etype=ir.IntType(8))


def build(
    tiles: list[Tile], target: Target, symbols: tuple[str, ...] = (), finished: TextModule | None = None
) -> ir.Module:
    module = KernelModule("test", target)
    module.finished = finished
    i64, pointer = ir.IntType(64), ir.PointerType()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * 3 + [i64] * len(symbols)), "run")
    context = Context(
        ir.IRBuilder(function.append_basic_block()),
        target,
        dict(zip(("a", "b", "out"), function.args)),
        dict(zip(symbols, function.args[3:])),
    )
    for tile in tiles:
        emit_tile(context, tile)
    context.builder.ret_void()
    return module


def machine(target: Target) -> llvm.TargetMachine:
    wanted = llvm.Target.from_triple(target.triple)
    return wanted.create_target_machine(cpu=target.cpu, features=target.llvm_features, opt=3, reloc="pic")


class Native:
    """The module, compiled for ``target`` and loaded."""

    def __init__(self, module: ir.Module, target: Target) -> None:
        tm = machine(target)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        llvm.create_pass_builder(tm, llvm.create_pipeline_tuning_options(3)).getModulePassManager().run(
            parsed, llvm.create_pass_builder(tm, llvm.create_pipeline_tuning_options(3))
        )
        self.assembly = tm.emit_assembly(parsed)
        self.engine = load_module(parsed, target)
        self.address = self.engine.get_function_address("run")

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, *values: int) -> None:
        kinds = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * len(values)
        ctypes.CFUNCTYPE(None, *kinds)(self.address)(a.ctypes.data, b.ctypes.data, out.ctypes.data, *values)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype in ("i8", "u8"):
        info = np.iinfo(to_numpy(dtype))
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(to_numpy(dtype))
    return rng.standard_normal(shape).astype(to_numpy(dtype))


def check(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    if got.dtype == np.int32:
        np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64))
    else:
        want = a.astype(np.float64) @ b.astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=1e-4 if got.dtype == np.float32 else 1e-12, atol=1e-4)


def tile_of(form: str, rows: int, cols: int, k: int, n: int, a_dtype: str | None = None, **more: object) -> Tile:
    group, left = FORMS[form].group, a_dtype or DTYPES[form][0]
    steps = -(-k // group)
    return Tile(
        rows, cols, Buffer("out", FORMS[form].out, (rows, n)), 0, n, Buffer("a", left, (rows, k)), 0, k,
        Buffer("b", DTYPES[form][1], (steps * group * cols,)), 0, ((steps, group, group * cols),), FORMS[form], **more,
    )  # fmt: skip


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(("rows", "vectors", "k"), [(1, 4, 36), (3, 2, 12), (5, 1, 4), (12, 2, 64)])
def test_forms(form: str, rows: int, vectors: int, k: int, target: Target) -> None:
    if form == "f32_f16" and "f16" in target.lacks:
        pytest.skip("has no instruction that widens f16")
    cols = vectors * target.vector_bytes // size_of(FORMS[form].out)
    rng = np.random.default_rng(k)
    a, b = numbers(rng, (rows, k), DTYPES[form][0]), numbers(rng, (k, cols), DTYPES[form][1])
    out = np.full((rows, cols), 7, to_numpy(FORMS[form].out))
    run = Native(build([tile_of(form, rows, cols, k, cols)], target), target)
    run(a, pack_panels(b, cols, form), out)
    check(out, a, b)


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize(("form", "a_dtype"), [("bf16", "f32"), ("i8", "u8")])
def test_other_left_dtype(form: str, a_dtype: str, target: Target) -> None:
    cols = 2 * target.vector_bytes // 4
    rng = np.random.default_rng(1)
    a, b = numbers(rng, (4, 24), a_dtype), numbers(rng, (24, cols), DTYPES[form][1])
    out = np.zeros((4, cols), to_numpy(FORMS[form].out))
    Native(build([tile_of(form, 4, cols, 24, cols, a_dtype)], target), target)(a, pack_panels(b, cols, form), out)
    check(out, a, b)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 7, 8, 9])
def test_remainders(k: int) -> None:
    target = RUNNABLE[-1]
    cols = target.vector_bytes // 4
    rng = np.random.default_rng(k)
    a, b = numbers(rng, (2, max(k, 1)), "f32"), numbers(rng, (k, cols), "f32")
    out = numbers(rng, (2, cols), "f32")
    Native(build([tile_of("f32", 2, cols, k, cols)], target), target)(a, pack_panels(b, cols, "f32"), out)
    check(out, a[:, :k].reshape(2, k), b)


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("k", [0, 2, 4, 6, 8, 10, 18])
def test_remainders_of_pairs(k: int, target: Target) -> None:
    cols = target.vector_bytes // 4
    rng = np.random.default_rng(k)
    a, b = numbers(rng, (2, max(k, 1)), "bf16"), numbers(rng, (k, cols), "bf16")
    out = numbers(rng, (2, cols), "f32")
    Native(build([tile_of("bf16", 2, cols, k, cols)], target), target)(a, pack_panels(b, cols, "bf16"), out)
    check(out, a[:, :k].reshape(2, k), b)


@pytest.mark.parametrize("a_dtype", ["bf16", "f32"])
def test_pairs_by_one_instruction(a_dtype: str) -> None:
    """Of each pair of vectors, where both operands are bf16 and the target has it; in squares on AArch64."""
    for target in (t for t in TARGETS.values() if t.kind == "cpu"):
        text = str(build([tile_of("bf16", 3, 2 * target.vector_bytes // 4, 8, 32, a_dtype)], target))
        one = target.name == "cpu:x86-64-v4-bf16" and a_dtype == "bf16"
        square = target.name == "cpu:aarch64-bf16" and a_dtype == "bf16"
        scalable = target.name == "cpu:aarch64-sve256" and a_dtype == "bf16"
        matrix = "bf16" in target.matrices and a_dtype == "bf16"
        assert ("llvm.x86.tdpbf16ps" in text) == matrix
        assert len(re.findall(r'call <\d+ x float> @"llvm.x86.avx512bf16.dpbf16ps.512', text)) == 6 * UNROLL * one
        assert len(re.findall(r'call <\d+ x float> @"llvm.aarch64.neon.bfmmla', text)) == 8 * square
        assert ("aotc.sve.bfmmla" in text) == scalable
        assert ("fma" in text or "fmul" in text) != (one or matrix or square or scalable)


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
def test_convolution_levels_and_symbolic_strides(target: Target) -> None:
    """A 3x3 window over an image in place: two levels, every number given at run time."""
    width, channels, cols, rows = 9, 5, target.vector_bytes // 4, 4
    w, c, n = sym("w"), sym("c"), sym("n")
    a, b = Buffer("a", "f32", (3, w, c)), Buffer("b", "f32", (9 * c, cols))
    levels = ((3, w * c, 3 * c * cols), (3 * c, 1, cols))
    tile = Tile(rows, cols, Buffer("out", "f32", (rows, n)), 0, n, a, 0, c, b, 0, levels)
    rng = np.random.default_rng(2)
    image, weights = numbers(rng, (3, width, channels), "f32"), numbers(rng, (9 * channels, cols), "f32")
    out = np.zeros((rows, cols + 3), np.float32)
    Native(build([tile], target, ("w", "c", "n")), target)(image, weights, out, width, channels, cols + 3)
    patches = np.stack([image[:, i : i + 3].reshape(-1) for i in range(rows)])
    check(out[:, :cols], patches, weights)
    assert not out[:, cols:].any()


def test_packed_and_transposed_left() -> None:
    """bf16 pairs whose k is the slow axis of ``a``: a[k, i]."""
    target = RUNNABLE[-1]
    cols, rows, k = target.vector_bytes // 4, 3, 8
    rng = np.random.default_rng(3)
    a, b = numbers(rng, (k, rows), "bf16"), numbers(rng, (k, cols), "bf16")
    out = np.zeros((rows, cols), np.float32)
    tile = Tile(
        rows, cols, Buffer("out", "f32", (rows, cols)), 0, cols, Buffer("a", "bf16", (k, rows)), 0, 1,
        Buffer("b", "bf16", (k, cols)), 0, ((k // 2, 2 * rows, 2 * cols),), FORMS["bf16"], a_inner=rows,
    )  # fmt: skip
    Native(build([tile], target), target)(a, pack_panels(b, cols, "bf16"), out)
    check(out, a.T, b)


def test_equal_shapes_share_one_function() -> None:
    target = RUNNABLE[-1]
    tile = tile_of("f32", 2, 16, 8, 16)
    other = tile_of("f32", 2, 16, 9, 16)
    module = build([tile, tile, other], target)
    assert sum(f.name.startswith("tile_") for f in module.functions) == 2
    assert str(module) == str(build([tile, tile, other], target))


def functions_of(module: ir.Module) -> dict[str, str]:
    """Return the text of each function of a module."""
    return {name: text for name, text in symbol_texts(module).items() if name != "run"}


@pytest.mark.parametrize("name", ["cpu:x86-64-v3", "cpu:x86-64-v4"])
def test_kernels_share_the_text_of_a_shape(name: str) -> None:
    """What a second kernel gets is what is written for it alone; several shapes declare what they call once."""
    target = TARGETS[name]
    small, large = tile_of("f32", 2, 16, 8, 16), tile_of("f32", 3, 16, 9, 16)
    alone = functions_of(build([small, large], target))
    for tiles in ([small], [small, large]):
        finished = TextModule(target.triple, "")
        module = build(tiles, target, finished=finished)
        assert finished.symbols.items() <= alone.items()
        assert sum(f.is_declaration for f in module.functions) == len(tiles)
    assert finished.symbols == alone
    llvm.parse_assembly(str(finished)).verify()


@pytest.mark.parametrize("name", ["cpu:aarch64", "cpu:aarch64-dotprod", "cpu:aarch64-bf16"])
@pytest.mark.parametrize("form", WHOLE)
def test_aarch64_compiles_without_x86(form: str, name: str) -> None:
    target = TARGETS[name]
    lanes = target.vector_bytes // size_of(FORMS[form].out)
    module = build([tile_of(form, 4, 2 * lanes, 16, 2 * lanes)], target)
    assert "x86" not in str(module).replace(target.triple, "")
    parsed = llvm.parse_assembly(str(module))
    assert len(machine(target).emit_object(parsed)) > 0


@pytest.mark.parametrize("rows", [PREFETCH_ROWS, PREFETCH_ROWS + 1])
def test_few_rows_prefetch(rows: int) -> None:
    text = str(build([tile_of("f32", rows, 32, 16, 32)], TARGETS["cpu:x86-64-v4"]))
    assert ("llvm.prefetch" in text) == (rows <= PREFETCH_ROWS)


@pytest.mark.parametrize("rows", [APART_PREFETCH_ROWS, APART_PREFETCH_ROWS + 1])
def test_steps_that_lie_apart_are_fetched_by_whole_steps(rows: int) -> None:
    apart = replace(tile_of("f32", rows, 32, 16, 32), levels=((16, 1, 100),))
    text = str(build([apart], TARGETS["cpu:x86-64-v4"]))
    assert ("llvm.prefetch" in text) == (rows <= APART_PREFETCH_ROWS)
    if rows <= APART_PREFETCH_ROWS:
        assert f"i64 {PREFETCH_BYTES // (32 * 4) * 100 * 4}" in text


@pytest.mark.parametrize(("rows", "iterations"), [(UNROLLED_TILE // 2, UNROLL), (UNROLLED_TILE // 2 + 1, 1)])
def test_tiles_of_many_vectors_are_written_once(rows: int, iterations: int) -> None:
    text = str(build([tile_of("f32", rows, 32, 16 * UNROLL, 32)], TARGETS["cpu:x86-64-v4"]))
    assert len(re.findall(r"call .*@.?llvm\.fma", text)) == 2 * rows * iterations


def test_no_spills_and_wide_vectors() -> None:
    target = TARGETS["cpu:x86-64-v4"]
    assembly = Native(build([tile_of("f32", 13, 32, 64, 32)], target), target).assembly if target in RUNNABLE else ""
    assert "(%rsp), %zmm" not in assembly


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "f32", "cols": 17},
        {"form": "i8", "cols": 16, "a_inner": 2},
    ],
)
def test_impossible_tiles_are_refused(wrong: dict) -> None:
    cols, form = wrong.pop("cols"), wrong.pop("form")
    with pytest.raises(InternalError, match="tile"):
        build([tile_of(form, 2, cols, 8, cols, **wrong)], TARGETS["cpu:x86-64-v4"])


def test_pack_panels_layout() -> None:
    b = np.arange(1, 16, dtype=np.int8).reshape(5, 3)
    packed = pack_panels(b, 2, "i8")
    assert packed.shape == (2, 2, 8)
    assert packed[0, 0].tolist() == [1, 4, 7, 10, 2, 5, 8, 11]
    assert packed[1, 0].tolist() == [3, 6, 9, 12, 0, 0, 0, 0]
    assert packed[1, 1].tolist() == [15, 0, 0, 0, 0, 0, 0, 0]
    pairs = pack_panels(b.astype(ml_dtypes.bfloat16), 4, "bf16")
    assert pairs.shape == (1, 3, 8)
    assert pairs[0, 2].astype(int).tolist() == [13, 0, 14, 0, 15, 0, 0, 0]


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.kind == "cpu"], ids=lambda t: t.name)
@pytest.mark.parametrize("form", FORMS)
def test_best_tile_fits_the_registers(form: str, target: Target) -> None:
    lanes = target.vector_bytes // size_of(FORMS[form].out)
    for m in (1, 2, 3, 4, 5, 8, 64, 1000, sym("m")):
        for n in (1, 10, 64, 4096, sym("n")):
            rows, cols = best_tile(m, n, 256, FORMS[form], target)
            assert cols % lanes == 0
            vectors = cols // lanes
            assert vectors >= 1
            if FORMS[form].dot_product_dtype in target.matrices:
                assert -(-rows // 16) * vectors <= 4  # with one for a at least, and two for b, of eight
                assert rows <= 32
            else:
                assert rows * vectors + vectors + 1 <= target.registers
            assert not isinstance(m, int) or rows <= m
            assert not isinstance(m, int) or m > 4 or rows == m


@pytest.mark.parametrize(("rows", "pitch", "most"), [
    (14, 3072, 14), (14, 8192, 7), (14, 0, 14), (15, 3072, 14), (15, 8192, 7), (12, 8192, 12),
])  # fmt: skip
def test_rows_in_the_same_cache_sets_are_several_tiles(rows: int, pitch: int, most: int) -> None:
    assert best_tile(rows, 64, 768, FORMS["f32"], TARGETS["cpu:x86-64-v4"], pitch) == (most, 32)


def test_split_rows_is_balanced() -> None:
    assert split_rows(128, 13) == ((13, 8), (12, 2))
    assert split_rows(0, 13) == ()
    for m in range(1, 60):
        runs = split_rows(m, 13)
        assert sum(rows * tiles for rows, tiles in runs) == m
        assert all(rows <= 13 for rows, _ in runs)
