"""The option ``replace``: modules with users' functions in place of kernels, and checks of kernel names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.ir.loop.ir import Kernel, is_self_contained

Replacement: TypeAlias = str | os.PathLike[str] | Callable[..., Any]
"""A function in place of a kernel: itself, the text of a module with it (of several lines), or the module's path."""


def module_texts(replaced: Mapping[str, Replacement]) -> dict[str, str]:
    """Return the text of a module for each replaced kernel, which defines the function by the kernel's name.

    Raises
    ------
    CompileError
        If a file cannot be read, or a function cannot be sent to the compiler's process.
    """
    texts = {}
    for name, module in replaced.items():
        if callable(module):
            texts[name] = _replacement_text(name.rpartition("/")[2], module)
            continue
        if isinstance(module, str) and "\n" in module:
            texts[name] = module
            continue
        try:
            texts[name] = Path(module).read_text() + "\n"
        except (OSError, UnicodeDecodeError) as error:
            message = f"cannot read the module that replaces kernel {name}: {error}"
            raise CompileError.at(UNKNOWN, message, hint="--kernel NAME=FILE.py") from None
    return texts


def _replacement_text(name: str, function: Callable[..., Any]) -> str:
    from aotc.kernels.cpu.custom import NativeFunctionRefused, pickle_function  # imports Numba

    try:
        data = pickle_function(function)
    except NativeFunctionRefused as reason:
        message = f"cannot compile the function that replaces kernel {name}: {reason}"
        raise CompileError.at(UNKNOWN, message, hint="pass the text of a module, or its path") from None
    return f"from numba import cloudpickle\n\n{name} = cloudpickle.loads({data!r})\n"


def check_replaced_kernel_names(replaced: Mapping[str, Replacement], kernels: Iterable[tuple[str, Kernel]]) -> None:
    """Check that each replaced kernel is one of ``kernels``, each with its kind of target, and not a template's.

    Raises
    ------
    CompileError
        If there is no such kernel, or one for CPUs and one for GPUs have the name.
    """
    rows = list(kernels)
    names = dict.fromkeys(kernel.name for _, kernel in rows if is_replaceable(kernel))
    for key in replaced:
        own, _, name = key.rpartition("/")
        found = [(kind, kernel) for kind, kernel in rows if kernel.name == name and own in ("", kind)]
        if not found:
            hint = f"one of: {', '.join([*names][:20]) or 'none'}"
            raise CompileError.at(UNKNOWN, f"the bundle has no kernel {key!r} to replace", hint=hint)
        kinds = sorted({kind for kind, _ in found})
        if len(kinds) > 1:
            message = f"kernel name {name!r} is ambiguous: there is one for {' and one for '.join(kinds)}"
            raise CompileError.at(UNKNOWN, message, hint=" or ".join(f"{kind}/{name}" for kind in kinds))
        if not all(is_replaceable(kernel) for _, kernel in found):
            kernel = next(kernel for _, kernel in found if not is_replaceable(kernel))
            message = f"kernel {name} cannot be replaced: {_replacement_computed_by(kernel)} computes it"
            raise CompileError.at(UNKNOWN, message, hint=f"one of: {', '.join([*names][:20]) or 'none'}")


def is_replaceable(kernel: Kernel) -> bool:
    """Return True if the kernel is computed by its printed loops, not by a template."""
    return kernel.tiling is None and is_self_contained(kernel)


def _replacement_computed_by(kernel: Kernel) -> str:
    return "a template for tensor cores" if kernel.tiling is not None else "a function of yours"
