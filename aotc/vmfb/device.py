"""The device interface of the VM, and the table of device kinds.

A kind of device is a module with the functions of :class:`Device` and a row in :data:`DEVICES`. It is imported when a
bundle has a variant of its kind, so the import must succeed on machines without the hardware: a missing driver is an
obstacle, which :func:`choose` reports together with those of other variants.

Arrays are NumPy arrays in host memory, C-contiguous and aligned, with the dtypes of the signature. When the function of
``replay``, or ``submit``, returns, the results are written and the arguments are no longer read. Functions of an
executable are called from several threads at the same time; a session belongs to one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from aotc.vmfb.abi import COMMANDS_VERSIONS, EXECUTOR_VERSIONS, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.buffers import Buffers
from aotc.vmfb.errors import BundleError, VmError
from aotc.vmfb.memory.pointers import BYTES, EMPTY


class Unread:
    """An integer in memory that is read in each call, not when a plan is made."""

    __slots__ = ("dtype", "offset", "slot")

    def __init__(self, slot: int, offset: int, dtype: str) -> None:
        self.slot = slot
        self.offset = offset
        self.dtype = dtype


class Judgement:
    """An assertion on computed data: it fails with a message if a byte in memory is 0.

    Attributes
    ----------
    after : int
        Number of completed submissions at which it is checked.
    condition : Unread
        The location of the byte.
    """

    __slots__ = ("_message", "_values", "_where", "after", "condition")

    def __init__(
        self, where: str, after: int, condition: Unread, message: str, values: Sequence[int | Unread]
    ) -> None:
        self._where, self._message, self._values = where, message, values
        self.after, self.condition = after, condition

    def failure(self, read: Callable[[int, int, str], int]) -> VmError:
        """Return the error of a failed assertion; its message has values read by ``read(slot, offset, dtype)``."""
        from aotc.vmfb.messages import render  # only for a failure

        values = [read(v.slot, v.offset, v.dtype) if isinstance(v, Unread) else v for v in self._values]
        return VmError(self._where, render(self._message, values))


class Plan:
    """The work of a call whose shapes are known: the trace of a host program.

    A plain class, for fast start-up (:class:`aotc.vmfb.abi.Record`).

    Attributes
    ----------
    arguments : int
        Number of arguments.
    results : tuple of (tuple of int, dtype)
        Shape and NumPy dtype of each result.
    arena : int
        Bytes of the arena.
    submissions : tuple of (int, tuple of int)
        Command buffers in order, each with its parameters.
    empty : tuple of int
        Arguments and results without elements, numbered as in the pointer table.
    judgements : tuple of Judgement
        In order, to be checked after each submission by :func:`judge`.
    taken : tuple of (int, int)
        Results that share the memory of a donated argument, each with the argument's number: they are the same array,
        and command buffers use the argument's slot.
    others : tuple of int
        Bytes of the arena in each memory except the first.
    homes : tuple of int
        The memory of each argument and result, if there are several.
    """

    __slots__ = (
        "arena", "arguments", "empty", "homes", "judgements", "others", "results", "submissions", "taken",
    )  # fmt: skip

    def __init__(
        self,
        arguments: int,
        results: tuple[tuple[tuple[int, ...], np.dtype], ...],
        arena: int,
        submissions: tuple[tuple[int, tuple[int, ...]], ...],
        empty: tuple[int, ...] = (),
        judgements: tuple[Judgement, ...] = (),
        taken: tuple[tuple[int, int], ...] = (),
        others: tuple[int, ...] = (),
        homes: tuple[int, ...] = (),
    ) -> None:
        self.arguments = arguments
        self.results = results
        self.arena = arena
        self.submissions = submissions
        self.empty = empty
        self.judgements = judgements
        self.taken = taken
        self.others = others
        self.homes = homes

    def slots_of_results(self) -> list[int]:
        """Return the slot of each result in the pointer table: its own, or that of the argument whose memory it has."""
        layout, taken = Slots(self.arguments, len(self.results)), dict(self.taken)
        return [taken.get(n, layout.result(n)) for n in range(len(self.results))]

    def judged_after(self) -> list[tuple[Judgement, ...]]:
        """Return the assertions to check before the first submission, after the first, after the second..."""
        stages = range(len(self.submissions) + 1)
        return [tuple(j for j in self.judgements if j.after == stage) for stage in stages]


def judge(judgements: Sequence[Judgement], read: Callable[[int, int, str], int]) -> None:
    """Check assertions; ``read(slot, offset, dtype)`` returns an integer in memory.

    Raises
    ------
    VmError
        If an assertion fails.
    """
    for judgement in judgements:
        place = judgement.condition
        if not read(place.slot, place.offset, place.dtype):
            raise judgement.failure(read)


def run_judged(
    calls: Sequence[Callable[[], int]], judged: Sequence[Sequence[Judgement]], slots: Any
) -> VmError | None:
    """Make the calls and check the assertions after each; return the error that ended the sequence, or None."""
    failure = _first_failure(judged[0], slots)
    for call, after in zip(calls, judged[1:]):
        if failure is not None:
            break
        if call():
            raise SystemExit  # the interpreter exits, and this is a daemon thread
        failure = _first_failure(after, slots)
    return failure


def _first_failure(judgements: Sequence[Judgement], slots: Any) -> VmError | None:
    """Return the error of the first failed assertion, or None."""
    for judgement in judgements:
        place = judgement.condition
        if not BYTES[slots[place.slot] + place.offset]:
            from aotc.vmfb.devices.cpu.session import read_scalar  # only for a failure

            return judgement.failure(partial(read_scalar, slots))
    return None


def without_empty(
    run: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None], plan: Plan
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
    """Wrap ``run`` to replace arrays without elements by :data:`EMPTY`."""

    def call(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        every = [*arrays, *results]
        for n in plan.empty:
            every[n] = EMPTY
        run(every[: plan.arguments], every[plan.arguments :])

    return call


class DeviceSession(Protocol):
    """One interpreted call of a function with data-dependent control flow."""

    def arena(self, size: int) -> None:
        """Allocate an arena; the content of an earlier one of this call is copied."""

    def arena_in(self, space: int, size: int) -> None:
        """Allocate an arena in a memory other than the first; only for devices with several memories."""

    def bind(self, slot: int, array: np.ndarray) -> None:
        """Bind an argument or a result to its slot in the pointer table."""

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer and wait for it."""

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""

    def stepper(self, make: Callable[..., Any]) -> Any:
        """Return a stepper for submissions: see :class:`aotc.vmfb.profile.trace.Stepper`."""

    def block(self, slot: int, offset: int, size: int) -> None:
        """Make a block of a slot accessible and protect the rest of it; for debugging, on host devices only."""

    def close(self) -> None:
        """Release the resources of the call."""


class Executable(Protocol):
    """A variant of a bundle, loaded on a device.

    Attributes
    ----------
    buffers : Buffers
        Its command buffers, decoded by :func:`aotc.vmfb.devices.buffers.load_buffers`.
    constants_bytes : int
    """

    buffers: Buffers
    constants_bytes: int

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return a function that runs a plan on argument and result arrays.

        It raises VmError if an assertion of the plan fails.
        """

    def session(self, layout: Slots) -> DeviceSession:
        """Start a call with a pointer table of this layout."""

    def stats(self) -> dict[str, Any]:
        """Return counters and facts to show to users."""

    def trim(self) -> int:
        """Free the memory that no call uses; return the number of bytes."""


class Device(Protocol):
    """A module that drives one kind of device."""

    def obstacle(self, variant: dict[str, Any]) -> str:
        """Return why this machine cannot run the variant, or an empty string."""

    def rank(self, variant: dict[str, Any]) -> Any:
        """Return a comparable rank of a variant; the highest one without an obstacle runs."""

    def check(self, bundle: OpenedBundle, variant: dict[str, Any]) -> None:
        """Check a variant as far as any machine can: command buffers, kernel entries, presence of the code.

        Raises BundleError if something is wrong.
        """

    def open_executable(
        self,
        bundle: OpenedBundle,
        variant: dict[str, Any],
        threads: int | None,
        ordinal: Any,
        custom_calls: Mapping[str, Any],
    ) -> Executable:
        """Load a variant on device number ``ordinal`` of the kind; for a mix, a mapping of device names to devices.

        ``threads`` and ``custom_calls``, Python functions by name, are for host devices only.

        Raises BundleError if the variant is damaged or the device does not exist.
        """


DEVICES = {"cpu": "aotc.vmfb.devices.cpu.device", "cuda": "aotc.vmfb.devices.cuda.device"}
MIX = "mix"
"""The kind of a variant with devices of several kinds, or devices with their own memory."""
_MIX = "aotc.vmfb.devices.mixed.mix"


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
    wanted: dict[str, str] = variant.get("devices", {})
    if not wanted and (devices is None or not isinstance(devices, Mapping)):
        return {}
    model = _listed(wanted)
    if isinstance(devices, Mapping):
        asked = dict(devices)
    elif devices is None or (isinstance(devices, str) and devices in DEVICES):
        asked = wanted
    else:
        places = [devices] if isinstance(devices, str) else list(devices)
        if len(places) != len(wanted):
            what = f"devices= has {len(places)}, and the model names {len(wanted)}"
            raise BundleError(bundle.where, what, ", ".join(places) or "none", model, "a place for each, in this order")
        asked = dict(zip(wanted, places))
    if set(asked) != set(wanted):
        raise BundleError(bundle.where, "devices= and the model name different devices", _listed(asked), model)
    counts: dict[str, int] = {}
    for name, kind in wanted.items():
        if asked[name].partition(":")[0] != kind:
            raise BundleError(bundle.where, f"device {name!r} is of another kind", _listed(asked), model)
        if ":" not in asked[name]:
            counts[kind] = number = counts.get(kind, -1) + 1
            asked = {**asked, name: f"{kind}:{number if kind == 'cpu' else device_module(MIX).default_gpu(number)}"}
    return {name: asked[name] for name in wanted}


def _listed(devices: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {place}" for name, place in devices.items()) or "no devices"


def choose(
    bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None
) -> tuple[dict[str, Any], Any, int]:
    """Select the variant to run; return it, the module of its device, and the device's number.

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
    usable: list[tuple[str, Any, dict[str, Any], Any]] = []
    for variant in bundle.manifest["variants"]:
        kind, target = variant["kind"], variant["target"]
        if kind == MIX and "devices" not in variant:
            raise BundleError(bundle.where, f"the variant {target} names no devices", expected="devices by their names")
        of_a_mix = kind == MIX and (several or ordinals.keys() >= set(variant["devices"].values()))
        if ordinals and kind not in ordinals and not of_a_mix:
            its = f", it is for {_listed(variant['devices'])}" if "devices" in variant else ""
            obstacles.append(f"{target}: devices={devices!r} was asked for{its}")
            continue
        module = module_of(variant)
        obstacle = _version_problem(variant) or (
            module.obstacle(variant) if module else f"this aotc has no runtime for {kind!r}"
        )
        if obstacle:
            obstacles.append(f"{target}: {obstacle}")
        else:
            usable.append((kind, module.rank(variant), variant, module))
    if not usable:
        offered = "\n              ".join(obstacles) or "none: the bundle has no variants"
        named = any(variant.get("devices") for variant in bundle.manifest["variants"])
        options = "--target, and --device NAME=TARGET," if named else "--target"
        hint = f"compile with {options} for this machine"
        raise BundleError(bundle.where, "this machine cannot run the bundle", offered, hint=hint)
    first = min((row[0] for row in usable), key=lambda kind: kind == "cpu")  # every machine has a CPU
    best = max((row for row in usable if row[0] == first), key=lambda row: row[1])
    return best[2], best[3], ordinals.get(first, 0)


def _requested_ordinals(where: str, devices: Any) -> tuple[dict[str, int], bool]:
    """Return the requested device number of each kind, and True if ``devices`` is a sequence or mapping."""
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
    """Return the unsupported version of a variant as text, or an empty string."""
    newest = {"commands_version": COMMANDS_VERSIONS, "executor_version": EXECUTOR_VERSIONS}
    for key, known in newest.items():
        if key in variant and variant[key] not in known:
            shown = ", ".join(map(str, sorted(known)))
            return f"its {key.replace('_', ' ')} is {variant[key]}, this aotc runs {shown}"
    return ""


def module_of(variant: Mapping[str, Any]) -> Any:
    """Return the module for the devices of a variant, or None if this aotc has none."""
    return device_module(MIX if "spaces" in variant else variant["kind"])


def implied_places(variant: Mapping[str, Any], ordinal: int) -> dict[str, str]:
    """Return default devices for a GPU variant whose model names none: GPU ``ordinal`` and the host; else empty."""
    implied = variant.get("implied", {})
    return {name: f"{kind}:{ordinal if kind == variant['kind'] else 0}" for name, kind in implied.items()}


def device_module(kind: str) -> Any:
    """Return the module for this kind of device, or None if this aotc has none."""
    module = _MIX if kind == MIX else DEVICES.get(kind)
    if module is None:
        return None
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
