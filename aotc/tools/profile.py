"""The time of each kernel of a bundle, measured in isolation, as typed values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, overload

from aotc.display.document import Column, Document, Line, Table, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.tools.explain.schedule import measured_on
from aotc.tools.profile_ranks import RanksProfile, profile_ranks
from aotc.tools.sample_arguments import sample_call
from aotc.vmfb.assumed_sizes import kernel_sizes_text
from aotc.vmfb.gang.gang import gang
from aotc.vmfb.module import load
from aotc.vmfb.profile.model_place import PlaceTime, line_and_scope, runs_by_location, times_by_place
from aotc.vmfb.profile.roofline import roof_of


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """Measurement of a kernel for given sizes of its dims.

    Attributes
    ----------
    name : str
        Name of the kernel.
    line, scope : str
        The user's innermost source line, and the layer, of its ops; several launches may have several.
    sizes : mapping of str to int
        Sizes of its dims.
    runs : int
        Number of runs in one call.
    seconds : float
        Duration of one run, alone on one core or a whole GPU.
    share : float
        Fraction of the time of all runs of all kernels.
    bytes, flops : int
        Bytes that one run reads and writes, and its floating-point operations.
    roofline : float or None
        The least time by the peak rates of a core, relative to ``seconds``; None on a GPU.
    """

    name: str
    line: str
    scope: str
    sizes: Mapping[str, int]
    runs: int
    seconds: float
    share: float
    bytes: int
    flops: int
    roofline: float | None


@dataclass(frozen=True, slots=True, repr=False)
class ProfileResult(DisplayedResult):
    """Kernels of a function by decreasing total time; ``print`` displays them as ``aotc profile`` does.

    Attributes
    ----------
    function, target, machine : str
        The function, the target of its code, and the processor or GPU.
    seconds : float
        Duration of all runs of all kernels, one after the other.
    kernels : tuple of ProfiledKernel
        The kernels.
    record : mapping
        Cost record for ``aotc.compile(..., costs=record)``.
    """

    function: str
    target: str
    machine: str
    seconds: float
    kernels: tuple[ProfiledKernel, ...]
    record: Mapping[str, Any]

    def document(self, by: str = "kernel", depth: int = 0) -> Document:
        """Return a table of the kernels, and their total time.

        Parameters
        ----------
        by : {"kernel", "scope", "line"}
            A row is a kernel, or the sum of a layer or of a line of the user's program.
        depth : int
            By scope: the number of outermost names that count; 0 means all.
        """
        core = "one core of " if "cpu" in self.target else ""
        what = f"{count_text(len(self.kernels), 'kernel')} of @{self.function}"
        total = Line(f"{what}: {time_text(self.seconds)} on {core}{self.machine}")
        return Document("", (self._kernel_table() if by == "kernel" else self._place_table(by, depth), total))

    def times_by_place(self, by: str = "scope", depth: int = 0) -> list[PlaceTime]:
        """Return the sums of each scope or line, the longest first; ``depth`` outermost names count, 0 means all."""
        return times_by_place(self.record, by, depth)

    def _place_table(self, by: str, depth: int) -> Table:
        """Return the table of the sums by scope or line."""
        columns = [
            Column(by), Column("kernels", True, 4), Column("runs", True, 3), Column("time", True),
            Column("share", True), Column("bytes", True, 5), Column("GFLOP/s", True, 2), Column("GB/s", True, 1),
        ]  # fmt: skip
        rows = [
            ((t.name if by == "scope" else short_location_text(t.name)) or "(none)", f"{len(t.kernels)}", f"{t.runs}",
             time_text(t.ns / 1e9), f"{100 * t.ns / 1e9 / self.seconds:.1f} %", size_text(t.bytes),
             f"{t.flops / t.ns:.1f}" if t.flops else "", f"{t.bytes / t.ns:.1f}")
            for t in self.times_by_place(by, depth)
        ]  # fmt: skip
        return table(columns, rows)

    def _kernel_table(self) -> Table:
        """Return the table of the kernels with times, rates and locations."""
        columns = [
            Column("kernel"), Column("sizes", priority=3), Column("runs", True, 4), Column("per run", True, 3),
            Column("time", True), Column("share", True), Column("bytes", True, 7), Column("GFLOP/s", True, 6),
            Column("GB/s", True, 5), Column("roof", True, 2), Column("from", priority=1), Column("scope", priority=1),
        ]  # fmt: skip
        rows = [
            (k.name, kernel_sizes_text(k.sizes), f"{k.runs}", time_text(k.seconds),
             time_text(k.runs * k.seconds), f"{100 * k.share:.1f} %", size_text(k.bytes),
             f"{k.flops / k.seconds / 1e9:.1f}" if k.flops else "",
             f"{k.bytes / k.seconds / 1e9:.1f}", "" if k.roofline is None else f"{100 * k.roofline:.0f} %",
             k.line, k.scope)
            for k in self.kernels
        ]  # fmt: skip
        return table(columns, rows)


def profile_result_of_record(record: Mapping[str, Any]) -> ProfileResult:
    """Convert a record that ``module.profile(name, ...)`` returned to a :class:`ProfileResult`."""
    times = [(row, next(iter(row["ns"].values()))) for row in record["kernels"]]
    total = sum(ns * row["runs"] for row, ns in times) or 1.0
    kernels = []
    for row, ns in sorted(times, key=lambda pair: -pair[1] * pair[0]["runs"]):
        flops = row.get("flops", 0)
        least = roof_of(row["bytes"]).nanoseconds(flops, row["bytes"]) / ns if "cpu" in row["ns"] else None
        share = ns * row["runs"] / total
        line, scope = line_and_scope(runs_by_location(row))
        seconds, size = ns / 1e9, row["bytes"]
        kernels.append(
            ProfiledKernel(row["name"], line, scope, row["sizes"], row["runs"], seconds, share, size, flops, least)
        )
    machine = measured_on(record, record["target"])
    return ProfileResult(record["function"], record["target"], machine, total / 1e9, tuple(kernels), record)


@overload
def profile(
    bundle: str | os.PathLike[str] | bytes, *, function: str = "", inputs: Sequence[Any] = (),
    sizes: Mapping[str, int] = MappingProxyType({}), devices: str | Sequence[str] | Mapping[str, str] | None = None,
    repeat: int = 7, ranks: None = None,
) -> ProfileResult: ...  # fmt: skip


@overload
def profile(
    bundle: str | os.PathLike[str] | bytes, *, function: str = "", inputs: Sequence[Any] = (), ranks: int,
    calls: int = 3,
) -> RanksProfile: ...  # fmt: skip


def profile(
    bundle: str | os.PathLike[str] | bytes,
    *,
    function: str = "",
    inputs: Sequence[Any] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
    devices: str | Sequence[str] | Mapping[str, str] | None = None,
    repeat: int = 7,
    ranks: int | None = None,
    calls: int = 3,
) -> ProfileResult | RanksProfile:
    """Run a function once, and each of its kernels repeatedly, alone on one core or on the whole GPU.

    With ``ranks``, run calls of a sharded bundle on a process for each rank, and record all ranks over time.

    Parameters
    ----------
    bundle : path or bytes
        A bundle with debug information; it is not modified.
    function : str
        By default the only function, or ``main``.
    inputs : sequence of arrays
        The first arguments, flat; the others are random values.
    sizes : mapping of str to int
        Sizes of symbolic dims of the random values; others have their typical size, or 16.
    devices
        As for :func:`aotc.load`.
    repeat : int
        Rounds for each kernel; the fastest counts.
    ranks : int, optional
        Number of ranks of a sharded bundle. ``devices`` and ``repeat`` are for bundles of one device.
    calls : int
        With ``ranks``: calls to record, after warm-up calls.

    Returns
    -------
    ProfileResult or RanksProfile
        The measured kernels; with ``ranks`` a RanksProfile, whose ``save(path)`` writes a trace.

    Raises
    ------
    BundleError
        If the bundle cannot be loaded.
    CallError
        If there is no such function, the arguments do not fit, or the bundle has no debug information.
    """
    source = bundle if isinstance(bundle, bytes) else os.fspath(bundle)
    if ranks is not None:
        return _profile_ranks(source, function, inputs, ranks, calls)
    module = load(source, devices=devices, threads=1, copy=True)
    name, values = sample_call(module, function, inputs, sizes)
    return profile_result_of_record(module.profile(name, *values, repeat=repeat))


def _profile_ranks(
    source: str | bytes, function: str, inputs: Sequence[Any], ranks: int, calls: int
) -> RanksProfile:
    with gang(source, ranks=ranks) as module:
        name, values = sample_call(module, function, inputs, {})
        return profile_ranks(module, name, values, calls)
