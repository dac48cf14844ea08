"""Compare the kernels of a bundle with their printed Python functions, compiled by Numba, on random arguments."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from aotc.driver.gpu_kernels import GpuKernels
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import ExternalCall, Kernel, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.numba_front.trial import (
    NoTrial,
    TrialArguments,
    call_loops,
    call_native,
    call_printed,
    is_for_cpus,
    output_difference,
    random_arguments,
)
from aotc.lowering.analysis.fft_tables import real_twiddles, twiddles
from aotc.targets import TARGETS
from aotc.vmfb.abi import TABLE_SYMBOL
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.devices.cpu import device as cpu_device
from aotc.vmfb.devices.cpu.native import SharedObject
from aotc.vmfb.devices.cuda import device as cuda_device
from aotc.vmfb.devices.cuda.loaded_kernels import has_code, kernel_images
from aotc.vmfb.errors import BundleError


class KernelCheck(NamedTuple):
    """Result of the check of one kernel: ``problem`` is a difference, ``skipped`` the reason if it did not run."""

    name: str
    problem: str = ""
    skipped: str = ""


class KernelCode(Protocol):
    """Interface to the kernels of one target of a variant, and to their printed functions.

    Attributes
    ----------
    is_native : bool
        True if the kernels are for a CPU.
    """

    is_native: bool

    def run_bundle_kernel(self, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run the bundle's kernel on its whole grid, which overwrites the outputs."""

    def run_printed_function(self, function: Any, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run the printed Python function of a kernel on ``arguments``, instead of the bundle's kernel."""


class NativeKernels:
    """Machine code of CPU kernels, by name."""

    is_native = True

    def __init__(self, opened: OpenedBundle, part: Mapping[str, Any], names: list[str]) -> None:
        self._library = SharedObject(opened.verified_segment(part["library"]))
        table = list((ctypes.c_int64 * len(names)).in_dll(self._library.library, TABLE_SYMBOL))
        self._addresses = dict(zip(names, table, strict=True))

    def run_bundle_kernel(self, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run the bundle's kernel."""
        call_native(self._addresses[kernel.name], kernel, arguments)

    def run_printed_function(self, function: Any, kernel: Kernel, arguments: TrialArguments) -> None:
        """Compile the printed Python function of a CPU kernel and run it on ``arguments``."""
        call_printed(function, kernel, arguments)


class CudaKernels:
    """Images of GPU kernels.

    If no GPU can run them, printed functions are only compiled.
    """

    is_native = False

    def __init__(self, opened: OpenedBundle, part: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self._target = TARGETS[part["target"]]
        self.obstacle = cuda_device.obstacle(dict(part))
        self._kernels: GpuKernels | None = None
        if not self.obstacle:
            coded = [row for row in rows if has_code(row)]
            code = [image for image in kernel_images(opened, {**part, "kernels": coded}) if image is not None]
            self._kernels = GpuKernels(opened.where, coded, code)

    def run_bundle_kernel(self, kernel: Kernel, arguments: TrialArguments) -> None:
        """Run the bundle's kernel if a GPU can run it."""
        if self._kernels is not None:
            self._kernels.run_own(kernel, arguments)

    def run_printed_function(self, function: Any, kernel: Kernel, arguments: TrialArguments) -> None:
        """Compile a printed function for the target and run it; the loops of a template run on the CPU.

        Raises
        ------
        NoTrial
            If no GPU can run it.
        """
        from aotc.kernels.numba_front.gpu_compile import compile_function

        if hasattr(function, "tiles"):
            if self._kernels is None:
                raise NoTrial(f"a template computes it; {self.obstacle}")
            call_loops(function.py_func, kernel, arguments)
            return
        image = compile_function(kernel, self._target, function)
        if self._kernels is None:
            raise NoTrial(f"it compiles for {self._target.name}; {self.obstacle}")
        self._kernels.run(image.data, kernel.name, kernel, arguments)


def _checkable_kernels(
    opened: OpenedBundle, variant: Mapping[str, Any]
) -> Iterator[tuple[KernelCode, list[dict[str, Any]]]]:
    """Yield the kernels of each target of a variant that this machine can check."""
    begin = 0
    for part in variant.get("parts", [variant]):
        end = begin + part.get("count", len(variant["kernels"]))
        rows, begin = variant["kernels"][begin:end], end
        if part.get("library") is None:
            yield CudaKernels(opened, part, rows), rows
        elif not cpu_device.obstacle(part):
            yield NativeKernels(opened, part, [row["name"] for row in rows]), rows


def checked_kernels(opened: OpenedBundle, functions: Mapping[str, Any]) -> Iterator[KernelCheck]:
    """Check each kernel that has a printed function, and yield the result.

    The kernels are those of the first variant of the bundle that has any of them.
    """
    texts = (opened.manifest.get("debug") or {}).get("kernels", {})
    for variant in opened.manifest["variants"]:
        known = [
            (code, row["name"], functions[row["name"]])
            for code, rows in _checkable_kernels(opened, variant)
            for row in rows
            if row["name"] in functions and is_for_cpus(functions[row["name"]]) == code.is_native
        ]
        for code, name, function in known:
            yield _checked_kernel(parse_kernel(texts[f"{variant['target']}/{name}"]["text"]), function, code)
        if known:
            return
    raise BundleError(opened.where, "no variant has such kernels that this machine runs")


def _checked_kernel(kernel: Kernel, function: Any, code: KernelCode) -> KernelCheck:
    """Run a kernel and its printed function on random arguments, and compare the outputs."""
    try:
        arguments = random_arguments(kernel, tables=_twiddle_tables(kernel))
        expected, found = arguments.copied(), arguments.copied()
        code.run_printed_function(function, kernel, found)
        code.run_bundle_kernel(kernel, expected)
    except NoTrial as reason:
        return KernelCheck(kernel.name, skipped=str(reason))
    return KernelCheck(kernel.name, output_difference(kernel, expected, found))


def _twiddle_tables(kernel: Kernel) -> dict[str, np.ndarray]:
    """Return the twiddle-factor tables that the Fourier transforms of a kernel read, by buffer name."""
    found = {}
    for stmt in walk(kernel.body):
        if isinstance(stmt, ExternalCall) and isinstance(t := stmt.function, Transform):
            found[stmt.args[1][0].name] = real_twiddles(t.radices) if t.real else twiddles(t.radices, t.inverse)
    return found


def main(bundle: str, scope: Mapping[str, Any], arguments: list[str] | None = None) -> None:
    """Command line of a file of printed kernels: check its functions, and exit with 1 if one differs.

    ``bundle`` is the default; another bundle may be the argument. Numba compiles each function when it is called.
    """
    words = sys.argv[1:] if arguments is None else arguments
    opened = open_bundle(str(Path(words[0] if words else bundle)))
    failed = 0
    for row in checked_kernels(opened, {n: f for n, f in scope.items() if hasattr(f, "py_func")}):
        failed += bool(row.problem)
        print(f"{row.name}: {row.problem or (f'not run: {row.skipped}' if row.skipped else 'agrees')}", flush=True)
    if failed:
        raise SystemExit(1)
