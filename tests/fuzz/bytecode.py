"""Changed MLIR bytecode: a model or a CompileError. The reader process may end, this one may not."""

from __future__ import annotations

from fuzz.artifacts import changed, codes, compiled, read

PATIENCE = 40.0  # seconds: a reader process starts within it on a busy machine


def input_of(number: int) -> tuple[bytes, str]:
    """Return the changed bytecode of a case."""
    return changed(codes(), number), ".mlirbc"


def case(number: int) -> str:
    """Read one mutant; compile one of eight."""
    return (compiled if number % 8 == 0 else read)(input_of(number)[0])
