"""Compile a loop-IR kernel to a native object file.

The kernel function is a *shell*: a loop over a range of the grid that calls the *body*. The shell is the same for all
kernels. The body is emitted from the loop IR, and LLVM inlines it.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Kernel
from aotc.kernels import back_end
from aotc.kernels.back_end import Library, Module
from aotc.kernels.cpu.tiles import amx as matrix_unit
from aotc.kernels.cpu.tiles.shape import PREFIX
from aotc.kernels.cpu.tiles.tile import annotate_tiles, emit_tile
from aotc.kernels.emit.body import Emitter, emit_body
from aotc.kernels.emit.metadata import constants_fill_registers
from aotc.kernels.emit.poll import annotate_polls
from aotc.kernels.emit.rare_calls import annotate_rare_calls, calls_rarely, link_rare_functions
from aotc.kernels.emit.vector.scalar_emitter import ScalarEmitter, has_loop_to_unroll, needs_no_llvm_passes
from aotc.kernels.emit.vector.sve import with_vector_length
from aotc.kernels.emit.vector.vector_emitter import VectorEmitter
from aotc.kernels.emit.vector.vector_loops import vector_loops
from aotc.kernels.llvm_types import KernelModule, break_reference_cycles, internalize_definitions
from aotc.kernels.loop_addresses import loop_addresses
from aotc.kernels.symbol_table import TextModule
from aotc.targets import Target

_BODY = "aotc_body"
_DEFINED = re.compile(r'^define [^@]*@"?([^"(]+)"?\(', re.MULTILINE)
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
"""The shell ``for item in range(begin, end): body(buffers, dims, item, scratch, monitor)``, as LLVM canonicalizes it.

An item is a work item of a thread, so the loop is not unrolled.
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
"""The shell of a kernel whose grid has one item: no loop."""


@dataclass(frozen=True, slots=True)
class EmittedKernel:
    """A kernel as LLVM assembly, which any thread can compile to machine code, mostly without the GIL.

    ``finished`` is the assembly of called functions that bypass LLVM's passes, and ``names`` are their names. ``done``
    is True if LLVM's passes would not improve the kernel's loops.
    """

    kernel: Kernel
    target: Target
    text: str
    finished: str
    names: tuple[str, ...]
    done: bool


def unoptimized_kernel_module(kernel: Kernel, target: Target) -> Module:
    """Return the LLVM module of a kernel before LLVM's passes; its function has the C interface of ``vmfb.abi``."""
    emitted = emit_kernel(kernel, target)
    library = back_end.parse_assembly_for_target(emitted.text, target, kernel.name)
    _link_directly_emitted_functions(library, emitted)
    return library.module


def _link_directly_emitted_functions(library: Library, emitted: EmittedKernel) -> None:
    """Link the functions of an emitted kernel that bypass LLVM's passes, as internal functions."""
    if emitted.names:
        library.link_text(emitted.finished, emitted.names)


def _direct_emitter(kernel: Kernel, target: Target) -> Emitter | None:
    """Return the emitter of a kernel whose loops LLVM's passes would not improve; None for other kernels."""
    if needs_no_llvm_passes(kernel):
        return ScalarEmitter
    found = vector_loops(kernel, target)
    return None if found is None else partial(VectorEmitter, vectors=found)


def emit_kernel(kernel: Kernel, target: Target) -> EmittedKernel:
    """Emit a kernel as LLVM assembly; this part of its compilation is Python code and needs the GIL."""
    body = KernelModule(kernel.name, target)
    body.data_layout = back_end.data_layout(target)
    body.finished = finished = TextModule(body.triple, body.data_layout)
    emitter = _direct_emitter(kernel, target)
    emit_body(body, _BODY, kernel, target, emit_tile, emitter)
    internalize_definitions(body)
    shell = (_ONCE if kernel.grid == 1 else _LOOP).format(name=kernel.name, leave=matrix_unit.amx_release_line(body))
    text = annotate_tiles(annotate_rare_calls(annotate_polls(str(body))))
    whole = with_vector_length(text + shell, target)
    rest = with_vector_length(str(finished), target) if finished.symbols else ""
    break_reference_cycles(body)
    return EmittedKernel(kernel, target, whole, rest, tuple(_DEFINED.findall(rest)), emitter is not None)


def optimized_kernel_module(kernel: Kernel, target: Target) -> Module:
    """Return the LLVM module of a kernel after LLVM's passes.

    Raises
    ------
    InternalError
        If LLVM finds the IR invalid, or if the code calls a function that a bundle does not have.
    """
    return _optimized_library(emit_kernel(kernel, target)).module


def _optimized_library(emitted: EmittedKernel) -> Library:
    """Run LLVM's passes on an emitted kernel; return its library.

    If the kernel's tiles bypass the passes, the code around them takes little of the run time, and O1 is enough.
    """
    kernel, target = emitted.kernel, emitted.target
    library = back_end.parse_assembly_for_target(emitted.text, target, kernel.name)
    try:
        library.verify()
    except RuntimeError as error:
        raise InternalError(f"kernel {kernel.name}: {error}") from error
    if emitted.done:
        library.simplify(has_loop_to_unroll(kernel))
    else:
        library.optimize(level=1 if PREFIX in emitted.finished else 3)
    if calls_rarely(emitted.text) and link_rare_functions(library, target):
        library.inline_late()
    if may_have_one_lane_stores(emitted.text):
        remove_one_lane_stores(library)
    _link_directly_emitted_functions(library, emitted)
    return library


def _loop_address_context(kernel: Kernel, target: Target) -> AbstractContextManager[None]:
    """Return the context manager that keeps loop addresses in registers if registers are spare."""
    return loop_addresses(target.triple.startswith("x86_64") and not constants_fill_registers(kernel))


def kernel_machine_code(emitted: EmittedKernel) -> bytes:
    """Compile an emitted kernel to an object file; this is LLVM's work, mostly without the GIL.

    Raises
    ------
    InternalError
        As :func:`optimized_kernel_module`.
    """
    library = _optimized_library(emitted)
    try:
        with _loop_address_context(emitted.kernel, emitted.target):
            return library.emit_native_object()
    finally:
        library.dispose()


def compile_kernel(kernel: Kernel, target: Target) -> bytes:
    """Compile a kernel to an object file that defines the symbol ``kernel.name``."""
    return kernel_machine_code(emit_kernel(kernel, target))


def kernel_assembly(kernel: Kernel, target: Target) -> str:
    """Compile a kernel to assembly text of the target."""
    library = _optimized_library(emit_kernel(kernel, target))
    with _loop_address_context(kernel, target):
        return library.get_asm_str()


_STORED = re.compile(r"^llvm\.masked\.store\.v\d+i(8|16)\.")
_CALL = re.compile(
    r"^ *(?:tail )?call void @llvm\.masked\.store\.v\d+i(?:8|16)\.p0"
    r"\((?P<vector><\d+ x (?P<type>i8|i16)>) (?P<value>[^,]+), ptr (?P<align>align \d+) (?P<place>[^,]+), "
    r"<\d+ x i1> <(?P<mask>i1 (?:true|false)(?:, i1 (?:true|false))*)>\)(?P<metadata>.*)$",
    re.MULTILINE,
)


_NARROW = re.compile(r"\bstore (?:<\d+ x )?i(?:8|16)\b|\.masked\.store\.")


def may_have_one_lane_stores(text: str) -> bool:
    """Return True if LLVM may create a masked store of one lane from this assembly: it stores 8- or 16-bit values."""
    return _NARROW.search(text) is not None


def remove_one_lane_stores(library: Library) -> None:
    """Replace masked stores of one 8- or 16-bit lane in the module of ``library`` by equivalent code.

    A workaround for LLVM 22 on x86: such a store may overwrite the lane's neighbour, as LLVM writes 32 bits. A
    vectorized loop with a masked last vector has such a store, with a constant mask, if one iteration is left. LLVM
    turns it into a scalar store of the lane (``reduceMaskedStoreToScalarStore``). If it merged the store with a
    truncation before, the scalar store has the width before the truncation. Here the lane is extracted before LLVM does
    so::

        call void @llvm.masked.store.v16i16.p0(<16 x i16> %x, ptr align 2 %p, <16 x i1> <i1 true, i1 false, ...>)
        ->
        %lane.1 = extractelement <16 x i16> %x, i64 0
        %place.1 = getelementptr i16, ptr %p, i64 0
        store i16 %lane.1, ptr %place.1, align 2
    """
    if not any(_STORED.match(function.name) for function in library.module.functions):
        return
    text, before = "", str(library.module)
    ends = 0
    for number, found in enumerate(_CALL.finditer(before)):
        lanes = found["mask"].split(", ")
        if lanes.count("i1 true") == 1:
            text += before[ends : found.start()] + _scalar_store_of_lane(found, lanes.index("i1 true"), number)
            ends = found.end()
    if ends:
        library.replace(text + before[ends:])


def _scalar_store_of_lane(found: re.Match[str], lane: int, number: int) -> str:
    """Return assembly that stores one lane of a vector, in place of the masked store that ``found`` matches."""
    return (
        f"  %lane.{number} = extractelement {found['vector']} {found['value']}, i64 {lane}\n"
        f"  %place.{number} = getelementptr {found['type']}, ptr {found['place']}, i64 {lane}\n"
        f"  store {found['type']} %lane.{number}, ptr %place.{number}, {found['align']}{found['metadata']}"
    )
