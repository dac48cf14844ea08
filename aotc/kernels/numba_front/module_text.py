"""The file of printed kernels: all functions of a bundle for Numba, with the command that checks them.

A kernel for a CPU is an ``njit`` function, one for a GPU a ``cuda.jit`` function. A kernel of a template prints the
records of its plan, as the template's call, above the loops that the template computes::

    @template(WarpTiles(operands='bf16', stages=3, cols=64, ...))
    def k0_matmul(a0: "bf16[256, 512]", ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from aotc.ir.loop.ir import Kernel, needs_grid, thread_count
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.kernels.cuda.shared_memory import dynamic_shared_bytes
from aotc.kernels.cuda.templates.attention.launch import attention_tiles
from aotc.kernels.cuda.templates.gemm.launch import gemm_tiles
from aotc.kernels.numba_front.gpu_source import gpu_source
from aotc.kernels.numba_front.source import import_line, numba_source
from aotc.targets import Target

_FOR_CPUS = '@njit(error_model="numpy")'
_FOR_GPUS = "@cuda.jit"
_WIDTH = 120
_CHECK = """

if __name__ == "__main__":  # compares each kernel with the bundle's machine code, on random arguments
    from aotc.tools.kernel_check import main

    main({bundle!r}, globals())
"""


def module_text(kernels: Iterable[tuple[Kernel, Target, str]], bundle: str) -> str:
    """Return the text of a module with the functions of ``kernels``, for the bundle at path ``bundle``.

    Each kernel has its target and a comment.
    """
    names: set[str] = set()
    records: set[type] = set()
    functions, decorators = [], set()
    for kernel, target, comment in kernels:
        if target.kind == "cpu":
            decorator, source = _FOR_CPUS, numba_source(kernel)
        elif kernel.tiling is not None:
            tiles = template_tiles(kernel)
            decorator, source = f"@template({_constructor_text(tiles, records)})", numba_source(kernel)
            names.add("template")
        else:
            decorator, source = _FOR_GPUS, gpu_source(kernel, target)
            comment += f"# {_kernel_launch_text(kernel, target)}\n"
        names |= set(source.names)
        decorators.add(decorator)
        functions.append(f"\n\n{comment}{decorator}\n{source.text}")
    compilers = [n for n, used in (("cuda", _FOR_GPUS), ("njit", _FOR_CPUS)) if used in decorators]
    imports = [f"from numba import {', '.join(compilers)}\n"] if compilers else []
    imports += [import_line(tuple(sorted(names)))]
    imports += sorted(f"from {kind.__module__} import {kind.__name__}" for kind in records)
    head = f'"""The kernels of {bundle}, as Numba compiles them."""\n\n' + "\n".join(imports)
    return f"{head}\n{''.join(functions)}{_CHECK.format(bundle=bundle)}"


def template_tiles(kernel: Kernel) -> Any:
    """Return the parameters (tile sizes, dtypes) of the template that computes ``kernel``."""
    is_attention = kernel.tiling is not None and kernel.tiling.is_attention
    return attention_tiles(kernel) if is_attention else gemm_tiles(kernel)


def _kernel_launch_text(kernel: Kernel, target: Target) -> str:
    """Return the launch of the kernel as text."""
    threads, shared = thread_count(kernel), dynamic_shared_bytes(kernel, target)
    memory = f", and {shared} bytes of shared memory" if shared else ""
    if needs_grid(kernel):
        return f"launch: cooperative, blocks of {threads} threads{memory}"
    if threads:
        return f"launch: a block of {threads} threads{memory} for each item"
    return f"launch: blocks of {block_threads_of_flat_kernel(kernel)} threads, a thread for each item"


def _constructor_text(record: Any, used: set[type], indent: str = "") -> str:
    """Return the text of the call that constructs a record, without default values; ``used`` collects its classes."""
    if not is_dataclass(record) or isinstance(record, type):
        return repr(record)
    used.add(type(record))
    inner = indent + "    "
    texts = []
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            texts.append(f"{field.name}={_constructor_text(value, used, inner)}")
    line = f"{type(record).__name__}({', '.join(texts)})"
    if len(indent) + len(line) + len("@template()") <= _WIDTH and "\n" not in line:
        return line
    return f"{type(record).__name__}(\n" + "".join(f"{inner}{text},\n" for text in texts) + f"{indent})"
