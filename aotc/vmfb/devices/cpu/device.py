"""The CPU device: kernel libraries, the thread pool, and the submission of command buffers.

A submission is one native call, which runs the whole command buffer on the pool with the GIL released. Every few
milliseconds the call acquires the GIL briefly, so that signals and cancellation can end it
(:mod:`aotc.vmfb.host.interruption`). Pointer table, parameters, command cells and call block are allocated once per
concurrent call and reused, unless the call was aborted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb import abi
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_commands, decode_commands, encode_commands, kernel_words
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host import logical_devices, machine
from aotc.vmfb.host.interruption import raise_if_interrupted
from aotc.vmfb.host.machine import PERF, cpu_features, missing_features, thread_count, threads_within_memory_limit
from aotc.vmfb.limits import NOTICE_NANOSECONDS
from aotc.vmfb.memory.arena import ARENAS, ArenaPool, trim_c_library
from aotc.vmfb.memory.mapped_file import check_files_before, mapped_file_check
from aotc.vmfb.memory.pointers import DATA_FIELD, EMPTY, WORDS, address_of, aligned_bytes, read_scalar
from aotc.vmfb.plan import Plan, check_assertions, replace_empty_arrays, run_with_assertions
from aotc.vmfb.verify.buffers import check_interface_digest, load_command_buffers
from aotc.vmfb.weights.constants import ConstantMemory, load_constants

if TYPE_CHECKING:
    from aotc.vmfb.call_limits import Limits
    from aotc.vmfb.custom_calls import Callbacks
    from aotc.vmfb.devices.cpu.session import CpuSession
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.host.lapack import Lapack
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.debug_texts import DebugText
    from aotc.vmfb.profile.perf import KernelLibrary

    CallState = tuple[PointerTable, ctypes.c_void_p, tuple[Callable[[], int], ...]]
    """Memory and code of one call of a plan at a time: pointer table, scratch address, a native call per submission."""


def obstacle(variant: dict[str, Any]) -> str:
    """Return the CPU features that a variant needs and this machine lacks, as text; an empty string if it can run."""
    return missing_features(variant, cpu_features())


def rank(variant: dict[str, Any]) -> tuple[int, bool, int]:
    """Return a sort key of a variant: of those that this machine can run, the highest is the fastest."""
    return machine.cpu_speed_rank(variant["features"], cpu_features())


def check(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Check command buffers and code of a variant without loading them; see :class:`aotc.vmfb.interfaces.Device`."""
    load_command_buffers(bundle, variant)
    libraries = [("executor", variant.get("executor"))]
    if variant["kernels"]:
        libraries.append(("kernel library", variant.get("library")))
    for role, number in libraries:
        if number is None:
            raise BundleError(bundle.where, f"the variant has no {role}")
        bundle.verified_segment(number)


def open_executable(
    bundle: OpenedBundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> CpuExecutable:
    """Load a CPU variant; ``threads`` as in :func:`aotc.vmfb.module.load`. All ``cpu:N`` share the same cores."""
    return CpuExecutable(bundle, variant, thread_count(threads), custom_calls)


class _Buffer:
    """A command buffer ready to run: its words, with kernel addresses in place of kernel numbers.

    Attributes
    ----------
    words : numpy.ndarray
    states, parameters : int
        Number of state cells, and of parameters of a submission.
    stride : int
        Bytes between the scratch memories of two workers.
    """

    __slots__ = ("address", "parameters", "states", "stride", "words")

    def __init__(self, words: np.ndarray, states: int, parameters: int, stride: int) -> None:
        self.words, self.address = words, address_of(words)
        self.states, self.parameters, self.stride = states, parameters, stride


class CpuExecutable:
    """A loaded CPU variant.

    Parameters
    ----------
    bundle : OpenedBundle
    variant : dict
        The variant's entry in the manifest.
    threads : int
        Number of threads, including the caller's.
    custom_calls : mapping of str to callable
        Python functions that the variant calls, by name.

    Raises
    ------
    BundleError
        If a library lacks a symbol, or a command buffer is invalid.
    """

    limits: Limits | None = None  # of the module's calls

    def __init__(
        self, bundle: OpenedBundle, variant: dict[str, Any], threads: int, custom_calls: Mapping[str, Any]
    ) -> None:
        self._bundle = bundle
        self._variant = variant
        self.threads = threads
        self._executor = native.load_executor(bundle, variant.get("executor"), variant.get("executor_version", 0))
        self._constants: ConstantMemory = load_constants(bundle, variant.get("constants"))
        self._widths = [-(-kernel["scratch"] // abi.ALIGNMENT) * abi.ALIGNMENT for kernel in variant["kernels"]]
        self._stride = max(self._widths, default=0)
        self._limit: int = variant.get("memory_limit") or 0
        self.arenas: ArenaPool = ARENAS
        self.device_bits = 0
        self._lapack: Lapack | None = None
        calls = variant.get("custom_calls", [])
        self._callbacks: Callbacks | None = None
        if calls:
            from aotc.vmfb.custom_calls import Callbacks  # only for bundles with custom calls

            self._callbacks = Callbacks(bundle.where, calls, custom_calls)
        self.has_callbacks = bool(calls)
        self._notice = raise_if_interrupted if self._callbacks is None else self._callbacks.stop_if_needed
        self.buffers = load_command_buffers(bundle, variant)
        self.constants_bytes = self._constants.size
        self.mapped = () if self._constants.file is None else (self._constants.file,)
        self._buffers = self._load_buffers()
        self.words = [buffer.words for buffer in self._buffers]  # a recording replaces kernel addresses in them

    def _load_buffers(self) -> list[_Buffer]:
        """Copy the words of all command buffers, and replace kernel numbers by addresses."""
        self._addresses = self._kernel_addresses(len(self._variant["kernels"]))
        buffers = []
        for row, stored, nodes in zip(self._variant["command_buffers"], self.buffers.words, self.buffers.nodes):
            words = stored.astype(np.int64)
            patches = kernel_words(nodes)
            stride = 0
            if patches:
                numbers = words[patches]
                words[patches] = self._addresses[numbers]
                stride = max(map(self._widths.__getitem__, numbers.tolist())) if self._stride else 0
            buffers.append(_Buffer(words, row["states"], row["parameters"], stride))
        return buffers

    def _kernel_addresses(self, count: int) -> np.ndarray:
        """Load the kernel library, and return the addresses in its kernel table."""
        if not count:
            return np.zeros(0, np.int64)
        own = self._callbacks is not None  # its pointers belong to this executable
        number = self._variant.get("library")
        self._library: KernelLibrary = native.load_library(self._bundle, number, "kernel library", own)
        if PERF and not own:
            from aotc.vmfb.profile.perf import with_kernel_symbols  # only for profilers

            self._library = with_kernel_symbols(self._library, self._bundle, self._variant)
        library = self._library.library
        try:
            table = (ctypes.c_int64 * count).in_dll(library, abi.TABLE_SYMBOL)
        except ValueError:
            raise BundleError(self._bundle.where, f"the kernel library exports no {abi.TABLE_SYMBOL!r}") from None
        self._check_interface(library)
        self._bind_imports(library)
        addresses = np.array(table, np.int64)
        if not addresses.all():
            raise BundleError(self._bundle.where, "the kernel library's table holds a null address")
        return addresses

    def _check_interface(self, library: ctypes.CDLL) -> None:
        """Refuse a kernel library whose embedded digest differs from that of the manifest's kernel declarations."""
        try:
            sealed = bytes((ctypes.c_uint8 * abi.INTERFACE_BYTES).in_dll(library, abi.INTERFACE_SYMBOL))
        except ValueError:
            raise BundleError(self._bundle.where, f"the kernel library exports no {abi.INTERFACE_SYMBOL!r}") from None
        check_interface_digest(self._bundle.where, self._variant, sealed)

    def _bind_imports(self, library: ctypes.CDLL) -> None:
        """Write the addresses of LAPACK functions and of Python callbacks to the pointers that the library exports."""
        addresses: dict[str, int] = {}
        functions = self._variant.get("imports", {}).get("lapack", [])
        if functions:
            from aotc.vmfb.host.lapack import open_lapack  # only for bundles that call LAPACK

            self._lapack, addresses = open_lapack(self._bundle.where, functions)
        if self._callbacks is not None:
            addresses |= self._callbacks.addresses()
        for name, address in addresses.items():
            try:
                ctypes.c_int64.in_dll(library, abi.IMPORT_PREFIX + name).value = address
            except ValueError:
                raise BundleError(self._bundle.where, f"the kernel library does not import {name!r}") from None

    # ------------------------------------------------------------ running

    def native_call_of_buffer(
        self, number: int, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p, threads: int = 0
    ) -> Callable[[], int]:
        """Return a function that runs command buffer ``number`` by one native call.

        Parameters
        ----------
        number : int
        slots : ctypes array of int64
            The pointer table, to be filled in before each call.
        parameters : sequence of int
        scratch : ctypes.c_void_p
            Read at the time of the call.
        threads : int
            Number of threads; 0 for all of the executable's.
        """
        return self._native_call(self._buffers[number], slots, parameters, scratch, threads or self.threads)

    def call_of_command(
        self, command: abi.Command, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p,
        times: int = 1,
    ) -> Callable[[], None]:
        """Return a call that runs one command ``times`` times, without its predecessors."""
        kernel = int(self._addresses[command.kernel]) if command.kind == abi.DISPATCH else 0
        alone = abi.Command(command.kind, kernel, command.items, command.grain, 0, (), command.places, command.dims)
        words = np.array(encode_commands([abi.Graph([alone] * times, state=0, serial=True)]), np.int64)
        buffer = _Buffer(words, times, len(parameters), self._stride)
        call = partial(self._run_native_call, self._native_call(buffer, slots, parameters, scratch, self.threads))
        return call if self._callbacks is None else self._callbacks.wrap_native_call(call)

    def nodes(self, number: int) -> list[abi.Node]:
        """Return the nodes of command buffer ``number``, with kernel numbers."""
        return self.buffers.nodes[number]

    def kernel_texts(self) -> list[DebugText] | None:
        """Return the debug information of each kernel, or None if the bundle has none."""
        from aotc.vmfb.profile.debug_texts import kernel_texts  # only for profilers

        return kernel_texts(self._bundle, self._variant)

    def command_locs(self, number: int) -> dict[int, str]:
        """Return the source locations of commands of buffer ``number``, by the position of their first word.

        Commands with their kernel's location are left out.
        """
        from aotc.vmfb.profile.debug_texts import command_locs

        return command_locs(self._bundle, self._variant, number, self.buffers.nodes[number])

    def origin(self) -> dict[str, str]:
        """Return the compiler version and the program digest of the bundle, which must have debug information."""
        from aotc.vmfb.profile.debug_texts import bundle_origin

        return bundle_origin(self._bundle)

    def _native_call(
        self, buffer: _Buffer, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p, threads: int
    ) -> Callable[[], int]:
        """Fill in a call block, and return a function that runs a buffer with this block by one native call."""
        values = (ctypes.c_int64 * max(len(parameters), 1))(*parameters)
        memory, address = aligned_bytes(8 * (abi.CALL_WORDS + abi.STATE_WORDS * buffer.states), abi.ALIGNMENT)
        block = (ctypes.c_int64 * abi.CALL_WORDS).from_address(address)
        block[abi.CALL_POOL] = self._executor.pool
        block[abi.CALL_SLOTS] = ctypes.addressof(slots)
        block[abi.CALL_PARAMS] = ctypes.addressof(values)
        block[abi.CALL_CELLS] = address + 8 * abi.CALL_WORDS
        block[abi.CALL_STRIDE] = buffer.stride
        block[abi.CALL_SCRATCH] = ctypes.addressof(scratch)
        block[abi.CALL_CODE], block[abi.CALL_LENGTH] = buffer.address, len(buffer.words)
        block[abi.CALL_THREADS], block[abi.CALL_DEVICES] = threads, self.device_bits
        # With callbacks, check at every opportunity: a Python function that raised must end the call at once.
        block[abi.CALL_EVERY] = 0 if self._callbacks is not None else NOTICE_NANOSECONDS
        block[abi.CALL_ARGUMENT] = id(self._notice)
        call = partial(self._executor.run, ctypes.c_void_p(address))
        call.keepalive = (memory, values, slots, scratch, buffer, self._notice)  # type: ignore[attr-defined]
        call.stop = ctypes.c_int64.from_buffer(block, 8 * abi.CALL_STOP)  # type: ignore[attr-defined]
        return call

    def run_buffer(self, number: int, slots: PointerTable, parameters: Sequence[int], scratch: ctypes.c_void_p) -> None:
        """Run command buffer ``number`` and wait; parameters as in :meth:`native_call_of_buffer`."""
        call = self.native_call_of_buffer(number, slots, parameters, scratch, self._threads_within(0, self._stride))
        self._run_native_call(call if self._callbacks is None else self._callbacks.wrap_native_call(call))

    def _run_native_call(self, call: Callable[[], int]) -> None:
        """Run a native call with LAPACK limited to one thread; raise the exception of a custom call in it."""
        if self._lapack is not None:
            self._lapack.limit_to_one_thread()
        try:
            if call():
                raise SystemExit  # the interpreter exits, and this is a daemon thread
        finally:
            if self._lapack is not None:
                self._lapack.restore_threads()

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return a function that runs ``plan`` on argument and result arrays.

        The arrays must be C-contiguous, with the plan's shapes and dtypes. The function may be called by several
        threads at the same time. It raises CallError if an assertion of the plan fails.
        """
        layout = abi.Slots(plan.arguments, len(plan.results))
        need, arena_bytes, make_call_state = self._call_state_factory(plan, self._buffers, layout.count)
        idle: list[CallState] = []
        take, give = self.arenas.take_arena, self.arenas.return_arena
        words, field = WORDS, DATA_FIELD

        lapack, judged = self._lapack, plan.assertions_by_submission() if plan.judgements else None

        def run(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            """Take an arena and a state, write all addresses to the pointer table, and run the plan's submissions."""
            try:
                state = idle.pop()
            except IndexError:
                state = make_call_state()
            slots, scratch, calls = state
            i = 0
            for x in arrays:
                slots[i] = words[(id(x) + field) >> 3] if field else address_of(x)
                i += 1
            for x in results:
                slots[i] = words[(id(x) + field) >> 3] if field else address_of(x)
                i += 1
            if need:
                arena = take(need)
                slots[i] = arena.address
                scratch.value = arena.address + arena_bytes
            if lapack is not None:
                lapack.limit_to_one_thread()
            try:
                failure = None if judged is None else run_with_assertions(calls, judged, slots)
                for call in calls if judged is None else ():
                    if call():
                        raise SystemExit  # the interpreter exits, and this is a daemon thread
            finally:
                if lapack is not None:
                    lapack.restore_threads()
                if need:
                    give(arena)  # also after an aborted call: no worker uses it any more
            idle.append(state)
            if failure is not None:
                raise failure

        wrapped = run if self._callbacks is None else self._callbacks.wrap_native_call(run)
        whole = check_files_before(wrapped, self.mapped)
        return replace_empty_arrays(whole, plan) if plan.empty else whole

    def _call_state_factory(
        self, plan: Plan, buffers: Sequence[_Buffer], count: int
    ) -> tuple[int, int, Callable[[], CallState]]:
        """Return the arena sizes of a plan, and a function that makes the state of a call.

        A state has a pointer table of ``count`` slots. No two calls use a state at the same time.

        Returns
        -------
        need : int
            Bytes of an arena with scratch memory.
        arena : int
            Bytes of the arena alone.
        make_call_state : callable
            Makes a state; it has no arena yet.
        """
        arena_bytes = -(-plan.arena // abi.ALIGNMENT) * abi.ALIGNMENT
        stride = max((buffers[n].stride for n, _ in plan.submissions), default=0) if self._stride else 0
        threads = self._threads_within(arena_bytes, stride) if stride else self.threads
        constants_slot = abi.Slots(plan.arguments, len(plan.results)).constants

        def make_call_state() -> CallState:
            slots = (ctypes.c_int64 * count)()
            slots[constants_slot] = self._constants.address
            scratch = ctypes.c_void_p()
            calls = tuple([self._native_call(buffers[n], slots, p, scratch, threads) for n, p in plan.submissions])
            return slots, scratch, calls

        return arena_bytes + stride * threads, arena_bytes, make_call_state

    @property
    def has_early_results(self) -> bool:
        """Return True if some results may be complete long before the call ends; False for a few serial commands."""
        nodes = (node for nodes in self.buffers.nodes for node in nodes)
        return self.has_callbacks or any(not isinstance(node, abi.Graph) or not node.serial for node in nodes)

    def early_replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray], EarlyResults], None]:
        """Return the function of :meth:`replay` for calls whose results can be read before the call ends."""
        from aotc.vmfb.devices.early import make_mark_table

        layout = abi.Slots(plan.arguments, len(plan.results))
        buffers, needed, unwritten = self._add_result_marks(plan, layout.count)
        need, arena_bytes, make_call_state = self._call_state_factory(plan, buffers, layout.count + 1)
        idle: list[CallState] = []
        judged, check = plan.assertions_by_submission(), mapped_file_check(self.mapped)

        def run(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray], early: EarlyResults) -> None:
            """Run the submissions of the plan, and report completed results through ``early``."""
            check()
            slots, scratch, calls = state = idle.pop() if idle else make_call_state()
            for slot, x in enumerate((*arrays, *results)):
                slots[slot] = address_of(EMPTY if slot in plan.empty else x)
            marks = make_mark_table(len(results))
            for number in unwritten:
                marks[1 + number] = 1
            slots[layout.count] = ctypes.addressof(marks)
            arena = self.arenas.take_arena(need) if need else None
            if arena is not None:
                slots[layout.arena], scratch.value = arena.address, arena.address + arena_bytes
            if self._lapack is not None:
                self._lapack.limit_to_one_thread()
            stops = [call.stop for call in calls]  # type: ignore[attr-defined]
            early.begin(results, marks, needed, lambda: any(stop.value for stop in stops))
            try:
                for stage, after in enumerate(judged):
                    if stage and calls[stage - 1]():
                        raise SystemExit  # the interpreter exits, and this is a daemon thread
                    check_assertions(after, partial(read_scalar, slots))
                    early.stage = stage
            finally:
                if self._lapack is not None:
                    self._lapack.restore_threads()
                if arena is not None:
                    self.arenas.return_arena(arena)
            idle.append(state)

        return run if self._callbacks is None else self._callbacks.wrap_native_call(run)

    def _add_result_marks(self, plan: Plan, table: int) -> tuple[list[_Buffer], list[int], list[int]]:
        """Add commands to a plan's command buffers that mark each result as complete.

        A mark is a copy to slot ``table``. A result whose submission is followed by assertions can be read only after
        these have been checked.

        Returns
        -------
        buffers : list of _Buffer
        needed : list of int
            For each result the number of submissions after which it can be read.
        unwritten : list of int
            Results that no command writes.
        """
        from aotc.vmfb.devices.early import add_result_marks  # only for submissions

        kernels, judged = self._variant["kernels"], plan.assertions_by_submission()

        def written(command: abi.Command) -> list[int]:
            inputs = 1 if command.kind == abi.COPY else kernels[command.kernel]["inputs"]
            return [slot for slot, _ in command.places[inputs:]]

        buffers, needed, unwritten = [*self._buffers], [0] * len(plan.results), []
        last: dict[int, dict[int, int]] = {}  # by submission: results that it writes last, with slots
        for number, slot in enumerate(plan.slots_of_results()):
            writers = [
                n for n, (buffer, _) in enumerate(plan.submissions)
                if any(slot in written(command) for command in all_commands(self.buffers.nodes[buffer]))
            ]  # fmt: skip
            if writers:
                last.setdefault(writers[-1], {})[number] = slot
                needed[number] = writers[-1] + 1 if judged[writers[-1] + 1] else 0
            else:
                unwritten.append(number)
        for submission, slots in last.items():
            number = plan.submissions[submission][0]
            old = self.buffers.nodes[number]
            nodes, states = add_result_marks(old, slots, written, table, buffers[number].states, self.has_callbacks)
            buffers[number] = self._with_kernel_addresses(encode_commands(nodes), states, buffers[number])
        return buffers, needed, unwritten

    def _with_kernel_addresses(self, encoded: Sequence[int], states: int, like: _Buffer) -> _Buffer:
        """Return an encoded command buffer with kernel addresses in place of kernel numbers.

        ``like`` is the original buffer, for the scratch memory.
        """
        words = np.array(encoded, np.int64)
        patches = kernel_words(decode_commands(encoded))
        words[patches] = self._addresses[words[patches]]
        return _Buffer(words, states, like.parameters, like.stride)

    def use_devices(self, names: Sequence[str]) -> None:
        """Let calls run on the cores of these logical devices; the executor reads them from ``device_bits``."""
        self.device_bits = logical_devices.use_logical_devices(self, names)

    def limit_memory(self, limit: int) -> None:
        """Limit the working memory of all concurrent calls together to ``limit`` bytes."""
        from aotc.vmfb.memory.memory_limit import LimitedPool  # only for processes with a limit

        self.arenas = LimitedPool(limit)
        self._limit = min(limit, self._limit or limit)

    def _threads_within(self, arena: int, stride: int) -> int:
        """Return the number of threads, at least one, whose scratch of ``stride`` bytes fits next to an arena."""
        return threads_within_memory_limit(self.threads, self._limit, arena, stride)

    def session(self, layout: abi.Slots) -> CpuSession:
        """Start a call with a pointer table of this layout."""
        from aotc.vmfb.devices.cpu.session import CpuSession  # only for calls without a plan

        mapped_file_check(self.mapped)()
        scratch = self._stride * self._threads_within(0, self._stride)
        return CpuSession(self, layout, self._constants.address, scratch)

    def stats(self) -> dict[str, Any]:
        """Return threads, kernels and memory in bytes, for ``module.stats()``."""
        return {
            "target": self._variant["target"],
            "threads": self.threads,
            "slots": logical_devices.core_shares(self.device_bits, self._executor[abi.POOL_CORES]),
            **self._executor.stats(),
            "kernels": len(self._variant["kernels"]),
            "command_buffers": len(self._buffers),
            "arena_peak": self._variant.get("arena_peak"),
            "arena_idle_bytes": self.arenas.idle_bytes(),
            "arena_high_water": self.arenas.high_water,
            "arena_allocations": self.arenas.made,
            "memory": {"cpu": self.arenas.stats()},
            "constants_bytes": self.constants_bytes,
            "constants_copied": self._constants.copied,
        }

    def trim(self) -> int:
        """Free unused arenas, and let the C library return free memory to the system; return the freed bytes."""
        freed = self.arenas.trim()
        trim_c_library()
        return freed
