"""What ``--verify-each`` checks between the stages from a region to a host program.

Each function stands for one stage, takes what the stage has made, and raises an InternalError that names the stage and
the function or kernel if a check of the IRs' verifiers finds something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import For, Kernel
from aotc.ir.loop.ir import walk as walk_statements
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.program.ir import Buffered, Launch, stretches, walk
from aotc.ir.program.verify import verify_plan, verify_steps
from aotc.ir.tensor.ir import Function, Value
from aotc.ir.tensor.substitute_dims import is_loop_name
from aotc.lowering.analysis.in_place import overwritten
from aotc.lowering.program.emit_program import Program, Stage
from aotc.lowering.program.schedule import CommandBuffer
from aotc.lowering.program.verify_schedule import verify_schedule
from aotc.vmfb.abi import Slots
from aotc.vmfb.commands import read_commands
from aotc.vmfb.verify.kernel_interface import Invalid
from aotc.vmfb.verify.program import check_commands, check_program


def after_region(kernel: Kernel) -> None:
    """Check the kernel of one region."""
    _report("lower_region", kernel.name, _kernel(kernel))


def _kernel(kernel: Kernel) -> list[str]:
    """Return what is wrong with a kernel, and which of its loops have names that a model's dim may have."""
    loops = {s.var for s in walk_statements(kernel.body) if isinstance(s, For)}
    names = sorted(name for name in loops if not is_loop_name(name))
    return [*verify_kernel(kernel), *(f"a dim of a model may be named as the loop over {name}" for name in names)]


def after_bufferize(program: Buffered, function: Function, functions: Mapping[str, Function]) -> None:
    """Check the steps of one function, and the kernels that it has besides those of regions."""
    for name, kernel in program.kernels.items():
        if name not in functions:
            _report("bufferize", name, _kernel(kernel))
    _report("bufferize", function.name, verify_steps(program, function, updates(functions)))


def after_sharing(programs: Mapping[str, Buffered], functions: Mapping[str, Function]) -> None:
    """Check the steps of all functions, and the kernels that read parts of arrays in some of them."""
    for name, program in programs.items():
        for step in walk(program.steps):
            if isinstance(step, Launch) and step.begins:
                _report("merge_by_offsets", step.kernel.name, _kernel(step.kernel))
        _report("merge_by_offsets", name, verify_steps(program, functions[name], updates(functions)))


def after_schedule(
    program: Buffered,
    function: Function,
    functions: Mapping[str, Function],
    stages: Sequence[Stage],
    slots: Slots,
    numbers: Mapping[str, int],
    sizes: Mapping[str, Sequence[int]],
) -> None:
    """Check the arena's plan and the command buffers of one function.

    ``numbers`` has each kernel's place, ``sizes`` the numbers that the kernel there is given for it.
    """
    totals: list[Sequence[Dim]] = [stage.arenas for stage in stages]
    _report("plan_memory", function.name, verify_plan(program, function, totals, updates(functions)))
    for stage, (steps, _) in zip(stages, stretches(program.steps), strict=True):
        _report("schedule", function.name, _commands(stage.buffer, len(set(numbers.values())), slots.count))
        _report("schedule", function.name, verify_schedule(stage.buffer, steps, slots, numbers.__getitem__, sizes))


def after_emit(program: Program, function: Function, buffers: Sequence[CommandBuffer], spaces: int) -> None:
    """Check the host program of one function as the loader does."""
    donated = function.attrs.get("donated", ())
    signature = {
        "arguments": [{**_value(v), "donated": n in donated} for n, v in enumerate(function.body.params)],
        "results": [_value(v) for v in function.body.results],
    }
    rows = [{"parameters": len(b.parameters)} for b in buffers]
    try:
        check_program(program.code, program.registers, signature, rows, spaces)
    except Invalid as error:
        _report("emit_program", function.name, [str(error)])


def _value(v: Value) -> dict[str, Any]:
    return {"dtype": v.type.dtype, "dims": list(map(str, v.type.shape))}


def updates(functions: Mapping[str, Function]) -> Callable[[str], int]:
    """Return how many outputs of a kernel hold old values that it reads, by the name of its region."""
    return lambda name: overwritten(functions[name]) if name in functions else 0


def _commands(buffer: CommandBuffer, kernels: int, slots: int) -> list[str]:
    try:
        check_commands(read_commands(buffer.code), kernels, slots, buffer.states, len(buffer.parameters))
    except Invalid as error:
        return [str(error)]
    return []


def _report(stage: str, name: str, findings: Sequence[str]) -> None:
    if findings:
        more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
        raise InternalError(f"after {stage} of {name}: {'; '.join(findings[:3])}{more}")
