"""Latency, throughput, start-up time and memory of bundles, measured in alternating rounds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import size_text, time_text
from aotc.tools.sample_arguments import sample_call
from aotc.vmfb.assumed_sizes import kernel_sizes_text
from aotc.vmfb.errors import CallError, check_keywords
from aotc.vmfb.gang.gang import Gang, gang
from aotc.vmfb.host.children import python_command
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.profile.latency import (
    Interval,
    KernelTimes,
    average,
    latencies,
    measure_concurrently,
    quantile,
    times_by_kernel,
)
from aotc.vmfb.profile.roofline import roof_of

if TYPE_CHECKING:
    from typing import Unpack

_COLD = """
import json, re, runpy, sys, time
devices = json.loads(sys.argv[2])
start = time.perf_counter()
import aotc
for path in sys.argv[3:]:
    runpy.run_path(path)
module = aotc.load(sys.argv[1], devices=devices)
seconds = time.perf_counter() - start
# Not getrusage: its maximum includes the memory of the parent before exec.
print(seconds, int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10)
"""
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Seconds that dispatches of calls are recorded at most: the recording has room for a limited number.
MOST_RECORDED = 0.5


class BenchKeywords(TypedDict, total=False):
    """Keywords of :func:`bench`: the fields of :class:`BenchSettings`."""

    seconds: float
    rounds: int
    callers: tuple[int, ...]
    per_dispatch: bool
    roofline: bool
    devices: str | Sequence[str] | Mapping[str, str] | None
    threads: int | None
    custom_calls: tuple[str, ...]
    ranks: int | None


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a benchmark.

    Attributes
    ----------
    seconds : float
        Duration for each bundle.
    rounds : int
        Number of rounds; each round measures every bundle.
    callers : tuple of int
        Numbers of concurrent callers to measure in addition to one.
    per_dispatch, roofline : bool
        Measure each kernel during calls; compare kernels with the peak rates of the cores.
    devices
        As for :func:`aotc.load`.
    threads : int, optional
        Threads to compute with; all usable cores by default.
    custom_calls : tuple of str
        Python files that register custom calls, run before the load in a fresh process.
    ranks : int, optional
        Run sharded bundles on a gang of this number of processes: see :func:`aotc.gang`.
    """

    seconds: float = 2.0
    rounds: int = 5
    callers: tuple[int, ...] = ()
    per_dispatch: bool = False
    roofline: bool = False
    devices: str | Sequence[str] | Mapping[str, str] | None = None
    threads: int | None = None
    custom_calls: tuple[str, ...] = ()
    ranks: int | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Calls per second of concurrent callers, and the latency of their calls in seconds."""

    callers: int
    calls_per_second: Interval
    latency: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class BenchedBundle:
    """Measurements of a bundle, in seconds and bytes.

    Attributes
    ----------
    file : str
        The bundle.
    import_and_load, memory_after_load : float, int
        Duration of the import of aotc and the load of the bundle, and memory after it, in a fresh process.
    first_call : float
        Duration of the first call.
    latency : mapping of str to Interval
        Durations of the later calls: ``p50``, ``p90`` and ``p99``.
    calls : int
        Number of measured calls.
    throughput : tuple of Throughput
        Calls per second for each number of concurrent callers.
    dispatches : tuple of KernelTimes
        Times of the kernels; empty if they were not requested, or if there were more than are recorded.
    slowest_rank : mapping of str to Interval
        For a gang: the latency of each call on its slowest rank, without the copies of whole arrays; else empty.
    """

    file: str
    import_and_load: float
    memory_after_load: int
    first_call: float
    latency: Mapping[str, Interval]
    calls: int
    throughput: tuple[Throughput, ...]
    dispatches: tuple[KernelTimes, ...]
    slowest_rank: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class BenchResult(DisplayedResult):
    """Measurements of one bundle or of two; ``print`` displays them as ``aotc bench`` does.

    Attributes
    ----------
    bundles : tuple of BenchedBundle
        The measurements of each bundle.
    ratio : Interval or None
        The duration of the first bundle's calls relative to the second's.
    settings : BenchSettings
        The settings of the measurement.
    """

    bundles: tuple[BenchedBundle, ...]
    ratio: Interval | None
    settings: BenchSettings

    def document(self) -> Document:
        """Return the benchmark report: latency and size figures per bundle, kernel times if measured."""
        names = [one.file for one in self.bundles]
        columns = [Column(""), *(Column(name, right=True) for name in names)]
        blocks: list[Block] = [table(columns, self._rows())]
        if self.ratio is not None:
            x = self.ratio
            often = f" [{x.low:.2f}, {x.high:.2f}]" if self.settings.rounds > 1 else ""
            blocks.append(Line(f"{names[0]} takes {x.value:.2f}{often} times as long as {names[1]}"))
        for one in self.bundles:
            if self.settings.per_dispatch or self.settings.roofline:
                blocks += _dispatch_blocks(one, self.settings.roofline)
        return Document("", tuple(blocks))

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the report: a label, and a text for each bundle."""
        every = self.bundles
        rows = [
            ("import and load", *(time_text(one.import_and_load) for one in every)),
            ("memory after load", *(size_text(one.memory_after_load) for one in every)),
            ("first call", *(time_text(one.first_call) for one in every)),
            *((label, *(_interval_text(one.latency[label]) for one in every)) for label in _SHARES),
        ]
        if every[0].slowest_rank:
            rows += [
                (f"{label} of the slowest rank", *(_interval_text(one.slowest_rank[label]) for one in every))
                for label in _SHARES
            ]
        rows.append(("calls", *(f"{one.calls:,}" for one in every)))
        for n, row in enumerate(every[0].throughput):
            label = f"{row.callers} caller{'s' * (row.callers > 1)}, calls/s"
            rows.append((label, *(_rate_text(one.throughput[n].calls_per_second) for one in every)))
            rows.append(("  p99", *(_interval_text(one.throughput[n].latency["p99"]) for one in every)))
        return rows


def _interval_text(x: Interval) -> str:
    return f"{time_text(x.value)} [{time_text(x.low)}, {time_text(x.high)}]"


def _rate_text(x: Interval) -> str:
    return f"{x.value:,.0f}" + (f" [{max(x.low, 0):,.0f}, {x.high:,.0f}]" if x.high != float("inf") else "")


def _dispatch_blocks(one: BenchedBundle, roofline: bool) -> list[Block]:
    """Return the table of a bundle's kernels: runs, times, rates, and share of the roofline."""
    if not one.dispatches:
        return [Line(""), Line(f"{one.file}: more dispatches than are recorded; try --seconds=0.1")]
    rows = []
    for d in one.dispatches:
        sizes = kernel_sizes_text(d.sizes)
        times = f"{d.runs:.4g}", time_text(d.ns.value / 1e9), f"{100 * d.share:.1f} %", f"{d.threads:.1f}"
        roof = f"{100 * d.roofline:.0f} %" if roofline else ""
        rows.append((d.kernel, sizes, *times, f"{d.gflops:.1f}", f"{d.gbs:.1f}", roof, short_location_text(d.loc)))
    columns = [
        Column("kernel"), Column("sizes", priority=2), Column("runs", True, 5), Column("p50", True),
        Column("share", True), Column("threads", True, 6), Column("GFLOP/s", True, 4), Column("GB/s", True, 3),
        Column("roof", True, 1), Column("from", priority=1),
    ]  # fmt: skip
    blocks: list[Block] = [Line(f"{one.file}, kernels:"), table(columns, rows)]
    if roofline:
        roof_ = roof_of(max(d.bytes for d in one.dispatches))
        text = f"a core does {roof_.flops:.0f} GFLOP/s of f32 at most, copies of as many bytes {roof_.bytes:.0f} GB/s"
        share = sum(d.share * d.roofline for d in one.dispatches)
        blocks.append(Line(f"{one.file}: {100 * share:.0f} % of the roofline of the threads at work; {text}"))
    return blocks


def bench(
    bundle: str | os.PathLike[str] | bytes,
    against: str | os.PathLike[str] | bytes | None = None,
    *,
    function: str = "",
    inputs: Sequence[Any] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
    **settings: Unpack[BenchKeywords],
) -> BenchResult:
    """Measure a bundle: import and load in a fresh process, the first call, and the latency of later calls.

    Parameters
    ----------
    bundle : path or bytes
    against : path or bytes, optional
        A second bundle, measured in turn with the first.
    function : str
        By default the only function, or ``main``.
    inputs : sequence of arrays
        The first arguments, flat; the others are random values.
    sizes : mapping of str to int
        Sizes of symbolic dims of the random values; others have their typical size, or 16.
    **settings
        Fields of :class:`BenchSettings`.

    Returns
    -------
    BenchResult

    Raises
    ------
    BundleError
        If a bundle cannot be loaded.
    CallError
        If there is no such function or keyword, or the arguments do not fit.
    """
    check_keywords("bench", settings, [f.name for f in fields(BenchSettings)])
    with TemporaryDirectory() as folder:
        paths = []
        for number, source in enumerate([bundle] if against is None else [bundle, against]):
            paths.append(Path(folder, f"bundle{number}.vmfb") if isinstance(source, bytes) else Path(source))
            if isinstance(source, bytes):
                paths[-1].write_bytes(source)
        bind = partial(sample_call, function=function, inputs=inputs, sizes=sizes)
        return measure(paths, bind, replace(BenchSettings(), **settings))


Bind = Callable[[Any], tuple[str, Sequence[Any]]]


@dataclass
class _BundleMeasurement:
    """Measurements of a bundle during a benchmark; ``call`` runs one call."""

    file: str
    call: Callable[[], Any]
    module: LoadedModule | Gang
    import_and_load: float
    memory_after_load: int
    first_call: float
    times: list[list[float]] = field(default_factory=list)  # by round
    throughput: list[Throughput] = field(default_factory=list)
    dispatches: list[KernelTimes] = field(default_factory=list)
    rank_times: list[float] = field(default_factory=list)

    def result(self) -> BenchedBundle:
        """Summarize the measurements as quantiles with confidence intervals."""
        every = [t for some in self.times for t in some]
        return BenchedBundle(
            self.file,
            self.import_and_load,
            self.memory_after_load,
            self.first_call,
            _latency_quantiles(every),
            len(every),
            tuple(self.throughput),
            tuple(self.dispatches),
            _latency_quantiles(self.rank_times) if self.rank_times else {},
        )


def measure(paths: Sequence[Path], bind: Bind, settings: BenchSettings) -> BenchResult:
    """Measure one or two bundles; ``bind`` returns the function name and the arguments for a loaded module."""
    found = [_prepare_measurement(path, bind, settings) for path in paths]
    _measure_in_rounds(found, settings)
    if settings.per_dispatch or settings.roofline:
        for one in found:
            _record_dispatches(one, settings.seconds / settings.rounds)
    return BenchResult(
        tuple(one.result() for one in found), _duration_ratio(found) if len(found) == 2 else None, settings
    )


def _prepare_measurement(path: Path, bind: Bind, settings: BenchSettings) -> _BundleMeasurement:
    """Load a bundle, bind its arguments, and measure its start-up and first call."""
    if settings.ranks is not None:
        return _prepare_gang_measurement(path, bind, settings)
    module = load(str(path), devices=settings.devices, threads=settings.threads)
    name, values = bind(module)
    begin = perf_counter()
    module.invoke(name, *values)
    first = perf_counter() - begin
    cold, memory = _cold_start(path, settings)
    return _BundleMeasurement(path.name, lambda: module.invoke(name, *values), module, cold, int(memory), first)


def _prepare_gang_measurement(path: Path, bind: Bind, settings: BenchSettings) -> _BundleMeasurement:
    """Start a gang, bind its arguments, and measure its start-up, memory of all ranks and first call."""
    if settings.callers or settings.per_dispatch or settings.roofline:
        what = "of a gang only the latency is measured: its calls run one after another, on several processes"
        raise CallError(path.name, what, hint="neither callers, nor per_dispatch, nor roofline")
    begin = perf_counter()
    module = gang(path, ranks=settings.ranks, threads=settings.threads)
    cold, memory = perf_counter() - begin, sum(map(_peak_bytes, module.processes))
    name, values = bind(module)
    times: list[float] = []

    def call() -> None:
        module.invoke(name, *values)
        times.append(max(module.rank_seconds))

    begin = perf_counter()
    call()
    first = perf_counter() - begin
    times.clear()
    return _BundleMeasurement(path.name, call, module, cold, memory, first, rank_times=times)


def _peak_bytes(process: int) -> int:
    """Return the largest resident memory of a process so far in bytes; 0 where the system does not report it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _measure_in_rounds(found: Sequence[_BundleMeasurement], settings: BenchSettings) -> None:
    """Measure the bundles in alternating rounds, with one caller and then with each number of callers."""
    seconds, rounds = settings.seconds / settings.rounds, settings.rounds
    for _ in range(rounds):
        for one in found:
            one.times.append(latencies(one.call, seconds))
    for count in settings.callers:
        made = [[measure_concurrently(one.call, count, seconds) for one in found] for _ in range(rounds)]
        for one, results in zip(found, zip(*made)):
            every = [t for _, times in results for t in times]
            one.throughput.append(Throughput(count, average([rate for rate, _ in results]), _latency_quantiles(every)))


def _latency_quantiles(times: Sequence[float]) -> dict[str, Interval]:
    return {label: quantile(times, share) for label, share in _SHARES.items()}


def _record_dispatches(one: _BundleMeasurement, seconds: float) -> None:
    """Record the kernel launches of some calls, for about ``seconds``."""
    assert isinstance(one.module, LoadedModule)  # ``_prepare_gang_measurement``
    recording = one.module.profile()
    assert not isinstance(recording, dict)
    with recording:
        calls = len(latencies(one.call, min(seconds, MOST_RECORDED)))
    if not recording.lost:
        one.dispatches = times_by_kernel(recording.dispatches, calls)


def _cold_start(path: Path, settings: BenchSettings) -> tuple[float, float]:
    """Import aotc and load ``path`` in fresh processes; return the median seconds of three runs, and the peak bytes."""
    found = []
    script = python_command(_COLD, str(path), json.dumps(settings.devices), *settings.custom_calls)
    for _ in range(3):
        done = subprocess.run(script, capture_output=True, text=True, check=True)
        seconds, size = done.stdout.split()
        found.append((float(seconds), float(size)))
    return sorted(found)[1]


def _duration_ratio(found: Sequence[_BundleMeasurement]) -> Interval:
    """Return the duration of the first bundle's calls relative to the second's: the mean over rounds."""
    middle = [[quantile(times, 0.5).value for times in one.times] for one in found]
    return average([a / b for a, b in zip(*middle)])
