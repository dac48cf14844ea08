"""The one answer to what something costs: measured if a record has it, predicted if not.

Grain, serial or parallel, order, placement and fusion ask :class:`Costs`, and nobody else what the clock says. A record
(:mod:`aotc.vmfb.profile.cost_record`) knows kernels by digest,
and ops by where they stand in the model; that it is of the
model which is compiled has been checked before (:func:`check_program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp, log
from types import MappingProxyType
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.opset import CONTROL_FLOW, ELEMENTWISE
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, walk
from aotc.lowering.cost_model.kernel_facts import FactsOfKernels
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.op_time import elements, op_nanoseconds
from aotc.lowering.cost_model.predict import Prediction, predict
from aotc.lowering.cost_model.work import SERIAL_NS, expected_turns, guess
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.profile.cost_record import digest_of

Rows = Sequence[Mapping[str, Any]]


class StaleCosts(CompileError):
    """A record is of another program than the one that is compiled."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kernel costs: ``ns`` is what decisions go by; ``measured`` is None where only ``predicted`` is known."""

    predicted: Prediction
    measured: float | None = None

    @property
    def ns(self) -> float:
        """Return the nanoseconds on one core of a CPU, or on a whole GPU."""
        return self.predicted.ns if self.measured is None else self.measured


MEMORY_BOUND = Limit(
    200,
    "measured time of an op, in percent of its predicted memory time, up to which its arithmetic cost stays unknown",
    "the model predicts times of memory within a factor of two",
    benchmark="benchmarks/cost_model.py",
)
CLAIM_NS = BlockSize(
    5_000,
    "nanoseconds of work in the grid items that a thread claims at once",
    "a claim costs 0.01 to 0.03 microseconds (decision 13), at most 0.6 percent of that",
)
MAX_CLAIMS = BlockSize(64, "claims of one grid, at most", "several for each of 16 cores")
FEW_CLAIMS = Limit(
    8,
    "claims of one grid, at most, whose number is rounded up to a power of two",
    "two threads of a Zen 4: a product of 8 items in a loop takes 1.20 times as long in 3 claims as in 4",
)


class Costs:
    """What kernels cost on ``target``, and ops on any device; ``record`` is what was measured, or empty.

    ``targets`` says by the name of a kernel where a program for several kinds of devices has it, ``shared`` which one
    is measured in place of it, and the numbers that this one is given for its dims.
    """

    def __init__(
        self, target: Target, record: Mapping[str, Any] | None = None, targets: Mapping[str, Target] | None = None,
        shared: Mapping[str, tuple[Kernel, Sequence[int]]] | None = None,
    ) -> None:  # fmt: skip
        self.target, self._shared = target, shared or {}
        self._targets = targets or {}
        self._by_digest: dict[str, list[Mapping[str, Any]]] = {}
        self._by_place: dict[str, list[Mapping[str, Any]]] = {}
        for row in (record or {}).get("kernels", ()):
            self._by_digest.setdefault(row["digest"], []).append(row)
            self._by_place.setdefault(row["loc"], []).append(row)
        self._known: dict[int, tuple[Kernel, Cost]] = {}  # kernels are large to hash; they are kept, so ids stay
        self._predicted = FactsOfKernels(predict)  # for each target
        self._grains: dict[int, int] = {}  # as what is known

    # ------------------------------------------------------------ kernels

    def of(self, kernel: Kernel, sizes: Mapping[str, int] | None = None) -> Cost:
        """Return what ``kernel`` costs, with sizes for its dims as far as they are known."""
        if sizes:
            return self._cost(kernel, sizes)
        found = self._known.get(id(kernel))
        if found is None:
            found = self._known[id(kernel)] = kernel, self._cost(kernel, {})
        return found[1]

    def _cost(self, kernel: Kernel, sizes: Mapping[str, int]) -> Cost:
        target = self._targets.get(kernel.name, self.target)
        predicted = predict(kernel, target, sizes) if sizes else self._predicted.of(kernel, target)
        if kernel.name in self._shared:
            kernel, given = self._shared[kernel.name]
            sizes = dict(zip(kernel.dims, given, strict=True))
        rows = self._rows(kernel, target)
        if not rows:
            return Cost(predicted)
        same = [row for row in rows if all(sizes.get(name) == n for name, n in row["sizes"].items())]
        if same:
            return Cost(predicted, _measured(same[0], target))
        # Of other sizes: as far off as the prediction was for those that were measured.
        ratios = [_measured(row, target) / predict(kernel, target, row["sizes"]).ns for row in rows]
        return Cost(predicted, predicted.ns * exp(sum(map(log, ratios)) / len(ratios)))

    def _rows(self, kernel: Kernel, target: Target) -> Rows:
        if not self._by_digest:
            return ()
        rows = self._by_digest.get(digest_of(print_kernel(kernel)), ())
        return [row for row in rows if _measured(row, target)]

    def unknown(self, kernels: Iterable[Kernel]) -> list[str]:
        """Return the names of measured kernels that are none of ``kernels``: other options made them."""
        have = {digest_of(print_kernel(k)) for k in kernels} if self._by_digest else set()
        return [row["name"] for digest, rows in self._by_digest.items() if digest not in have for row in rows[:1]]

    # ------------------------------------------------------------ what the schedule decides

    def grain(self, kernel: Kernel) -> int:
        """Return how many grid items to claim at once: each claim worth some microseconds.

        Few claims are a power of two: three of eight items would leave one of two threads with five.
        """
        found = self._grains.get(id(kernel))
        if found is None:
            found = self._grains[id(kernel)] = self._grain(max(guess(kernel.grid), 1), self.of(kernel).ns)
        return found

    def _grain(self, items: int, nanoseconds: float) -> int:
        claims = max(1, round(nanoseconds / CLAIM_NS.value))
        if FEW_CLAIMS.holds(claims):
            claims = 1 << (claims - 1).bit_length()
        return -(-items // min(claims, items, MAX_CLAIMS.value))

    def copy(self, size: Dim) -> float:
        """Return the nanoseconds of a copy of ``size`` bytes."""
        machine, moved = machine_of(self.target), 2 * guess(size)
        return machine.launch + moved / machine.level_of(moved).rate

    def is_serial(self, nanoseconds: Iterable[float]) -> bool:
        """Are commands that take so long too little for several threads?"""
        return SERIAL_NS.holds(int(sum(nanoseconds)))

    # ------------------------------------------------------------ ops, before there are kernels

    def of_op(
        self, op: Op, target: Target, device: str = "", constants: Mapping[Value, Op] = MappingProxyType({})
    ) -> float:
        """Return the nanoseconds of ``op`` by itself on a device of ``target``, which the model may have a name for.

        ``constants`` may say how often loops turn.
        """
        if op.name in CONTROL_FLOW:
            inner = [sum(self.of_op(i, target, device, constants) for i in r.ops) for r in op.regions]
            return sum(inner) * expected_turns(op, constants, {}) if op.name == "while" else max(inner, default=0.0)
        rows = self._by_place.get(place_of(op.loc), ())
        named = [row["ns"][device] for row in rows if device in row["ns"]]
        found = named or [ns for row in rows if (ns := _measured(row, target))]
        return sum(found) / len(found) if found else op_nanoseconds(op, target)

    def work_of(self, op: Op) -> int | None:
        """Return the scalar operations of an element of ``op``, if it was measured in a kernel of its own.

        What took no longer than its memory does tells nothing of them.
        """
        if op.name not in ELEMENTWISE:
            return None
        rows = [row for row in self._by_place.get(place_of(op.loc), ()) if row["ops"] == 1]
        machine = machine_of(self.target)
        times = []
        for row in rows:
            least = machine.launch + row["bytes"] / machine.level_of(row["bytes"]).rate
            ns = _measured(row, self.target)
            if not MEMORY_BOUND.holds(round(100 * ns / least)):
                times.append(ns)
        if not times:
            return None
        rate = machine.vector * max(machine.vector_bytes // size_of(op.result.type.dtype), 1)
        return max(round(sum(times) / len(times) / max(elements(op.result), 1) * rate), 1)


def _measured(row: Mapping[str, Any], target: Target) -> float:
    """Return what a row of a record says for ``target``: under its own name where kinds have several; 0 if nothing."""
    ns = row["ns"].get(target.name) or row["ns"].get(target.kind, 0.0)
    return float(ns)


def place_of(loc: Loc) -> str:
    """Return how records and bundles name a place of the model."""
    return loc.traced_by or str(loc)


def digest_of_program(module: Module) -> str:
    """Return the digest of an imported module: its ops and their types in order, without constants and places."""
    parts: list[str] = []
    texts: dict[TensorType, str] = {}
    for function in module.functions.values():
        parts.append(function.name)
        for op in walk(function.body):
            parts.append(op.name)
            for v in (*op.operands, *op.results):
                text = texts.get(v.type)
                if text is None:
                    text = texts[v.type] = str(v.type)
                parts.append(text)
    return sha256("\n".join(parts).encode()).hexdigest()[:32]


def check_program(record: Mapping[str, Any], module: Module) -> None:
    """Refuse a record of another program than ``module``, as it was imported.

    Raises
    ------
    StaleCosts
    """
    found = digest_of_program(module)
    if record and record["program"] != found:
        loc = next(f.loc for f in module.functions.values() if f.public)
        message = f"the costs are stale: they were measured on program {record['program']}, this one is {found}"
        raise StaleCosts.at(loc, message, hint="aotc profile a bundle of this model, and compile with that record")
