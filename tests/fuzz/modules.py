"""StableHLO whose text was changed: import, passes, lowering and every verifier; now and then also compiled and run.

What is left of a module means something or is refused with a CompileError; an InternalError is a failure, and so are
results that differ from those of XLA, or of the reference interpreter where XLA refuses the module.
"""

from __future__ import annotations

import os
import random
import re
from functools import cache

import numpy as np
from support.checklist import MLIR, module
from support.checklist_all import CASES

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.ir.tensor_run import interpret
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import host
from aotc.vmfb.errors import VmError

PATIENCE = 60.0  # seconds: XLA and LLVM start within it on a busy machine
COMPILED = int(os.environ.get("AOTC_FUZZ_COMPILED", "50"))  # one of so many is compiled and run as well
DTYPES = [*sorted(set(MLIR.values())), "i8", "ui8", "i16", "bf16", "f16", "i4", "complex<f64>"]
DIMS = ("0", "1", "2", "3", "4", "5", "7", "8", "16", "?", "100000000000")
VALUES = ("0", "1", "2", "3", "-1", "4", "9223372036854775807", "0.0", "1.5", "-1.0e+30", "0x7FC00000", "true", "false")
TENSOR = re.compile(r"tensor<((?:[0-9?]+x)*)([a-z0-9]+(?:<[a-z0-9]+>)?)")
NUMBER = re.compile(r"(?<![\w%.])-?[0-9]+(?![\w.])")
NAME = re.compile(r"%[a-z0-9_]+")
OP = re.compile(r"(?:stablehlo|chlo)\.[a-z_0-9]+")
RUNS = 1e-3  # of the largest value: what another order of sums may cost


@cache
def texts() -> tuple[str, ...]:
    """The modules to start from: one for each row of the checklist."""
    return tuple(module(*row) for rows in CASES.values() for row in rows)


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
    """Take one mutant through the compiler without machine code; compile and run one of :data:`COMPILED`."""
    text = mutant(number)
    options = Options(verify_each=True, cache=False, jobs=1)
    try:
        lower(run_passes(import_model(text), options), host(), options)
    except CompileError:
        return "refused"
    if number % COMPILED:
        return "accepted"
    return ran(number, text)


def ran(number: int, text: str) -> str:
    """Compile and run a mutant; compare what it gives."""
    loaded = aotc.load(aotc.compile(text, verify_each=True, jobs=1), threads=1)
    rng = np.random.default_rng(number)
    arrays = []
    for argument in loaded.main.signature.arguments:
        shape = [d if isinstance(d, int) else 3 for d in argument["dims"]]
        if np.prod(shape) > 10**6:
            return "accepted, too large to run"
        arrays.append(rng.integers(0, 3, shape).astype(aotc.vmfb.dtypes.to_numpy(argument["dtype"])))
    try:
        got = loaded.invoke("main", *arrays)
    except VmError:
        return "accepted, VmError"
    try:
        wanted = run_xla(fetch(text), arrays)
    except CompileError:
        wanted = interpret(import_model(text), *arrays)
    for one, other in zip(got, wanted, strict=True):
        left, right = (np.asarray(x).astype("c16" if np.iscomplexobj(x) else "f8") for x in (one, other))
        largest = float(np.max(np.abs(right[np.isfinite(right)]), initial=1))
        np.testing.assert_allclose(left, right, rtol=RUNS, atol=RUNS * largest)
    return "compiled and right"


def may_hang(number: int) -> bool:
    """Tell whether a mutant has a loop of the model, which may have no end now."""
    return "while" in mutant(number)
