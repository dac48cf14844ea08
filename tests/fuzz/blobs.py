"""Changed ``jax.export`` blobs: a model or a CompileError. The reader process may end, this one may not."""

from __future__ import annotations

from fuzz.artifacts import blobs, changed, compiled, read

PATIENCE = 40.0  # seconds: a reader process starts within it on a busy machine


def input_of(number: int) -> tuple[bytes, str]:
    """Return the changed blob of a case."""
    return changed(blobs(), number), ".jaxexp"


def case(number: int) -> str:
    """Read one mutant; compile one of eight."""
    return (compiled if number % 8 == 0 else read)(input_of(number)[0])
