"""Selection of the variant and the devices to run a bundle, and the tables of optional modules.

A kind of device is a module with the functions of :class:`aotc.vmfb.interfaces.Device` and a row in :data:`DEVICES`. It
is imported when a bundle has a variant of its kind, so the import must succeed on machines without the hardware: a
missing driver is an obstacle, which :func:`choose_variant` reports together with those of other variants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aotc.vmfb.abi import COMMANDS_VERSIONS, EXECUTOR_VERSIONS
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.log import DEBUG, log

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Device


DEVICES = {"cpu": "aotc.vmfb.devices.cpu.device", "cuda": "aotc.vmfb.devices.cuda.device"}
MIX = "mix"
"""The kind of a variant with devices of several kinds, or devices with their own memory."""
EXTRAS = {"sign": "aotc.tools.sign", "compile": "aotc.recompile"}
"""Modules outside of the runtime, by the extra of the package that installs what they need."""


def bind_devices(bundle: OpenedBundle, variant: dict[str, Any], devices: Any) -> dict[str, str]:
    """Return the device of this machine for each device that the model names.

    Parameters
    ----------
    devices : mapping of str to str, sequence of str, str, or None
        ``{"d0": "cpu:0", "d1": "cpu:1"}``, or a sequence in the order of the model's devices. A device that is not
        specified, or a kind without a number, is the next one of its kind; with too few GPUs the numbers wrap around.

    Raises
    ------
    BundleError
        If a device is missing, unknown, or of another kind than the model's; the message lists both.
    """
    model_devices: dict[str, str] = variant.get("devices", {})
    if not model_devices and (devices is None or not isinstance(devices, Mapping)):
        return {}
    model = _listed_devices(model_devices)
    if isinstance(devices, Mapping):
        requested = dict(devices)
    elif devices is None or (isinstance(devices, str) and devices in DEVICES):
        requested = model_devices
    else:
        places = [devices] if isinstance(devices, str) else list(devices)
        if len(places) != len(model_devices):
            what = f"devices= has {len(places)}, and the model names {len(model_devices)}"
            raise BundleError(bundle.where, what, ", ".join(places) or "none", model, "a place for each, in this order")
        requested = dict(zip(model_devices, places))
    if set(requested) != set(model_devices):
        what = "devices= and the model name different devices"
        raise BundleError(bundle.where, what, _listed_devices(requested), model)
    counts: dict[str, int] = {}
    for name, kind in model_devices.items():
        if requested[name].partition(":")[0] != kind:
            raise BundleError(bundle.where, f"device {name!r} is of another kind", _listed_devices(requested), model)
        if ":" not in requested[name]:
            counts[kind] = number = counts.get(kind, -1) + 1
            requested = {**requested, name: f"{kind}:{number if kind == 'cpu' else default_gpu(number)}"}
    return {name: requested[name] for name in model_devices}


def _listed_devices(devices: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {place}" for name, place in devices.items()) or "no devices"


def choose_variant(
    bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None
) -> tuple[dict[str, Any], Device, int]:
    """Select the variant to run; return the variant, the module of its device kind, and the device's number.

    Parameters
    ----------
    bundle : OpenedBundle
    devices : str, sequence or mapping of str, or None
        ``cpu``, ``cuda:0``...; None selects a GPU if this machine can run a variant for one, else the CPU.

    Raises
    ------
    BundleError
        If no variant can run; the message lists each variant with the reason.
    """
    ordinals, several = _requested_ordinals(bundle.where, devices)
    obstacles: list[str] = []
    usable: list[tuple[str, Any, dict[str, Any], Device]] = []
    for variant in bundle.manifest["variants"]:
        kind, target = variant["kind"], variant["target"]
        if kind == MIX and "devices" not in variant:
            raise BundleError(bundle.where, f"the variant {target} names no devices", expected="devices by their names")
        of_a_mix = kind == MIX and (several or ordinals.keys() >= set(variant["devices"].values()))
        if ordinals and kind not in ordinals and not of_a_mix:
            its = f", it is for {_listed_devices(variant['devices'])}" if "devices" in variant else ""
            obstacles.append(f"{target}: devices={devices!r} was asked for{its}")
            continue
        module = device_module_of_variant(variant)
        obstacle = _version_problem(variant) or (
            module.obstacle(variant) if module else f"this aotc has no runtime for {kind!r}"
        )
        if obstacle or module is None:
            obstacles.append(f"{target}: {obstacle}")
            log(DEBUG, "%s: no use of the variant %s: %s", bundle.where, target, obstacle)
        else:
            usable.append((kind, module.rank(variant), variant, module))
    if not usable:
        raise _no_variant_error(bundle, ordinals, obstacles)
    first = min((row[0] for row in usable), key=lambda kind: kind == "cpu")  # every machine has a CPU
    best = max((row for row in usable if row[0] == first), key=lambda row: row[1])
    return best[2], best[3], ordinals.get(first, 0)


def _no_variant_error(bundle: OpenedBundle, asked: Collection[str], obstacles: Sequence[str]) -> BundleError:
    """Return the error of a bundle without a variant that can run; ``asked`` are the kinds of the requested devices."""
    variants = bundle.manifest["variants"]
    named = any(variant.get("devices") for variant in variants)
    targets = ", ".join(variant["target"] for variant in variants)
    if asked and not named and variants and not any(variant["kind"] in asked for variant in variants):
        kind = next(iter(asked))
        example = "cuda:sm_90" if kind == "cuda" else kind
        hint = f"leave out --device (devices=), or compile with --target={example},{variants[0]['kind']}"
        return BundleError(bundle.where, f"the bundle has no code for {kind}", targets, hint=hint)
    offered = "\n              ".join(obstacles) or "none: the bundle has no variants"
    options = "--target, and --device NAME=TARGET," if named else "--target"
    cpus = not named and all(variant["kind"] == "cpu" for variant in variants)
    portable = "--portable, for all CPUs, or with " if cpus else ""
    hint = f"compile with {portable}{options} for this machine"
    if any(variant["kind"] == "cuda" for variant in variants) and (missing := _missing_gpu_driver()):
        others = asked and any(variant["kind"] not in asked for variant in variants)
        way = "leave out --device (devices=)" if others else "compile with --target=cpu"
        hint = f"{way}, or run it on a machine with an NVIDIA GPU and its driver ({missing})"
    return BundleError(bundle.where, "this machine cannot run the bundle", offered, hint=hint)


def _missing_gpu_driver() -> str:
    """Return the reason why this machine has no GPU driver, or an empty string."""
    return str(import_module("aotc.vmfb.devices.cuda.driver").missing())


def _requested_ordinals(where: str, devices: Any) -> tuple[dict[str, int], bool]:
    """Parse the option ``devices``.

    Returns
    -------
    ordinals : dict of str to int
        The requested device number of each kind.
    is_list : bool
        True if ``devices`` is a sequence or a mapping.
    """
    if devices is None:  # before any isinstance with an abstract class: the first one takes 0.1 ms
        return {}, False
    names = list(devices.values()) if isinstance(devices, Mapping) else devices
    several = isinstance(names, Iterable) and not isinstance(names, str)
    ordinals: dict[str, int] = {}
    for name in names if several else (names,):
        if not isinstance(name, str):
            raise BundleError(where, "devices are named", repr(name), ", ".join(DEVICES))
        kind, colon, number = name.partition(":")
        if kind not in DEVICES:
            raise BundleError(where, f"unknown device {kind!r}", expected=", ".join(DEVICES))
        if colon and not number.isdecimal():
            raise BundleError(where, f"device {name!r} has no number", expected=f"{kind} or {kind}:N")
        ordinals.setdefault(kind, int(number or 0))
    return ordinals, several


def _version_problem(variant: dict[str, Any]) -> str:
    """Describe the first format version of a variant that this runtime does not support.

    The text is empty if all are supported.
    """
    newest = {"commands_version": COMMANDS_VERSIONS, "executor_version": EXECUTOR_VERSIONS}
    for key, known in newest.items():
        if key in variant and variant[key] not in known:
            shown = ", ".join(map(str, sorted(known)))
            return f"its {key.replace('_', ' ')} is {variant[key]}, this aotc runs {shown}"
    return ""


def device_module_of_variant(variant: Mapping[str, Any]) -> Device | None:
    """Return the module that drives the devices of a variant; None for a kind of device unknown to this aotc."""
    return device_module(MIX if "spaces" in variant else variant["kind"])


def default_gpu(number: int) -> int:
    """Return a GPU for a rank or for a CUDA device of the model: number ``number`` modulo the number of GPUs here."""
    return int(_mixed_device_module().default_gpu(number))


def default_mixed_devices(variant: Mapping[str, Any], ordinal: int) -> dict[str, str]:
    """Return GPU ``ordinal`` and the host as the devices of a variant for both whose model names no devices.

    The mapping of device names to devices of this machine is empty for all other variants.
    """
    implied = variant.get("implied", {})
    return {name: f"{kind}:{ordinal if kind == variant['kind'] else 0}" for name, kind in implied.items()}


def _mixed_device_module() -> ModuleType:
    from aotc.vmfb.devices.mixed import mix  # imports the drivers of all devices

    return mix


def import_extra(name: str) -> Any:
    """Import an optional module, a key of :data:`EXTRAS`; raise ImportError if a library is missing."""
    return import_module(EXTRAS[name])


def device_module(kind: str) -> Device | None:
    """Return the module that drives devices of this kind (``cpu``, ``cuda``); None for a kind unknown to this aotc."""
    if kind == MIX:
        return _mixed_device_module()
    module = DEVICES.get(kind)
    if module is None:
        return None
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
