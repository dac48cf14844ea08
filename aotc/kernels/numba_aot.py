"""Numba's front end as an ahead-of-time compiler: Python functions to libraries of the back end.

Numba's CPU target compiles for this process: it links a reference-counting
runtime and wraps functions for CPython. The context here does neither, and its
code generator and libraries are those of :mod:`aotc.kernels.back_end`, so the
LLVM IR has no symbol of Python. Numba compiles for one plain 64-bit
little-endian machine, because its dispatchers cache their results. The IR is
the same for all such machines; :func:`compile_by_numba_front_end` then sets the triple and data
layout of the :class:`~aotc.targets.Target`. The context is global to the
process, so the front end runs in a process of its own
(:mod:`aotc.kernels.worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import _dynfunc
from numba.core import compiler, cpu, fastmathpass, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from aotc.kernels.back_end import Codegen, Library, codegen_for
from aotc.targets import Target

_FRONT = Target("front", "cpu", "x86-64")


class Export(NamedTuple):
    """A Python function, and the Numba types of its C signature."""

    function: Callable[..., Any]
    result: Any
    arguments: tuple[Any, ...]


class _Context(cpu.CPUContext):
    """A target context without the reference-counting runtime and the CPython wrappers."""

    @global_compiler_lock
    def init(self):
        self.is32bit = False
        self._internal_codegen = Codegen(_FRONT)

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
def _numba_context() -> _Context:
    """Return our context, and make every dispatcher (``@njit`` helpers, overloads) compile with it."""
    context = _Context(cpu_target.typing_context)
    context.refresh()
    cpu_target.typing_context.refresh()
    cpu_target.__dict__["_toplevel_target_context"] = context
    return context


def _numba_flags() -> compiler.Flags:
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    flags.noalias = True
    flags.enable_looplift = flags.enable_pyobject = False
    flags.fastmath = cpu.FastMathOptions({"contract"})
    return flags


def compile_by_numba_front_end(name: str, export: Export, target: Target) -> Library:
    """Compile one Python function to a library of unoptimised LLVM IR that defines the C function ``name``.

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
    Library
        All other functions in it are internal and ``alwaysinline`` unless the
        source made them ``noinline``. It belongs to the calling thread.
    """
    with global_compiler_lock:
        context, arguments = _numba_context(), tuple(export.arguments)
        result = compiler.compile_extra(
            cpu_target.typing_context, context, export.function, arguments, export.result, _numba_flags(), {}
        )
        bitcode = result.library.emit_bitcode()
    library = codegen_for(target).parse_bitcode(bitcode, name)
    library.link_text(str(_c_signature_wrapper(name, context, result.fndesc)))
    library.internalize({name})
    library.retarget(target)
    return library


def _c_signature_wrapper(name: str, context: _Context, descriptor: Any) -> ir.Module:
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
