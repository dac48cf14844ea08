"""Bounds checks of a call's memory accesses: each command must stay within the slots of the pointer table.

Checks that depend on the sizes of a call run when the sizes are known. For a program whose control flow depends on
shapes only, that is once for each tuple of shapes, when its trace is recorded; for a program that reads sizes from
memory, before each submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from aotc.vmfb.abi import ALIGNMENT, COPY, Command, Graph, Node, Slots, WhileNode, operand_value
from aotc.vmfb.commands import all_nodes
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.limits import MAX_BYTES
from aotc.vmfb.verify.kernel_interface import Interface, Invalid


class TooLarge(Invalid):
    """A call needs more bytes than the address space has; valid programs may do so for some argument sizes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


# Maximum number of grid items. Each item writes at least one byte, so MAX_BYTES is an upper bound too; together with
# MAX_GRAIN the executor's counters stay within 64 bits.
MAX_ITEMS = 1 << 48
# Maximum number of items that a worker claims at once. Every worker may add it once more to a counter that is already
# past the grid; 64 bits suffice for 2^14 workers.
MAX_GRAIN = 1 << 48


class CallMemory:
    """Bytes of each slot of a call's pointer table at the current instruction of the host program.

    Parameters
    ----------
    arguments : sequence of int
        Bytes of each argument.
    donated : sequence of bool
        True for arguments that commands may write.
    results : sequence of dict
        As in the manifest: ``dtype``, ``dims``.
    constants : sequence of int
        Bytes of the constants in each memory space.

    Attributes
    ----------
    sizes : list of int
        Bytes by slot; 0 for results and arenas that are not allocated yet.
    writable : list of bool
        By slot, True if commands may write to it.
    """

    __slots__ = ("_made", "_results", "_slots", "_taken", "sizes", "writable")

    def __init__(
        self,
        arguments: Sequence[int],
        donated: Sequence[bool],
        results: Sequence[dict[str, Any]],
        constants: Sequence[int],
    ) -> None:
        spaces = len(constants)
        self._slots = Slots(len(arguments), len(results), spaces)
        self._results = results
        self._made: set[int] = set()
        self._taken: set[int] = set()
        self.sizes = [*arguments, *[0] * (len(results) + spaces), *constants]
        self.writable = [*donated, *[True] * (len(results) + spaces), *[False] * spaces]

    def allocate_result(self, number: int, dims: tuple[int, ...]) -> None:
        """Record the size of a result that the host program allocates.

        Raises
        ------
        Invalid
            If the result is already allocated, does not match the signature, or is too large.
        """
        entry = self._results[number]
        if number in self._made:
            raise Invalid(f"result {number} is made twice")
        if any(isinstance(declared, int) and declared != found for declared, found in zip(entry["dims"], dims)):
            raise Invalid(f"result {number} has the shape {dims}, not {tuple(entry['dims'])}")
        size = prod(dims) * size_of(entry["dtype"])
        if any(d < 0 for d in dims):
            raise Invalid(f"result {number} has the shape {dims}")
        if size > MAX_BYTES:
            raise TooLarge(f"result {number} has the shape {dims}", size)
        self._made.add(number)
        self.sizes[self._slots.result_slot(number)] = size

    def share_argument_memory(self, number: int, argument: int) -> None:
        """Record that result ``number`` has the memory of the donated argument number ``argument``.

        Raises
        ------
        Invalid
            If the result is already allocated, the argument is not donated, or another result has its memory.
        """
        if number in self._made:
            raise Invalid(f"result {number} is made twice")
        if argument in self._taken or not self.writable[argument]:
            raise Invalid(f"result {number} cannot have the memory of argument {argument}")
        self._made.add(number)
        self._taken.add(argument)

    def allocate_arena(self, size: int, space: int = 0) -> None:
        """Record the size in bytes of an arena that the host program allocates in memory space ``space``.

        Raises
        ------
        Invalid
            If the arena is too large.
        """
        if size < 0:
            raise Invalid(f"an arena of {size} bytes")
        if size > MAX_BYTES:
            raise TooLarge(f"an arena of {size} bytes", size)
        self.sizes[self._slots.arena_slot(space)] = size

    def check_access(self, slot: int, offset: int, size: int) -> None:
        """Refuse an access to ``size`` bytes at ``offset`` that is not within the slot.

        Raises
        ------
        Invalid
            The message has the slot and the range.
        """
        if not 0 <= offset <= self.sizes[slot] - size:
            raise Invalid(f"{self._place_text(slot, offset, size)}")

    def check_submission(self, nodes: Sequence[Node], kernels: Sequence[Interface], parameters: Sequence[int]) -> None:
        """Refuse a command buffer that would access memory outside of its slots.

        Parameters
        ----------
        nodes : sequence of Node
            Nodes of a validated command buffer.
        kernels : sequence of Interface
        parameters : sequence of int

        Raises
        ------
        Invalid
            The message has the command and the violated rule.
        """
        cache: dict[tuple[Interface, tuple[int, ...]], tuple[int, list[int]]] = {}
        for node in all_nodes(nodes):
            if not isinstance(node, Graph):
                slot, offset = node.place
                size = size_of("i1" if isinstance(node, WhileNode) else "i32")
                self.check_access(slot, operand_value(offset, parameters), size)
                continue
            for command in node.leaves:
                if command.kind == COPY:
                    self._check_copy(command, parameters)
                else:
                    self._check_dispatch(command, kernels[command.kernel], parameters, cache)

    def _check_dispatch(
        self,
        command: Command,
        interface: Interface,
        parameters: Sequence[int],
        cache: dict[tuple[Interface, tuple[int, ...]], tuple[int, list[int]]],
    ) -> None:
        """Refuse a dispatch whose arrays are outside of their slots, overlap forbidden ones, or do not fit the grid.

        ``cache`` has the grid and the array sizes by kernel and dims. Most of the time of a check is spent here, so
        operands are decoded inline.
        """
        places, words = command.places, command.dims
        if len(places) != len(interface.extents) or len(words) != interface.dims:
            found = f"{len(places)} arrays and {len(words)} dims"
            expected = f"{len(interface.extents)} and {interface.dims}"
            raise Invalid(f"kernel {interface.name!r} is given {found}, not {expected}")
        dims = tuple([parameters[word >> 1] if word & 1 else word >> 1 for word in words]) if words else ()
        touched = cache.get((interface, dims))
        if touched is None:
            touched = cache[interface, dims] = interface.evaluate_sizes(dims)
        grid, extents = touched
        sizes, inputs = self.sizes, interface.inputs
        spans: list[tuple[int, int, int]] = []
        for (slot, word), extent in zip(places, extents):
            offset = parameters[word >> 1] if word & 1 else word >> 1
            end = offset + extent
            if offset % ALIGNMENT or offset < 0 or end > sizes[slot]:
                raise Invalid(f"kernel {interface.name!r}: {self._place_text(slot, offset, extent)}")
            number = len(spans)
            if number >= inputs and extent:
                if not self.writable[slot]:
                    raise Invalid(f"kernel {interface.name!r} writes slot {slot}, which is to be read only")
                for other, (where, first, last) in enumerate(spans):
                    if where == slot and first < end and offset < last:
                        alias = other < inputs and first == offset and (number - inputs, other) in interface.aliases
                        if not alias:
                            raise Invalid(f"kernel {interface.name!r} writes its array {number} over its array {other}")
            spans.append((slot, offset, end))
        word = command.items
        items = parameters[word >> 1] if word & 1 else word >> 1
        if (items != grid and (items > 0 or grid > 0)) or items > MAX_ITEMS:
            raise Invalid(f"kernel {interface.name!r} runs {items} items, its grid has {grid}")
        if (grain := operand_value(command.grain, parameters)) > MAX_GRAIN:
            raise Invalid(f"kernel {interface.name!r} is claimed {grain} items at a time")

    def _check_copy(self, command: Command, parameters: Sequence[int]) -> None:
        """Refuse a copy whose source or destination is outside of its slot, or whose destination is read-only."""
        (size,) = (operand_value(word, parameters) for word in command.dims)
        if size < 0 or operand_value(command.items, parameters) != 1:
            raise Invalid(f"a copy of {size} bytes, {operand_value(command.items, parameters)} times")
        for slot, word in command.places:
            offset = operand_value(word, parameters)
            if not 0 <= offset <= self.sizes[slot] - size:
                raise Invalid(f"a copy: {self._place_text(slot, offset, size)}")
        to = command.places[1][0]
        if size and not self.writable[to]:
            raise Invalid(f"a copy writes slot {to}, which is to be read only")

    def _place_text(self, slot: int, offset: int, size: int) -> str:
        return f"{size} bytes at {offset} of slot {slot}, which has {self.sizes[slot]}"
