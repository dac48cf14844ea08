"""The file of printed kernels: all functions of a bundle for Numba, with the command that checks them."""

from __future__ import annotations

from collections.abc import Iterable

from aotc.ir.loop.ir import Kernel
from aotc.kernels.numba_front.source import import_line, numba_source

DECORATOR = '@njit(error_model="numpy")'
_CHECK = """

if __name__ == "__main__":  # compares each kernel with the bundle's machine code, on random arguments
    from aotc.tools.kernel_check import main

    main({bundle!r}, globals())
"""


def module_text(kernels: Iterable[tuple[Kernel, str]], bundle: str) -> str:
    """Return the text of a module with the functions of ``kernels`` (each with a comment), from a bundle's path."""
    names: set[str] = set()
    functions = []
    for kernel, comment in kernels:
        source = numba_source(kernel)
        names |= set(source.names)
        functions.append(f"\n\n{comment}{DECORATOR}\n{source.text}")
    head = f'"""The kernels of {bundle}, as Numba compiles them."""\n\nfrom numba import njit\n'
    return f"{head}\n{import_line(tuple(sorted(names)))}\n{''.join(functions)}{_CHECK.format(bundle=bundle)}"
