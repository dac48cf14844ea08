"""Properties of this machine: CPU features, number of threads to use, cores that the process may use."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Collection, Mapping, Set
from functools import cache
from typing import Any

from aotc.vmfb.errors import ArgumentValueError

# Maximum number of threads. No machine computes faster with more, and a mistyped million would exhaust its memory.
MOST_THREADS = 1024


GUARDED = os.environ.get("AOTC_GUARD", "") not in ("", "0")
"""For debugging: arrays end at inaccessible pages, see :mod:`aotc.vmfb.memory.guard_pages`."""

PERF = os.environ.get("AOTC_PERF", "").removeprefix("0")
"""For profilers: 1, or a folder for files with kernel names, see :mod:`aotc.vmfb.profile.perf`."""

SHUFFLE = os.environ.get("AOTC_SHUFFLE", "")
"""For tests: the seed of a shuffled execution order; empty: the usual order.

See :mod:`aotc.vmfb.devices.cpu.executor_trials`.
"""


SCALABLE = "sve"
"""The feature of AArch64 processors with vectors of an implementation-defined length."""
_GET_LENGTH, _LENGTH_BYTES = 51, 0xFFFF  # PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
_WORDS = {  # AT_HWCAP and AT_HWCAP2: bits of the auxiliary vector on AArch64
    16: {1: "asimd", 20: "asimddp", 22: SCALABLE},
    26: {9: "svei8mm", 12: "svebf16", 13: "i8mm", 14: "bf16"},
}


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU's features as named in ``/proc/cpuinfo``, plus for example ``sve256`` for 256-bit SVE vectors."""
    found = _listed_cpu_features() | _features_of_auxiliary_vector()
    return found | {f"{SCALABLE}{sve_bits()}"} if SCALABLE in found else found


def _listed_cpu_features() -> frozenset[str]:
    """Read the CPU's features from ``/proc/cpuinfo``; an empty set if the system has no such file."""
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _features_of_auxiliary_vector() -> frozenset[str]:
    """Return CPU features from the auxiliary vector: under an emulator ``/proc/cpuinfo`` describes another machine."""
    library = _aarch64_library()
    if library is None:
        return frozenset()
    library.getauxval.restype, library.getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    words = {number: library.getauxval(number) for number in _WORDS}
    return frozenset(name for number, bits in _WORDS.items() for bit, name in bits.items() if words[number] >> bit & 1)


def sve_bits() -> int:
    """Return the SVE vector length in bits of this thread, which the threads that it starts inherit; 0 without SVE."""
    library = _aarch64_library()
    answer = library.prctl(_GET_LENGTH, 0, 0, 0, 0) if library is not None else -1
    return 8 * (answer & _LENGTH_BYTES) if answer > 0 else 0


def _aarch64_library() -> Any:
    """Return the C library of a Linux on AArch64, or None."""
    if not sys.platform.startswith("linux") or platform.machine() != "aarch64":
        return None
    try:
        library = ctypes.CDLL(None)
        return library if library.getauxval and library.prctl else None
    except (OSError, AttributeError):  # there is no such library
        return None


TILES = "amx_tile"
"""The feature of processors with AMX tile registers, 8 KiB a thread, which the system grants on request."""
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # the system call of x86-64, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

_UNITS = frozenset(
    {"avx_vnni", "avx512_vnni", "avx512_bf16", TILES, "amx_int8", "amx_bf16"}
    | {"asimddp", "i8mm", "bf16", "svei8mm", "svebf16"}
)
"""Features that only matmuls use; all other code is compiled for the other features."""
_SLOW = {"avx512_bf16": "amx_bf16"}
"""Features whose code is slower than code without them if the processor has another feature.

With AMX, ``vdpbf16ps`` has half the rate of f32 (0.51 on a Sapphire Rapids); on a Zen 5 it has twice that rate.
"""


@cache
def request_amx_tiles() -> bool:
    """Ask the system for the AMX tile registers in all threads of this process; return True if it grants them."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0
    except (OSError, AttributeError):  # there is no such library
        return False


def runs_features_slowly(features: Collection[str], have: Set[str]) -> bool:
    """Return True if a CPU with features ``have`` runs code that uses ``features`` slower than code that uses fewer."""
    return any(name in features and other in have and other not in features for name, other in _SLOW.items())


def cpu_speed_rank(features: Collection[str], have: Set[str]) -> tuple[int, bool, int]:
    """Return the speed rank of code for ``features`` on a CPU with features ``have``; higher is faster."""
    return len(set(features) - _UNITS), not runs_features_slowly(features, have), len(features)


def missing_features(variant: Mapping[str, Any], have: Set[str]) -> str:
    """Describe the CPU features that a variant needs and this machine lacks; an empty string if it lacks none."""
    missing = sorted(set(variant["features"]) - have)
    if not missing:
        refused = TILES in variant["features"] and not request_amx_tiles()
        return "the system refuses tile registers (arch_prctl)" if refused else ""
    rows = variant.get("targets", {}).items()
    of_devices = [f"device {name!r} is {t['target']}" for name, t in rows if not have >= set(t["features"])]
    asking = f"{' and '.join(of_devices)}, and " if of_devices else ""
    return f"{asking}this CPU lacks {', '.join(missing)}"


def thread_count(requested: int | None) -> int:
    """Return the number of threads to compute with, including the caller's.

    This is ``requested``, else ``AOTC_NUM_THREADS``, else ``OMP_NUM_THREADS``, else the number of cores that the
    process may use (affinity and cgroup quota).

    Raises
    ------
    CallError
        If ``requested`` or ``AOTC_NUM_THREADS`` is not a positive integer, or more than 1024.
    """
    if requested is not None:
        return _positive_number("threads", requested)
    text = os.environ.get("AOTC_NUM_THREADS")
    if text:
        return _positive_number("AOTC_NUM_THREADS", text)
    omp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2" means nested levels
    return _parse_thread_count(omp) or usable_cores()


def shuffle_seed() -> int | None:
    """Return the seed of the environment variable ``AOTC_SHUFFLE``, which shuffles work for tests; None if it is empty.

    Raises
    ------
    CallError
        If it is not a number.
    """
    if not SHUFFLE:
        return None
    if SHUFFLE.isascii() and SHUFFLE.isdigit() and len(SHUFFLE) < 10:
        return int(SHUFFLE)
    raise ArgumentValueError("", "AOTC_SHUFFLE is not a seed", repr(SHUFFLE[:40]), "an integer of up to 9 digits")


def threads_within_memory_limit(threads: int, limit: int, arena: int, scratch: int) -> int:
    """Reduce ``threads`` so that the arena and the ``scratch`` bytes of each thread fit in ``limit`` bytes.

    0 for no limit.

    The result is at least one: code compiled for a limit fits with one thread.
    """
    return max(min(threads, (limit - arena) // scratch), 1) if limit and scratch else threads


def _positive_number(name: str, value: int | str) -> int:
    number = _parse_thread_count(str(value))
    if number:
        return number
    found = repr(value) if len(str(value)) < 40 else f"{str(value)[:40]!r}..."
    raise ArgumentValueError("", f"{name} must be an integer from 1 to {MOST_THREADS}", found)


def _parse_thread_count(text: str) -> int:
    """Parse a number of threads; return 0 if it is invalid or too large."""
    good = text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if good and int(text) <= MOST_THREADS else 0


def usable_cores(root: str = "/sys/fs/cgroup") -> int:
    """Return the number of cores that this process may use, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return max(1, min(cores, -int(-quota // 1)) if quota else cores)


def cgroup_quota(root: str) -> float:
    """Return the number of cores that the cgroup grants (version 2, then 1), a fraction possible; 0 for no limit."""
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
