"""Move the largest private arrays of kernels from a thread's stack to thread-local scratch memory in the arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Alloc, Buffer, Kernel, walk
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def stack_to_scratch(kernel: Kernel, target: Target) -> Kernel:
    """Return ``kernel`` with the largest private arrays moved to scratch, until the rest fits a thread's stack.

    Scalars do not count. Kernels of other targets than CPUs are returned unchanged.
    """
    allocated = [s.buffer for s in walk(kernel.body) if isinstance(s, Alloc)]
    arrays = {b.name: b for b in allocated if b.space == "private" and b.shape}
    sizes = {name: _buffer_bytes_on_stack(b) for name, b in arrays.items()}
    moved: dict[str, Buffer] = {}
    if target.kind != "cpu":  # a GPU thread has no other memory
        return kernel
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if sum(sizes.values()) <= target.stack:
            break
        moved[name] = replace(arrays[name], space="scratch")
        del sizes[name]
    return replace(kernel, body=_with_buffers_replaced(kernel.body, moved)) if moved else kernel


def _buffer_bytes_on_stack(buffer: Buffer) -> int:
    size = product(buffer.shape)
    return int(size) * size_of(buffer.dtype)  # type: ignore[arg-type]


def _with_buffers_replaced(node: Any, moved: Mapping[str, Buffer]) -> Any:
    """Return part of a kernel with its buffers replaced by name."""
    match node:
        case Buffer():
            return moved.get(node.name, node)
        case tuple():
            return tuple(_with_buffers_replaced(part, moved) for part in node)
    if not is_dataclass(node) or type(node).__module__ != "aotc.ir.loop.ir":
        return node
    changes = {f.name: _with_buffers_replaced(getattr(node, f.name), moved) for f in fields(node)}
    return replace(node, **changes)  # type: ignore[type-var]
