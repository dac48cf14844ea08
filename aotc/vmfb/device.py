"""What the VM asks of a device, and the table of kinds of device.

A kind of device is a module that has the functions of :class:`Device`; a row of
:data:`DEVICES` makes it known. It is imported when a bundle has a variant of its
kind, so importing it must succeed on machines without the hardware: a missing
driver is an obstacle, which :func:`choose` reports beside those of other variants.

Arrays are NumPy arrays in host memory, C-contiguous and aligned, of the dtypes of
the signature. When ``replay``'s function or ``submit`` returns, the results are
written and the arguments are no longer read. Functions of an executable are called
from several threads at the same time; a session belongs to one call.
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
    """A place in memory: the integer there is read in each call, not when a plan is made."""

    __slots__ = ("dtype", "offset", "slot")

    def __init__(self, slot: int, offset: int, dtype: str) -> None:
        self.slot = slot
        self.offset = offset
        self.dtype = dtype


class Judgement:
    """An assertion on what a call has computed: the message if a byte in memory is 0.

    Attributes
    ----------
    after : int
        How many submissions are done when it is judged.
    condition : Unread
        The byte's place.
    """

    __slots__ = ("_message", "_values", "_where", "after", "condition")

    def __init__(
        self, where: str, after: int, condition: Unread, message: str, values: Sequence[int | Unread]
    ) -> None:
        self._where, self._message, self._values = where, message, values
        self.after, self.condition = after, condition

    def failure(self, read: Callable[[int, int, str], int]) -> VmError:
        """Return the error, whose message holds what ``read(slot, offset, dtype)`` finds."""
        from aotc.vmfb.messages import render  # for a failure

        values = [read(v.slot, v.offset, v.dtype) if isinstance(v, Unread) else v for v in self._values]
        return VmError(self._where, render(self._message, values))


class Plan:
    """What one call does when its shapes are known: the trace of a host program.

    A plain class, for the sake of a process that starts (:class:`aotc.vmfb.abi.Record`).

    Attributes
    ----------
    arguments : int
        How many.
    results : tuple of (tuple of int, dtype)
        Shape and NumPy dtype of each result.
    arena : int
        Bytes.
    submissions : tuple of (int, tuple of int)
        Command buffers in order, with their parameters.
    empty : tuple of int
        The arguments and results, numbered as in the pointer table, that have no elements.
    judgements : tuple of Judgement
        In order, for :func:`judge` after each submission.
    taken : tuple of (int, int)
        Results that are the memory of an argument, with its number: they are the same array, and command buffers
        name the argument.
    others : tuple of int
        Bytes of the arena in each memory but the first.
    homes : tuple of int
        The memory that each argument and result is in, if there are several.
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
        """Return in which slot of the pointer table each result is: its own, or that of the argument it takes."""
        layout, taken = Slots(self.arguments, len(self.results)), dict(self.taken)
        return [taken.get(n, layout.result(n)) for n in range(len(self.results))]

    def judged_after(self) -> list[tuple[Judgement, ...]]:
        """Return what is to be judged before the first submission, after the first, after the second..."""
        stages = range(len(self.submissions) + 1)
        return [tuple(j for j in self.judgements if j.after == stage) for stage in stages]


def judge(judgements: Sequence[Judgement], read: Callable[[int, int, str], int]) -> None:
    """Judge what a call has computed; ``read(slot, offset, dtype)`` returns an integer in memory.

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
    """Make the calls, and judge what each computed; return why the rest was not made, if so."""
    failure = _first_failure(judged[0], slots)
    for call, after in zip(calls, judged[1:]):
        if failure is not None:
            break
        if call():
            raise SystemExit  # the interpreter ends: this is a daemon thread's call
        failure = _first_failure(after, slots)
    return failure


def _first_failure(judgements: Sequence[Judgement], slots: Any) -> VmError | None:
    """Return what is to be raised, if anything is, because of what a call has computed."""
    for judgement in judgements:
        place = judgement.condition
        if not BYTES[slots[place.slot] + place.offset]:
            from aotc.vmfb.devices.cpu.session import read_scalar  # a process that starts need not pay for it

            return judgement.failure(partial(read_scalar, slots))
    return None


def without_empty(
    run: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None], plan: Plan
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
    """Return ``run`` with :data:`EMPTY` in place of arrays that have no elements."""

    def call(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        every = [*arrays, *results]
        for n in plan.empty:
            every[n] = EMPTY
        run(every[: plan.arguments], every[plan.arguments :])

    return call


class DeviceSession(Protocol):
    """One call of a function whose course depends on its data."""

    def arena(self, size: int) -> None:
        """Take an arena; what an earlier one of this call held is kept."""

    def arena_in(self, space: int, size: int) -> None:
        """Take an arena in a memory other than the first; only devices with several have it."""

    def bind(self, slot: int, array: np.ndarray) -> None:
        """Put an argument or a result in the pointer table."""

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer and wait for it."""

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""

    def stepper(self, make: Callable[..., Any]) -> Any:
        """Return what runs submissions a dispatch at a time: see :class:`aotc.vmfb.profile.trace.Stepper`."""

    def block(self, slot: int, offset: int, size: int) -> None:
        """Let nothing be touched in a slot but the blocks that are named so; for debugging, host devices only."""

    def close(self) -> None:
        """Give everything back."""


class Executable(Protocol):
    """A variant of a bundle, loaded on a device.

    Attributes
    ----------
    buffers : Buffers
        Its command buffers, as :func:`aotc.vmfb.devices.buffers.load_buffers` read them.
    constants_bytes : int
    """

    buffers: Buffers
    constants_bytes: int

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return the function that runs a plan on argument and result arrays.

        It raises VmError if one of the plan's judgements fails.
        """

    def session(self, layout: Slots) -> DeviceSession:
        """Begin a call with a pointer table of this layout."""

    def stats(self) -> dict[str, Any]:
        """Return counters for people."""

    def trim(self) -> int:
        """Free the memory that no call uses; return how many bytes that were."""


class Device(Protocol):
    """A module that drives one kind of device."""

    def obstacle(self, variant: dict[str, Any]) -> str:
        """Return why this machine cannot run the variant, or an empty string."""

    def rank(self, variant: dict[str, Any]) -> Any:
        """Return how good a variant is, as what can be compared; the best that has no obstacle runs."""

    def check(self, bundle: OpenedBundle, variant: dict[str, Any]) -> None:
        """Check a variant as far as any machine can: command buffers, kernels' entries, that the code is there.

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
        """Load a variant on device number ``ordinal`` of the kind; of a mix, on the devices that it maps names to.

        ``threads``, and ``custom_calls``, Python functions by name, matter to host devices only.

        Raises BundleError if the variant is damaged or there is no such device.
        """


DEVICES = {"cpu": "aotc.vmfb.devices.cpu.device", "cuda": "aotc.vmfb.devices.cuda.device"}
MIX = "mix"
"""The kind of a variant whose devices are of several kinds, or have memory of their own."""
_MIX = "aotc.vmfb.devices.mixed.mix"


def bind_devices(bundle: OpenedBundle, variant: dict[str, Any], devices: Any) -> dict[str, str]:
    """Return the device of this machine for each device that the model names.

    Parameters
    ----------
    devices : mapping of str to str, sequence of str, str, or None
        ``{"d0": "cpu:0", "d1": "cpu:1"}``, or the places alone, in the order of the model's devices. Each that is not
        said, or a kind without a number, is the next one of its kind; GPUs begin again with the first where they are
        too few.

    Raises
    ------
    BundleError
        If a device is missing, unknown, or of another kind than the model's; lists both sides.
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
    """Return the variant to run, the module of its device and the device's number.

    Parameters
    ----------
    bundle : OpenedBundle
    devices : str, sequence or mapping of str, or None
        ``cpu``, ``cuda:0``...; None takes a GPU where this machine can run a variant
        for one, else the CPU.

    Raises
    ------
    BundleError
        If no variant can run; lists each variant with the reason.
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
    first = min((row[0] for row in usable), key=lambda kind: kind == "cpu")  # which every machine has
    best = max((row for row in usable if row[0] == first), key=lambda row: row[1])
    return best[2], best[3], ordinals.get(first, 0)


def _requested_ordinals(where: str, devices: Any) -> tuple[dict[str, int], bool]:
    """Return the requested device number of each kind, and whether ``devices`` is a sequence or mapping."""
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
    """Return which version this loader does not run, or an empty string."""
    newest = {"commands_version": COMMANDS_VERSIONS, "executor_version": EXECUTOR_VERSIONS}
    for key, known in newest.items():
        if key in variant and variant[key] not in known:
            shown = ", ".join(map(str, sorted(known)))
            return f"its {key.replace('_', ' ')} is {variant[key]}, this aotc runs {shown}"
    return ""


def module_of(variant: Mapping[str, Any]) -> Any:
    """Return the module that drives the devices of a variant, or None if this aotc has none."""
    return device_module(MIX if "spaces" in variant else variant["kind"])


def implied_places(variant: Mapping[str, Any], ordinal: int) -> dict[str, str]:
    """Return the places of the devices that nobody named: GPU ``ordinal`` and the host; of other variants none."""
    implied = variant.get("implied", {})
    return {name: f"{kind}:{ordinal if kind == variant['kind'] else 0}" for name, kind in implied.items()}


def device_module(kind: str) -> Any:
    """Return the module that drives this kind of device, or None if this aotc has none."""
    module = _MIX if kind == MIX else DEVICES.get(kind)
    if module is None:
        return None
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
