"""Turn a loop over small tensors into one kernel that contains its condition and body.

An ODE step, a line search or a small recurrent cell spends microseconds on dispatch for nanoseconds of computation.
Here the whole loop runs inside one kernel, with its state in private memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aotc.ir.dims.algebra import Dim, is_static, product, static, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.limits import PRIVATE_BYTES
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    For,
    If,
    Kernel,
    Load,
    Scalar,
    Space,
    Stmt,
    Store,
    While,
    is_self_contained,
    needs_block,
)
from aotc.ir.loop.ir import walk as walk_statements
from aotc.ir.opset import EFFECTS
from aotc.ir.opset.control import RUNS_ONCE
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, captured_values, use_counts, walk
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.analysis.index_maps import reshape_index
from aotc.lowering.cost_model.work import expected_iterations
from aotc.lowering.plans.thresholds import LOOP_ELEMENTS, LOOP_TURNS, LOOP_VALUE, UNROLLED_STEPS
from aotc.lowering.program.owners.owners import BufferOwner, Owners
from aotc.lowering.program.owners.ties import original_iterations_per_iteration
from aotc.lowering.program.while_kernels.carries import ordered_copies
from aotc.lowering.program.while_kernels.inline_kernels import inline_kernel
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True)
class CandidateLoop:
    """A ``while`` that may become one kernel, and its context.

    Attributes
    ----------
    op : Op
    name : str
        Name of the kernel.
    functions, kernels : mapping
        Those of the program, by name.
    constants : mapping
        Constants by their values, also outside of the loop. They may determine the trip count, which is otherwise
        estimated.
    owners : Owners
    """

    op: Op
    name: str
    functions: Mapping[str, Function]
    kernels: Mapping[str, Kernel]
    constants: Mapping[Value, Op]
    owners: Owners


def is_small_loop(loop: CandidateLoop, limit: Limit) -> bool:
    """Return True if an iteration does so little work that launches would dominate its time."""
    if not is_closed_loop(loop.op, loop.functions, loop.kernels, loop.owners):
        return False
    if any(needs_block(k) or not is_self_contained(k) for k in kernels_in(loop.op, loop.kernels)):
        return False
    often = [
        loop.kernels[o.attrs["callee"]] for r in loop.op.regions for o in _frequently_run_ops(r) if o.name == "dispatch"
    ]
    total = sum(static(k.flops) for k in often) + sum(copied_elements(loop.op, loop.owners))
    return limit.holds(total // original_iterations_per_iteration(loop.op))


def _frequently_run_ops(region: Region) -> Iterator[Op]:
    """Yield the ops of ``region`` and nested regions, except branches that run about once in the loop."""
    for op in region.ops:
        yield op
        for n, inner in enumerate(op.regions):
            if op.attrs.get(RUNS_ONCE) != n:
                yield from _frequently_run_ops(inner)


def kernels_in(op: Op, kernels: Mapping[str, Kernel]) -> list[Kernel]:
    """Return the kernels that the regions of ``op`` dispatch, once per dispatch."""
    return [kernels[o.attrs["callee"]] for r in op.regions for o in walk(r) if o.name == "dispatch"]


def copied_elements(op: Op, owners: Owners) -> list[int]:
    """Return the element counts of the values of static shape that an iteration copies."""
    return [static(product(tie.new.type.shape)) for tie in owners.copies_in_loop(op) if is_static(tie.new.type.shape)]


def is_closed_loop(
    op: Op, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], owners: Owners,
    value: Limit = LOOP_VALUE, elements: Limit = LOOP_ELEMENTS,
) -> bool:  # fmt: skip
    """Return True if a ``while`` has few values, of small known sizes, so that one kernel may store them.

    Values that an iteration copies count, too.
    """
    if not is_whole_loop(op) or not all(is_static(v.type.shape) for v in values_computed_in_loop(op)):
        return False
    often = {o for r in op.regions for o in _frequently_run_ops(r)}
    carried = {owners.owner_of(v) for v in op.results}
    counts = [
        static(product(v.type.shape))
        for r in op.regions
        for o in walk(r)
        if o.name == "dispatch" and not _updates_in_place(o, functions)
        for v in o.results
        if o in often or owners.owner_of(v) not in carried
    ]
    counts += copied_elements(op, owners)
    whole = sum(counts) // original_iterations_per_iteration(op)
    if any(not value.holds(n) for n in counts) or not elements.holds(whole):
        return False
    return not any(k.dims for k in kernels_in(op, kernels))


LOOP_BUFFERS = Limit(
    60,
    "values that a while loop reads and returns, if it becomes one kernel",
    "each is a kernel parameter",
)


def is_whole_loop(op: Op) -> bool:
    """Return True if one kernel can run a ``while``: no effects, no transfers, few enough values for its parameters."""
    if any(o.name in EFFECTS or o.name == "transfer" for r in op.regions for o in walk(r)):
        return False
    outer = {v for r in op.regions for v in captured_values(r)} | set(op.operands)
    return LOOP_BUFFERS.holds(len(outer) + len(op.results))


def values_computed_in_loop(op: Op) -> Iterator[Value]:
    """Yield the values that ops inside of a loop compute, and those that it carries."""
    for r in op.regions:
        yield from r.params
        yield from (v for o in walk(r) for v in o.results)


def loop_name(op: Op, *taken: Mapping[str, Kernel]) -> str:
    """Return an unused name for the kernel of a loop."""
    name = f"k{len(taken[0])}_loop_{op.results[0].name if op.results else len(taken[-1])}"
    name = "".join(c if c.isalnum() else "_" for c in name)
    while any(name in kernels for kernels in taken):
        name += "_"
    return name


def _updates_in_place(op: Op, functions: Mapping[str, Function]) -> bool:
    return count_overwritten_parameters(functions[op.attrs["callee"]]) > 0


class LoopKernel(NamedTuple):
    """A kernel that runs a whole ``while``: condition, body and state.

    Attributes
    ----------
    kernel : Kernel
        The kernel. Its outputs are the results of the loop; if ``bounded``, a flag that is true while iterations
            remain; and the work memory ``kept``.
    reads : tuple of Value
        Values from outside of the loop that the kernel reads, in the order of its inputs.
    kept : tuple of Buffer
        Work memory that the caller allocates for the kernel. If the last buffer is a scalar, the caller sets it to 0.
    bounded : bool
        True if a launch runs a bounded number of iterations, so that several launches may be needed.
    held : tuple of int
        Numbers of the outputs to whose memory the caller copies the initial state before the launch.
    """

    kernel: Kernel
    reads: tuple[Value, ...]
    kept: tuple[Buffer, ...] = ()
    bounded: bool = False
    held: tuple[int, ...] = ()


@dataclass
class LoopKernelWriter:
    """Emit the regions of a loop as statements of the loop IR.

    Attributes
    ----------
    memory : dict of Value to Buffer
        The buffer of each value.
    places : dict of BufferOwner to Buffer
        The buffer of each owner: values with the same owner share memory.
    kept : list of Buffer
        Work memory that the caller allocates.
    """

    functions: Mapping[str, Function]
    kernels: Mapping[str, Kernel]
    owners: Owners
    memory: dict[Value, Buffer]
    count: int = 0
    kept: list[Buffer] = field(default_factory=list)
    places: dict[BufferOwner, Buffer] = field(default_factory=dict)

    def local_memory_space(self, value: Value) -> Space:
        """Return the kind of local memory for a computed or carried value."""
        bytes_ = static(product(value.type.shape)) * size_of(value.type.dtype)
        return "private" if bytes_ <= PRIVATE_BYTES else "scratch"

    def carried_buffer(self, value: Value, out: Buffer, block: list[Stmt]) -> Buffer:
        """Return the buffer of a loop-carried value: private memory, or that of the result for a large value."""
        return (
            self.buffer_of_value(value, block)
            if self.local_memory_space(value) == "private"
            else self.assign_buffer(value, out)
        )

    def assign_buffer(self, value: Value, place: Buffer) -> Buffer:
        """Record ``place`` as the buffer of ``value`` and of all values that share its memory."""
        self.memory[value] = self.places[self.owners.owner_of(value)] = place
        return place

    def emit_copy(self, block: list[Stmt], source: Buffer, target: Buffer) -> None:
        """Emit a copy between whole buffers of equal shape."""
        self.count += 1
        copy_buffers(block, source, target, f"_{self.count}")

    def emit_kernel(self, block: list[Stmt], kernel: Kernel, where: Mapping[str, Buffer]) -> None:
        """Emit a dispatched kernel's whole grid inline; ``where`` maps its parameters to memory."""
        self.count += 1
        block += inline_kernel(kernel, where, f"_{self.count}")

    def can_compute_in(self, value: Value, place: Buffer) -> bool:
        """Return True if ``value`` may be computed in ``place``, the memory of another value of its owner."""
        return place.dtype == value.type.dtype

    def kernel_statements(self, block: list[Stmt]) -> list[Stmt]:
        """Return the statements of the whole kernel."""
        return block

    def load_predicate(self, value: Value, block: list[Stmt]) -> Load:
        """Return the load of the only element of a value that controls a loop or branch."""
        return load_of_only_element(self.memory[value])

    def emit_before_loop(self, block: list[Stmt]) -> None:
        """Emit the statements before a loop; overridden by writers with barriers."""

    def emit_while(self, block: list[Stmt], test: list[Stmt], continue_while: Scalar, step: list[Stmt]) -> None:
        """Emit a loop of the kernel."""
        block.append(While(tuple(test), continue_while, tuple(step)))

    def buffer_of_value(self, value: Value, block: list[Stmt]) -> Buffer:
        """Return the buffer of ``value``: that of its owner if it has one, else new local memory."""
        owner = self.owners.owner_of(value)
        place = self.places.get(owner)
        if place is None or not self.can_compute_in(value, place):
            place = self.allocate_local(value, block)
            self.places.setdefault(owner, place)
        self.memory[value] = place
        return place

    def allocate_local(self, value: Value, block: list[Stmt]) -> Buffer:
        """Allocate local memory for ``value``."""
        self.count += 1
        buffer = Buffer(f"v{self.count}", value.type.dtype, value.type.shape, self.local_memory_space(value))
        block.append(Alloc(buffer))
        return buffer

    def emit_region(self, region: Region, block: list[Stmt]) -> None:
        """Emit the ops of ``region``."""
        for op in region.ops:
            match op.name:
                case "dispatch":
                    self._emit_dispatch(op, block)
                case "reshape":
                    self.memory[op.result] = self.memory[op.operands[0]]
                case "while":
                    self.emit_loop(op, block)
                case "case":
                    self._emit_branch(op, block)

    def _emit_dispatch(self, op: Op, block: list[Stmt]) -> None:
        """Emit a dispatch: copies of operands that the kernel overwrites, then the kernel."""
        kernel = self.kernels[op.attrs["callee"]]
        shared = count_overwritten_parameters(self.functions[op.attrs["callee"]])
        for n, v in enumerate(op.results):
            result = self.buffer_of_value(v, block)
            if n < shared:
                self.emit_parallel_copies(block, [(self.memory[op.operands[n]], result)])
        names = [b.name for b in (*kernel.inputs, *kernel.outputs)]
        values = [*op.operands[shared:], *op.results]
        self.emit_kernel(block, kernel, {name: self.memory[v] for name, v in zip(names, values, strict=True)})

    def emit_parallel_copies(self, block: list[Stmt], rows: Iterable[tuple[Buffer, Buffer]]) -> None:
        """Emit copies of whole buffers that act as if all ran at once."""
        def copy_to_temporary(source: Buffer) -> Buffer:
            return self.allocate_local(Value("saved", TensorType(source.dtype, source.shape)), block)

        for source, target in ordered_copies(rows, copy_to_temporary):
            self.emit_copy(block, source, target)

    def emit_loop(
        self, op: Op, block: list[Stmt], carries: list[Buffer] | None = None, begin: Sequence[Buffer] = (),
        more: Buffer | None = None,
    ) -> None:  # fmt: skip
        """Emit a loop whose initial state is in ``begin``; ``more``, if any, receives whether iterations remain."""
        cond, body = op.regions
        if carries is None:
            carries = [self.buffer_of_value(v, block) for v in op.results]
        self.emit_parallel_copies(block, zip(begin or [self.memory[v] for v in op.operands], carries, strict=True))
        for region in (cond, body):
            self.memory.update(zip(region.params, carries, strict=True))
        self.emit_before_loop(block)
        test: list[Stmt] = []
        self.emit_region(cond, test)
        continue_while: Scalar = self.load_predicate(cond.results[0], test)
        step: list[Stmt] = []
        self.emit_region(body, step)
        self.emit_parallel_copies(step, zip([self.memory[v] for v in body.results], carries, strict=True))
        if more is not None:
            continue_while = _iteration_bounded_condition(more, block, test, continue_while, step)
        self.emit_while(block, test, continue_while, step)

    def _emit_branch(self, op: Op, block: list[Stmt]) -> None:
        """Emit a ``case`` as nested tests of its index; each side ends with copies to the results."""
        results = [self.buffer_of_value(v, block) for v in op.results]
        chosen = self.load_predicate(op.operands[0], block)
        rest: tuple[Stmt, ...] = ()
        for number in reversed(range(len(op.regions))):
            region, branch = op.regions[number], list[Stmt]()
            self.emit_region(region, branch)
            self.emit_parallel_copies(branch, zip([self.memory[v] for v in region.results], results, strict=True))
            if number == len(op.regions) - 1:
                rest = tuple(branch)
            else:
                test = Apply("eq", (chosen, Const(number, "i32")), "i1")
                rest = (If(test, tuple(branch), rest),)
        block += rest


def _iteration_bounded_condition(
    more: Buffer, block: list[Stmt], test: list[Stmt], continue_while: Scalar, step: list[Stmt]
) -> Scalar:  # fmt: skip
    """Emit a counter that bounds the iterations; return the new condition of the loop.

    ``more`` receives whether iterations remain.
    """
    count = Buffer("iterations", "i32", (), "private")
    block += [Alloc(more), Alloc(count), Store(count, (), Const(0, "i32"))]
    test.append(Store(more, (), continue_while))
    iteration = Load(count, ())
    step.append(Store(count, (), Apply("add", (iteration, Const(1, "i32")), "i32")))
    return Apply("and", (Load(more, ()), Apply("lt", (iteration, Const(LOOP_TURNS.value, "i32")), "i1")), "i1")


def load_of_only_element(buffer: Buffer) -> Load:
    """Return the load of a one-element buffer of any rank."""
    return Load(buffer, (0,) * len(buffer.shape))


def copy_buffers(block: list[Stmt], source: Buffer, target: Buffer, suffix: str) -> None:
    """Emit an elementwise copy of whole buffers of equal shape."""
    index: list[Dim] = []
    loops: list[tuple[str, Dim]] = []
    for d, extent in enumerate(target.shape):
        if extent == 1:
            index.append(0)
        else:
            index.append(sym(f"c{d}{suffix}", 0, extent))
            loops.append((f"c{d}{suffix}", extent))
    load = Load(source, reshape_index(tuple(index), target.shape, source.shape))
    body: tuple[Stmt, ...] = (Store(target, tuple(index), load),)
    for name, extent in reversed(loops):
        body = (For(name, 0, extent, body, "unroll" if UNROLLED_STEPS.holds(extent) else "serial"),)
    block += body


def _allocated_buffers(body: tuple[Stmt, ...]) -> list[Buffer]:
    return [s.buffer for s in walk_statements(body) if isinstance(s, Alloc)]


def kernel_of_whole_loop(
    loop: CandidateLoop, make: Callable[..., LoopKernelWriter] = LoopKernelWriter, bounded: bool = False,
    initialized: Collection[int] | None = None, filled: Collection[int] = (),
) -> LoopKernel:  # fmt: skip
    """Return one kernel for a whole loop.

    Before the kernel starts, the memory of the results numbered ``initialized`` contains their initial state; other
    initial values are inputs. By default these are the results that share memory with their initial state, and those
    in ``filled``. A ``bounded`` kernel runs a bounded number of iterations, with all results initialized. It also
    returns whether iterations remain.
    """
    op, kernels, owners = loop.op, loop.kernels, loop.owners
    rows = list(enumerate(zip(op.operands, op.results, strict=True)))
    if bounded:
        initialized = range(len(rows))
    elif initialized is None:
        results = {owners.owner_of(v) for v in op.results}
        initialized = [n for n, (init, _) in rows if owners.owner_of(init) in results or n in filled]
    first = [init for n, (init, _) in rows if n not in initialized]
    outer = list(dict.fromkeys([*first, *(v for r in op.regions for v in captured_values(r))]))
    named = {v for r in op.regions for v in use_counts(r)}
    made_inside = [v for v in constants_in(*op.regions) if v in named]
    reads = [*outer, *made_inside]
    inputs = [Buffer(f"a{n}", v.type.dtype, v.type.shape) for n, v in enumerate(reads)]
    outputs = [Buffer(f"o{n}", v.type.dtype, v.type.shape) for n, v in enumerate(op.results)]
    more = Buffer("more", "i1", (), "private") if bounded else None
    writer = make(loop.functions, kernels, owners, dict(zip(reads, inputs, strict=True)))
    state = [outputs[n] if n in initialized else writer.memory[init] for n, (init, _) in rows]
    block: list[Stmt] = []
    carries = [writer.carried_buffer(v, out, block) for out, v in zip(outputs, op.results, strict=True)]
    writer.emit_loop(op, block, carries, state, more)
    if more is not None:
        outputs.append(Buffer("goes_on", "i1", ()))
        carries.append(more)
    for out, carry in zip(outputs, carries, strict=True):
        if carry is not out:
            writer.emit_copy(block, carry, out)
    iterations = expected_iterations(op, loop.constants, loop.functions)
    iterations = min(iterations, LOOP_TURNS.value) if bounded else iterations
    flops = sum((k.flops for k in kernels_in(op, kernels)), 0) * iterations
    body, persistent = tuple(writer.kernel_statements(block)), tuple(writer.kept)
    dims = {s.name for b in (*inputs, *outputs, *_allocated_buffers(body)) for d in b.shape for s in symbols(d)}
    dims.update(d for k in kernels_in(op, kernels) for d in k.dims)
    kernel = Kernel(loop.name, tuple(inputs), (*outputs, *persistent), tuple(sorted(dims)), 1, body, (), flops, 0)
    return LoopKernel(kernel, tuple(reads), persistent, bounded, tuple(sorted(initialized)))
