"""The LLVM back end for CPUs: a code generator and a code library, subclasses of Numba's (``numba.core.codegen``).

Everything that becomes machine code for a CPU is a :class:`Library`: kernels with their shells, the executor, users'
functions. A :class:`Codegen` has the target machine and the data layout, and runs passes. Numba's own classes compile
for this process: they have an execution engine for the host, modules in llvmlite's global context, and a lock around
all compilation. Here each thread has a :class:`Codegen` for each target, and modules in its own LLVM context, so
threads optimize and emit in parallel (:mod:`aotc.kernels.unlocked`). Only Numba's front end
(:mod:`aotc.kernels.numba_aot`) uses the global context, with Numba's lock. Its result is copied to the thread's context
as bitcode.

This module, :mod:`aotc.kernels.unlocked` and :mod:`aotc.kernels.loop_addresses` alone use ``llvmlite.binding``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeAlias

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, codegen, config

from aotc.kernels import unlocked
from aotc.targets import Target

Module: TypeAlias = llvm.ModuleRef
"""A parsed LLVM module."""

# C library functions that LLVM substitutes for plain loops; every C program has them.
LIBC_ALLOWED = frozenset({"memset", "memcpy", "memmove"})

_OWN = threading.local()
_DROP = "GlobalDCE", "StripDeadPrototypes"
"""Two passes that remove unused symbols."""


class Library(codegen.AOTCodeLibrary):
    """One LLVM module from its IR to a relocatable object.

    Numba's front end creates libraries by name, in llvmlite's global context, and links them to each other; they are
    not optimized. Every other library adopts a complete module of the calling thread's context (``module``). Such a
    library belongs to its thread and is linked only to modules of the same context (:meth:`link`).
    """

    def __init__(self, generator: Codegen, name: str, module: Module | None = None) -> None:
        if module is None:
            super().__init__(generator, name)
            return
        codegen.CodeLibrary.__init__(self, generator, name)  # the next class would parse an empty module
        self._linking_libraries: list[Library] = []
        self._shared_module, self._final_module = None, module
        self._finalized = True

    @property
    def module(self) -> Module:
        """Return the LLVM module."""
        return self._final_module

    def _optimize_functions(self, ll_module: Module) -> None:
        """Do nothing: functions of Numba's front end are optimized later, as parts of whole modules."""
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Do nothing: modules of Numba's front end are optimized later, as parts of whole modules."""

    def verify(self) -> None:
        """Run LLVM's verifier.

        Raises
        ------
        RuntimeError
            If the module is invalid.
        """
        unlocked.verify_llvm_module(self.module)

    def retarget(self, target: Target) -> None:
        """Set the triple and data layout to those of ``target``; the code must fit any 64-bit little-endian machine."""
        self.module.triple, self.module.data_layout = target.triple, data_layout(target)

    def internalize(self, keep: Iterable[str]) -> None:
        """Make all defined symbols except ``keep`` internal, so that LLVM may inline and remove them."""
        names = set(keep)
        for function in self.module.functions:
            if function.is_declaration:
                continue
            function.add_function_attribute("nounwind")
            if function.name not in names:
                function.linkage = "internal"
                if b"noinline" not in b" ".join(function.attributes):
                    function.add_function_attribute("alwaysinline")
        for variable in self.module.global_variables:
            if not variable.is_declaration and variable.name not in names and not variable.name.startswith("llvm."):
                variable.linkage = "internal"

    def link(self, other: Library) -> None:
        """Link the module of ``other``, which must not be used again, into this one.

        Raises
        ------
        RuntimeError
            If LLVM cannot link them.
        """
        unlocked.link_llvm_modules(self.module, other.module)

    def link_text(self, text: str, names: Sequence[str] = ()) -> None:
        """Link the module of the assembly ``text`` into this one, and make its functions ``names`` internal."""
        self.link(self._codegen.parse(text))
        unlocked.make_functions_internal(self.module, names)

    def replace(self, text: str) -> None:
        """Replace the module by the module of the assembly ``text``."""
        self._final_module = unlocked.parse_assembly(text)

    def optimize(self, loops: bool = True, level: int = 3) -> None:
        """Run LLVM's pipeline of ``level`` (O3), then remove unused symbols.

        ``loops`` enables vectorization and unrolling; without it, code without hot loops is a quarter smaller.
        """
        self._codegen.run_passes(self.module, _DROP, (level, loops))

    def simplify(self, unroll: bool) -> None:
        """Inline, promote stack variables to registers, and clean up; ``unroll`` unrolls loops with explicit counts."""
        self._run_llvm_passes(
            "AlwaysInliner", "SROA", "InstCombine", "SimplifyCFG", *(["LoopUnroll"] if unroll else [])
        )

    def inline_late(self) -> None:
        """Inline functions that were linked to the module after its optimization."""
        self._run_llvm_passes("AlwaysInliner", "InstCombine", "SimplifyCFG")

    def shrink_numba_module(self) -> None:
        """Shrink a module of Numba's front end, by passes that do not depend on the target."""
        self._run_llvm_passes("SROA", "SimplifyCFG", "InstCombine")

    def _run_llvm_passes(self, *passes: str) -> None:
        """Run passes in order, then remove unused symbols."""
        self._codegen.run_passes(self.module, (*passes, *_DROP))

    def exports(self) -> set[str]:
        """Return the names of the functions that other modules can call."""
        functions = (f for f in self.module.functions if not f.is_declaration)
        return {f.name for f in functions if f.linkage == llvm.Linkage.external}

    def imports(self) -> set[str]:
        """Return the names of the functions that other modules must define."""
        return {f.name for f in self.module.functions if f.is_declaration and not f.name.startswith("llvm.")}

    def emit_native_object(self) -> bytes:
        """Return the relocatable object of the module.

        Raises
        ------
        RuntimeError
            If LLVM cannot generate it.
        """
        self._ensure_finalized()
        return unlocked.emit_object(self._codegen.machine, self.module)

    def dispose(self) -> None:
        """Free the module; the library must not be used again."""
        unlocked.dispose_llvm_module(self.module)


class Codegen(codegen.AOTCPUCodegen):
    """A thread's code generator for a target and optimization ``level``: position-independent, no execution engine."""

    _library_class = Library

    def __init__(self, target: Target, level: int = 3) -> None:
        self.target, self._level = target, level
        super().__init__(target.name, target.cpu)

    def _init(self, llvm_module: Module) -> None:
        """Create the target machine of the target; Numba's would be the host's and have an execution engine."""
        _initialize_targets()
        self._tm_features = self._customize_tm_features()
        options = {"opt": self._level}
        self._customize_tm_options(options)
        self._tm = llvm.Target.from_triple(self.target.triple).create_target_machine(**options)
        self._engine = None
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)

    def _customize_tm_features(self) -> str:
        return self.target.llvm_features

    def _create_empty_module(self, name: str) -> ir.Module:
        """Return an empty module for the target; Numba's would be for the host."""
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple = self.target.triple
        if self._data_layout:
            module.data_layout = self._data_layout
        return module

    def _check_llvm_bugs(self) -> None:
        """Skip Numba's check of the locale, which parses a module for each function."""

    @property
    def machine(self) -> llvm.TargetMachine:
        """Return LLVM's target machine."""
        return self._tm

    @property
    def data_layout(self) -> str:
        """Return the data layout string of modules for the target."""
        return self._data_layout

    def parse(self, text: str, name: str = "") -> Library:
        """Return a library of the assembly ``text``, in the calling thread's context.

        Raises
        ------
        RuntimeError
            If the text is not valid LLVM IR.
        """
        return Library(self, name, unlocked.parse_assembly(text))

    def parse_bitcode(self, data: bytes, name: str = "") -> Library:
        """Return a library of the bitcode ``data``, in the calling thread's context."""
        return Library(self, name, unlocked.parse_bitcode(data))

    def run_passes(self, module: Module, passes: Sequence[str], pipeline: tuple[int, bool] | None = None) -> None:
        """Run LLVM's own pipeline of a level, if one is given, with or without loop passes; then run ``passes``."""
        unlocked.run_passes(module, self._tm, passes, pipeline)


@cache
def _initialize_targets() -> None:
    """Register all of LLVM's target machines; Numba only registers the host's."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def codegen_for(target: Target, level: int = 3) -> Codegen:
    """Return the calling thread's code generator for ``target``, of optimization ``level``."""
    own: dict[tuple[Target, int], Codegen] = _OWN.__dict__.setdefault("generators", {})
    if (target, level) not in own:
        own[target, level] = Codegen(target, level)
    return own[target, level]


@cache
def data_layout(target: Target) -> str:
    """Return the data layout string of LLVM modules for ``target``."""
    return codegen_for(target).data_layout


def parse_assembly_for_target(text: str, target: Target, name: str = "") -> Library:
    """Return a library for ``target`` of the assembly ``text``; see :meth:`Codegen.parse`."""
    return codegen_for(target).parse(text, name)


def emit_data(text: str, target: Target) -> bytes:
    """Return the relocatable object of a module that contains only data; a machine of the lowest level is enough."""
    return codegen_for(target, 0).parse(text).emit_native_object()


def is_svml_enabled() -> bool:
    """Return True if Numba has enabled Intel's SVML for LLVM, in this whole process."""
    return bool(config.USING_SVML)
