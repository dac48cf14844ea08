"""StableHLO whose text was changed: import, passes, lowering and every verifier.

What is left of a module means something or is refused with a CompileError; an InternalError is a failure. What
accepted ones compute is the matter of ``compiled.py``.
"""

from __future__ import annotations

import random
import re
from functools import cache

from support.checklists.checklist import MLIR, module
from support.checklists.checklist_all import CASES

from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import host_target

PATIENCE = 20.0  # seconds: a case takes hundredths
DTYPES = [*sorted(set(MLIR.values())), "i8", "ui8", "i16", "bf16", "f16", "i4", "complex<f64>"]
DIMS = ("0", "1", "2", "3", "4", "5", "7", "8", "16", "?", "100000000000")
VALUES = ("0", "1", "2", "3", "-1", "4", "9223372036854775807", "0.0", "1.5", "-1.0e+30", "0x7FC00000", "true", "false")
TENSOR = re.compile(r"tensor<((?:[0-9?]+x)*)([a-z0-9]+(?:<[a-z0-9]+>)?)")
NUMBER = re.compile(r"(?<![\w%.])-?[0-9]+(?![\w.])")
NAME = re.compile(r"%[a-z0-9_]+")
OP = re.compile(r"(?:stablehlo|chlo)\.[a-z_0-9]+")


COLLECTIVE = """func.func @main(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %y = "stablehlo.NAME"(%x) REGION {ATTRS, replica_groups = dense<0> : tensor<1x1xi64>}
    : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}
"""
REGION = """({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %r = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %r : tensor<f32>
  })"""
COLLECTIVES = (
    ("all_reduce", REGION, "channel_handle = #stablehlo.channel_handle<handle = 0, type = 1>"),
    ("reduce_scatter", REGION, "scatter_dimension = 0 : i64"),
    ("all_gather", "", "all_gather_dim = 0 : i64"),
    ("all_to_all", "", "split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 1 : i64"),
)


@cache
def texts() -> tuple[str, ...]:
    """The modules to start from: one for each row of the checklist, and collectives."""
    collectives = [
        COLLECTIVE.replace("NAME", name).replace("REGION", region).replace("ATTRS", attrs)
        for name, region, attrs in COLLECTIVES
    ]
    return (*(module(*row) for rows in CASES.values() for row in rows), *collectives)


@cache
def ops() -> tuple[str, ...]:
    """Names of ops."""
    return tuple(sorted({name for text in texts() for name in OP.findall(text)}))


def mutant(number: int) -> str:
    """Return a module's text with one to three changes."""
    rng = random.Random(number)
    text = rng.choice(texts())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = changed(text, rng)
    return text


def input_of(number: int) -> tuple[bytes, str]:
    """Return the changed text of a case."""
    return mutant(number).encode(errors="replace"), ".mlir"


def changed(text: str, rng: random.Random) -> str:
    """Return a text with one change, made everywhere or in one place."""
    pattern, make = rng.choice(
        [
            (TENSOR, lambda m: f"tensor<{dims(m[1], rng)}{m[2]}"),
            (TENSOR, lambda m: f"tensor<{m[1]}{rng.choice(DTYPES)}"),
            (NUMBER, lambda m: rng.choice((*VALUES, str(int(m[0]) + rng.choice((-1, 1)))))),
            (NAME, lambda m: rng.choice(NAME.findall(text))),
            (OP, lambda m: rng.choice(ops())),
            (re.compile(r"[^\n]+\n"), lambda m: rng.choice(("", m[0] * 2))),
            (re.compile(r"[A-Z]{2,}"), lambda m: rng.choice(re.findall(r"[A-Z]{2,}", text))),
        ]
    )
    found = list(pattern.finditer(text))
    if not found:
        return text
    one = rng.choice(found)
    new = make(one)
    if rng.random() < 0.4 and pattern is not NAME:
        return text.replace(one[0], new)
    return text[: one.start()] + new + text[one.end() :]


def dims(text: str, rng: random.Random) -> str:
    """Return the dims of a tensor with one changed, dropped or repeated."""
    parts = text.split("x")[:-1]
    at = rng.randrange(len(parts) + 1)
    match rng.randrange(3):
        case 0 if parts:
            parts[at % len(parts)] = rng.choice(DIMS)
        case 1 if parts:
            del parts[at % len(parts)]
        case _:
            parts.insert(at, rng.choice(DIMS))
    return "".join(f"{part}x" for part in parts)


def case(number: int) -> str:
    """Take one mutant through the compiler without machine code."""
    text = mutant(number)
    options = Options(verify_each=True, cache=False, jobs=1)
    try:
        lower(run_passes(import_model(text), options), host_target(), options)
    except CompileError:
        return "refused"
    return "accepted"
