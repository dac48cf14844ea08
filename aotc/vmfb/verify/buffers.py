"""Decoded and validated command buffers of a variant, for all kinds of devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.vmfb.abi import CONTROLS_SINCE, PARTS_SINCE, TILES_SINCE, Node, Slots
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import all_graphs, decode_commands
from aotc.vmfb.errors import BundleError
from aotc.vmfb.isa import BY_NAME
from aotc.vmfb.manifest import signatures_and_programs
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
        """Return the declared memory accesses of each kernel; computed on first use, because loading needs none."""
        if not self._kernels:  # cached_property would take a lock, 1 us
            self._kernels = [Interface(row) for row in self._entries]
        return self._kernels


def load_command_buffers(bundle: OpenedBundle, variant: dict[str, Any]) -> Buffers:
    """Decode and validate the command buffers of a variant.

    Raises
    ------
    BundleError
        If a command buffer is invalid.
    """
    rows = variant["command_buffers"]
    found = Buffers(variant["kernels"])
    for number, (row, slots) in enumerate(zip(rows, _minimum_slot_counts(bundle, variant), strict=True)):
        try:
            words, nodes = read_command_buffer(bundle, row)
            check_commands(nodes, len(variant["kernels"]), slots, row["states"], row["parameters"])
            _check_executor_support(nodes, variant)
        except Invalid as error:
            raise BundleError(bundle.where, f"command buffer {number} is invalid: {error}") from None
        found.words.append(words)
        found.nodes.append(nodes)
    return found


def _check_executor_support(nodes: list[Node], variant: dict[str, Any]) -> None:
    """Refuse tile dependences and control commands that the variant's executor version does not support."""
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


def check_interface_digest(where: str, variant: dict[str, Any], machine_code_digest: bytes) -> None:
    """Refuse machine code whose embedded digest differs from the digest of the manifest's kernel declarations.

    Raises
    ------
    BundleError
        If the digests differ.
    """
    expected = interface_digest(variant)
    if expected != machine_code_digest:
        raise BundleError(
            where,
            "the machine code is not what the manifest describes",
            f"sealed {machine_code_digest.hex()}",
            f"{expected.hex()}, of the kernels' entries, imports and features",
            "copy the file again from where it was made, or compile the model again",
        )


def read_command_buffer(bundle: OpenedBundle, row: dict[str, Any]) -> tuple[np.ndarray, list[Node]]:
    """Decode one command buffer without validation; return its words and its nodes.

    Raises
    ------
    Invalid
        If the words are not an encoded command buffer.
    """
    data = bundle.verified_segment(row["code"])
    if data.nbytes % 8:
        raise Invalid(f"{data.nbytes} bytes are no whole number of words")
    words = np.frombuffer(data, "<i8")
    return words, decode_commands(words.tolist())


def _minimum_slot_counts(bundle: OpenedBundle, variant: dict[str, Any]) -> list[int]:
    """Return for each command buffer the smallest number of slots among the functions that submit it."""
    submit = BY_NAME["submit"].opcode
    spaces = len(variant.get("spaces", ())) or 1
    fewest: dict[int, int] = {}
    for signature, program in signatures_and_programs(bundle.manifest, variant).values():
        count = Slots(len(signature["arguments"]), len(signature["results"]), spaces).count
        for line in program["code"]:
            if line[0] == submit:
                fewest[line[1]] = min(fewest.get(line[1], count), count)
    return [fewest.get(number, 0) for number in range(len(variant["command_buffers"]))]
