"""Compare the kernels of a bundle with their printed Python functions, compiled by Numba, on random arguments."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import ExternalCall, Kernel, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.numba_front.trial import Arguments, NoTrial, call_native, call_printed, difference, random_arguments
from aotc.lowering.analysis.fft_tables import real_twiddles, twiddles
from aotc.vmfb.abi import TABLE_SYMBOL
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.devices.cpu.device import obstacle
from aotc.vmfb.devices.cpu.native import SharedObject
from aotc.vmfb.errors import BundleError


class Checked(NamedTuple):
    """The check of one kernel: ``problem`` is a difference, ``skipped`` the reason why it was not run."""

    name: str
    problem: str = ""
    skipped: str = ""


class NativeKernels:
    """The machine code of a variant's kernels, by their names."""

    def __init__(self, opened: OpenedBundle, variant: Mapping[str, Any]) -> None:
        names = [row["name"] for row in variant["kernels"]]
        self._library = SharedObject(opened.checked(variant["library"]))
        table = list((ctypes.c_int64 * len(names)).in_dll(self._library.library, TABLE_SYMBOL))
        self._addresses = dict(zip(names, table, strict=True))

    def call(self, kernel: Kernel, arguments: Arguments) -> None:
        """Run all of the kernel's grid on ``arguments``."""
        call_native(self._addresses[kernel.name], kernel, arguments)


def checked_kernels(opened: OpenedBundle, functions: Mapping[str, Callable[..., Any]]) -> Iterator[Checked]:
    """Yield the check of each kernel of the first CPU variant that this machine runs, as far as it has a function.

    Raises
    ------
    BundleError
        If the bundle has no such variant, or no text of its kernels.
    """
    texts = (opened.manifest.get("debug") or {}).get("kernels", {})
    variants = [v for v in opened.manifest["variants"] if v.get("library") is not None and not obstacle(v)]
    if not variants:
        raise BundleError(opened.where, "no variant with CPU kernels runs on this machine")
    variant = variants[0]
    native = NativeKernels(opened, variant)
    for row in variant["kernels"]:
        name = row["name"]
        if name not in functions:
            continue
        kernel = parse_kernel(texts[f"{variant['target']}/{name}"]["text"])
        try:
            arguments = random_arguments(kernel, tables=_tables(kernel))
        except NoTrial as reason:
            yield Checked(name, skipped=str(reason))
            continue
        expected, found = arguments.copied(), arguments.copied()
        native.call(kernel, expected)
        call_printed(functions[name], kernel, found)
        yield Checked(name, difference(kernel, expected, found))


def _tables(kernel: Kernel) -> dict[str, np.ndarray]:
    """Return the twiddle factors that the Fourier transforms of a kernel read, by their buffers' names."""
    found = {}
    for stmt in walk(kernel.body):
        if isinstance(stmt, ExternalCall) and isinstance(t := stmt.function, Transform):
            found[stmt.args[1][0].name] = real_twiddles(t.radices) if t.real else twiddles(t.radices, t.inverse)
    return found


def main(bundle: str, scope: Mapping[str, Any], arguments: list[str] | None = None) -> None:
    """Check the functions of a file of printed kernels; exit with 1 if one differs. Another bundle may be an argument.

    Numba compiles each function when it is called.
    """
    words = sys.argv[1:] if arguments is None else arguments
    opened = open_bundle(str(Path(words[0] if words else bundle)))
    failed = 0
    for row in checked_kernels(opened, {n: f for n, f in scope.items() if hasattr(f, "py_func")}):
        failed += bool(row.problem)
        print(f"{row.name}: {row.problem or (f'not run: {row.skipped}' if row.skipped else 'agrees')}", flush=True)
    if failed:
        raise SystemExit(1)
