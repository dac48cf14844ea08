"""Every row of the checklist with `?` for sizes, called with sizes that fit and that do not.

The oracle is XLA, after jaxlib's own refinement of the program for these arguments: where XLA refuses them, aotc must
fail, and otherwise return the same result. For rows that XLA cannot run with their own sizes, and calls with empty
arrays that it refuses, the oracle is the reference interpreter. As a program this module runs rows under
``AOTC_GUARD=1`` and prints a line before each call, so that the parent knows the call that ended the process.
"""

import re
import sys
import zlib

import numpy as np

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.semantics.run import OperandError, interpret
from aotc.vmfb.errors import CallError
from support.checklists.checklist import MLIR
from support.checklists.checklist_all import CASES

NAMES = "abcdefg"
NOT_RUN = ("stablehlo.custom_call",)  # the function is one of the test's own
# XLA does not compare the sizes of these, or not with those that the model states
NOT_XLAS = (
    "stablehlo.einsum", "stablehlo.unary_einsum", "stablehlo.torch_index_select", "stablehlo.reduce_scatter",
    "stablehlo.reduce",  # it leaves the start out of a sum of one element, which the specification allows
    "stablehlo.set_dimension_size",  # the result keeps the operand's size where the model states the one that is set
    "chlo.constant_like",  # jaxlib's expansion, ours too, does not read the operand
)  # fmt: skip
SPREAD = "chlo.broadcast_"  # of an unknown size that turns out to be 1 nothing is spread: docs/limits.md


def type_of(array, dynamic):
    sizes = "".join("?x" if dynamic else f"{n}x" for n in array.shape)
    return f"tensor<{sizes}{MLIR[array.dtype.name]}>"


def text_of(row, dynamic, stated):
    """Return a row's module with `?` for sizes of the arguments in ``dynamic``, and of results unless ``stated``."""
    line, args, results = row
    types = [type_of(a, n in dynamic) for n, a in enumerate(args)]
    given = [f"tensor<{t if stated else re.sub(r'[0-9]+x', '?x', t)}>" for t in results]
    for n, t in enumerate(types):
        line = line.replace(f"@T{n}", t)
    for n, t in enumerate(given):
        line = line.replace(f"@R{n}", t)
    head = ", ".join(f"%{n}: {t}" for n, t in zip(NAMES, types))
    names = ", ".join(f"%y#{n}" for n in range(len(results))) if len(results) > 1 else "%y"
    listed = ", ".join(given)
    return f"func.func @main({head}) -> ({listed}) {{\n {line}\n return {names} : {listed}\n}}"


def forms(row, every):
    """Yield texts of a row: all sizes unknown, or those of one argument; the sizes of results unknown, or stated."""
    ranked = [n for n, a in enumerate(row[1]) if a.ndim]
    choices = [ranked, *([n] for n in ranked)] if len(ranked) > 1 else [ranked]
    for dynamic in choices if ranked else []:
        for stated in (False, True):
            text = text_of(row, dynamic, stated)
            try:
                yield text, dynamic, aotc.load(aotc.compile(text.encode()), threads=1)
            except CompileError:
                continue  # MLIR or aotc wants to know this size: there is nothing to call
            if not every:
                return


def shapes_of(args, dynamic, rng, count):
    """Yield shapes: the row's own; all equal dims changed alike, which often fits; a single dim changed."""
    yield [a.shape for a in args]
    for iteration in range(count):
        if iteration % 2:
            sizes = {n: int(rng.integers(0, 8)) for n in range(64)}
            yield [tuple(sizes[n % 64] for n in a.shape) if k in dynamic else a.shape for k, a in enumerate(args)]
            continue
        k = int(rng.choice(dynamic))
        shape = list(args[k].shape)
        d = int(rng.integers(len(shape)))
        shape[d] = int(rng.choice([max(shape[d] - 1, 0), shape[d] + 1, 0, shape[d] + 9]))
        yield [tuple(shape) if n == k else a.shape for n, a in enumerate(args)]


def resized(a, shape):
    """Return an array of ``shape`` with the elements of ``a``, repeated as needed."""
    return np.resize(a, shape) if a.size else np.zeros(shape, a.dtype)


def agree(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, f"{a.shape}, XLA {b.shape}"
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def by_xla(text, args):
    """Return XLA's results; None if XLA refuses these arguments."""
    try:
        return run_xla(fetch(text.encode()), args)
    except CompileError:
        return None


def by_reference(text, args):
    """Return the results of the reference interpreter; None if it refuses these arguments."""
    try:
        return interpret(import_model(text), *args)
    except (OperandError, AssertionFailed):
        return None


def check_call(module, text, args, judged):
    """Run one call; return ``fits`` or ``refused`` if it agrees with ``judged``, else a description of the failure."""
    wanted = by_xla(text, args) if judged else None
    if wanted is None and (not judged or any(a.size == 0 for a in args)):
        wanted = by_reference(text, args)
    try:
        found = module.invoke("main", *args)
    except CallError as error:
        return f"the judge computes it, but: {error}" if wanted is not None else "refused"
    if wanted is None:
        return f"the judge refuses it, but we give {[np.asarray(x).shape for x in found]}"
    try:
        agree(found, wanted)
    except AssertionError as error:
        return f"differs: {error}"
    return "fits"


def check_row(name, number, row, count, every):
    """Yield the failures of a row; print a line before each call."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {number}".encode()))
    args = [np.asarray(a) for a in row[1]]
    for text, dynamic, module in forms(row, every):
        seen = set()
        judged = name not in NOT_XLAS and by_xla(text, args) is not None
        for shapes in shapes_of(args, dynamic, rng, count):
            if tuple(shapes) in seen:
                continue
            seen.add(tuple(shapes))
            print("CALL", name, number, dynamic, shapes, flush=True)
            outcome = check_call(module, text, [resized(a, s) for a, s in zip(args, shapes)], judged)
            print("DONE", outcome.splitlines()[0], flush=True)
            refused = outcome.startswith("the judge computes it")
            if refused and name.startswith(SPREAD) and any(1 in shapes[n] for n in dynamic):
                continue
            if outcome not in ("fits", "refused"):
                yield f"{name} {number}, sizes {shapes}: {outcome}\n{text}"


def main(count, every, names):
    wrong = []
    for name in names:
        for number, row in enumerate(CASES[name]):
            wrong += check_row(name, number, row, count, every)
    print("WRONG", len(wrong), flush=True)
    print("\n\n".join(wrong), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "every", sys.argv[3:])
