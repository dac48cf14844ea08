"""Undo the compiler's packing of constants: find the array of the model that a packed array was computed from.

Packing only rearranges elements. The unpacking steps (a *way*) undo it, in the form in which a bundle stores them:
``["reshape", shape]``, ``["transpose", perm]``, ``["reverse", dims]``, ``["slice", starts, limits, strides]``,
``["convert", dtype]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import is_static
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, walk
from aotc.source.limits import LARGE_BYTES
from aotc.vmfb.dtypes import size_of, to_numpy

UnpackingSteps = tuple[tuple[Any, ...], ...]


def undo_packing(array: np.ndarray, way: Sequence[Sequence[Any]]) -> np.ndarray:
    """Apply the unpacking steps ``way`` to a packed array and return the original array, as a view if possible.

    The caller applies a final ``reshape``, which would copy.

    Raises
    ------
    ValueError, IndexError, TypeError, KeyError
        If a step does not fit the array.
    """
    for left, step in enumerate(way, start=1 - len(way)):
        match step:
            case ["reshape", _] if not left:
                pass
            case ["reshape", shape]:
                array = array.reshape(tuple(shape))
            case ["transpose", perm]:
                array = array.transpose(tuple(perm))
            case ["reverse", dims]:
                array = np.flip(array, tuple(dims))
            case ["slice", starts, limits, strides]:
                array = array[tuple(map(slice, starts, limits, strides))]
            case ["convert", dtype]:
                array = array.astype(to_numpy(dtype))
            case _:
                raise ValueError(f"no step {step!r}")
    return array


def _undo_reshape(op: Op) -> tuple[Any, ...]:
    return "reshape", op.operands[0].type.shape


def _undo_transpose(op: Op) -> tuple[Any, ...]:
    return "transpose", tuple(int(n) for n in np.argsort(op.attrs["perm"]))


def _undo_reverse(op: Op) -> tuple[Any, ...]:
    return "reverse", tuple(op.attrs["dims"])


def _undo_convert(op: Op) -> tuple[Any, ...]:
    return "convert", op.operands[0].type.dtype


def _undo_pad(op: Op) -> tuple[Any, ...] | None:
    """Return the step that undoes a padding: a slice; None if the padding is negative."""
    low, high, interior = (tuple(op.attrs[name]) for name in ("low", "high", "interior"))
    if min((*low, *high), default=0) < 0:  # elements were left out
        return None
    strides = tuple(n + 1 for n in interior)
    ends = tuple(a + (n - 1) * s + 1 if n else a for a, n, s in zip(low, op.operands[0].type.shape, strides))
    return "slice", low, ends, strides


_UNDO: dict[str, Callable[[Op], tuple[Any, ...] | None]] = {
    "reshape": _undo_reshape,
    "transpose": _undo_transpose,
    "reverse": _undo_reverse,
    "convert": _undo_convert,
    "pad": _undo_pad,
}


# Candidates of a search for the array that a constant was computed from, at most. Layers of a model share theirs; three
# are usual. ResNet50V2 and GPT-2 have at most 4.
MOST_WAYS = 64
# Folding passes that rearranged a constant one after the other, at most. The table of passes has two.
MOST_FOLDS = 4


@dataclass
class UnpackingRules:
    """The unpacking steps of one compilation, by the type of the packed constant.

    They are recorded from the modules whose constants are folded. The steps apply to every constant of a type and may
    be wrong for some: the caller must compare the result with the model's constant.
    """

    of: dict[TensorType, dict[tuple[UnpackingSteps, TensorType], None]] = field(default_factory=dict)

    def record_module(self, module: Module) -> None:
        """Record how the ops of ``module`` rearrange large constants."""
        for function in module.functions.values():
            unpacked: dict[Value, tuple[UnpackingSteps, TensorType]] = {}
            for op in walk(function.body):
                if op.name == "constant":
                    unpacked.update((v, ((), v.type)) for v in op.results if _is_large_type(v.type))
                elif op.name in _UNDO and op.operands[0] in unpacked and is_static(op.result.type.shape):
                    step, (way, first) = _UNDO[op.name](op), unpacked[op.operands[0]]
                    if step is not None:
                        unpacked[op.result] = (step, *way), first
                        self.of.setdefault(op.result.type, {})[unpacked[op.result]] = None
                elif op.name == "gather" and op.operands[0] in unpacked and op.operands[0].type.rank == 2:
                    # gather_panels may replace the table by a matmul's panels, packed from its transpose.
                    table = op.operands[0].type
                    swapped = TensorType(table.dtype, table.shape[::-1])
                    self.of.setdefault(swapped, {})[(("transpose", (1, 0)),), table] = None

    def unpacked_candidates(self, array: np.ndarray, type_: TensorType) -> Iterator[tuple[UnpackingSteps, np.ndarray]]:
        """Yield candidates for the original of the packed ``array``: itself first, each with its unpacking steps."""
        found: list[tuple[UnpackingSteps, np.ndarray, TensorType, int]] = [((), array, type_, 0)]
        for way, unpacked, now, folds in found:
            yield way, unpacked
            if folds < MOST_FOLDS:
                for more, first in list(self.of.get(now, ()))[: MOST_WAYS - len(found)]:
                    found.append(
                        ((*way, *more), undo_packing(unpacked.reshape(_static_shape_of(now)), more), first, folds + 1)
                    )


def _static_shape_of(t: TensorType) -> tuple[int, ...]:
    return tuple(d for d in t.shape if isinstance(d, int))


def _is_large_type(t: TensorType) -> bool:
    shape = _static_shape_of(t)
    return len(shape) == t.rank > 0 and int(np.prod(shape, dtype=np.int64)) * size_of(t.dtype) >= LARGE_BYTES
