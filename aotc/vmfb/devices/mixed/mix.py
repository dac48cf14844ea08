"""Variants with several devices or memory spaces: one part for each target, loaded on each device of that target."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.cpu import device as cpu
from aotc.vmfb.devices.cuda import device as cuda
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.devices.mixed.executable import PlacedExecutable
from aotc.vmfb.devices.mixed.host_part import HostPart
from aotc.vmfb.devices.mixed.spaces import Spaces
from aotc.vmfb.host.machine import thread_count
from aotc.vmfb.manifest import signatures_and_programs
from aotc.vmfb.verify.buffers import load_command_buffers
from aotc.vmfb.weights.constants import load_constants

__all__ = ["check", "default_gpu", "obstacle", "open_executable", "rank"]

_KINDS = {"cpu": cpu, "cuda": cuda}


def obstacle(variant: dict[str, Any]) -> str:
    """Return the reason why this machine cannot run the variant, or an empty string."""
    parts = [{**part, "targets": variant.get("targets", {})} for part in variant.get("parts", ())]
    found = [f"{part['target']}: {why}" for part in parts if (why := _obstacle_of_part(part))]
    return "; ".join(found)


def _obstacle_of_part(part: dict[str, Any]) -> str:
    driver = _KINDS.get(part["kind"])
    return driver.obstacle(part) if driver else f"this aotc has no runtime for {part['kind']!r}"


def rank(variant: dict[str, Any]) -> Any:
    """Return a sort key of a variant: that of its CPU part, or that of its GPU part if the host only assists a GPU."""
    return cuda.rank(variant) if "implied" in variant else cpu.rank(variant)


def check(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Check command buffers and code of a variant without its devices; see :class:`aotc.vmfb.interfaces.Device`."""
    spaces = Spaces(bundle, variant)
    spaces.check(signatures_and_programs(bundle.manifest, variant), load_command_buffers(bundle, variant))
    for part in spaces.parts:
        if part["kind"] == "cuda":
            cuda.check_code(bundle, part)
        else:
            cpu.check(bundle, part)


def default_gpu(number: int) -> int:
    """Return the GPU for CUDA device ``number`` of the model: ``number`` modulo the number of GPUs of this machine."""
    count = 0 if cuda_driver.missing() else cuda_driver.device_count()
    return number % count if count else number


def open_executable(
    bundle: OpenedBundle,
    variant: dict[str, Any],
    threads: int | None,
    devices: Mapping[str, str],
    custom_calls: Mapping[str, Any],
) -> PlacedExecutable:
    """Load a variant; ``devices`` maps the model's device names to devices of this machine."""
    spaces = Spaces(bundle, variant)
    constants = load_constants(bundle, variant.get("constants"))
    loaded: list[LoadedGpu | HostPart] = []
    for number, row in enumerate(spaces.rows):
        part = {**spaces.parts[row["part"]], "constants": variant.get("constants")}
        if spaces.kind(number) == "cpu":
            host = HostPart(bundle, part, thread_count(threads), custom_calls)
            host.keep_within(variant.get("memory_limit", 0), row["arena"] or 0)
            loaded.append(host)
            continue
        ordinal = int(devices[row["device"]].partition(":")[2] or 0)
        cuda.check_gpu(bundle, part, ordinal)
        loaded.append(LoadedGpu(bundle, part, spaces.first[row["part"]], constants, row["pieces"], ordinal))
    gpus = [space.gpu for space in loaded if isinstance(space, LoadedGpu)]
    for one, other in permutations(gpus, 2):
        one.enable_peer_access(other)
    return PlacedExecutable(bundle, variant, loaded, spaces)
