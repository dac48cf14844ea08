"""Interfaces (``Protocol`` classes) between parts of the runtime that must not import each other.

They cover devices, executables, functions and modules. Only type checkers import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.arguments import Argument, Signature
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.plan import Plan
from aotc.vmfb.verify.buffers import Buffers

if TYPE_CHECKING:
    from aotc.vmfb.call_limits import Limits
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.devices.cuda.resident_calls import ResidentCalls
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.profile.debug_texts import DebugText
    from aotc.vmfb.profile.trace import Stepper, StepRunner
    from aotc.vmfb.ranks.layout import Mesh
    from aotc.vmfb.submit.fence import Fence

Replay = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]
"""Run a plan on argument arrays and result arrays."""

class DeviceSession(Protocol):
    """A call whose host program is interpreted, because its control flow depends on data."""

    def allocate_arena(self, size: int) -> None:
        """Allocate an arena of ``size`` bytes; the content of an earlier arena of this call is copied."""

    def bind_array(self, slot: int, array: np.ndarray) -> None:
        """Bind an argument or a result to its slot in the pointer table."""

    def submit(self, number: int, parameters: list[int]) -> None:
        """Run a command buffer and wait for it."""

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""

    def stepper(self, make: Callable[..., Stepper]) -> StepRunner:
        """Return a stepper, which runs single commands of this call; ``make`` constructs the stepper."""

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Make ``size`` bytes at an offset of a slot accessible, and the rest of the slot inaccessible.

        For debugging on the host.
        """

    def close(self) -> None:
        """Free the arenas, and give back the streams or scratch memory of the call."""


class Executable(Protocol):
    """A variant of a bundle, loaded on a device.

    Attributes
    ----------
    buffers : Buffers
        Its command buffers, decoded by :func:`aotc.vmfb.verify.buffers.load_command_buffers`.
    constants_bytes : int
    limits : Limits or None
        Limits of the module's calls.
    """

    buffers: Buffers
    constants_bytes: int
    limits: Limits | None

    def replay(self, plan: Plan) -> Replay:
        """Return a function that runs a plan, a recorded call, on argument and result arrays.

        The function raises a CallError if an assertion of the plan fails.
        """

    @property
    def has_early_results(self) -> bool:
        """Return True if results can be read before the call ends."""

    def early_replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray], EarlyResults], None]:
        """Return the function of :meth:`replay` for calls whose results can be read before the call ends."""

    def session(self, layout: Slots) -> DeviceSession:
        """Start a call with a pointer table of this layout."""

    def kernel_texts(self) -> list[DebugText] | None:
        """Return the debug information of each kernel, or None if the bundle has none."""

    def command_locs(self, number: int) -> dict[int, str]:
        """Return the source locations of commands of buffer ``number``, by the position of their first word.

        Commands with their kernel's location are left out.
        """

    def use_devices(self, names: Sequence[str]) -> None:
        """Let calls run on the cores of the logical CPU devices ``names``, such as ``cpu:0``."""

    def limit_memory(self, limit: int) -> None:
        """Limit the working memory of all concurrent calls together to ``limit`` bytes."""

    def stats(self) -> dict[str, Any]:
        """Return properties and counters for ``module.stats()``."""

    def trim(self) -> int:
        """Free the memory that no call uses; return the number of freed bytes."""


class Device(Protocol):
    """A module that drives one kind of device."""

    def obstacle(self, variant: dict[str, Any]) -> str:
        """Return the reason why this machine cannot run the variant; an empty string if it can."""

    def rank(self, variant: dict[str, Any]) -> Any:
        """Return a sort key of a variant; the loader runs the variant with the highest key that has no obstacle."""

    def check(self, bundle: OpenedBundle, variant: dict[str, Any]) -> None:
        """Check a variant as far as any machine can: command buffers, kernel entries, presence of the code.

        Raises BundleError if the variant is invalid.
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


class FunctionResidence(Protocol):
    """The memory of each argument and result of a function; see :class:`aotc.vmfb.results.Residence`."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Return the GPU number of each argument, or -1 for host memory."""

    @property
    def result_gpus(self) -> tuple[int, ...]:
        """Return the GPU number of each result, or -1 for host memory."""

    @property
    def named(self) -> tuple[bool, ...]:
        """Return, for each result, True if the signature places the result on a GPU."""

    def owner(self, number: int) -> LoadedGpu | None:
        """Return the GPU module that allocates an argument's memory; None for host memory."""


class RuntimeFunction(Protocol):
    """A function of a loaded module, with all of its arguments or with some bound; see :mod:`aotc.vmfb.vm`.

    Attributes
    ----------
    name : str
    where : str
        Module and function, for messages.
    signature : Signature
    arguments : list of Argument
    result_dtypes : list of numpy.dtype
    executable : Executable
    resident : ResidentCalls or None
        Fast paths of calls whose arrays are all on the GPU.
    """

    name: str
    where: str
    signature: Signature
    arguments: list[Argument]
    result_dtypes: list[np.dtype]
    executable: Executable
    resident: ResidentCalls | None

    @property
    def residence(self) -> FunctionResidence:
        """The memory of each argument and result."""

    @property
    def direct(self) -> RuntimeFunction:
        """The function that submissions run: without limits on calls."""

    @property
    def recordings(self) -> int:
        """Number of times that the host program was recorded as a plan."""

    @property
    def has_early_results(self) -> bool:
        """Return True if results can be read before the call ends."""

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run the function on positional arguments, without donation or ``out=``."""

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function; see :meth:`aotc.vmfb.vm.LoadedFunction.run`."""

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """Run the function as :meth:`run` does; ``early`` receives results that can be read before the call ends."""

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """Run the function and write the inputs and outputs of each dispatch to ``folder``."""

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """Run the function one command at a time, by a stepper that ``make`` constructs."""

    def check_ahead(self) -> None:
        """Verify the program before its first call, if its shapes are static."""


class FunctionEntry(Protocol):
    """A function called with pytrees; see :class:`aotc.vmfb.api.entry.Entry`."""

    signature: Signature

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the flat arrays of a call."""

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Build the pytree that a call returns from its flat results."""


class FunctionTable(Protocol):
    """Functions by name, and the programs that precompute values from bound arguments."""

    @property
    def name(self) -> str:
        """The module's name."""

    @property
    def home(self) -> str:
        """Return the device of values that are not on a device of the model."""

    @property
    def prepared(self) -> Mapping[str, Any]:
        """Manifest entries of the functions with bound arguments: their ``prepare`` and ``call`` programs."""

    def get_function(self, name: str) -> RuntimeFunction:
        """Return a function by name; raise CallError if it does not exist."""


class RuntimeModule(FunctionTable, Protocol):
    """A loaded bundle; see :class:`aotc.vmfb.module.LoadedModule`.

    Attributes
    ----------
    devices : dict of str to str
        The device of this machine for each device that the model names.
    dependents : set of Bound or KeptState
        Objects that are closed together with the module.
    """

    devices: dict[str, str]
    dependents: WeakSet[Any]

    @property
    def functions(self) -> Mapping[str, FunctionEntry]:
        """The functions that the model exports, by name."""

    @property
    def every_function(self) -> Mapping[str, RuntimeFunction]:
        """All functions by name, including the internal programs for bound arguments."""

    @property
    def gpus(self) -> Sequence[LoadedGpu]:
        """The kernels and constants that are loaded on each GPU."""

    @property
    def rank(self) -> int:
        """The number of this process among those that run the model together."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of ranks; None for a model of one device."""

    def default_name(self) -> str:
        """Return the name of the function that a call of the module runs."""

    def invoke(self, name: str, *arrays: Any, **options: Any) -> list[Any]:
        """Run a function on flat arrays."""

    def submit(self, name: str, *arrays: Any, **options: Any) -> Fence:
        """Submit a call of a function on flat arrays."""
