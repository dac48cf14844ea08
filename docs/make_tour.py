"""Write ``docs/tour.md``: one small model through every stage of the compiler, as the compiler prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aotc import pipeline
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.ir.tensor.ir import Module
from aotc.ir.tensor.text import print_module
from aotc.kernels.numba_front.source import numba_source
from aotc.options import Options
from aotc.targets import resolve_targets
from aotc.vmfb.assembly import disassemble
from aotc.vmfb.commands import decode_commands
from aotc_cli.commands.dump import node_lines

TARGET = "cpu:x86-64-v3"
MODEL = """\
module @tour {
  func.func public @main(%x: tensor<64x96xf32>, %w: tensor<96x32xf32>, %b: tensor<32xf32>) -> tensor<64xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
       : (tensor<64x96xf32>, tensor<96x32xf32>) -> tensor<64x32xf32>
    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<32xf32>) -> tensor<64x32xf32>
    %2 = stablehlo.add %0, %1 : tensor<64x32xf32>
    %3 = stablehlo.exponential %2 : tensor<64x32xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %4 = stablehlo.reduce(%3 init: %zero) applies stablehlo.add across dimensions = [1]
       : (tensor<64x32xf32>, tensor<f32>) -> tensor<64xf32>
    %5 = stablehlo.log %4 : tensor<64xf32>
    return %5 : tensor<64xf32>
  }
}
"""
HEAD = """\
# A tour: one model through every stage

Written by `python docs/make_tour.py` from what the compiler prints; a test fails when it is out of date. Each text
below can be had for your own model: `--print-after=PASS`, `--dump-ir=DIR`, `--stop-after=PASS` and `aotc dump`.

## The model

StableHLO for `log(sum(exp(x @ w + b), 1))`.
"""


def tour() -> str:
    """Return the text of the tour."""
    options = Options(target=TARGET)
    module = import_model(MODEL)
    parts = [HEAD, _block("mlir", MODEL), "## Tensor IR, as imported\n", _block("text", _text(module))]
    before = _text(module)
    for step in pipeline.PASSES:
        module = step.run(module, options)
        after = _text(module)
        if after != before:
            parts += [f"## After `{step.name}`\n", _summary(step), _block("text", after)]
        before = after
    variant = pipeline.lower(module, resolve_targets(TARGET)[0], options)
    parts.append(LOOP_IR)
    parts += [_block("python", print_kernel(kernel)) for kernel in variant.kernels]
    parts.append(f"{PRINTED}\n")
    parts.append(_block("python", numba_source(variant.kernels[-1]).module))
    names = [kernel.name for kernel in variant.kernels]
    parts.append("## The schedule\n\nWhat the executor runs, with the order that it must keep.\n")
    for buffer in variant.command_buffers:
        parts.append(_block("text", "\n".join(node_lines(decode_commands(buffer.code), names))))
    parts.append("## The host program\n\nIt sizes the results, takes the arena and submits the schedule.\n")
    parts += [_block("text", disassemble(program.code)) for program in variant.programs.values()]
    return "\n".join(parts)


LOOP_IR = """## Loop IR

Each region becomes a kernel: a Python function, from which aotc emits LLVM IR. A code generator on Numba's compiles
that to machine code.
"""
PRINTED = """`aotc dump --kernels -o kernels.py` prints kernels for Numba: each operation has its type, small floats are
codes in unsigned integers. `python kernels.py` compares each with the bundle's machine code on random arguments.
`aotc compile --kernel-compiler=numba` compiles kernels from this text, `--kernel k1_row=my.py` one from yours.
Kernels for GPUs print as functions of `numba.cuda`."""


def _summary(step: pipeline.Pass) -> str:
    """Return the first paragraph of the pass's docstring."""
    text = (step.run.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split()) + "\n"


def _text(module: Module) -> str:
    """Return the module without locations, nor what is kept for the signature (names, pytrees)."""
    plain = {n: replace(f, attrs={}) if f.public else f for n, f in module.functions.items()}
    return print_module(replace(module, functions=plain), locs=False)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    Path(__file__).with_name("tour.md").write_text(tour())
