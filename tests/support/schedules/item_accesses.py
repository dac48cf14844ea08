"""Oracle of the memory accesses of items: each item of a kernel runs alone, and its accesses are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from aotc.ir.dims.algebra import static
from aotc.ir.loop import run as loop_run
from aotc.ir.loop.forms.tile_forms import F32, TileForm
from aotc.ir.loop.ir import Kernel
from aotc.vmfb.dtypes import size_of, to_numpy


def accesses_of(kernel: Kernel, rng: np.random.Generator) -> list[list[set[int]]]:
    """Return the accessed bytes of each buffer for each item of a kernel, by the first byte of each element."""
    buffers = (*kernel.inputs, *kernel.outputs)
    found = []
    for item in range(static(kernel.grid)):
        arrays = [np.asarray(rng.integers(0, 4, b.shape)).astype(to_numpy(b.dtype)) for b in buffers]
        touched: dict[int, set[int]] = {id(a): set() for a in arrays}
        with pytest.MonkeyPatch.context() as patch:
            _record(patch, touched)
            loop_run.run_kernel(kernel, arrays, begin=item, end=item + 1)
        found.append([{n * size_of(b.dtype) for n in touched[id(a)]} for a, b in zip(arrays, buffers, strict=True)])
    return found


def _record(patch: pytest.MonkeyPatch, touched: dict[int, set[int]]) -> None:
    """Patch the interpreter of kernels to record accessed elements of the arrays in ``touched``."""
    memory, tile = loop_run._Memory, loop_run._tile

    class Noted(memory):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def _note(self, index: Any) -> None:
            at = index if isinstance(index, tuple) else (index,)
            if id(self.array) in touched:
                touched[id(self.array)].add(int(np.ravel_multi_index(at, self.array.shape)) if at else 0)

        def __getitem__(self, index: Any) -> Any:
            self._note(index)
            return super().__getitem__(index)

        def __setitem__(self, index: Any, value: Any) -> None:
            self._note(index)
            super().__setitem__(index, value)

    def noted_tile(
        out: Any, a: Any, b: Any, *, rows: int, cols: int, levels: list, form: TileForm = F32, **at: Any
    ) -> None:
        group, bits = form.group, form.bits
        for n, where in ((out, _result(rows, cols, at)), (a, _left(rows, group, levels, at)),
                         (b, _right(cols, group, bits, levels, at))):  # fmt: skip
            if id(n.array) in touched:
                touched[id(n.array)].update(where)
        tile(out, a, b, rows=rows, cols=cols, levels=levels, form=form, **at)

    patch.setattr(loop_run, "_Memory", Noted)
    patch.setattr(loop_run, "_tile", noted_tile)


def _result(rows: int, cols: int, at: dict[str, int]) -> Iterator[int]:
    return (at["out_base"] + at["out_row"] * i + j for i in range(rows) for j in range(cols))


def _steps(levels: list, operand: int) -> Iterator[int]:
    for k in product(*(range(level[0]) for level in levels)):
        yield sum(i * level[1 + operand] for i, level in zip(k, levels, strict=True))


def _left(rows: int, group: int, levels: list, at: dict[str, int]) -> Iterator[int]:
    inner = at.get("a_inner", 1)
    for step, i, t in product(_steps(levels, 0), range(rows), range(group)):
        yield at["a_base"] + step + i * at["a_row"] + t * inner


def _right(cols: int, group: int, bits: int, levels: list, at: dict[str, int]) -> Iterator[int]:
    if bits:  # with scales between what the levels are of
        return iter(range(at["b_base"], at["b_base"] + levels[0][0] * levels[0][2]))
    return (at["b_base"] + step + j for step, j in product(_steps(levels, 1), range(cols * group)))
