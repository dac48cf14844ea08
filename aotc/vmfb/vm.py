"""The VM: interprets host programs, records their work as plans, and replays the plans.

A program's control flow depends on the shapes of its arguments, rarely on their data. So the VM runs a program once for
each tuple of shapes with a recorder in place of the device (:mod:`aotc.vmfb.verify.plan_recorder`). Later calls replay
the recording, a :class:`~aotc.vmfb.plan.Plan`. Only a program that reads sizes from memory is interpreted in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakMethod

import numpy as np

from aotc.vmfb.arguments import (
    GOOD_FLAGS,
    Argument,
    Signature,
    check_output_buffer,
    check_output_buffers,
    invalidate_donated_arrays,
    prepare_arguments,
    type_text,
)
from aotc.vmfb.dtypes import size_of, to_numpy
from aotc.vmfb.errors import ArgumentError, BundleError, CallError
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.host.machine import GUARDED
from aotc.vmfb.isa import ISA, Frame, Session
from aotc.vmfb.limits import MAX_BYTES, PLANS
from aotc.vmfb.plan import Plan
from aotc.vmfb.results import Residence, copy_to_output_buffer, resident_calls
from aotc.vmfb.verify.call_memory import CallMemory, TooLarge
from aotc.vmfb.verify.kernel_interface import Invalid
from aotc.vmfb.verify.plan_recorder import Recorder, is_plan_possible

if TYPE_CHECKING:
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.devices.mixed.session import PlacedSession
    from aotc.vmfb.interfaces import Executable, Replay
    from aotc.vmfb.memory.result_pool import Rows
    from aotc.vmfb.profile.trace import Stepper

_Planned: TypeAlias = "tuple[Plan, Replay, Callable[[Any, Any], np.ndarray], Rows]"  # the last two allocate results
Program = list[tuple[Callable[..., int | None], list[Any]]]

_Result = TypeVar("_Result")


def decode_program(code: list[list[Any]]) -> Program:
    """Replace the opcodes of a verified host program by the functions that execute them."""
    return [(ISA[opcode].run, operands) for opcode, *operands in code]


def interpret_program(program: Program, frame: Frame) -> None:
    """Run a decoded host program from its first instruction to its return."""
    at = 0
    while at >= 0:
        run, operands = program[at]
        to = run(frame, *operands)
        at = at + 1 if to is None else to


class _InterpretedSession:
    """Session of an interpreted call: checks accesses, allocates host results, and forwards to the device."""

    def __init__(
        self, function: LoadedFunction, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray | None]
    ) -> None:
        self.function, self.arrays = function, arrays
        self.memory = function.initial_call_memory([x.nbytes for x in arrays])
        self.slots = function.residence.layout
        self.session = function.executable.session(self.slots)
        self.out = out
        self.results: list[np.ndarray | None] = [None] * len(function.result_dtypes)
        self.guarded: dict[int, np.ndarray] = {}  # results in other memory: of arguments, or with AOTC_GUARD
        self.run = self.session.submit

    def allocate_arena(self, size: int, space: int = 0) -> None:
        self.memory.allocate_arena(size, space)
        if space:
            cast("PlacedSession", self.session).allocate_arena_in_space(space, size)
        else:
            self.session.allocate_arena(size)

    def submit(self, number: int, parameters: list[int]) -> None:
        """Check a command buffer's memory accesses for the current sizes, once, and run the command buffer."""
        proven, key = self.function.proven, (number, *parameters, *self.memory.sizes)
        if key not in proven:
            buffers = self.function.executable.buffers
            self.memory.check_submission(buffers.nodes[number], buffers.kernels, parameters)
            if len(proven) >= PLANS:
                proven.clear()
            proven.add(key)
        self.run(number, parameters)

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        self.memory.check_access(slot, offset, size_of(dtype))
        return self.session.load_scalar(slot, offset, dtype)

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        self.memory.check_access(slot, offset, size)
        if GUARDED:
            self.session.open_debug_block(slot, offset, size)

    def allocate_result(self, index: int, dims: tuple[int, ...]) -> None:
        """Allocate a result, or take its ``out=`` buffer, and write its address to the pointer table."""
        self.memory.allocate_result(index, dims)
        residence, dtype = self.function.residence, self.function.result_dtypes[index]
        found = residence.output_buffer_or_new_array(self.out[index], dtype, dims, index, self.function.where)
        self.results[index] = found
        if GUARDED:
            from aotc.vmfb.memory.guard_pages import guarded_array  # only for debugging

            self.guarded[index] = found = guarded_array(dims, dtype)
        self.session.bind_array(self.slots.result_slot(index), found)

    def share_argument_memory(self, index: int, argument: int) -> None:
        self.memory.share_argument_memory(index, argument)
        found, given = self.arrays[argument], self.out[index]
        if given is not None:
            check_output_buffer(given, found.dtype, found.shape, index, self.function.where)
        self.results[index] = self.guarded[index] = found

    def computed_result(self, index: int) -> np.ndarray | None:
        """Return a computed result, copied to its ``out=`` buffer if the program wrote other memory."""
        given, guarded = self.out[index], self.guarded.get(index)
        if guarded is None:
            return self.results[index]
        if given is None:
            return guarded
        given[...] = guarded
        return given


class LoadedFunction:
    """A function of a loaded bundle.

    Attributes
    ----------
    name : str
    signature : Signature
    resident : ResidentCalls or None
        Fast paths of calls whose arrays are all on the GPU, if the function uses a single GPU.
    recordings : int
        Number of times that the program was recorded: once for each tuple of shapes.
    call : callable
        ``call(arrays) -> list of numpy.ndarray``: the fast path for positional arguments, without donation or ``out=``.
        It has only a weak reference to the function, so its holder must also hold the function: a reference cycle would
        keep files open until the garbage collector runs.
    """

    def __init__(
        self, name: str, entry: dict[str, Any], program: dict[str, Any], executable: Executable, where: str
    ) -> None:
        self.name = name
        self.where = name if where == name else f"{where}: {name}"
        self.executable = executable
        self.arguments = [Argument(i, a) for i, a in enumerate(entry["arguments"])]
        self.result_dtypes = [to_numpy(r["dtype"]) for r in entry["results"]]
        self.signature = Signature(name, entry)
        self.residence = Residence(executable, entry)
        self._names = tuple(a.name for a in self.arguments)
        self._program = decode_program(program["code"])
        self._registers = program["registers"]
        self._planned = not GUARDED and is_plan_possible(program["code"])
        self.proven: set[tuple[int, ...]] = set()  # verified submissions of an interpreted program
        self._plans: dict[tuple[tuple[int, ...], ...], _Planned] = {}
        self._early: dict[tuple[tuple[int, ...], ...], tuple[Plan, Callable[..., None]]] = {}
        self._lock = new_lock()
        self.resident = resident_calls(executable) if self._planned else None
        self.recordings = 0

    @property
    def direct(self) -> LoadedFunction:
        """The function that submissions run."""
        return self

    def run(
        self,
        values: Sequence[Any],
        out: Sequence[Any] | None = None,
        donate: bool = False,
        results: str = "",
    ) -> list[Any]:
        """Run the function on any values that convert to its argument types.

        Parameters
        ----------
        values : sequence
            One for each argument: arrays, objects with ``__array__`` or ``__dlpack__``, Python scalars.
        out : sequence of arrays or None, optional
            ``out=`` buffer of each result; None allocates.
        donate : bool
            Allow donated arguments to be overwritten; device arrays among them become unusable. Otherwise they are
            copied.
        results : str
            ``"numpy"``; ``"device"`` leaves results computed on a GPU there; by default only those that the signature
            places there.

        Returns
        -------
        list of numpy.ndarray or CudaArray

        Raises
        ------
        CallError
            If an argument does not fit or an assertion of the program fails.
        """
        return self._run_converted(values, out, donate, results, None)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """Run the function as :meth:`run` does; ``early`` receives results that can be read before the call ends."""
        return self._run_converted(values, out, donate, results, early)

    def _run_converted(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults | None
    ) -> list[Any]:
        """Convert arguments, allocate results, and run the program by its plan, on the GPU's fast path, or interpreted.

        ``early`` receives results that can be read before the call ends; None waits for all of them.
        """
        if self.resident is not None:
            found = self.resident.run_fast_path(values, out, donate, results)
            if found is not None:
                return found
        if len(values) != len(self.arguments):
            raise ArgumentError(
                self.where,
                "wrong number of arguments",
                len(values),
                f"{len(self.arguments)}: {', '.join(map(str, self.arguments))}",
            )
        key = self.resident.new_fast_path_key(values, out, donate, results) if self.resident is not None else None
        arrays = prepare_arguments(self.arguments, values, self.where, donate, self.residence.gpus)
        buffers = check_output_buffers(out, len(self.result_dtypes), arrays, self.where, self.residence.result_gpus)
        stays = self.residence.results_on_gpu(results, buffers)
        if not self._planned:
            invalidate_donated_arrays(self.arguments, values, arrays, donate)
            computed = self._interpret_for_gpu_buffers([np.asarray(x) for x in arrays], buffers)
        else:
            shapes = tuple([x.shape for x in arrays])
            plan, replay, *_ = self._plan_for_shapes(shapes)
            invalidate_donated_arrays(self.arguments, values, arrays, donate)
            computed = self.residence.allocate_results(plan, arrays, buffers, stays, self.where)
            if early is None:
                replay(arrays, computed)
            else:
                early.stays = stays
                self._early_replay(shapes, plan)(arrays, computed, early)
            if key is not None and self.resident is not None:
                self.resident.create_fast_path(plan, replay, key, arrays, computed, out)
        computed = self.residence.move_results(computed, stays)
        return computed if out is None else [x if given is None else given for x, given in zip(computed, out)]

    def _interpret_for_gpu_buffers(self, arrays: list[np.ndarray], out: Sequence[Any]) -> list[Any]:
        """Interpret the program with results in host memory, then copy those with ``out=`` buffers on a GPU there."""
        computed: list[Any] = self._interpret(arrays, [x if isinstance(x, np.ndarray) else None for x in out])
        for number, (found, given) in enumerate(zip(computed, out)):
            if given is not None and not isinstance(given, np.ndarray):
                check_output_buffer(given, found.dtype, found.shape, number, self.where)
                copy_to_output_buffer(given, found)
                computed[number] = given
        return computed

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """Run the function one command at a time, and write the inputs and outputs of each dispatch to ``folder``."""
        from aotc.vmfb.profile.trace import (
            Tracer,  # only for debugging
        )

        return self.step(values, partial(Tracer, where=self.where, folder=folder))

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """Run the function one command at a time, by a stepper that ``make`` constructs.

        Raises
        ------
        CallError
            As for :meth:`run`; also if the bundle has no kernel texts.
        """
        arrays = prepare_arguments(self.arguments, values, self.where)
        return self._interpret(arrays, [None] * len(self.result_dtypes), make)

    def _interpret(
        self, arrays: list[np.ndarray], out: Sequence[np.ndarray | None],
        steps: Callable[..., Stepper] | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Interpret the program on arrays in host memory; ``steps`` constructs a stepper that runs single commands."""
        if GUARDED:
            from aotc.vmfb.memory.guard_pages import guarded_copy

            arrays = [guarded_copy(x) for x in arrays]
        live = _InterpretedSession(self, arrays, out)
        try:
            if steps is not None:
                live.run = live.session.stepper(steps).submit
            for i, x in enumerate(arrays):
                live.session.bind_array(i, x)
            self._run_program([x.shape for x in arrays], cast("Session", live))  # without assertions
        finally:
            live.session.close()
        return [self._present_result(live.computed_result(i), i) for i in range(len(live.results))]

    def _present_result(self, x: _Result | None, number: int) -> _Result:
        if x is None:
            raise CallError(self.where, f"the program returned without result {number}")
        return x

    def _run_program(self, dims: list[tuple[int, ...]], session: Session) -> None:
        """Interpret the program with a session, and add function and shapes to the errors of invalid programs."""
        try:
            interpret_program(self._program, Frame(self._registers, dims, session, self.where, self._names))
        except Invalid as error:
            if isinstance(error, TooLarge) and not all(a.static for a in self.arguments):
                what = "arguments of these sizes need more memory than there are addresses"
                raise CallError(self.where, what, f"{error.size:,} bytes", f"at most {MAX_BYTES:,}") from None
            shapes = ", ".join(type_text(a.dtype_name, d) for a, d in zip(self.arguments, dims))
            hint = "copy the file again from where it was made, or compile the model again"
            what = f"the program is invalid: {error}"
            raise BundleError(self.where, what, f"called with {shapes}", hint=hint) from None

    def initial_call_memory(self, arguments: Sequence[int]) -> CallMemory:
        """Return the memory state at the start of a call, given the bytes of each argument."""
        donated = [a.donated for a in self.arguments]
        return CallMemory(arguments, donated, self.signature.results, self.residence.constants)

    def check_ahead(self) -> None:
        """Verify the program before its first call if all shapes are static.

        Raises
        ------
        BundleError
            If the program would access memory other than its own.
        """
        if self._planned and all(a.static for a in self.arguments):
            self._plan_for_shapes(tuple([a.dims for a in self.arguments]))

    def _plan_for_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> _Planned:
        """Return the plan for these argument shapes and the functions that replay it and allocate its results.

        The plan is recorded on first use, and cached.
        """
        found = self._plans.get(shapes)
        if found is None:
            bytes_ = [prod(shape) * a.dtype.itemsize for shape, a in zip(shapes, self.arguments)]
            memory, spaces = self.initial_call_memory(bytes_), len(self.residence.constants)
            recorder = Recorder(self.executable.buffers, memory, len(self.result_dtypes), self.where, spaces)
            self._run_program(list(shapes), recorder)
            self.recordings += 1
            for n, argument in recorder.taken.items():
                recorder.shapes[n] = shapes[argument]
            result_shapes = [self._present_result(shape, i) for i, shape in enumerate(recorder.shapes)]
            plan = Plan(
                len(self.arguments),
                tuple(zip(result_shapes, self.result_dtypes)),
                recorder.sizes[0],
                tuple(recorder.submissions),
                tuple([n for n, shape in enumerate((*shapes, *result_shapes)) if 0 in shape]),
                tuple(recorder.judgements),
                tuple(recorder.taken.items()),
                tuple(recorder.sizes[1:]),
                tuple(self.residence.layout.homes),
            )
            found = plan, self.executable.replay(plan), *self.residence.memory.plan_allocations(plan.results)
            with self._lock:  # other threads add plans too, for these shapes or others
                if len(self._plans) >= PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[shapes] = found
        return found

    @property
    def has_early_results(self) -> bool:
        """Return True if results can be read before the call ends: there are several, and the program has a plan."""
        several = self._planned and len(self.result_dtypes) > 1
        return several and getattr(self.executable, "has_early_results", False)

    def _early_replay(self, shapes: tuple[tuple[int, ...], ...], plan: Plan) -> Callable[..., None]:
        """Return the function that replays a plan with early results, which are readable before the call ends."""
        found = self._early.get(shapes)
        if found is None or found[0] is not plan:
            found = plan, self.executable.early_replay(plan)
            with self._lock:
                if len(self._early) >= PLANS:
                    self._early.clear()
                self._early[shapes] = found
        return found[1]

    # ------------------------------------------------------------ the fast path

    def call(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run the function; the first call replaces this method by a fast path if the function allows one."""
        if not self._planned or any(a.donated for a in self.arguments) or any(self.residence.named):
            return self.run(values)
        fast = self._static_call() if all(a.static for a in self.arguments) else self._dynamic_call()
        self.call = fast  # type: ignore[method-assign, assignment]
        return fast(values)

    def _general_call(self) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """Return :meth:`run` as a function that holds only a weak reference to this object.

        The fast paths call it, and this object references them: a strong reference would be a cycle.
        """
        method = WeakMethod(self.run)

        def run(values: Sequence[Any]) -> list[np.ndarray]:
            found = method()
            if found is None:  # the collector clears weak references before it runs finalizers, which may call
                raise ReferenceError
            return found(values)

        return run

    def _static_call(self) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """Return the fast path for static shapes: it compares types, allocates the results and submits the plan."""
        _, replay, new, rows = self._plan_for_shapes(tuple([a.dims for a in self.arguments]))
        checks = [(a.dtype, a.dims) for a in self.arguments]
        count, ndarray, good = len(checks), np.ndarray, GOOD_FLAGS
        run = self._general_call()

        def call(values: Sequence[Any]) -> list[np.ndarray]:
            """Replay the plan if all values are plain arrays of the expected type; else take the general path."""
            if len(values) != count:
                return run(values)
            for x, (dtype, shape) in zip(values, checks):
                if (
                    type(x) is not ndarray
                    or x.dtype is not dtype
                    or x.shape != shape
                    or x.flags.num & good != good
                ):
                    return run(values)
            results = [new(shape, dtype) for shape, dtype in rows]
            replay(values, results)
            return results

        return call

    def _dynamic_call(self) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """Return the fast path for symbolic shapes: it looks up the plan by the shapes of the arguments."""
        dtypes = [a.dtype for a in self.arguments]
        plans, count, ndarray, good, run = self._plans, len(dtypes), np.ndarray, GOOD_FLAGS, self._general_call()

        def call(values: Sequence[Any]) -> list[np.ndarray]:
            """Replay the cached plan of these shapes; without one, or for other types, take the general path."""
            if len(values) != count:
                return run(values)
            for x, dtype in zip(values, dtypes):
                if type(x) is not ndarray or x.dtype is not dtype or x.flags.num & good != good:
                    return run(values)
            found = plans.get(tuple([x.shape for x in values]))
            if found is None:
                return run(values)
            _, replay, new, rows = found
            results = [new(shape, dtype) for shape, dtype in rows]
            replay(values, results)
            return results

        return call
