"""Declarations of functions and constants by symbol: several emitters may use a function, which a module declares once.

llvmlite's module objects have such a table in ``globals``, to which :func:`declare_function` adds. Functions that are
written as text are merged by :class:`TextModule`: LLVM rejects a module that declares a function twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.kernels.llvm_text import global_text


def declare_function(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    """Return the function ``name`` of ``module``; declare it if the module has no such function.

    Raises
    ------
    InternalError
        If ``name`` is a symbol of another type.
    """
    function = module.globals.get(name)
    if function is None:
        return ir.Function(module, kind, name)
    if not isinstance(function, ir.Function) or function.ftype != kind:
        raise InternalError(f"kernels: {module.name} uses @{name} as {kind}, but has it as {function.type}")
    return function


def declaration_text(name: str, result: object, parameters: Iterable[object]) -> str:
    """Return the assembly of a function's declaration; a :class:`TextModule` compares declarations in this form."""
    return f'declare {result} @"{name}"({", ".join(map(str, parameters))})'


def symbol_texts(module: ir.Module) -> dict[str, str]:
    """Return the assembly of the declarations and definitions of ``module``, by symbol.

    Raises
    ------
    InternalError
        If it has metadata, whose nodes are numbered in each module.
    """
    if module.metadata:
        raise InternalError(f"kernels: functions of {module.name} refer to metadata of their module")
    return {name: _symbol_text(value) for name, value in module.globals.items()}


def _symbol_text(value: ir.GlobalValue) -> str:
    if isinstance(value, ir.Function) and value.is_declaration:
        return declaration_text(value.name, value.ftype.return_type, value.ftype.args)
    return global_text(value)


class TextModule:
    """Functions and constants as LLVM assembly, by symbol, from any number of emitters.

    Parameters
    ----------
    triple, data_layout : str
        Header of the module.

    Attributes
    ----------
    symbols : dict of str to str
        The assembly of each symbol.
    """

    def __init__(self, triple: str, data_layout: str) -> None:
        self.triple, self.data_layout = triple, data_layout
        self.symbols: dict[str, str] = {}

    def add(self, symbols: Mapping[str, str]) -> None:
        """Add symbols with their assembly; a known symbol must have the same assembly.

        Raises
        ------
        InternalError
            If the assembly of a known symbol differs: one of two emitters would call the other's function.
        """
        for name, text in symbols.items():
            known = self.symbols.setdefault(name, text)
            if known != text:
                raise InternalError(f"kernels: two emitters define @{name}:\n{known}\n{text}")

    def __str__(self) -> str:
        head = f'target triple = "{self.triple}"\ntarget datalayout = "{self.data_layout}"'
        return "\n".join([head, *self.symbols.values(), ""])
