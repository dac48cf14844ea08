"""LLVM metadata of a kernel: aliasing of memory accesses, unrolling and vectorization of loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llvmlite import ir

from aotc.ir.dims.algebra import bounds, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import scalars_in, statement_scalars
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Either,
    ExternalCall,
    For,
    If,
    Kernel,
    Let,
    Load,
    Store,
    Tile,
    While,
    walk,
)
from aotc.ir.opset import EXPENSIVE
from aotc.kernels.limits import COUNTED_PLACES
from aotc.kernels.llvm_text import Distinct
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of

# Iterations of a loop up to which LLVM must not unroll it, if the loop walks along its arrays or reduces into one
# scalar. LLVM unrolls a loop fully, up to 300 instructions, before it vectorizes; it vectorizes longer loops anyway. ns
# an f32 element with AVX-512, unrolled and vectorized: sums of rows of 15 to 64 elements 0.27 and 0.06, of 96 0.4 and
# 0.05; x + u * v of 12 to 33 elements 0.6 and 0.1.
UNROLLED_TURNS = 100


def mark_load_invariant(load: ir.Instruction) -> ir.Value:
    """Mark the memory of a load as never written by the kernel; return the load."""
    load.set_metadata("invariant.load", load.module.add_metadata([]))
    return load


def _has_independent_iterations(loop: For) -> bool:
    """Return True if a loop's iterations are independent, given that loads read only the element that is written."""
    return all(
        not isinstance(s, Tile | While | Alloc | ExternalCall | Either)
        and not (isinstance(s, Store) and s.buffer.space != "global")
        for s in walk(loop.body)
    )


def _alias_groups_of_parameters(kernel: Kernel) -> dict[str, str]:
    """Map the name of each buffer parameter to the representative of all parameters that may share its memory."""
    group = {b.name: b.name for b in (*kernel.inputs, *kernel.outputs)}
    for output, source in kernel.aliases:
        old, new = group[kernel.outputs[output].name], group[kernel.inputs[source].name]
        group = {name: new if g == old else g for name, g in group.items()}
    return group


def _candidates_of_selected_buffers(kernel: Kernel, group: Mapping[str, str]) -> dict[str, set[str]]:
    """Map the name of each buffer that an :class:`Either` selects to the buffers that it may be, if these are known."""
    found: dict[str, set[str]] = {}
    for s in walk(kernel.body):
        if isinstance(s, Either):
            named = [found.get(b.name, {group[b.name]} if b.name in group else set()) for b, _ in s.places]
            if all(named):
                found[s.buffer.name] = set.union(*named)
    return found


class LoopMetadata:
    """Writer of the metadata of a kernel, for its memory accesses and its loops.

    Each buffer has an alias scope of the whole function; buffers that may share memory have a common scope. An
    iteration accesses such buffers only at the element that it writes. So the accesses of a loop without state are
    independent, but LLVM assumes that only if every access of the loop is marked.

    Parameters
    ----------
    module : llvmlite.ir.Module
        Gets the metadata.
    kernel : Kernel
        The loop IR.
    target : Target
        The machine.
    scratch : iterable of str
        The names of the buffers in a worker's scratch memory.
    """

    def __init__(self, module: ir.Module, kernel: Kernel, target: Target, scratch: Iterable[str]) -> None:
        self._module, self._target = module, target
        self._tags: dict[str, tuple[ir.MDValue | None, ir.MDValue]] = {}
        self._parallel: ir.MDValue | None = None
        group = _alias_groups_of_parameters(kernel) | {name: name for name in scratch}
        domain = module.add_metadata([kernel.name])
        names = list(dict.fromkeys(group.values()))
        scopes = {name: module.add_metadata([name, domain]) for name in names}
        for name, own in group.items():
            others = module.add_metadata([scopes[n] for n in names if n != own])
            self._tags[name] = (module.add_metadata([scopes[own]]), others)
        for name, either in _candidates_of_selected_buffers(kernel, group).items():
            self._tags[name] = (None, module.add_metadata([scopes[n] for n in names if n not in either]))
        shared = {kernel.inputs[source].name for _, source in kernel.aliases}
        written = {s.buffer.name for s in walk(kernel.body) if isinstance(s, Store)} | shared
        self._constant = {b.name for b in kernel.inputs} - written if target.kind == "cuda" else set()
        if kernel.aliases and target.kind == "cpu":
            self._parallel = Distinct(module)

    def access_annotation(self, buffer: Buffer) -> Callable[[ir.Instruction], None]:
        """Return a function that marks a load or store of ``buffer`` as not aliasing other buffers."""
        tag = self._tags.get(buffer.name)

        def annotate(instruction: ir.Instruction) -> None:
            if tag is not None:
                if tag[0] is not None:
                    instruction.set_metadata("alias.scope", tag[0])
                instruction.set_metadata("noalias", tag[1])
            if buffer.name in self._constant and isinstance(instruction, ir.LoadInstr):
                mark_load_invariant(instruction)
            if self._parallel is not None:
                instruction.set_metadata("llvm.access.group", self._parallel)

        return annotate

    def annotate_loop(self, loop: For, backedge: ir.Instruction) -> None:
        """Attach metadata to the back edge of ``loop``: independent iterations, no unrolling, or a masked last vector.

        Unrolling outer loops gains nothing. A short loop that accumulates or walks along its arrays must not be
        unrolled before it can be vectorized: LLVM would vectorize the enclosing loop instead, across the rows.
        """
        module = self._module
        facts = []
        if self._parallel is not None and _has_independent_iterations(loop):
            facts.append(module.add_metadata(["llvm.loop.parallel_accesses", self._parallel]))
        around = any(isinstance(s, For) for s in walk(loop.body))
        in_vain = (
            around
            or _depends_on_loaded_data(loop)
            or _accumulates_one_scalar(loop)
            or _accesses_contiguous_vectors(loop, self._target)
        )
        if self._target.kind == "cpu" and in_vain:
            facts.append(module.add_metadata(["llvm.loop.unroll.disable"]))
        if self._target.has_masks and not around and _is_masked_last_vector_worthwhile(loop, self._target):
            facts.append(module.add_metadata(["llvm.loop.vectorize.predicate.enable", ir.Constant(ir.IntType(1), 1)]))
        self.attach_loop_metadata(backedge, *facts)

    def attach_loop_metadata(self, backedge: ir.Instruction, *facts: ir.MDValue | list[object]) -> None:
        """Attach properties of a loop to its back edge."""
        if facts:
            nodes = [f if isinstance(f, ir.MDValue) else self._module.add_metadata(f) for f in facts]
            backedge.set_metadata("llvm.loop", Distinct(self._module, nodes))


def _depends_on_loaded_data(loop: For) -> bool:
    """Return True if an iteration updates state under a loaded condition, or several histograms at loaded indices."""
    arms = (s for stmt in loop.body if isinstance(stmt, If) for s in walk((stmt,)))
    if any(isinstance(s, Store) and s.buffer.space == "private" for s in arms):
        return True
    lets = {s.var.name for s in loop.body if isinstance(s, Let)}
    stores = [s for s in loop.body if isinstance(s, Store) and s.buffer.space == "scratch"]
    return sum(any(a.name in lets for i in s.index for a in symbols(i)) for s in stores) >= COUNTED_PLACES


def _known_iterations(loop: For) -> int:
    """Return the number of iterations of ``loop``, or 0 if it is unknown at compile time."""
    iterations = loop.end - loop.begin
    return iterations if isinstance(iterations, int) and loop.step == 1 else 0


def _accumulates_one_scalar(loop: For) -> bool:
    """Return True if a loop that LLVM would unroll fully reduces into one scalar."""
    short = 0 < _known_iterations(loop) <= UNROLLED_TURNS
    return short and any(isinstance(s, Store) and s.reduce and not s.index for s in loop.body)


def _accesses_contiguous_vectors(loop: For, target: Target) -> bool:
    """Return True if a loop that LLVM would unroll fully accesses at least half a vector of contiguous elements."""
    stores = [s for s in loop.body if isinstance(s, Store)]
    if not stores or not all(isinstance(s, Let | Store) for s in loop.body):
        return False
    fewest = target.vector_bytes // max(size_of(s.buffer.dtype) for s in stores) // 2
    if not fewest <= _known_iterations(loop) <= UNROLLED_TURNS:
        return False
    loads = [x for x in scalars_in(x for s in loop.body for x in statement_scalars(s)) if isinstance(x, Load)]
    return all(_is_access_contiguous(s, loop.var) for s in stores) and all(
        _is_access_contiguous(x, loop.var) is not False for x in loads
    )


def _is_access_contiguous(place: Load | Store, var: str) -> bool | None:
    """Return True if the access is contiguous in ``var``, None if it does not depend on ``var``."""
    *outer, last = [i for i, extent in zip(place.index, place.buffer.shape) if extent != 1] or (0,)
    inside = [a for a in symbols(last) if a.name == var]
    if any(a.name == var for i in outer for a in symbols(i)):
        return False
    rest = last - sym(var, inside[0].lo, inside[0].extent) if inside else last
    return None if not inside else all(a.name != var for a in symbols(rest))


# Iterations of a loop of expensive functions up to which its last, partial vector is computed under a mask. Masks cost
# each iteration some time, and a longer loop has few iterations outside of whole vectors. ns an f32 element with
# AVX-512, without and with masks: exp and sum of rows of 30 1.3 and 0.36, of 60 0.51 and 0.32.
MASKED_TURNS = 511


def _is_masked_last_vector_worthwhile(loop: For, target: Target) -> bool:
    """Return True if the last vector of a loop of expensive functions should be masked.

    Iterations outside of whole vectors would be scalar and cost many times more.
    """
    stores = [s for s in loop.body if isinstance(s, Store)]
    if not stores or not all(isinstance(s, Let | Store) for s in loop.body):
        return False
    half = target.vector_bytes // max(size_of(s.buffer.dtype) for s in stores) // 2
    fewest, most = bounds(loop.end - loop.begin) if loop.step == 1 else (0, None)
    if fewest is None or most is None or (fewest == most and most % half == 0):
        return False
    return half < fewest and most <= MASKED_TURNS and _is_expensive_float_loop(loop)


def _is_expensive_float_loop(loop: For) -> bool:
    """Return True if each iteration computes an expensive function of floats, and none of integers.

    Division of integers must not be masked.
    """
    inner = scalars_in(x for s in loop.body for x in statement_scalars(s))
    return {kind_of(x.dtype) for x in inner if isinstance(x, Apply) and x.fn in EXPENSIVE} == {"f"}


def constants_fill_registers(kernel: Kernel) -> bool:
    """Return True if a loop's functions need so many constants that they fill the registers."""
    dtypes = {b.dtype for b in (*kernel.inputs, *kernel.outputs)}
    narrow = any(kind_of(dtype) == "f" and size_of(dtype) < size_of("f32") for dtype in dtypes)
    return narrow and any(isinstance(s, For) and _is_expensive_float_loop(s) for s in walk(kernel.body))
