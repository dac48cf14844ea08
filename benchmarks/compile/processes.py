"""Processor time of the compiler with all its processes, and compilations with an empty cache."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import aotc
from aotc.kernels.jobs.pool import POOL

Times: TypeAlias = tuple[float, float]
"""Processor time and wall time."""
CLOCK = 2  # CLOCK_PROCESS_CPUTIME_ID of another process: the low bits of a clock's number


def processor_time() -> float:
    """Return the processor time of this process, of its ended children and of the compiler processes."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [p.pid for p in POOL._idle if p.poll() is None]
    return (
        time.process_time()
        + ended.ru_utime
        + ended.ru_stime
        + sum(time.clock_gettime(~pid << 3 | CLOCK) for pid in running)
    )


def timed(call: Callable[[], Any]) -> Times:
    """Run ``call`` after a garbage collection; return its processor time and its wall time in seconds.

    A garbage collection at its end would take 80 ms.
    """
    gc.collect()
    processor, wall = processor_time(), time.perf_counter()
    call()
    return processor_time() - processor, time.perf_counter() - wall


@contextmanager
def cache_with_executor() -> Iterator[Path]:
    """Yield a temporary cache folder that contains the executor, which every compilation needs."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOTC_CACHE_DIR"] = folder
        aotc.compile(jax.jit(lambda x: x + 1), jnp.ones(3))
        yield Path(folder)


def compile_by_aotc(function: Callable[..., Any], args: tuple[Any, ...], cache: Path, warm: bool = False) -> Times:
    """Compile with a copy of the folder ``cache``, and with new compiler processes unless ``warm``; return times."""
    if not warm:
        end_workers()
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        shutil.copytree(cache, os.environ["AOTC_CACHE_DIR"])
        return timed(lambda: aotc.compile(function, *args))


def end_workers() -> None:
    """End the compiler processes, so that the next compilation starts new ones."""
    processes = list(POOL._idle)
    POOL.close()
    for process in processes:
        process.wait()


def compile_by_xla(function: Callable[..., Any], args: tuple[Any, ...]) -> Times:
    """Compile with XLA, and return the times."""
    jax.clear_caches()
    return timed(lambda: jax.jit(function).lower(*args).compile())
