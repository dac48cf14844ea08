"""Run programs at real sizes, and report those whose results differ.

    python tests/support/sizes/run.py                        # a hundred new ones
    python tests/support/sizes/run.py --seed 3 --count 1000  # these ones
    python tests/support/sizes/run.py --seed 3 --only 17     # one of them

Each program is named before it runs, so that the last name belongs to a program that ends the process. Floats are
compared with the same program in float64 under XLA, exact results with XLA bit by bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import aotc
from support.sizes import arrays, products
from support.sizes.draw import EPS, Draw, Program

FAMILIES: tuple[Callable[[Draw], Program], ...] = (
    products.convolution, products.product, products.convolution, products.product, products.attention,
    arrays.reduction, arrays.scan, arrays.window, arrays.gather, arrays.scatter, arrays.sort, arrays.movement,
)  # fmt: skip


def draw(seed: int, number: int) -> Program:
    """Return program ``number`` of a seed; the families take turns."""
    return FAMILIES[number % len(FAMILIES)](Draw(seed, number))


def compare(program: Program, level: int, threads: int = 2) -> None:
    """Compile and run ``program``; raise an AssertionError that describes a difference."""
    with jax.enable_x64(True):
        _compare(program, level, threads)


def _compare(program: Program, level: int, threads: int) -> None:
    free = [n for n in range(len(program.arguments)) if n not in program.baked]

    def function(*given: jax.Array) -> object:
        values = dict(zip(free, given, strict=True))
        return program.function(*(values.get(n, a) for n, a in enumerate(program.arguments)))

    args = [program.arguments[n] for n in free]
    got = jax.tree.leaves(aotc.load(aotc.compile(jax.jit(function), *args, opt_level=level), threads=threads)(*args))
    want = jax.tree.leaves(oracle(program))
    assert [(a.shape, a.dtype) for a in got] == [a[:2] for a in want], "shapes or types differ"
    for a, (_, dtype, b) in zip(got, want, strict=True):
        if program.terms == 0:
            # NumPy does not know that a bfloat16 can be nan
            np.testing.assert_array_equal(*(v.astype("float32") if v.dtype.kind == "V" else v for v in (a, b)))
            continue
        wide = b.astype("float64")
        scale = max(float(np.abs(wide[np.isfinite(wide)]).max(initial=0)), 1.0)
        allowed = 8 * EPS[dtype.name] * scale * (1 + program.terms**0.5 / 8)
        np.testing.assert_allclose(a.astype("float64"), wide, rtol=0, atol=allowed)


def oracle(program: Program) -> object:
    """Return shape, dtype and value of each result, computed in float64 unless it is exact."""
    plain = jax.eval_shape(program.function, *program.arguments)
    inexact = program.terms != 0
    args = [a.astype("float64") if inexact and a.dtype.kind not in "iub" else a for a in program.arguments]
    values = jax.jit(program.function)(*args)
    shapes, leaves = jax.tree.leaves(plain), jax.tree.leaves(values)
    return [_Leaf((s.shape, s.dtype, np.asarray(v))) for s, v in zip(shapes, leaves, strict=True)]


class _Leaf(tuple):
    """Shape, dtype and value of a result, as a leaf of a pytree although it is a tuple."""


def main() -> int:
    """Run the programs that the command line selects; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the programs and their values")
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--level", type=int, default=2, help="optimization level")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    wrong = 0
    for number in numbers:
        program = draw(options.seed, number)
        print(f"--seed {options.seed} --only {number}: {program.text}", flush=True)
        try:
            compare(program, options.level)
        except Exception as error:
            wrong += 1
            print(f"WRONG {type(error).__name__}: {error}", flush=True)
    print(f"{len(numbers)} programs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
