"""Description of the machine for a record: processor, GPU, versions, load; no host names, no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("aotc", "numpy", "jax", "jaxlib", "numba", "llvmlite")
PEERS = {  # module: distribution; noted if the process, or a child by way of it, imported them
    "iree": "iree-base-runtime", "onnxruntime": "onnxruntime", "openvino": "openvino", "torch": "torch",
}  # fmt: skip
QUIET = 0.05  # the share of the machine's processor time that others may use while it counts as quiet


def describe(peers: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """Return processor, number of cores, GPU and package versions as data."""
    found: dict[str, Any] = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    if graphics := gpu():
        found["gpu"] = graphics
    loaded = [name for module, name in PEERS.items() if module in sys.modules or module in peers]
    found["versions"] = {"python": platform.python_version()} | versions((*PACKAGES, *loaded))
    return found


def processor() -> str:
    """Return the processor's name and the widest target of aotc that it supports."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    from aotc.targets import host_target

    return f"{name[1] if name else platform.machine()} ({host_target().name})"


def gpu() -> str:
    """Return the name of the first GPU and its driver's version, or an empty string."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.splitlines()[0].replace(", ", ", driver ")


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_by_other_processes(seconds: float = 0.5) -> float:
    """Return the fraction of the machine's processor time that other processes use, sampled for ``seconds``."""
    before, own = _ticks(), time.process_time()
    time.sleep(seconds)
    busy, total = (b - a for a, b in zip(before, _ticks()))
    own = (time.process_time() - own) * os.sysconf("SC_CLK_TCK")  # background threads of this process
    return min(max(busy - own, 0) / max(total, 1), 1.0)


def _ticks() -> tuple[int, int]:
    """Return the busy and the total clock ticks of all processors since boot."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
