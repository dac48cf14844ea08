"""Numba as an ahead-of-time compiler: Python functions to native objects.

Numba's CPU target is made for this process and this machine: it starts an MCJIT
engine, links its reference-counting runtime and wraps functions for CPython.
The three classes here replace those parts, so that what comes out is LLVM IR
with no Python symbol in it. Numba always works for one plain 64-bit
little-endian machine, because its dispatchers remember what they compiled; the
finished IR, which is the same for all such machines, is then given the triple
and data layout of the :class:`~aotc.targets.Target`. The swap is global to the
process, which is why the compiler lives in a process of its own
(:mod:`aotc.kernels.workers.worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import _dynfunc
from numba.core import cgutils, codegen, compiler, cpu, fastmathpass, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from aotc.targets import Target

# C library functions that LLVM makes of plain loops; every C program has them.
LIBC_ALLOWED = frozenset({"memset", "memcpy", "memmove"})


_FRONT = Target("front", "cpu", "x86-64")


class Export(NamedTuple):
    """A Python function, and the Numba types of its C signature."""

    function: Callable[..., Any]
    result: Any
    arguments: tuple[Any, ...]


class _Library(codegen.CPUCodeLibrary):
    """A code library that Numba neither optimizes nor loads."""

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        pass

    def _finalize_specific(self):
        pass


class _Codegen(codegen.CPUCodegen):
    """A code generator for a given machine, without an execution engine."""

    _library_class = _Library

    def _init(self, llvm_module):
        self._tm = target_machine(_FRONT)
        self._tm_features = _FRONT.llvm_features
        self._engine = None
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect = False
        self._opt_level = 0

    def _create_empty_module(self, name):
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple = _FRONT.triple
        if self._data_layout:
            module.data_layout = self._data_layout
        return module

    def _customize_tm_features(self):
        return self._tm_features

    def _customize_tm_options(self, options):
        pass

    def _add_module(self, module):
        pass

    def _check_llvm_bugs(self):
        pass


class _Context(cpu.CPUContext):
    """A target context without the reference-counting runtime and the CPython wrappers."""

    @global_compiler_lock
    def init(self):
        self.is32bit = False
        self._internal_codegen = _Codegen("aotc")

    def load_additional_registries(self):
        initialize = rtsys.initialize
        rtsys.initialize = lambda context: None
        try:
            super().load_additional_registries()
        finally:
            rtsys.initialize = initialize

    def post_lowering(self, mod, library):
        if self.fastmath:
            fastmathpass.rewrite_module(mod, self.fastmath)

    def create_cpython_wrapper(self, library, fndesc, env, call_helper, release_gil=False):
        pass

    def create_cfunc_wrapper(self, library, fndesc, env, call_helper):
        pass

    def get_executable(self, library, fndesc, env):
        # A dispatcher accepts only builtins, and keys on their identity; nobody calls this one.
        doc, module, name = "", fndesc.lookup_module(), fndesc.qualname.split(".")[-1]
        return _dynfunc.make_function(module, name, doc, 1, env, (library,))


@cache
def target_machine(target: Target) -> llvm.TargetMachine:
    """Return LLVM's machine for ``target``: position independent, optimization level 3."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(target.triple)
    return machine.create_target_machine(
        cpu=target.cpu, features=target.llvm_features, opt=3, reloc="pic", codemodel="default"
    )


@cache
def _context() -> _Context:
    """Return our context, and make every dispatcher (``@njit`` helpers, overloads) compile with it."""
    context = _Context(cpu_target.typing_context)
    context.refresh()
    cpu_target.typing_context.refresh()
    cpu_target.__dict__["_toplevel_target_context"] = context
    return context


def _flags() -> compiler.Flags:
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    flags.noalias = True
    flags.enable_looplift = flags.enable_pyobject = False
    flags.fastmath = cpu.FastMathOptions({"contract"})
    return flags


def front_end(name: str, export: Export, target: Target) -> llvm.ModuleRef:
    """Compile one Python function to unoptimised LLVM IR that defines the C function ``name``.

    Parameters
    ----------
    name : str
        The C symbol.
    export : Export
        The function and its Numba types; the result may be ``numba.types.void``.
    target : Target
        The machine.

    Returns
    -------
    llvmlite.binding.ModuleRef
        All other functions in it are internal and ``alwaysinline`` unless the
        source made them ``noinline``.
    """
    context = _context()
    result = compiler.compile_extra(
        cpu_target.typing_context, context, export.function, tuple(export.arguments), export.result, _flags(), {}
    )
    with global_compiler_lock:
        result.library._ensure_finalized()
    module = result.library._final_module
    module.link_in(llvm.parse_assembly(str(_c_wrapper(name, context, result.fndesc))))
    internalize(module, {name})
    retarget(module, target)
    return module


def retarget(module: llvm.ModuleRef, target: Target) -> None:
    """Make ``module`` one for ``target``, which must be 64-bit and little-endian."""
    module.triple = target.triple
    module.data_layout = str(target_machine(target).target_data)


def _c_wrapper(name: str, context: _Context, descriptor: Any) -> ir.Module:
    """Return a module whose function ``name`` has the plain C signature of Numba's function."""
    module = context.codegen()._create_empty_module("wrap_" + name)
    convention = context.call_conv
    callee_type = convention.get_function_type(descriptor.restype, descriptor.argtypes)
    callee = ir.Function(module, callee_type, descriptor.llvm_func_name)
    void = descriptor.restype in (types.void, types.none)
    result = ir.VoidType() if void else context.get_value_type(descriptor.restype)
    arguments = [context.get_value_type(a) for a in descriptor.argtypes]
    wrapper = ir.Function(module, ir.FunctionType(result, arguments), name)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    _, value = convention.call_function(builder, callee, descriptor.restype, descriptor.argtypes, wrapper.args)
    if void:
        builder.ret_void()
    else:
        builder.ret(value)
    return module


def internalize(module: llvm.ModuleRef, keep: Iterable[str]) -> None:
    """Hide every defined symbol but ``keep``, so that LLVM may inline and drop it."""
    names = set(keep)
    for function in module.functions:
        if function.is_declaration:
            continue
        function.add_function_attribute("nounwind")
        if function.name not in names:
            function.linkage = "internal"
            if b"noinline" not in b" ".join(function.attributes):
                function.add_function_attribute("alwaysinline")
    for variable in module.global_variables:
        if not variable.is_declaration and variable.name not in names and not variable.name.startswith("llvm."):
            variable.linkage = "internal"


def optimize(module: llvm.ModuleRef, target: Target, loops: bool = True) -> None:
    """Run LLVM's O3 pipeline for ``target``, then drop what is not used.

    ``loops`` are made vectors and unrolled; code of which no loop takes long is a quarter smaller without.
    """
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = loops
    tuning.loop_interleaving = tuning.loop_unrolling = loops
    builder = llvm.create_pass_builder(target_machine(target), tuning)
    builder.getModulePassManager().run(module, builder)
    _drop_unused(module, builder)


def inline_late(module: llvm.ModuleRef, target: Target) -> None:
    """Inline what was linked to ``module`` after it was optimised."""
    builder = llvm.create_pass_builder(target_machine(target), llvm.create_pipeline_tuning_options(speed_level=3))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
    _drop_unused(module, builder)


def _drop_unused(module: llvm.ModuleRef, builder: llvm.PassBuilder) -> None:
    cleanup = llvm.create_new_module_pass_manager()
    cleanup.add_global_dead_code_eliminate_pass()
    cleanup.add_strip_dead_prototype_pass()
    cleanup.run(module, builder)


def emit_object(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the relocatable object of ``module``."""
    return target_machine(target).emit_object(module)
