"""What the runtime asks of the machine it runs on: CPU features and usable cores."""

from __future__ import annotations

import os
from functools import cache

from aotc.vmfb.errors import VmError


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


def thread_count(asked: int | None) -> int:
    """Return how many threads to compute with, the caller's included.

    ``asked``, else ``AOTC_NUM_THREADS``, else ``OMP_NUM_THREADS``, else the cores
    that the process may use (affinity and cgroup quota).

    Raises
    ------
    VmError
        If ``asked`` or ``AOTC_NUM_THREADS`` is not a positive integer.
    """
    if asked is not None:
        return _positive("threads", asked)
    text = os.environ.get("AOTC_NUM_THREADS")
    if text:
        return _positive("AOTC_NUM_THREADS", text)
    omp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2" means nested levels
    if omp.isdigit() and int(omp) > 0:
        return int(omp)
    return usable_cores()


def _positive(name: str, value: int | str) -> int:
    if str(value).isdigit() and int(value) > 0:
        return int(value)
    raise VmError("", f"{name} is not a number of threads", repr(value), "an integer, at least 1")


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
