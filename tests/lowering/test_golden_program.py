"""Golden cases of everything between regions and a bundle: a fused module in; steps, command buffers, host program out.

A case is ``tests/golden/program/<case>.txt``: a line that says what it shows, the module, ``====``, then the steps with
the arena's plan, the host program and the command buffers as ``aotc dump`` prints them. The steps run on NumPy over one
arena, and must give what the reference interpreter gives. ``--update`` rewrites the second part.
"""

from __future__ import annotations

import pytest
from support.golden import FOLDER, arguments, close, sections
from support.program_run import run_program

from aotc.ir.program.text import parse_program, print_program
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.substitute_dims import free_loop_names
from aotc.ir.tensor.text import parse_module
from aotc.lowering.lower import Variant, lower
from aotc.options import Options
from aotc.targets import resolve_targets
from aotc.vmfb.assembly import disassemble
from aotc.vmfb.commands import decode_commands
from aotc_cli.commands.dump import node_lines

pytestmark = pytest.mark.ir

CASES = sorted((FOLDER / "program").glob("*.txt"))
OPTIONS = Options(target="cpu:x86-64-v4", verify_each=True)
(TARGET,) = resolve_targets(OPTIONS.target)


def text_of(variant: Variant) -> str:
    """Return all that a case shows of a variant."""
    parts = [print_program(steps, name) for name, steps in variant.steps.items()]
    for name, program in variant.programs.items():
        parts.append(f"# host program of {name}\n{disassemble(program.code)}")
    names = [k.name for k in variant.kernels]
    for n, buffer in enumerate(variant.command_buffers):
        parameters = "".join(f", p{k} = {e}" for k, e in enumerate(buffer.parameters))
        lines = node_lines(decode_commands(buffer.code), names)
        parts.append("\n".join([f"# command buffer {n}{parameters}", *lines, ""]))
    return "".join(parts)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.stem)
def test_lowered_programs_match_the_golden_text(case, update):
    head, before, after = sections(case)
    module = parse_module(before)
    assert verify(module) == []
    variant = lower(module, TARGET, OPTIONS)
    main = free_loop_names(module).functions["main"]  # the dims' names in the steps
    for seed in range(3):
        arrays = arguments([p.type for p in main.body.params], seed)
        close(run_program(variant.steps["main"], main, variant.constants, arrays), interpret(module, *arrays))
    text = text_of(variant)
    if update:
        case.write_text(f"{head}{before}====\n{text}")
    else:
        assert text == after


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.stem)
def test_program_text_parses_to_the_same_program(case):
    variant = lower(parse_module(sections(case)[1]), TARGET, OPTIONS)
    for name, steps in variant.steps.items():
        text = print_program(steps, name)
        assert print_program(parse_program(text, steps.kernels), name) == text
