"""Command buffers of a variant, decoded and validated: shared by all devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.vmfb.abi import CONTROLS_SINCE, PARTS_SINCE, TILES_SINCE, Node, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_graphs, read_commands
from aotc.vmfb.errors import BundleError
from aotc.vmfb.isa import BY_NAME
from aotc.vmfb.manifest import programs_of
from aotc.vmfb.verify.kernel_interface import Interface, Invalid, interface_digest
from aotc.vmfb.verify.program import check_commands


class Buffers:
    """The command buffers of a variant.

    Attributes
    ----------
    words : list of numpy.ndarray
        The encoded words, in the bundle's memory.
    nodes : list of list of Node
        The decoded records, with kernel numbers.
    """

    def __init__(self, kernels: list[dict[str, Any]]) -> None:
        self.words: list[np.ndarray] = []
        self.nodes: list[list[Node]] = []
        self._entries = kernels
        self._kernels: list[Interface] = []

    @property
    def kernels(self) -> list[Interface]:
        """Return the interface of each kernel, computed on first use: loading alone does not need it."""
        if not self._kernels:  # cached_property would take a lock, 1 us
            self._kernels = [Interface(row) for row in self._entries]
        return self._kernels


def load_buffers(bundle: OpenedBundle, variant: dict[str, Any]) -> Buffers:
    """Decode and validate the command buffers of a variant.

    Raises
    ------
    BundleError
        If a command buffer is invalid.
    """
    rows = variant["command_buffers"]
    found = Buffers(variant["kernels"])
    for number, (row, slots) in enumerate(zip(rows, _fewest_slots(bundle, variant), strict=True)):
        try:
            words, nodes = read_buffer(bundle, row)
            check_commands(nodes, len(variant["kernels"]), slots, row["states"], row["parameters"])
            _check_versions(nodes, variant)
        except Invalid as error:
            raise BundleError(bundle.where, f"command buffer {number} is invalid: {error}") from None
        found.words.append(words)
        found.nodes.append(nodes)
    return found


def _check_versions(nodes: list[Node], variant: dict[str, Any]) -> None:
    """Refuse tiles and control commands that the variant's executor does not support."""
    tiles, parts = (variant.get("executor_version", 0) >= since for since in (TILES_SINCE, PARTS_SINCE))
    controls = variant["kind"] == "cpu" and variant["commands_version"] >= CONTROLS_SINCE
    for graph in all_graphs(nodes):
        if graph.tiled and not tiles:
            raise Invalid(f"word {graph.at}: only executors of version {TILES_SINCE} and later know tiles")
        if not parts and graph.tiled and any(not t.over for c in graph.leaves for t in c.tiles):
            raise Invalid(f"word {graph.at}: only executors of version {PARTS_SINCE} and later know parts of items")
        if len(graph.leaves) < len(graph.commands) and not controls:
            version = variant["commands_version"]
            raise Invalid(f"word {graph.at}: a control command for {variant['kind']}, commands version {version}")


def check_digest(where: str, variant: dict[str, Any], sealed: bytes) -> None:
    """Compare the digest of kernel declarations in the machine code, ``sealed``, with that of the manifest.

    Raises
    ------
    BundleError
        If the digests differ.
    """
    said = interface_digest(variant)
    if said != sealed:
        raise BundleError(
            where,
            "the machine code is not what the manifest describes",
            f"sealed {sealed.hex()}",
            f"{said.hex()}, of the kernels' entries, imports and features",
            "copy the file again from where it was made, or compile the model again",
        )


def read_buffer(bundle: OpenedBundle, row: dict[str, Any]) -> tuple[np.ndarray, list[Node]]:
    """Return the words and records of one command buffer, before validation.

    Raises
    ------
    Invalid
        If the words are not an encoded command buffer.
    """
    data = bundle.checked(row["code"])
    if data.nbytes % 8:
        raise Invalid(f"{data.nbytes} bytes are no whole number of words")
    words = np.frombuffer(data, "<i8")
    return words, read_commands(words.tolist())


def _fewest_slots(bundle: OpenedBundle, variant: dict[str, Any]) -> list[int]:
    """Return for each command buffer the smallest slot count of the functions that submit it."""
    submit = BY_NAME["submit"].opcode
    spaces = len(variant.get("spaces", ())) or 1
    fewest: dict[int, int] = {}
    for signature, program in programs_of(bundle.manifest, variant).values():
        count = Slots(len(signature["arguments"]), len(signature["results"]), spaces).count
        for line in program["code"]:
            if line[0] == submit:
                fewest[line[1]] = min(fewest.get(line[1], count), count)
    return [fewest.get(number, 0) for number in range(len(variant["command_buffers"]))]
