"""Command buffers of a variant, read and checked: what a device that walks them starts from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.abi import CASE, COMMAND_HEADER, COPY, GRAPH, GRAPH_HEADER, WHILE
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.isa import BY_NAME
from aotc.vmfb.verify import Invalid, check_commands


class Commands(NamedTuple):
    """The words of one command buffer, and the slots that its commands write."""

    words: list[int]
    writes: frozenset[int]


def load_commands(bundle: Bundle, variant: dict[str, Any]) -> list[Commands]:
    """Return the command buffers of a variant whose kernels say how many ``inputs`` they have.

    Raises
    ------
    BundleError
        If one breaks the rules.
    """
    slots = fewest_slots(bundle, variant)
    kernels = variant["kernels"]
    found = []
    for number, row in enumerate(variant["command_buffers"]):
        data = bundle.checked(row["code"])
        try:
            if data.nbytes % 8:
                raise Invalid(f"{data.nbytes} bytes are no whole number of words")
            words = np.frombuffer(data, "<i8").tolist()
            check_commands(words, len(kernels), slots[number], row["states"], row["parameters"])
        except Invalid as error:
            raise BundleError(bundle.where, f"command buffer {number} is invalid: {error}") from None
        found.append(Commands(words, _writes(words, kernels)))
    return found


def fewest_slots(bundle: Bundle, variant: dict[str, Any]) -> list[int]:
    """Return, for each command buffer, the slots of the smallest function that submits it."""
    submit = BY_NAME["submit"].opcode
    signatures = bundle.manifest["functions"]
    most = 1 << 62
    slots = [most] * len(variant["command_buffers"])
    for name, program in variant["functions"].items():
        count = len(signatures[name]["arguments"]) + len(signatures[name]["results"]) + 2
        for line in program["code"]:
            if line[0] == submit:
                slots[line[1]] = min(slots[line[1]], count)
    return [0 if count == most else count for count in slots]


def _writes(words: list[int], kernels: list[dict[str, Any]]) -> frozenset[int]:
    """Return the slots that some command writes; loops and branches are looked into."""
    found: set[int] = set()
    at = 0
    while at < len(words):
        match words[at]:
            case code if code == WHILE:
                at += 6
            case code if code == CASE:
                at += 5 + words[at + 2]
            case code if code == GRAPH:
                for n in range(words[at + 2]):
                    found |= _command_writes(words, at + words[at + GRAPH_HEADER + n], kernels)
                at += words[at + 1]
    return frozenset(found)


def _command_writes(words: list[int], at: int, kernels: list[dict[str, Any]]) -> set[int]:
    kind, kernel, _, _, _, successors, places, _ = words[at : at + COMMAND_HEADER]
    first = at + COMMAND_HEADER + successors
    skip = 1 if kind == COPY else kernels[kernel]["inputs"]
    return {words[first + 2 * n] for n in range(skip, places)}
