"""The CUDA device: which GPU can run a variant; what runs it is :mod:`aotc.vmfb.devices.placed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotc.vmfb.bundle import Bundle
from aotc.vmfb.devices import driver as cuda_driver
from aotc.vmfb.devices.buffers import load_buffers
from aotc.vmfb.devices.loaded_gpu import LoadedGpu, check_kernels, images
from aotc.vmfb.devices.placed import PlacedExecutable
from aotc.vmfb.errors import BundleError
from aotc.vmfb.weights.constants import load_constants


def _architecture(variant: dict[str, Any]) -> tuple[int, int]:
    """Return the compute capability that a variant was compiled for: ``cuda:sm_90`` is (9, 0)."""
    digits = variant["target"].rpartition("sm_")[2]
    return int(digits[:-1]), int(digits[-1])


def obstacle(variant: dict[str, Any]) -> str:
    """Return why no GPU of this machine can run the variant, or an empty string."""
    missing = cuda_driver.missing()
    if missing:
        return missing
    found = {n: cuda_driver.capability(n) for n in range(cuda_driver.device_count())}
    if any(_runs(variant, have) for have in found.values()):
        return ""
    names = ", ".join(f"{cuda_driver.device_name(n)} is sm_{a}{b}" for n, (a, b) in found.items())
    return f"its code is for another GPU ({names})"


def _runs(variant: dict[str, Any], have: tuple[int, int]) -> bool:
    major, minor = _architecture(variant)
    return have[0] == major and have[1] >= minor


def rank(variant: dict[str, Any]) -> int:
    """Return how new the variant's architecture is: newer is better."""
    major, minor = _architecture(variant)
    return 10 * major + minor


def check(bundle: Bundle, variant: dict[str, Any]) -> None:
    """Check what can be checked of a variant without a GPU: see :class:`aotc.vmfb.device.Device`."""
    load_buffers(bundle, variant)
    check_code(bundle, variant)


def check_code(bundle: Bundle, part: dict[str, Any]) -> None:
    """Check the entries and the code of kernels."""
    check_kernels(bundle, part)
    images(bundle, part)


def open_executable(
    bundle: Bundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> PlacedExecutable:
    """Load a CUDA variant on GPU ``ordinal``."""
    check_gpu(bundle, variant, ordinal)
    constants = load_constants(bundle, variant.get("constants"))
    return PlacedExecutable(bundle, variant, [LoadedGpu(bundle, variant, 0, constants, None, ordinal)])


def check_gpu(bundle: Bundle, part: dict[str, Any], ordinal: int) -> None:
    """Refuse a GPU that is not there, or cannot run the kernels.

    Raises
    ------
    BundleError
        Names the GPU and what it is.
    """
    count = cuda_driver.device_count()
    if not 0 <= ordinal < count:
        raise BundleError(bundle.where, f"there is no GPU {ordinal}", expected=f"below {count}")
    if not _runs(part, cuda_driver.capability(ordinal)):
        name, (major, minor) = cuda_driver.device_name(ordinal), cuda_driver.capability(ordinal)
        raise BundleError(bundle.where, f"GPU {ordinal} cannot run it", f"{name}, sm_{major}{minor}", part["target"])
