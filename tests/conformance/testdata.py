"""StableHLO's own test data: programs with the results that XLA had when they were made.

``stablehlo/testdata`` of https://github.com/openxla/stablehlo (Apache License 2.0); the files here are copies. Its own
judge, ``check.expect_close``, wants each part of a result within 3 units in the last place. An element that is farther
away is right only if mpmath says that aotc's is no farther from the exact value than the data is. A sum that cancels
need not agree in any digit: errors of sums are in units of ``u * sum(abs(x))``, as in :mod:`conformance.sums`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import aotc
from conformance.edges import errors, run_xla
from conformance.exact import FUNCTIONS, exact_values

SUMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cumsum": lambda x: x.cumsum(0),
    "reduce_window_add": lambda x: np.lib.stride_tricks.sliding_window_view(x, (2, 2)).sum((-2, -1)),
}
FOLDER = Path(__file__).parent / "stablehlo_testdata"
CLOSE = 3.0

_CALL = re.compile(r"(%\w+)(?::(\d+))? = call @inputs\(\) : \(\) -> \(?(.*?)\)?\n")
_TYPE = re.compile(r"tensor<[^<>]*(?:<[^<>]*>)?[^<>]*>")
_FUNCTION = r"  func\.func private @{}\(\)(?:.*\n)+?  }}\n"


@dataclass(frozen=True, slots=True)
class Distance:
    """How many elements lie beyond ``CLOSE`` of the data, and the largest errors of both against mpmath, if known.

    ``farther`` of those elements are farther from the exact value than the data is.
    """

    beyond: int
    farther: int
    own: float
    data: float


def arguments_and_results(text: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the constants of ``@inputs`` and ``@expected``."""
    found = []
    for name in ("inputs", "expected"):
        body = re.search(_FUNCTION.format(name), text)
        assert body is not None
        main = body[0].replace(f"private @{name}", "public @main")
        found.append(run_xla_all(main))
    return found[0], found[1][0]


def run_xla_all(text: str) -> list[np.ndarray]:
    """Return what a program without arguments gives."""
    first = re.search(r"return ((?:%\w+(?:, )?)+) : (.*)\n", text)
    assert first is not None
    names, kinds = first[1].split(", "), _TYPE.findall(first[2])
    results = []
    for name, kind in zip(names, kinds, strict=True):
        one = re.sub(r"-> .* \{\n", f"-> {kind} {{\n", text, count=1).replace(first[0], f"return {name} : {kind}\n")
        value = run_xla(one, [])
        assert value is not None
        results.append(value)
    return results


def program(text: str) -> str:
    """Return the text as a program of its inputs."""
    call = _CALL.search(text)
    assert call is not None
    name, count, kinds = call[1], call[2], _TYPE.findall(call[3])
    text = text.replace(call[0], "\n")
    for n in range(len(kinds)):
        text = re.sub(re.escape(f"{name}#{n}" if count else name) + r"(?![\w#])", f"%in{n}", text)
    parameters = ", ".join(f"%in{n}: {kind}" for n, kind in enumerate(kinds))
    text = text.replace("@main()", f"@main({parameters})")
    text = re.sub(r".*(call @expected\(\)|custom_call @check\.).*\n", "", text)
    for function in ("inputs", "expected"):
        text = re.sub(_FUNCTION.format(function), "", text)
    return text


def apart(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the distance of each element in units in the last place, of complex numbers part by part."""
    if got.dtype.kind != "c":
        return errors(got, want)
    return np.maximum(errors(got.real.copy(), want.real), errors(got.imag.copy(), want.imag))


def measure(path: Path) -> Distance:
    """Run one file and measure it."""
    text = path.read_text()
    args, data = arguments_and_results(text)
    got = np.asarray(aotc.load(aotc.compile(program(text))).invoke("main", *args)[0])
    wide = np.clongdouble if data.dtype.kind == "c" else np.longdouble
    beyond = apart(got, data.astype(wide)) > CLOSE
    operation = path.name.partition("_")[0]
    if operation not in FUNCTIONS:
        return Distance(int(beyond.sum()), int(beyond.sum()), np.nan, np.nan)
    exact = exact_values(operation, args, data.shape)
    own, theirs = apart(got, exact), apart(data, exact)
    return Distance(int(beyond.sum()), int((beyond & (own > theirs)).sum()), float(own.max()), float(theirs.max()))


def sum_of(path: Path) -> str:
    """Return which of :data:`SUMS` a file has, or an empty string."""
    return next((name for name in SUMS if path.name.startswith(f"{name}_")), "")


def measure_sum(path: Path) -> tuple[float, float]:
    """Return the largest errors of aotc and of the data, in half units in the last place of the sum of sizes."""
    text, exact = path.read_text(), SUMS[sum_of(path)]
    (x,), data = arguments_and_results(text)
    got = np.asarray(aotc.load(aotc.compile(program(text))).invoke("main", x)[0])
    found = []
    for result in (got, data):
        parts = ((result.real, x.real), (result.imag, x.imag)) if x.dtype.kind == "c" else ((result, x),)
        wide = [(r.astype(np.longdouble), v.astype(np.longdouble)) for r, v in parts]
        unit = float(np.finfo(x.dtype).eps) / 2
        found.append(max(float((np.abs(r - exact(v)) / (unit * exact(np.abs(v)))).max()) for r, v in wide))
    return found[0], found[1]
