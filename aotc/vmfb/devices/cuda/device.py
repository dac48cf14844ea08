"""The CUDA device: checks of a variant and of a GPU; :mod:`aotc.vmfb.devices.mixed.executable` runs variants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu, check_kernels, kernel_images
from aotc.vmfb.devices.mixed.executable import PlacedExecutable
from aotc.vmfb.errors import BundleError
from aotc.vmfb.verify.buffers import load_command_buffers
from aotc.vmfb.weights.constants import load_constants

_ARCHITECTURE = re.compile(r"cuda:(sm|compute)_(\d+)(\d)(a?)")


def _parse_cuda_target(variant: dict[str, Any]) -> tuple[int, int, str]:
    """Parse the target of a variant to a compute capability (major, minor) and a kind of compatibility.

    ``cuda:sm_80`` is (8, 0, "sm") and also runs on later capabilities of the same generation. ``cuda:sm_90a`` is (9, 0,
    "a") and runs on this capability only. ``cuda:compute_80`` is (8, 0, "compute") and runs on all later ones.
    """
    found = _ARCHITECTURE.fullmatch(variant["target"])
    if found is None:
        raise BundleError("", "a variant is for no GPU that this aotc knows", variant["target"])
    kind, major, minor, alone = found.groups()
    return int(major), int(minor), alone or kind


def obstacle(variant: dict[str, Any]) -> str:
    """Return the reason why no GPU of this machine can run the variant, or an empty string."""
    missing = cuda_driver.missing()
    if missing:
        return missing
    found = {n: cuda_driver.compute_capability(n) for n in range(cuda_driver.device_count())}
    if any(_can_run_variant(variant, have) for have in found.values()):
        return _driver_problem(variant)
    names = ", ".join(f"{cuda_driver.device_name(n)} is sm_{a}{b}" for n, (a, b) in found.items())
    return f"its code is for another GPU ({names})"


def _can_run_variant(variant: dict[str, Any], have: tuple[int, int]) -> bool:
    """Return True if a GPU of compute capability ``have`` can run the variant."""
    *needed, others = _parse_cuda_target(variant)
    match others:
        case "a":
            return list(have) == needed
        case "sm":
            return have[0] == needed[0] and list(have) >= needed
    return list(have) >= needed


def _driver_problem(variant: dict[str, Any]) -> str:
    """Return the reason why the driver cannot compile the variant's PTX, or an empty string.

    Cubins need no compilation.
    """
    needed, have = tuple(variant.get("driver", ())), cuda_driver.cuda_version()
    if have >= needed:
        return ""
    required, found = (".".join(map(str, v)) for v in (needed, have))
    return f"its PTX needs a driver for CUDA {required} or newer, this one is for {found}"


def rank(variant: dict[str, Any]) -> tuple[int, ...]:
    """Return a sort key of a variant that a GPU can run: cubins before PTX, then the newest architecture."""
    major, minor, others = _parse_cuda_target(variant)
    return others != "compute", major, minor, others == "a"


def check(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Check command buffers and code of a variant without a GPU; see :class:`aotc.vmfb.interfaces.Device`."""
    load_command_buffers(bundle, variant)
    check_code(bundle, variant)


def check_code(bundle: OpenedBundle, part: dict[str, Any]) -> None:
    """Check a part's kernel entries, and that their code is complete."""
    check_kernels(bundle, part)
    kernel_images(bundle, part)


def open_executable(
    bundle: OpenedBundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> PlacedExecutable:
    """Load a CUDA variant on GPU ``ordinal``."""
    check_gpu(bundle, variant, ordinal)
    constants = load_constants(bundle, variant.get("constants"))
    loaded = LoadedGpu(bundle, variant, 0, constants, None, ordinal, custom_calls)
    return PlacedExecutable(bundle, variant, [loaded])


def check_gpu(bundle: OpenedBundle, part: dict[str, Any], ordinal: int) -> None:
    """Refuse a GPU that does not exist or cannot run the kernels.

    Raises
    ------
    BundleError
        The message has the number and the name of the GPU.
    """
    count = cuda_driver.device_count()
    if not 0 <= ordinal < count:
        raise BundleError(bundle.where, f"there is no GPU {ordinal}", expected=f"below {count}")
    if not _can_run_variant(part, cuda_driver.compute_capability(ordinal)):
        name, (major, minor) = cuda_driver.device_name(ordinal), cuda_driver.compute_capability(ordinal)
        raise BundleError(bundle.where, f"GPU {ordinal} cannot run it", f"{name}, sm_{major}{minor}", part["target"])
    if problem := _driver_problem(part):
        raise BundleError(bundle.where, f"GPU {ordinal} cannot run it", problem, hint="a newer driver of NVIDIA's")
