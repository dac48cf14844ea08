"""Memory spaces of a variant that uses several: host memory, and the memory of each GPU device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotc.vmfb.abi import COPY, Graph, Node, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_nodes
from aotc.vmfb.errors import BundleError
from aotc.vmfb.isa import BY_NAME
from aotc.vmfb.manifest import Entries
from aotc.vmfb.verify.buffers import Buffers
from aotc.vmfb.verify.kernel_interface import Invalid


class Spaces:
    """The memory spaces of a variant, as the manifest lists them, validated.

    Attributes
    ----------
    rows : list of dict
        The entries of the memory spaces.
    parts : list of dict
        The kernels of each target, as an entry of a variant.
    first : list of int
        The number of each part's first kernel.

    Raises
    ------
    BundleError
        If the entries contradict each other.
    """

    def __init__(self, bundle: OpenedBundle, variant: Mapping[str, Any]) -> None:
        self._where = bundle.where
        self._kinds: Mapping[str, str] = variant.get("devices") or variant.get("implied", {})
        gpus = (name for name, kind in variant.get("implied", {}).items() if kind == "cuda")
        self._home_of_all = next(gpus, "")  # of values that have no device
        self.rows: list[dict[str, Any]] = variant.get("spaces", [])
        self.parts: list[dict[str, Any]] = []
        self.first: list[int] = []
        at = 0
        for part in variant.get("parts", ()):
            kernels = variant["kernels"][at : at + part["count"]]
            self.parts.append({**part, "kernels": kernels, "command_buffers": [], "functions": {}})
            self.first.append(at)
            at += part["count"]
        if at != len(variant["kernels"]) or len(self.rows) < 2:
            problem = f"{len(self.rows)} memories, and parts with {at} of {len(variant['kernels'])} kernels"
            raise self._contradiction_error(problem)
        for number, row in enumerate(self.rows):
            if row["part"] >= len(self.parts):
                raise self._contradiction_error(f"memory {number} is of part {row['part']} of {len(self.parts)}")
            kind = self.kind(number)
            if kind not in ("cpu", "cuda") or (kind == "cpu") != (number == 0 and not row["device"]):
                raise self._contradiction_error(f"memory {number} is of kind {kind!r} and device {row['device']!r}")
            if kind == "cuda" and self._kinds.get(row["device"]) != kind:
                raise self._contradiction_error(f"memory {number} is of device {row['device']!r}, which is no GPU")
            for piece in row["pieces"]:
                if len(piece) != 3 or piece[1] + piece[2] > row["constants"]:
                    raise self._contradiction_error(f"memory {number} has a piece {piece} of {row['constants']} bytes")

    def _contradiction_error(self, problem: str) -> BundleError:
        return BundleError(self._where, f"the variant's memories contradict each other: {problem}")

    def kind(self, number: int) -> str:
        """Return the kind of device, ``cpu`` or ``cuda``, of memory space ``number``."""
        return str(self.parts[self.rows[number]["part"]]["kind"])

    def homes(self, entry: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the number of the memory space of each argument and result of a function.

        Raises
        ------
        BundleError
            If a value is on a device that has no memory in this variant.
        """
        return tuple([self._memory_space_of_value(value) for value in (*entry["arguments"], *entry["results"])])

    def _memory_space_of_value(self, value: Mapping[str, Any]) -> int:
        """Return the number of the memory space of an argument or result, from its device."""
        device = value.get("device", self._home_of_all)
        name = "" if self._kinds.get(device) == "cpu" else device
        for number, row in enumerate(self.rows):
            if row["device"] == name:
                return number
        raise BundleError(self._where, f"the variant has no memory for {value['name']!r} on device {device!r}")

    def layout(self, entry: Mapping[str, Any]) -> Slots:
        """Return the layout of a function's pointer table."""
        return Slots(len(entry["arguments"]), len(entry["results"]), len(self.rows), self.homes(entry))

    def check(self, programs: Entries, buffers: Buffers) -> None:
        """Refuse command buffers in which a kernel accesses another memory space than its own.

        Parameters
        ----------
        programs : mapping
            Signature and host program of each function of the variant.
        buffers : Buffers

        Raises
        ------
        BundleError
            If a command buffer is invalid; the message has its number.
        """
        submit = BY_NAME["submit"].opcode
        for signature, program in programs.values():
            layout = self.layout(signature)
            for number in {line[1] for line in program["code"] if line[0] == submit}:
                try:
                    self._check_nodes(buffers.nodes[number], layout)
                except Invalid as error:
                    raise BundleError(self._where, f"command buffer {number} is invalid: {error}") from None

    def _check_nodes(self, nodes: Sequence[Node], layout: Slots) -> None:
        """Check that each graph accesses one memory space, that of its kernels; a copy alone may access two."""
        for node in all_nodes(nodes):
            if not isinstance(node, Graph):
                continue
            touched = {layout.memory_space(slot) for command in node.leaves for slot, _ in command.places}
            moves = len(node.leaves) == 1 and node.leaves[0].kind == COPY
            if len(touched) > 1 and not moves:
                raise Invalid(f"word {node.at}: a graph touches memories {sorted(touched)}")
            for command in node.leaves if not moves else ():
                if command.kind != COPY and touched and not self._is_kernel_of_space(command.kernel, *touched):
                    raise Invalid(f"word {node.at}: kernel {command.kernel} is not for memory {min(touched)}")

    def _is_kernel_of_space(self, kernel: int, space: int) -> bool:
        part = self.rows[space]["part"]
        return self.first[part] <= kernel < self.first[part] + self.parts[part]["count"]


def memory_space_of_node(node: Node, layout: Slots) -> int:
    """Return the number of the only memory space that a node accesses; -1 if it accesses several."""
    found = set(_spaces_of_node(node, layout))
    return found.pop() if len(found) == 1 else -1 if found else 0


def _spaces_of_node(node: Node, layout: Slots) -> Iterator[int]:
    for inner in all_nodes([node]):
        if isinstance(inner, Graph):
            yield from (layout.memory_space(slot) for command in inner.leaves for slot, _ in command.places)
        else:
            yield layout.memory_space(inner.place[0])
