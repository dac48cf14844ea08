"""``--dump-ir``: one file per pass, then the kernels with their plans and the steps; each reads back."""

import re

import jax
import pytest
from support.differential import normal

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.program.text import parse_program, print_program
from aotc.ir.tensor.text import parse_module, print_module
from aotc.lowering.plans.region_plan import parse_plan
from aotc.pipeline import PASSES

pytestmark = pytest.mark.cpu


def test_every_ir_is_written_and_reads_back(tmp_path):
    x = normal(4, 6)
    aotc.compile(jax.jit(lambda x: jax.nn.softmax(x @ x.T)[::-1].cumsum(0)), x, dump_ir=str(tmp_path))
    paths = sorted(tmp_path.iterdir())
    steps = [step.name for step in PASSES]
    assert [p.name for p in paths] == [f"{n:02}-{name}.txt" for n, name in enumerate([*steps, "lower"], 1)]
    for path in paths[:-1]:
        text = path.read_text()
        assert print_module(parse_module(text)) == text
    lowered = paths[-1].read_text()
    plans = re.findall(r"^# plan: (.*)$", lowered, re.MULTILINE)
    assert plans
    assert [str(parse_plan(plan)) for plan in plans] == plans
    *texts, program = re.split(r"\n(?=def |program )", re.sub(r"^# plan: .*\n", "", lowered, flags=re.MULTILINE))
    kernels = {k.name: k for k in map(parse_kernel, texts)}
    assert [print_kernel(k).strip() for k in kernels.values()] == [text.strip() for text in texts]
    assert print_program(parse_program(program, kernels)) == program
