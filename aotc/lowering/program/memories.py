"""The memory spaces of a program under construction: the space of each value, and the constants in each space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Constants, Launch, Pieces, Storage
from aotc.ir.tensor.ir import Function, Op, TensorType, Value, walk
from aotc.lowering.placement.memory_spaces import Space, space_finder
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.abi import MAX_PLACES
from aotc.vmfb.dtypes import size_of

LOOP_FLOPS = Limit(
    1 << 15,
    "operations per iteration of a while loop that becomes one CPU kernel",
    "4 microseconds at 8 operations per nanosecond",
)
LOOP_FLOPS_CUDA = Limit(
    1 << 11,
    "operations per iteration of a while loop that becomes one GPU kernel",
    "a single thread runs it, many times slower than a CPU core",
)


@dataclass
class Memories:
    """Memory spaces of a module, and its constants in each space.

    A GPU in a module with several devices has only the constants that its kernels read.

    Attributes
    ----------
    spaces : tuple of Space
    target : Target
        Target of the module, possibly a mix.
    constants : Constants
        All constants, as in the bundle.
    lower_region : callable
        Lowers a region to a kernel for a target.
    for_targets : dict of str to Target
        Target of each kernel, by name.
    pieces : list of Pieces
        For each space: the constants that are copied to a GPU's memory; None if the space maps all constants.
    """

    spaces: tuple[Space, ...]
    target: Target
    constants: Constants
    lower_region: Callable[[Function, Target], Kernel]
    for_targets: dict[str, Target] = field(default_factory=dict)
    pieces: list[Pieces] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces = [Pieces() for _ in self.spaces]

    def without_constants(self) -> Memories:
        """Return a copy with the same spaces but no constants, for a trial bufferisation."""
        return Memories(self.spaces, self.target, Constants(), self.lower_region, dict(self.for_targets))

    def space_finder(self, function: Function) -> Callable[[Value], int]:
        """Return the function that maps a value to the number of its space."""
        return space_finder(function, self.spaces, self.target)

    def copies_constants_separately(self, space: int) -> bool:
        """Return True if a space has copies of constants, rather than mapping them all."""
        return len(self.spaces) > 1 and self.spaces[space].target.kind != "cpu"

    def add_constant(self, array: np.ndarray, name: str, space: int) -> int:
        """Return the offset of a constant in the memory of ``space``."""
        offset = self.constants.add(array, name)
        return self.pieces[space].place(offset, array.nbytes) if self.copies_constants_separately(space) else offset

    def loop_flops(self, op: Op, spaces: set[int]) -> Limit | None:
        """Return the limit on operations up to which a loop becomes one kernel.

        None if the loop uses several memory spaces, or its kernels are for several targets.
        """
        if len(spaces) > 1 or len(self.targets_in(op)) > 1:
            return None
        kinds = {self.spaces[n].target.kind for n in spaces}
        return LOOP_FLOPS_CUDA if kinds == {"cuda"} else LOOP_FLOPS

    def targets_in(self, op: Op) -> set[Target]:
        """Return the targets of the kernels in a loop or a branch."""
        inner = (o for r in op.regions for o in walk(r))
        return {self.for_targets[o.attrs["callee"]] for o in inner if o.name == "dispatch"}

    def target_of(self, kernel: str, space: int) -> Target:
        """Return the target of a kernel that accesses ``space``, by default the target of the space."""
        return self.for_targets.get(kernel, self.spaces[space].target)


def tensor_bytes(type_: TensorType) -> Dim:
    """Return the bytes of a tensor."""
    return product(type_.shape) * size_of(type_.dtype)


def launch_step(kernel: Kernel, reads: tuple[Storage, ...], writes: tuple[Storage, ...], op: Op) -> Launch:
    """Return the step that runs a kernel for ``op``.

    Raises
    ------
    CompileError
        If the kernel has more than ``MAX_PLACES`` arrays.
    """
    count = len(reads) + len(writes)
    if count > MAX_PLACES:
        message = f"one kernel would read and write {count} arrays, expected at most {MAX_PLACES}"
        raise CompileError.at(op.loc, message, hint="pack them into fewer arrays, or compile with opt_level=0")
    return Launch(kernel, reads, writes, op.loc)
