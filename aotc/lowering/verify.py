"""Checks of ``--verify-each`` between the lowering stages, from a region to a host program.

Each function checks the output of one stage with the verifiers of the IRs. If one finds an error, the function raises
an InternalError that names the stage and the function or kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import For, Kernel
from aotc.ir.loop.ir import walk as walk_statements
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.program.ir import Buffered, Launch, split_at_host_reads, walk
from aotc.ir.program.verify import verify_plan, verify_steps
from aotc.ir.tensor.ir import Function, Value
from aotc.ir.tensor.substitute_dims import is_loop_name
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.program.emit_program import Stage, VmProgramBuilder
from aotc.lowering.program.schedule import CommandBuffer
from aotc.lowering.program.verify_schedule import verify_schedule
from aotc.vmfb.abi import Slots
from aotc.vmfb.commands import decode_commands
from aotc.vmfb.verify.kernel_interface import Invalid
from aotc.vmfb.verify.program import check_commands, check_program


def verify_after_region(kernel: Kernel) -> None:
    """Verify the kernel that a region was lowered to."""
    _raise_verifier_errors("lower_region", kernel.name, _kernel_errors(kernel))


def _kernel_errors(kernel: Kernel) -> list[str]:
    """Return the errors of a kernel; also those of loops whose names could clash with a dim of the model."""
    loops = {s.var for s in walk_statements(kernel.body) if isinstance(s, For)}
    names = sorted(name for name in loops if not is_loop_name(name))
    return [*verify_kernel(kernel), *(f"a dim of a model may be named as the loop over {name}" for name in names)]


def verify_after_bufferize(program: Buffered, function: Function, functions: Mapping[str, Function]) -> None:
    """Verify the steps of one function, and the kernels that bufferization created, such as whole loops."""
    for name, kernel in program.kernels.items():
        if name not in functions:
            _raise_verifier_errors("bufferize", name, _kernel_errors(kernel))
    _raise_verifier_errors(
        "bufferize", function.name, verify_steps(program, function, update_counts_of_regions(functions))
    )


def verify_after_merging(programs: Mapping[str, Buffered], functions: Mapping[str, Function]) -> None:
    """Verify the result of ``merge_by_offsets``: the steps of all functions, and each merged kernel.

    Kernels that differ only in offsets into arrays become one, which gets the offsets as arguments.
    """
    for name, program in programs.items():
        for step in walk(program.steps):
            if isinstance(step, Launch) and step.begins:
                _raise_verifier_errors("merge_by_offsets", step.kernel.name, _kernel_errors(step.kernel))
        _raise_verifier_errors(
            "merge_by_offsets", name, verify_steps(program, functions[name], update_counts_of_regions(functions))
        )


def verify_after_schedule(
    program: Buffered,
    function: Function,
    functions: Mapping[str, Function],
    stages: Sequence[Stage],
    slots: Slots,
    numbers: Mapping[str, int],
    sizes: Mapping[str, Sequence[int]],
) -> None:
    """Verify the memory plan and the command buffers of one function.

    ``numbers`` has the position of the kernel that runs for each kernel name, ``sizes`` the sizes with which that
    kernel is called.
    """
    totals: list[Sequence[Dim]] = [stage.arenas for stage in stages]
    _raise_verifier_errors(
        "plan_memory", function.name, verify_plan(program, function, totals, update_counts_of_regions(functions))
    )
    for stage, (steps, _) in zip(stages, split_at_host_reads(program.steps), strict=True):
        _raise_verifier_errors(
            "schedule", function.name, _command_buffer_errors(stage.buffer, len(set(numbers.values())), slots.count)
        )
        _raise_verifier_errors(
            "schedule", function.name, verify_schedule(stage.buffer, steps, slots, numbers.__getitem__, sizes)
        )


def verify_after_emit(
    program: VmProgramBuilder, function: Function, buffers: Sequence[CommandBuffer], spaces: int
) -> None:
    """Verify the host program of one function by the rules of the loader."""
    donated = function.attrs.get("donated", ())
    signature = {
        "arguments": [{**_verified_value(v), "donated": n in donated} for n, v in enumerate(function.body.params)],
        "results": [_verified_value(v) for v in function.body.results],
    }
    rows = [{"parameters": len(b.parameters)} for b in buffers]
    try:
        check_program(program.code, program.registers, signature, rows, spaces)
    except Invalid as error:
        _raise_verifier_errors("emit_program", function.name, [str(error)])


def _verified_value(v: Value) -> dict[str, Any]:
    return {"dtype": v.type.dtype, "dims": list(map(str, v.type.shape))}


def update_counts_of_regions(functions: Mapping[str, Function]) -> Callable[[str], int]:
    """Return a function from a region's name to its number of outputs updated in place."""
    return lambda name: count_overwritten_parameters(functions[name]) if name in functions else 0


def _command_buffer_errors(buffer: CommandBuffer, kernels: int, slots: int) -> list[str]:
    """Return the error that the loader's check finds in a command buffer, or an empty list."""
    try:
        check_commands(decode_commands(buffer.code), kernels, slots, buffer.states, len(buffer.parameters))
    except Invalid as error:
        return [str(error)]
    return []


def _raise_verifier_errors(stage: str, name: str, findings: Sequence[str]) -> None:
    if findings:
        more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
        raise InternalError(f"after {stage} of {name}: {'; '.join(findings[:3])}{more}")
