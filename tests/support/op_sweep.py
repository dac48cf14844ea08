"""Every op that jaxlib's MLIR registers, as small modules, with the result of their import.

Run as a program with names of dialects: it prints a line of JSON for each op, and one before each attempt, so that an
attempt that ends the process can be named.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxlib
from jaxlib.mlir import ir

from aotc.diagnostics import CompileError
from aotc.frontend.contexts import make_context
from aotc.frontend.importer import import_model

DIALECTS = (
    "stablehlo", "chlo", "mhlo", "func", "arith", "math", "tensor", "shape", "scf", "cf", "sdy", "complex", "ub",
)  # fmt: skip
_NAME = re.compile(rb"(?:%s)\.[a-z_0-9.-]*[a-z0-9]" % b"|".join(d.encode() for d in DIALECTS))
TYPES = ("tensor<4xf32>", "tensor<4xi32>", "tensor<2x2xcomplex<f32>>", "tensor<4xi1>", "f32", "i32", "index", "i1",
         "tensor<2xindex>", "complex<f32>", "!shape.shape", "!shape.size", "!shape.witness", "!mhlo.token",
         "tensor<?x4xf32>")  # fmt: skip
MOST_IMPORTS = 16  # of one op
ATTRIBUTES = {
    **dict.fromkeys(("broadcast_dimensions", "permutation", "dimensions", "edge_padding_low", "edge_padding_high",
                     "interior_padding", "start_indices"), "array<i64: 0>"),
    **dict.fromkeys(("broadcast_sizes", "limit_indices", "fft_length", "slice_sizes"), "array<i64: 2>"),
    **dict.fromkeys(("strides", "static_strides"), "array<i64: 1>"),
    **dict.fromkeys(("dimension", "iota_dimension", "dim", "k", "predicate", "split_dimension", "concat_dimension",
                     "split_count", "batch_dims"), "1 : i64"),
    "comparison_direction": "#DIALECT<comparison_direction LT>",
    "fft_type": "#DIALECT<fft_type FFT>",
    "rng_distribution": "#DIALECT.rng_distribution<UNIFORM>",
    "rng_algorithm": "#DIALECT<rng_algorithm DEFAULT>",
    "value": "dense<1.0> : tensor<4xf32>",
    "exponent_bits": "5 : i32",
    "mantissa_bits": "7 : i32",
    "call_target_name": '"foreign"',
    "index": "0 : i32",
    "msg": '"message"',
    "passing": "true",
    "shape": "dense<[1, 2]> : tensor<2xindex>",
    "callee": "@main",
    "cases": "array<i64: 2>",
    "reassociation": "[[0]]",
    "static_output_shape": "array<i64: 4>",
}  # fmt: skip
"""A value of each attribute that an op may require."""
_REQUIRED = re.compile(r"requires attribute '(\w+)'")
_RESULTS = ("tensor<4xi1>", "i1", "index", "tensor<4xf32>", "f32", "i32", "!shape.shape", "!shape.witness")


def registered_ops() -> list[str]:
    """Return the names of all ops of ``DIALECTS``: those among the strings of jaxlib's libraries that MLIR knows."""
    context, names = make_context(), set()
    for library in Path(jaxlib.__file__).parent.rglob("*.so*"):
        names.update(match.decode() for match in _NAME.findall(library.read_bytes()))
    return sorted(name for name in names if context.is_registered_operation(name))


def candidates() -> Iterator[tuple[list[str], list[str]]]:
    """Yield types of operands and results: up to three operands of a type, with results of it or of another type."""
    yield from (([], results) for results in ([], *([t] for t in TYPES)))
    for t, count in itertools.product(TYPES, (1, 2, 3)):
        for results in ([], [t], [t, t], *([r] for r in _RESULTS if r != t)):
            yield [t] * count, results


def _module(name: str, operands: list[str], results: list[str], attributes: str) -> str:
    arguments = ", ".join(f"%a{n}: {t}" for n, t in enumerate(operands))
    values = ", ".join(f"%a{n}" for n in range(len(operands)))
    bound = f"%0:{len(results)} = " if results else ""
    op = f'{bound}"{name}"({values}) {{{attributes}}} : ({", ".join(operands)}) -> ({", ".join(results)})'
    head = f"func.func @main(%x: tensor<4xf32>{', ' * bool(operands)}{arguments}) -> tensor<4xf32> {{"
    return f"{head}\n  {op}\n  return %x : tensor<4xf32>\n}}\n"


def attempts(name: str) -> Iterator[tuple[str, bool]]:
    """Yield modules with one op ``name``, and True if MLIR accepts them; they have the attributes that MLIR demands."""
    stated: dict[str, str] = {}
    for operands, results in candidates():
        for _ in range(8):  # attributes are asked for one by one
            text = _module(name, operands, results, ", ".join(f"{k} = {v}" for k, v in stated.items()))
            error = _verified(text)
            asked = _REQUIRED.search(error or "")
            if not asked or asked[1] in stated or asked[1] not in ATTRIBUTES:
                break
            stated[asked[1]] = ATTRIBUTES[asked[1]].replace("DIALECT", name.partition(".")[0])
        yield text, error is None


def _verified(text: str) -> str | None:
    """Return MLIR's error for a module, or None."""
    with _CONTEXT:
        try:
            ir.Module.parse(text)
        except ir.MLIRError as error:
            return str(error)
    return None


def outcome(name: str, text: str) -> str:
    """Return ``imported``, ``refused``, or a description of an improper refusal."""
    try:
        import_model(text)
    except CompileError as error:
        finding = error.findings[0]
        plain = name.partition(".")[2].removeprefix("broadcast_")
        if name not in finding.message and f".{plain}" not in finding.message:
            return f"does not name {name}: {error}"
        if finding.loc.line != 2:
            return f"does not name line 2: {error}"
        return "refused" if finding.hint else f"does not say what to try: {error}"
    return "imported"


def sweep(dialects: list[str]) -> None:
    """Print the outcome for each op of ``dialects``."""
    for name in registered_ops():
        if name.partition(".")[0] not in dialects:
            continue
        seen: dict[str, str] = {}
        valid = itertools.islice((text for text, is_valid in attempts(name) if is_valid), MOST_IMPORTS)
        for text in valid:
            print(json.dumps({"attempt": text}), flush=True)
            seen.setdefault(outcome(name, text), text)
        print(json.dumps({"op": name, "outcomes": seen}), flush=True)


_CONTEXT = make_context()

if __name__ == "__main__":
    sweep(sys.argv[1:])
