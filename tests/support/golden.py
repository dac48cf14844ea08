"""Golden cases of lowering: the sections of a case's file, and arguments for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import from_numpy, kind_of, to_numpy

FOLDER = Path(__file__).parents[1] / "golden"
SIZE = 3  # of every symbolic dim


def sections(case: Path) -> tuple[str, str, str]:
    """Return the comment, the input and the output of a case's file."""
    head, rest = case.read_text().split("\n", 1)
    before, after = rest.split("====\n")
    return head + "\n", before, after


def sizes_of(types: Sequence[TensorType]) -> dict[str, int]:
    """Return a size for each symbol of ``types``."""
    return {s.name: max(SIZE, s.lo) for t in types for d in t.shape for s in symbols(d)}


def arguments(types: Sequence[TensorType], seed: int = 0) -> list[np.ndarray]:
    """Return random values: normally distributed floats, and integers from 0 to 3."""
    rng, dims = np.random.default_rng(seed), sizes_of(types)
    return [array(rng, t, dims) for t in types]


def array(rng: np.random.Generator, t: TensorType, dims: Mapping[str, int]) -> np.ndarray:
    """Return random values of type ``t``."""
    shape = tuple(evaluate(d, dims) for d in t.shape)
    match kind_of(t.dtype):
        case "b":
            values = rng.integers(0, 2, shape)
        case "i" | "u":
            values = rng.integers(0, 4, shape)
        case "c":
            values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
        case _:
            values = rng.normal(size=shape)
    return np.asarray(values).astype(to_numpy(t.dtype))


def close(got: Sequence[np.ndarray], want: Sequence[np.ndarray], rounding: float = 0.0) -> None:
    """Assert that results agree with the reference: integers exactly, floats within the error of a reordered sum.

    ``rounding`` is the relative effect of omitted intermediate roundings.
    """
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        wide = {"f": np.float64, "c": np.complex128}.get(kind_of_array(y))
        if wide is None:
            np.testing.assert_array_equal(x, y)
            continue
        scale = max(1.0, float(np.abs(y.astype(wide)).max(initial=0)))
        np.testing.assert_allclose(x.astype(wide), y.astype(wide), rtol=1e-5 + rounding, atol=2e-6 * scale)


def kind_of_array(a: np.ndarray) -> str:
    """Return the kind of an array's dtype."""
    return kind_of(from_numpy(a.dtype))
