"""Table of modules by op name, and helpers to write its rows."""

import numpy as np

RNG = np.random.default_rng(0)
MLIR = {
    "float32": "f32",
    "int32": "i32",
    "bool": "i1",
    "complex64": "complex<f32>",
    "uint32": "ui32",
    "int64": "i64",
    "uint64": "ui64",
    "float64": "f64",
}
F = RNG.uniform(-3, 3, (3, 4)).astype("f4")
P = RNG.uniform(0.2, 0.9, (3, 4)).astype("f4")
I = RNG.integers(-9, 9, (3, 4)).astype("i4")  # noqa: E741
S = RNG.integers(0, 40, (3, 4)).astype("i4")
C = (F + 1j * P).astype("c8")
B = F > 0
N = np.int32


def mlir(a):
    return f"tensor<{''.join(f'{n}x' for n in a.shape)}{MLIR[a.dtype.name]}>"


def module(line, args, results):
    """Return a module that returns ``%y`` of ``line``; ``@T0`` is the type of argument 0, ``@R0`` that of result 0."""
    for n, a in enumerate(args):
        line = line.replace(f"@T{n}", mlir(a))
    for n, t in enumerate(results):
        line = line.replace(f"@R{n}", f"tensor<{t}>")
    types = ", ".join(f"tensor<{t}>" for t in results)
    head = ", ".join(f"%{n}: {mlir(a)}" for n, a in zip("abcdefg", args))
    names = ", ".join(f"%y#{n}" for n in range(len(results))) if len(results) > 1 else "%y"
    return f"func.func @main({head}) -> ({types}) {{\n {line}\n return {names} : {types}\n}}"


def region(op, dtype="f32"):
    return (
        f"({{ ^bb0(%p: tensor<{dtype}>, %q: tensor<{dtype}>):\n %s = stablehlo.{op} %p, %q : tensor<{dtype}>\n"
        f" stablehlo.return %s : tensor<{dtype}>\n}})"
    )


def less(dtype):
    return (
        f"({{ ^bb0(%p: tensor<{dtype}>, %q: tensor<{dtype}>):\n"
        f" %s = stablehlo.compare GE, %p, %q : (tensor<{dtype}>, tensor<{dtype}>) -> tensor<i1>\n"
        " stablehlo.return %s : tensor<i1>\n})"
    )


GROUPS = "replica_groups = dense<[[0]]> : tensor<1x1xi64>"
ZERO = "%z = stablehlo.constant dense<0.0> : tensor<f32>\n"
CASES = {}


def add(name, line, args, results):
    CASES.setdefault(name, []).append((line, args, results))
