"""Floats of 4, 6 and 8 bits for tests: all codes, roundings by table search, and programs over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import aotc
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

SMALL = list(SMALL_FLOATS)
FEW = ["f6E3M2FN", "f8E5M2", "f8E4M3FN", "f8E4M3FNUZ", "f8E8M0FNU"]  # one of each way with specials
QUICK = [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in SMALL]
WIDE = ("f16", "bf16", "f32", "f64")
INTEGERS = ("i2", "i4", "i8", "i16", "i32", "i64", "u2", "u4", "u8", "u16", "u32", "u64")


def mlir_name(dtype: str) -> str:
    return {"c64": "complex<f32>"}.get(dtype, "ui" + dtype[1:] if dtype[0] == "u" else dtype)


def codes(dtype: str) -> np.ndarray:
    """Return every value of a small float."""
    return np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8).view(to_numpy(dtype))


def tensor(a: np.ndarray, dtype: str = "") -> str:
    names = {np.dtype(to_numpy(n)): n for n in DTYPES}
    return f"tensor<{''.join(f'{n}x' for n in a.shape)}{mlir_name(dtype or names[a.dtype])}>"


def program(lines: Sequence[str], arguments: Sequence[np.ndarray], results: Sequence[str]) -> str:
    """Return a module with the results ``%0``, ``%1``... of types ``results``; arguments are ``%a``, ``%b``..."""
    given = ", ".join(f"%{'abc'[n]}: {tensor(a)}" for n, a in enumerate(arguments))
    names = ", ".join(f"%{n}" for n in range(len(results)))
    types = ", ".join(results)
    body = "\n".join(lines)
    return f"module {{ func.func public @main({given}) -> ({types}) {{\n{body}\nreturn {names} : {types} }} }}"


def run(text: str, *arrays: np.ndarray, level: int = 2) -> list[np.ndarray]:
    return aotc.load(aotc.compile(text.encode(), opt_level=level, verify_each=True)).invoke("main", *arrays)


def same(got: np.ndarray, want: np.ndarray, what: Any = "") -> None:
    """Assert equal bits; any NaN equals any other."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=str(what))
        return
    wide = [x.astype(np.float64) if x.dtype.kind != "c" else x for x in (got, want)]
    unlike = np.ascontiguousarray(got).view(f"u{got.itemsize}") != np.ascontiguousarray(want).view(f"u{got.itemsize}")
    unlike &= ~(np.isnan(wide[0]) & np.isnan(wide[1]))
    places = np.argwhere(unlike)[:5]
    assert not unlike.any(), (what, int(unlike.sum()), [(got[tuple(p)], want[tuple(p)], tuple(p)) for p in places])


@cache
def table(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted finite values in f64 without -0, and their codes."""
    every = codes(dtype)
    wide = every.astype(np.float64)
    keep = np.isfinite(wide) & ~((wide == 0) & np.signbit(wide))
    order = np.argsort(wide[keep], kind="stable")
    return wide[keep][order], np.flatnonzero(keep)[order]


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round f64 ``x`` by search in the table of all values, independent of the arithmetic of any implementation."""
    form = SMALL_FLOATS[dtype]
    values, their = table(dtype)
    with np.errstate(all="ignore"):
        above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
        low, high = values[above - 1], values[above]
        middle = low + (high - low) / 2
        to_high = (x > middle) | ((x == middle) & (their[above] % 2 == 0))
        if form.special == "power":  # rounds halfway up, and all that is above the least to the next
            to_high = (x >= middle) | ((low == values[0]) & (x > low))
        code = np.where(to_high, their[above], their[above - 1])
        top = values[-1] + (values[-1] - values[-2]) / 2
        if form.special == "power":
            top = values[-1] * 1.5
        too_large = (np.abs(x) >= top) if form.special != "fn" else (np.abs(x) > top)
    if form.special == "power":
        code = np.where(x <= values[0], 0, np.where(too_large, 255, code))
        return np.where(np.isnan(x) | (x <= 0), 255, code).astype(np.uint8).view(to_numpy(dtype))
    sign = np.where(np.signbit(x), form.sign, 0)
    if form.special == "fnuz":
        code = np.where(too_large | np.isnan(x), form.nan, code)
    else:
        code = np.where(too_large, form.overflow, code & (form.sign - 1)) | sign
        nan = form.nan if form.special == "finite" else form.nan | sign
        code = np.where(np.isnan(x), nan, code)
    return code.astype(np.uint8).view(to_numpy(dtype))


def interesting(dtypes: Sequence[str]) -> np.ndarray:
    """Return f64 numbers: all values of the types, the midpoints between them, and the neighbours of both."""
    found: list[np.ndarray] = [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-300, -1e300])]
    for dtype in dtypes:
        values, _ = table(dtype)
        top = values[-1] + (values[-1] - values[-2]) / 2
        middle = np.concatenate([values, (values[1:] + values[:-1]) / 2, [top, -top, 1.5 * values[-1]]])
        found += [np.nextafter(middle, np.inf), middle, np.nextafter(middle, -np.inf)]
        narrow = middle.astype(np.float32)
        found += [np.nextafter(narrow, np.float32(s)).astype(np.float64) for s in (np.inf, -np.inf)]
    return np.concatenate(found)


def convert_all(x: np.ndarray, source: str, targets: Sequence[str], level: int = 2) -> list[np.ndarray]:
    types = [f"tensor<{x.size}x{mlir_name(t)}>" for t in targets]
    lines = [f"%{n} = stablehlo.convert %a : ({tensor(x, source)}) -> {t}" for n, t in enumerate(types)]
    return run(program(lines, [x], types), x, level=level)


def total_order(dtype: str) -> np.ndarray:
    """Return the rank of each code: numbers by value, -0 below 0, NaN outermost (that of fnuz at the bottom)."""
    form, count = SMALL_FLOATS[dtype], 1 << DTYPES[dtype].bits
    if form.special == "power":
        return np.arange(count)
    negative = list(range(count - 1, form.sign - 1, -1))
    if form.special == "fnuz":
        negative = [form.sign, *negative[:-1]]
    rank = np.empty(count, int)
    rank[[*negative, *range(form.sign)]] = np.arange(count)
    return rank
