"""What the runtime asks of the machine it runs on: CPU features and usable cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from functools import cache
from typing import Any

from aotc.vmfb.errors import VmError
from aotc.vmfb.limits import MOST_THREADS

GUARDED = os.environ.get("AOTC_GUARD", "") not in ("", "0")
"""For debugging: memory lies before pages that nobody may touch, see :mod:`aotc.vmfb.safety.guard_pages`."""

SHUFFLE = os.environ.get("AOTC_SHUFFLE", "")
"""For tests: the seed of the order in which commands run, see :mod:`aotc.vmfb.devices.trial`; empty: the usual one."""


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU's features, as ``/proc/cpuinfo`` names them."""
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def lacking(variant: Mapping[str, Any], have: Set[str]) -> str:
    """Return which features a variant needs besides those that a CPU has, and for which devices, or nothing."""
    missing = sorted(set(variant["features"]) - have)
    if not missing:
        return ""
    rows = variant.get("targets", {}).items()
    of_devices = [f"device {name!r} is {t['target']}" for name, t in rows if not have >= set(t["features"])]
    asking = f"{' and '.join(of_devices)}, and " if of_devices else ""
    return f"{asking}this CPU lacks {', '.join(missing)}"


def thread_count(asked: int | None) -> int:
    """Return how many threads to compute with, the caller's included.

    ``asked``, else ``AOTC_NUM_THREADS``, else ``OMP_NUM_THREADS``, else the cores
    that the process may use (affinity and cgroup quota).

    Raises
    ------
    VmError
        If ``asked`` or ``AOTC_NUM_THREADS`` is not a positive integer, or more than 1024.
    """
    if asked is not None:
        return _positive("threads", asked)
    text = os.environ.get("AOTC_NUM_THREADS")
    if text:
        return _positive("AOTC_NUM_THREADS", text)
    omp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2" means nested levels
    return _number(omp) or usable_cores()


def shuffle_seed() -> int | None:
    """Return the seed of ``AOTC_SHUFFLE``, or None without it.

    Raises
    ------
    VmError
        If it is no number.
    """
    if not SHUFFLE:
        return None
    if SHUFFLE.isascii() and SHUFFLE.isdigit() and len(SHUFFLE) < 10:
        return int(SHUFFLE)
    raise VmError("", "AOTC_SHUFFLE is no seed", repr(SHUFFLE[:40]), "an integer of up to 9 digits")


def threads_within(threads: int, limit: int, arena: int, scratch: int) -> int:
    """Return how many threads may have ``scratch`` bytes each besides an arena, within ``limit`` bytes, 0 if any.

    One may, always: what is compiled for a limit fits with one thread.
    """
    return max(min(threads, (limit - arena) // scratch), 1) if limit and scratch else threads


def _positive(name: str, value: int | str) -> int:
    number = _number(str(value))
    if number:
        return number
    found = repr(value) if len(str(value)) < 40 else f"{str(value)[:40]!r}..."
    raise VmError("", f"{name} is not a number of threads", found, f"an integer from 1 to {MOST_THREADS}")


def _number(text: str) -> int:
    """Return the number of threads that ``text`` is; 0 if it is none, or more than there can be."""
    good = text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if good and int(text) <= MOST_THREADS else 0


def usable_cores(root: str = "/sys/fs/cgroup") -> int:
    """Return the cores that this process may use, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return max(1, min(cores, -int(-quota // 1)) if quota else cores)


def cgroup_quota(root: str) -> float:
    """Return the cores that the cgroup grants (version 2, then 1), or 0 for no limit."""
    try:
        with open(f"{root}/cpu.max") as f:
            quota, period = f.read().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        with open(f"{root}/cpu/cpu.cfs_quota_us") as f, open(f"{root}/cpu/cpu.cfs_period_us") as g:
            limit, span = int(f.read()), int(g.read())
        return limit / span if limit > 0 < span else 0.0
    except (OSError, ValueError):
        return 0.0
