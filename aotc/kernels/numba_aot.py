"""Numba as an ahead-of-time compiler: Python functions to native objects.

Numba's CPU target is made for this process and this machine: it starts an MCJIT
engine, links its reference-counting runtime and wraps functions for CPython.
The three classes here replace those parts, so that what comes out is LLVM IR
with no Python symbol in it. Numba always works for one plain 64-bit
little-endian machine, because its dispatchers remember what they compiled; the
finished IR, which is the same for all such machines, is then given the triple
and data layout of the :class:`~aotc.targets.Target`. The swap is global to the
process, which is why the compiler lives in a process of its own
(:mod:`aotc.kernels.worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import _dynfunc
from numba.core import cgutils, codegen, compiler, cpu, fastmathpass, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from aotc.kernels.back_end import internalize, retarget, target_machine
from aotc.targets import Target

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
