"""Options that name users' functions in place of kernels: their modules and their names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.ir.loop.ir import Kernel


def module_texts(replaced: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """Return the text of the module that replaces each kernel; a value with several lines is a text, else a path.

    Raises
    ------
    CompileError
        If a file cannot be read.
    """
    texts = {}
    for name, module in replaced.items():
        if isinstance(module, str) and "\n" in module:
            texts[name] = module
            continue
        try:
            texts[name] = Path(module).read_text() + "\n"
        except (OSError, UnicodeDecodeError) as error:
            message = f"the module in place of kernel {name} cannot be read: {error}"
            raise CompileError.at(UNKNOWN, message, hint="--kernel NAME=FILE.py") from None
    return texts


def check_names(replaced: Mapping[str, str | os.PathLike[str]], kernels: Iterable[Kernel]) -> None:
    """Check that each replaced kernel is one of ``kernels``, the CPU kernels of all variants.

    Raises
    ------
    CompileError
        If there is no such kernel.
    """
    names = list(dict.fromkeys(kernel.name for kernel in kernels))
    for name in replaced:
        if name not in names:
            message = f"the bundle has no CPU kernel {name!r} to replace"
            raise CompileError.at(UNKNOWN, message, hint=f"one of: {', '.join(names[:20]) or 'none'}")
