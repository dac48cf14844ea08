"""Layout of a block's buffers in shared memory, and launch parameters for kernels that need more than the default.

Buffers that fit the default size of shared memory are variables of the kernel. Otherwise all of them are in dynamic
shared memory, whose size is a launch parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from aotc.ir.dims.algebra import static
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, needs_grid, walk
from aotc.ir.loop.scratch import buffer_bytes, shared_array_bytes
from aotc.kernels.interface import manifest_size_entry
from aotc.kernels.llvm_types import PTR
from aotc.targets import Target
from aotc.vmfb.abi import GPU_ALIGNMENT

SHARED = 3
_DYNAMIC = "aotc_dynamic_shared"


def shared_layout(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Return the byte offset of every shared buffer of a kernel, and the total size in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for stmt in walk(kernel.body):
        if isinstance(stmt, Alloc) and stmt.buffer.space == "shared" and stmt.buffer.name not in offsets:
            offsets[stmt.buffer.name] = end
            end += shared_array_bytes(buffer_bytes(stmt.buffer))
    return offsets, end


def dynamic_shared_bytes(kernel: Kernel, target: Target) -> int:
    """Return the size of dynamic shared memory of a kernel in bytes; 0 if the default size suffices."""
    total = shared_layout(kernel)[1]
    return total if total > target.static_shared else 0


def shared_buffer_address(builder: ir.IRBuilder, kernel: Kernel, target: Target, buffer: Buffer) -> ir.Value:
    """Emit the address of a shared buffer of a kernel."""
    module = builder.module
    if not dynamic_shared_bytes(kernel, target):
        shape = ir.ArrayType(ir.IntType(8), shared_array_bytes(buffer_bytes(buffer)))
        memory = ir.GlobalVariable(module, shape, f"shared_{buffer.name}", addrspace=SHARED)
        memory.linkage = "internal"
        memory.initializer = ir.Constant(shape, ir.Undefined)
        memory.align = GPU_ALIGNMENT
        return builder.addrspacecast(memory, PTR)
    memory = module.globals.get(_DYNAMIC)
    if memory is None:
        memory = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _DYNAMIC, addrspace=SHARED)
        memory.linkage = "external"
        memory.align = GPU_ALIGNMENT
    base = builder.addrspacecast(memory, PTR)
    offset = ir.Constant(ir.IntType(64), shared_layout(kernel)[0][buffer.name])
    return builder.gep(base, [offset], inbounds=True, source_etype=ir.IntType(8))


def gpu_kernel_resources(found: Mapping[str, int], threads: int, asked: int, target: Target) -> dict[str, int]:
    """Return a kernel's resources for the manifest, from the linker's log and its dynamic shared memory (``asked``).

    They include the number of blocks that fit a multiprocessor.
    """
    if not found:
        return {}
    shared = found["shared"] + asked
    return {
        **found,
        "shared": shared,
        "blocks": target.multiprocessor.resident_blocks(threads, found["registers"], shared),
    }


def block_launch_entry(kernel: Kernel, target: Target) -> Mapping[str, Any]:
    """Return the launch entry of the manifest for a kernel with one item per block.

    The entry is empty if all parameters have default values. A kernel that all blocks run together has at most one
    block for each multiprocessor, so that all blocks run concurrently.
    """
    shared = dynamic_shared_bytes(kernel, target)
    if needs_grid(kernel):
        count = max(static(s.end) for s in walk(kernel.body) if isinstance(s, For) and s.kind == "blocks")
        row = {"blocks": [count, 1, 1], "resident": 1, "cluster": [1, 1, 1], "shared": shared, "maps": []}
        return {**row, "cooperative": True}
    if not shared:
        return {}
    numbers = {name: n for n, name in enumerate(kernel.dims)}
    blocks = [manifest_size_entry(kernel.grid, numbers), 1, 1]
    return {"blocks": blocks, "resident": 0, "cluster": [1, 1, 1], "shared": shared, "maps": []}
