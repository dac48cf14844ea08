"""What a warp stores, run by threads of the CPU: the code that is emitted, with Python for its few instructions."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import llvmlite.binding as llvm
from llvmlite import ir

from aotc.kernels.cuda.device_function import register_struct_type
from aotc.kernels.cuda.templates.gemm import epilogue as store_pieces
from aotc.kernels.cuda.templates.gemm.epilogue_layout import ResultPieces
from aotc.kernels.cuda.templates.steps import FAR, LOAD_AHEAD, STORE
from aotc.kernels.llvm_types import F32, F64, I32, I64, VOID, i32
from benchmarks.engines import load_module

pytestmark = pytest.mark.cudasim

LANES = 32
C = {F32: ctypes.c_float, F64: ctypes.c_double, I32: ctypes.c_int32, I64: ctypes.c_int64, VOID: None}


class WarpBuilder(ir.IRBuilder):
    """Emits calls in the place of instructions of PTX."""

    def outside(self, name, result, *values):
        kind = ir.FunctionType(result, [v.type for v in values])
        found = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return self.call(found, values)

    def asm(self, ftype, asm, constraint, args, side_effect, name=""):
        if ".v" not in asm:
            return self.outside("loaded", ftype.return_type, *args)
        whole = ir.Constant(ftype.return_type, ir.Undefined)
        kinds = ftype.return_type.elements
        for n, kind in enumerate(kinds):
            one = self.outside("loaded", kind, self.add(args[0], i32(16 // len(kinds) * n)))
            whole = self.insert_value(whole, one, n)
        return whole


def instruction(builder, text, result, operands, values):
    """Stand for :func:`aotc.kernels.cuda.ptx.assembly`."""
    name = {"bar.": "meet", "st.s": "stored", "pref": "asked"}[text[:4]]
    return builder.outside(name, VOID, *values)


def load_ahead(module, pieces):
    """Define what is loaded for a piece: numbers of its place."""
    function = ir.Function(module, ir.FunctionType(register_struct_type(pieces.held), [I64] * 3), LOAD_AHEAD)
    b = ir.IRBuilder(function.append_basic_block())
    z, row, col = function.args
    whole = ir.Constant(register_struct_type(pieces.held), ir.Undefined)
    first = b.add(b.mul(row, ir.Constant(I64, 1000)), b.add(col, b.mul(z, ir.Constant(I64, 100))))
    for n in range(sum(count for _, count in pieces.held)):
        value = b.sitofp(b.add(b.mul(first, ir.Constant(I64, 8)), ir.Constant(I64, n)), F32)
        whole = b.insert_value(whole, value, n)
    b.ret(whole)


def run_warp(emit, kinds, calls):
    """Run what ``emit`` makes of a builder and a lane on 32 threads; ``calls`` are what it calls: types, Python."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(VOID, [I32, *kinds]), "warp")
    builder = WarpBuilder(function.append_basic_block())
    emit(builder, function.args[0], list(function.args[1:]))
    builder.ret_void()
    kept = [ctypes.CFUNCTYPE(*types)(python) for types, python in calls.values()]
    for name, callback in zip(calls, kept):
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
    engine = load_module(str(module))
    native = ctypes.CFUNCTYPE(None, *(C[k] for k in (I32, *kinds)))(engine.get_function_address("warp"))


    def run(lane, *values, alive=(kept, engine)):
        return native(lane, *values)

    return run


@pytest.mark.parametrize(("parts", "transposed", "ahead"), [(1, False, 1), (2, False, 3), (1, True, 2)])
@pytest.mark.parametrize(("rows", "cols"), [(200, 200), (72, 48)])
@pytest.mark.parametrize(
    ("total", "width", "down", "held"),
    [
        *((t, *form) for t in ("f32", "i32", "f64") for form in ((1, False, 0), (1, True, 0))),
        *((t, *form) for t in ("f32", "i32", "f64") for form in ((4, False, 4), (4, True, 1))),
        *((t, *form) for t in ("f32", "i32") for form in ((8, False, 0), (8, False, 9), (8, True, 8), (16, False, 0))),
        *(("f64", *form) for form in ((2, False, 0), (2, False, 2), (2, True, 2))),
    ],
)
def test_each_sum_is_stored_once(monkeypatch, width, down, held, total, rows, cols, parts, transposed, ahead):
    """With row, column and what was loaded for it, if it is inside of the result; turned, they change places.

    ``ahead`` of two times 32 columns, or four in two parts, are loaded before the first is stored.
    """
    monkeypatch.setattr(store_pieces, "emit_inline_assembly", instruction)
    pieces = ResultPieces(width, down, (("f32", held),) if held else ())
    kind, size = {"f32": F32, "i32": I32, "f64": F64}[total], 8 if total == "f64" else 4
    tiles = SimpleNamespace(pieces=pieces, sum=total, transposed=transposed, staged=128 // size)
    tiles.steps = 16 * tiles.staged // (32 * width)
    (row, col), across = (16, 32), 64
    memory = np.zeros(2048 // size, {"f32": "f4", "i32": "i4", "f64": "f8"}[total])
    meeting, found = threading.Barrier(LANES), []
    count = across // 2 * parts

    def emit(b, lane, sums):
        load_ahead(b.module, pieces) if held else None
        none = ir.Constant(ir.ArrayType(I64, 0), ir.Undefined)
        given = [i32(0), lane, i32(3), i32(row), i32(col), i32(rows), i32(cols), none, none]
        each = count // parts
        own = store_pieces.EpiloguePieces(b, tiles, [sums[p * each : (p + 1) * each] for p in range(parts)], given)
        own.emit(own.load_first_operands(ahead))

    def put(place, first, second):
        memory[place // size : place // size + 2] = first, second

    calls = {
        "meet": ((None,), lambda: meeting.wait(20) and None),
        "stored": ((None, C[I32], C[kind], C[kind]), put),
        "loaded": ((C[kind], C[I32]), lambda place: memory[place // size].item()),
        STORE: ((C[I32], *[C[I64]] * 3, *[C[kind]] * width, *[C[F32]] * held), lambda *own: found.append(own) or 0),
    }
    run = run_warp(emit, [kind] * count, calls)
    n = np.arange(across // 2)
    with ThreadPoolExecutor(LANES) as pool:
        tasks = []
        for lane in range(LANES):
            i, j = lane // 4 + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * (lane % 4) + n % 2
            values = [1000 * (row + x + 64 * p) + col + y for p in range(parts) for x, y in zip(i, j)]
            tasks.append(pool.submit(run, lane, *map(int if total == "i32" else float, values)))
        for task in tasks:
            task.result()
    stored = []
    for z, at, across_at, *values in found:
        assert z == 3
        first = (at * (width if down else 1), across_at * (1 if down else width))
        places = [(first[0] + k * down, first[1] + k * (not down)) for k in range(width)]
        places = [place[::-1] for place in places] if transposed else places
        assert [x * 1000 + y for x, y in places] == values[:width]
        assert values[width:] == [8 * (at * 1000 + across_at + 300) + k for k in range(held)]
        stored += places
    whole = {(x + 64 * p, y) for p in range(parts) for x in range(row, row + 16) for y in range(col, col + across)}
    assert sorted(stored) == sorted((x, y) for x, y in whole if x < rows and y < cols)


@pytest.mark.parametrize(("down", "size"), [(False, 2), (False, 4), (True, 2), (True, 4)])
def test_every_line_is_prefetched_into_l2(monkeypatch, down, size):
    """Of 16 rows and 128 columns, of which 90 columns are in the result."""
    monkeypatch.setattr(store_pieces, "emit_inline_assembly", instruction)
    tiles, asked = SimpleNamespace(pieces=ResultPieces(4, down, (("f32", 4),), ((0, size),)), transposed=False), []

    def emit(b, lane, _):
        none = ir.Constant(ir.ArrayType(I64, 0), ir.Undefined)
        base = ir.Constant(ir.ArrayType(ir.IntType(8).as_pointer(), 1), [ir.Constant(ir.IntType(8).as_pointer(), None)])
        store_pieces.prefetch_epilogue_operands(
            b, tiles, 128, [lane, i32(0), i32(0), i32(0), i32(100), i32(90), base, none]
        )

    def far(pointer, z, row, col):
        return col * 1024 + row if down else row * 1024 + col

    calls = {"asked": ((None, C[I64]), asked.append),
             f"{FAR}0": ((C[I64], ctypes.c_void_p, *[C[I64]] * 3), far)}  # fmt: skip
    run = run_warp(emit, [], calls)
    for lane in range(LANES):
        run(lane)
    lines = {far(0, 0, i, j) * size // 128 for i in range(16) for j in range(90)}
    assert {place // 128 for place in asked} == lines
    assert len(asked) == len(lines)
