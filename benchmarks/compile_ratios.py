"""Compile time beside XLA's, by the processor time of all threads and processes, over a catalogue of programs.

    python benchmarks/compile_ratios.py                         # all of benchmarks/compile_programs.py
    python benchmarks/compile_ratios.py --only training --rounds 3
    python benchmarks/compile_ratios.py --stages                # where aotc's time goes, in one process

``aotc.compile(function, *arguments)`` and ``jax.jit(function).lower(*arguments).compile()`` take turns in this process,
with traces forgotten, aotc's cache empty but for the executor, and without compiler processes, which each compilation
starts as it needs them (``--warm`` keeps them). One warm-up of each before. The geometric mean is of medians' ratios.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

import aotc
from aotc.kernels.jobs.pool import POOL

Times: TypeAlias = tuple[float, float]
"""Processor time and wall time."""
ASKED = 2  # CLOCK_PROCESS_CPUTIME_ID of another process: the low bits of a clock's number


def processor_time() -> float:
    """Return the processor time of this process, of those that it waited for and of the compiler processes."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [p.pid for p in POOL._idle if p.poll() is None]
    return (
        time.process_time()
        + ended.ru_utime
        + ended.ru_stime
        + sum(time.clock_gettime(~pid << 3 | ASKED) for pid in running)
    )


def timed(call: Callable[[], Any]) -> Times:
    """Return what ``call`` takes; no garbage of others is left, a search for which takes 80 ms at its end."""
    gc.collect()
    processor, wall = processor_time(), time.perf_counter()
    call()
    return processor_time() - processor, time.perf_counter() - wall


def compile_ours(function: Callable[..., Any], args: tuple[Any, ...], started: Path, warm: bool = False) -> Times:
    """Compile with a cache that holds what ``started`` does."""
    if not warm:
        end_workers()
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        shutil.copytree(started, os.environ["AOTC_CACHE_DIR"])
        return timed(lambda: aotc.compile(function, *args))


def end_workers() -> None:
    """End the compiler processes, so that the next compilation starts some."""
    processes = list(POOL._idle)
    POOL.close()
    for process in processes:
        process.wait()


def compile_theirs(function: Callable[..., Any], args: tuple[Any, ...]) -> Times:
    """Compile with XLA."""
    jax.clear_caches()
    return timed(lambda: jax.jit(function).lower(*args).compile())


@contextmanager
def stages(found: dict[str, float]) -> Iterator[None]:
    """Add to ``found`` the processor time of each stage, all in this process."""
    from aotc import pipeline
    from aotc.driver import assemble
    from aotc.frontend import importer, mlir
    from aotc.kernels import back_end, worker
    from aotc.kernels.cpu import compile as cpu
    from aotc.kernels.cpu import link
    from aotc.kernels.jobs import objects, run

    kept: list[tuple[Any, str, Any]] = []
    inside: list[float] = []

    def watch(where: Any, name: str, stage: str) -> None:
        plain = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = processor_time()
            inside.append(0.0)
            try:
                return plain(*args, **kwargs)
            finally:
                whole = processor_time() - begin
                found[stage] = found.get(stage, 0.0) + whole - inside.pop()
                if inside:
                    inside[-1] += whole

        kept.append((where, name, plain))
        setattr(where, name, call)

    for where, name, stage in (
        (mlir, "fetch", "fetch"), (importer, "import_raw", "parse"), (pipeline, "run_passes", "passes"),
        (pipeline, "lower", "lowering"), (pipeline, "assemble", "bundle"), (worker, "parse_kernel", "emit"),
        (cpu, "emit_kernel", "emit"), (cpu, "define", "LLVM passes"), (back_end, "optimize", "LLVM passes"),
        (back_end, "inline_late", "LLVM passes"), (back_end, "emit_object", "code"), (link.Linker, "take", "link"),
        (link, "function_table", "link"), (pipeline, "embed", "bundle"), (pipeline, "check_bundle", "bundle"),
        (objects, "name_kernels", "lowering"),
    ):  # fmt: skip
        watch(where, name, stage)
    assert assemble.build_library is not None
    waiting: Any = run.Waiting
    kept += [(waiting, "shares", waiting.shares), (run, "OWN_TEXT", run.OWN_TEXT)]
    waiting.shares, run.OWN_TEXT = (lambda *_: (0, 1)), run.LONGEST_TEXT - 1
    try:
        yield
    finally:
        for where, name, plain in reversed(kept):
            setattr(where, name, plain)


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def measure(name: str, given: argparse.Namespace, started: Path) -> tuple[list[float], str]:
    """Return the medians of our and XLA's processor time, then of wall time, and a text about the stages."""
    from benchmarks.compile_programs import catalogue

    function, args = catalogue()[name]()
    jax.jit(function).lower(*args)  # what JAX imports for it counts for neither
    spent: dict[str, float] = {}
    ours: list[Times] = []
    theirs: list[Times] = []
    for _ in range(given.rounds):
        if given.stages:
            with stages(spent):
                ours.append(compile_ours(function, args, started, warm=True))
        else:
            ours.append(compile_ours(function, args, started, given.warm))
        theirs.append(compile_theirs(function, args))
    medians = [statistics.median(t[k] for t in rows) for k in (0, 1) for rows in (ours, theirs)]
    total = sum(t[0] for t in ours)
    spent["other"] = total - sum(spent.values())
    text = ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in sorted(spent.items(), key=lambda s: -s[1]))
    return medians, text if given.stages else ""


def main() -> None:
    """Print a row for each program, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose names contain this; several with commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm", action="store_true", help="keep compiler processes between compilations")
    parser.add_argument("--stages", action="store_true", help="compile in this process and show the stages' shares")
    given = parser.parse_args()
    from benchmarks.compile_programs import catalogue

    names = [n for n in catalogue() if any(part in n for part in given.only.split(","))]
    first = (lambda x, y: jax.numpy.tanh(x @ y)), (jax.numpy.ones((8, 8)), jax.numpy.ones((8, 8)))
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as started:
        os.environ["AOTC_CACHE_DIR"] = started
        aotc.compile(jax.jit(lambda x: x + 1), jax.numpy.ones(3))
        compile_ours(*first, Path(started))
        compile_theirs(*first)
        print(f"{'program':40} {'aotc s':>7} {'XLA s':>7} {'ratio':>6} {'wall s':>7} {'XLA s':>7} {'ratio':>6}")
        for name in names:
            (a, b, c, d), text = measure(name, given, Path(started))
            ratios.append((a / b, c / d))
            print(f"{name:40} {a:7.3f} {b:7.3f} {a / b:6.2f} {c:7.3f} {d:7.3f} {c / d:6.2f} {text}", flush=True)
    processor, wall = (geometric_mean([r[k] for r in ratios]) for k in (0, 1))
    print(f"{len(ratios)} programs, geometric mean: processor {processor:.2f}, wall {wall:.2f}")


if __name__ == "__main__":
    main()
