"""One loop-IR kernel to one native object.

The kernel function is a *shell*, the loop over a range of the grid around a call
of the *body*. The shell is the same text for all kernels; the body is emitted
from the loop IR, and LLVM inlines it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import llvmlite.binding as llvm

from aotc.diagnostics import InternalError
from aotc.ir.loop_ir import Kernel
from aotc.kernels import back_end
from aotc.kernels.cpu import matrix_unit
from aotc.kernels.cpu.one_lane_stores import without_one_lane_stores
from aotc.kernels.cpu.tiles.tile import annotate_tiles, emit_tile, link_tiles
from aotc.kernels.cpu.tiles.tile_shape import PREFIX
from aotc.kernels.emit.body import Emitter, emit_body
from aotc.kernels.emit.lanes import vector_loops
from aotc.kernels.emit.lanes_emitter import VectorEmitter
from aotc.kernels.emit.metadata import fills_registers
from aotc.kernels.emit.plain import PlainEmitter, is_plain, unrolls
from aotc.kernels.emit.poll import annotate_polls
from aotc.kernels.emit.rare_calls import annotate_rare_calls, define
from aotc.kernels.emit.scalable import with_length
from aotc.kernels.llvm_types import KernelModule, hide, release
from aotc.kernels.loop_addresses import loop_addresses
from aotc.kernels.unlocked import parse_assembly
from aotc.targets import Target

_BODY = "aotc_body"
_DEFINE = 'define void @"{name}"(ptr %buffers, ptr %dims, i64 %begin, i64 %end, ptr %scratch, ptr %monitor)'
_LOOP = f"""
{_DEFINE} nounwind {{{{
entry:
  %count = sub i64 %end, %begin
  %none = icmp slt i64 %count, 1
  br i1 %none, label %done, label %turn

turn:
  %item = phi i64 [ %next, %turn ], [ %begin, %entry ]
  %left = phi i64 [ %fewer, %turn ], [ %count, %entry ]
  %fewer = add nsw i64 %left, -1
  %next = add nuw nsw i64 %item, 1
  call void @{_BODY}(ptr %buffers, ptr %dims, i64 %item, ptr %scratch, ptr %monitor)
  %more = icmp sgt i64 %left, 1
  br i1 %more, label %turn, label %done, !llvm.loop !1000000

done:
{{leave}}  ret void
}}}}

!1000000 = distinct !{{{{!1000000, !1000001}}}}
!1000001 = !{{{{!"llvm.loop.unroll.disable"}}}}
"""
"""The shell as LLVM makes it of ``for item in range(begin, end): body(buffers, dims, item, scratch, monitor)``.

An item is a share of work for a thread: its code is not written out several times.
"""
_ONCE = f"""
{_DEFINE} nounwind {{{{
entry:
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %turn, label %done

turn:
  call void @{_BODY}(ptr %buffers, ptr %dims, i64 %begin, ptr %scratch, ptr %monitor)
  br label %done

done:
{{leave}}  ret void
}}}}
"""
"""The shell of a kernel whose grid has one item: no loop to unroll."""


def kernel_module(kernel: Kernel, target: Target) -> llvm.ModuleRef:
    """Return the unoptimised LLVM module that defines ``kernel.name`` with the ABI of ``vmfb.abi``."""
    module, tiles = _emitted(kernel, target, _emitter(kernel, target))
    link_tiles(module, tiles)
    return module


def _emitter(kernel: Kernel, target: Target) -> Emitter | None:
    """Return what emits a kernel of which LLVM's passes would make nothing better, if it is one."""
    if is_plain(kernel):
        return PlainEmitter
    found = vector_loops(kernel, target)
    return None if found is None else partial(VectorEmitter, vectors=found)


def _emitted(kernel: Kernel, target: Target, emitter: Emitter | None) -> tuple[llvm.ModuleRef, str]:
    """Return the module of a kernel, and the text of functions of tiles that it calls, which no pass need see."""
    body, tiles = (KernelModule(name, target) for name in (kernel.name, "tiles"))
    body.data_layout = tiles.data_layout = str(back_end.target_machine(target).target_data)
    body.finished = tiles
    emit_body(body, _BODY, kernel, target, emit_tile, emitter)
    hide(body)
    text = annotate_tiles(annotate_rare_calls(annotate_polls(str(body))))
    shell = _ONCE if kernel.grid == 1 else _LOOP
    declared, leave = matrix_unit.RELEASE if matrix_unit.configures(body) else ("", "")
    module = parse_assembly(with_length(text + declared + shell.format(name=kernel.name, leave=leave), target))
    finished = with_length(str(tiles), target) if tiles.globals else ""
    release(body)
    release(tiles)
    return module, finished


def optimized_module(kernel: Kernel, target: Target) -> llvm.ModuleRef:
    """Return the module of ``kernel`` after LLVM's passes.

    What is around tiles that are finished takes little of their time: O1 does for it.

    Raises
    ------
    InternalError
        If LLVM finds the IR invalid, or if the code calls a function that a
        bundle does not have.
    """
    emitter = _emitter(kernel, target)
    module, tiles = _emitted(kernel, target, emitter)
    try:
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"kernel {kernel.name}: {error}") from error
    if emitter:
        back_end.simplify(module, target, unrolls(kernel))
    else:
        back_end.optimize(module, target, level=1 if PREFIX in tiles else 3)
    if define(module, target):
        back_end.inline_late(module, target)
    module = without_one_lane_stores(module)
    link_tiles(module, tiles)
    return module


def _addresses(kernel: Kernel, target: Target) -> AbstractContextManager[None]:
    """Return what addresses of loops are emitted in; without registers to spare, indices make LLVM copy constants."""
    return loop_addresses(target.triple.startswith("x86_64") and not fills_registers(kernel))


def compile_kernel(kernel: Kernel, target: Target) -> bytes:
    """Return the relocatable object that defines ``kernel.name``."""
    module = optimized_module(kernel, target)
    with _addresses(kernel, target):
        return back_end.emit_object(module, target)


def assembly(kernel: Kernel, target: Target) -> str:
    """Return the assembly text of ``kernel``."""
    module = optimized_module(kernel, target)
    with _addresses(kernel, target):
        return back_end.target_machine(target).emit_assembly(module)
