"""Costs of kernels and ops: measured if a profile record has them, predicted otherwise.

:class:`Costs` is the single source of times for all decisions: the grain of claims, serial or parallel execution, the
order of commands, placement and fusion. A record (:mod:`aotc.vmfb.profile.cost_record`) identifies kernels by digest,
and ops by their location in the model. :func:`check_program` verifies beforehand that it belongs to the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp, log
from types import MappingProxyType
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import Dim, Expr, maximum
from aotc.ir.loop.ir import Kernel, Tile
from aotc.ir.loop.ir import walk as statements_in
from aotc.ir.loop.printer import print_kernel
from aotc.ir.opset import CONTROL_FLOW, ELEMENTWISE
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, walk
from aotc.lowering.cost_model.kernel_facts import FactsOfKernels
from aotc.lowering.cost_model.kernel_work import KernelWork, work_of_kernel
from aotc.lowering.cost_model.machines import Machine, machine_of
from aotc.lowering.cost_model.op_time import estimated_element_count, op_nanoseconds
from aotc.lowering.cost_model.work import SERIAL_NS, estimated_dim, expected_iterations
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.profile.cost_record import kernel_text_digest

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a kernel on one CPU core, or on a whole GPU.

    Attributes
    ----------
    ns : float
        The total nanoseconds.
    compute, memory, overhead : float
        The nanoseconds of arithmetic and of memory, which overlap, and of the launch and the grid items.
    bytes : int
        The bytes of the arrays that it accesses, each counted once.
    """

    ns: float
    compute: float
    memory: float
    overhead: float
    bytes: int

    @property
    def bound(self) -> str:
        """Return the largest part of the time: ``compute``, ``memory`` or ``overhead``."""
        parts = {"compute": self.compute, "memory": self.memory, "overhead": self.overhead}
        return max(parts, key=lambda name: parts[name])


def predict(kernel: Kernel, target: Target, sizes: Mapping[str, int] | None = None) -> Prediction:
    """Return the predicted time of ``kernel`` on ``target``; ``sizes`` are those of its dims that are known."""
    machine = machine_of(target)
    return predicted_kernel_time(work_of_kernel(kernel, machine.vector_bytes, sizes, target.matrices), machine)


def predicted_kernel_time(work: KernelWork, machine: Machine) -> Prediction:
    """Return the predicted nanoseconds of ``work`` on ``machine``.

    Arithmetic and memory accesses overlap: the slower of both counts, plus the launch and the grid items.
    """
    share = min(1.0, max(work.threads, 1.0) / machine.threads)  # the busy fraction of the machine
    compute = work.vector / machine.vector + work.scalar / machine.scalar
    compute = (compute + work.chained / machine.chained + work.tile / machine.tile) / share
    level = machine.level_of(work.bytes)
    memory = work.bytes / level.rate / min(1.0, share * machine.loads)
    memory += sum(count * machine.level_of(size).random for count, size in work.random) / share
    overhead = machine.launch + machine.item * work.items
    return Prediction(overhead + max(compute, memory), compute, memory, overhead, int(work.bytes))


class StaleCosts(CompileError):
    """The profile record does not belong to the program that is compiled."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a kernel. Decisions use ``ns``; ``measured`` is None if only ``predicted`` is known.

    If ``scaled``, the kernel was measured at other sizes only, and ``measured`` is the prediction scaled by its error
    at those.
    """

    predicted: Prediction
    measured: float | None = None
    scaled: bool = False

    @property
    def ns(self) -> float:
        """Return the measured, else the predicted nanoseconds on one CPU core, or on a whole GPU."""
        return self.predicted.ns if self.measured is None else self.measured


MEMORY_BOUND = Limit(
    200,
    "measured time of an op, in percent of its predicted memory time, up to which its arithmetic cost stays unknown",
    "the model predicts times of memory within a factor of two",
    benchmark="python -m benchmarks costs",
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
    """Costs of kernels on a target, and of ops on any device.

    Parameters
    ----------
    target : Target
    record : mapping, optional
        The measurements of a profile.
    targets : mapping of str to Target, optional
        The target of each kernel by its name, in a program for several kinds of devices.
    shared : mapping of str to (Kernel, sequence of int), optional
        For a kernel that was merged with others: the kernel that runs and is measured instead, and the sizes of its
        dims for this use.
    """

    def __init__(
        self, target: Target, record: Mapping[str, Any] | None = None, targets: Mapping[str, Target] | None = None,
        shared: Mapping[str, tuple[Kernel, Sequence[int]]] | None = None,
    ) -> None:  # fmt: skip
        """Index the measurements of ``record`` by kernel digest and by source location.

        ``targets`` has the target of each kernel that does not run on ``target``. ``shared`` has, for each kernel
        merged with others, the merged kernel and the sizes that its launches pass.
        """
        self.target, self._shared = target, shared or {}
        self._targets = targets or {}
        self._by_digest: dict[str, list[Mapping[str, Any]]] = {}
        self._by_place: dict[str, list[Mapping[str, Any]]] = {}
        for row in (record or {}).get("kernels", ()):
            self._by_digest.setdefault(row["digest"], []).append(row)
            self._by_place.setdefault(row["loc"], []).append(row)
        # Keys are identities, since hashing a kernel is expensive; the stored references keep the identities unique.
        self._known: dict[int, tuple[Kernel, Cost]] = {}
        self._predicted = FactsOfKernels(predict)  # for each target
        self._grains: dict[int, int] = {}  # by the identities of kernels in ``_known``

    # ------------------------------------------------------------ kernels

    def of(self, kernel: Kernel, sizes: Mapping[str, int] | None = None) -> Cost:
        """Return the measured or predicted cost of ``kernel``."""
        if sizes:
            return self._predicted_or_measured_cost(kernel, sizes)
        entry = self._known.get(id(kernel))
        if entry is None:
            entry = self._known[id(kernel)] = kernel, self._predicted_or_measured_cost(kernel, {})
        return entry[1]

    def _predicted_or_measured_cost(self, kernel: Kernel, sizes: Mapping[str, int]) -> Cost:
        """Return the prediction, with a measurement at the same sizes, or else scaled from those at other sizes."""
        target = self._targets.get(kernel.name, self.target)
        predicted = predict(kernel, target, sizes) if sizes else self._predicted.facts_of(kernel, target)
        if kernel.name in self._shared:
            kernel, own_sizes = self._shared[kernel.name]
            sizes = dict(zip(kernel.dims, own_sizes, strict=True))
        rows = self._measurements_of_kernel(kernel, target)
        if not rows:
            return Cost(predicted)
        same = [row for row in rows if all(sizes.get(name) == n for name, n in row["sizes"].items())]
        if same:
            return Cost(predicted, _measured_time_for_target(same[0], target))
        # Measured at other sizes only: scale the prediction by its geometric mean error at those sizes.
        ratios = [_measured_time_for_target(row, target) / predict(kernel, target, row["sizes"]).ns for row in rows]
        return Cost(predicted, predicted.ns * exp(sum(map(log, ratios)) / len(ratios)), scaled=True)

    def _measurements_of_kernel(self, kernel: Kernel, target: Target) -> Rows:
        """Return the rows of the record that measure ``kernel`` on the kind of ``target``."""
        if not self._by_digest:
            return ()
        rows = self._by_digest.get(kernel_text_digest(print_kernel(kernel)), ())
        return [row for row in rows if _measured_time_for_target(row, target)]

    def unmatched_measurements(self, kernels: Iterable[Kernel]) -> list[str]:
        """Return the names of measured kernels that are not among ``kernels``, because other options produced them."""
        have = {kernel_text_digest(print_kernel(k)) for k in kernels} if self._by_digest else set()
        return [row["name"] for digest, rows in self._by_digest.items() if digest not in have for row in rows[:1]]

    # ------------------------------------------------------------ scheduling

    def grain(self, kernel: Kernel) -> int:
        """Return the number of grid items that a thread claims at once, about ``CLAIM_NS`` of work.

        A small number of claims is rounded up to a power of two. Three claims of eight items would be uneven: with two
        threads, one of them would execute five items.
        """
        grain = self._grains.get(id(kernel))
        if grain is None:
            grain = self._grains[id(kernel)] = self._grain_of_items(
                max(estimated_dim(kernel.grid), 1), self.of(kernel).ns
            )
        return grain

    def items_per_claim(self, kernel: Kernel) -> Dim:
        """Return the number of grid items that a thread claims at once; for a matmul of unknown size an expression."""
        work = self.symbolic_matmul_work(kernel)
        if work is None:
            return self.grain(kernel)
        operations = round(CLAIM_NS.value * machine_of(self.target).tile)
        few = (kernel.grid + (MAX_CLAIMS.value - 1)) // MAX_CLAIMS.value
        return maximum(operations * kernel.grid // maximum(work, 1), maximum(few, 1))

    def symbolic_matmul_work(self, kernel: Kernel) -> Dim | None:
        """Return the operations of a CPU's matmul if they are a product of sizes that only a call knows, else None.

        Such a kernel is short at the sizes that the cost model assumes, and may take a million times as long.
        """
        target, work = self._targets.get(kernel.name, self.target), kernel.flops
        if target.kind != "cpu" or not isinstance(work, Expr) or all(len(sizes) == 1 for sizes, _ in work.terms):
            return None
        serial = self.is_serial((self.of(kernel).ns,))
        return work if serial and any(isinstance(s, Tile) for s in statements_in(kernel.body)) else None

    def _grain_of_items(self, items: int, nanoseconds: float) -> int:
        """Return the items per claim, so that a claim takes about ``CLAIM_NS``."""
        claims = max(1, round(nanoseconds / CLAIM_NS.value))
        if FEW_CLAIMS.holds(claims):
            claims = 1 << (claims - 1).bit_length()
        return -(-items // min(claims, items, MAX_CLAIMS.value))

    def copy_nanoseconds(self, size: Dim) -> float:
        """Return the nanoseconds of a copy of ``size`` bytes."""
        machine, moved = machine_of(self.target), 2 * estimated_dim(size)
        return machine.launch + moved / machine.level_of(moved).rate

    def is_serial(self, nanoseconds: Iterable[float]) -> bool:
        """Return True if commands of these times together are too short for several threads."""
        return SERIAL_NS.holds(int(sum(nanoseconds)))

    # ------------------------------------------------------------ ops, before kernels exist

    def of_op(
        self, op: Op, target: Target, device: str = "", constants: Mapping[Value, Op] = MappingProxyType({})
    ) -> float:
        """Return the nanoseconds of ``op`` as a kernel of its own on a device of ``target``.

        ``device`` is the name of the device in the model, if it has one. ``constants`` are the known constants, from
        which trip counts of loops are derived. A loop costs its regions times its trip count, a branch its most
        expensive region.
        """
        if op.name in CONTROL_FLOW:
            inner = [sum(self.of_op(i, target, device, constants) for i in r.ops) for r in op.regions]
            return (
                sum(inner) * expected_iterations(op, constants, {}) if op.name == "while" else max(inner, default=0.0)
            )
        rows = self._by_place.get(location_name(op.loc), ())
        named = [row["ns"][device] for row in rows if device in row["ns"]]
        times = named or [ns for row in rows if (ns := _measured_time_for_target(row, target))]
        return sum(times) / len(times) if times else op_nanoseconds(op, target)

    def work_of(self, op: Op) -> int | None:
        """Return the scalar operations per element of an elementwise ``op``, if it was measured in a kernel of its own.

        A kernel that took no longer than its memory accesses gives no information; the result is then None.
        """
        if op.name not in ELEMENTWISE:
            return None
        rows = [row for row in self._by_place.get(location_name(op.loc), ()) if row["ops"] == 1]
        machine = machine_of(self.target)
        times = []
        for row in rows:
            least = machine.launch + row["bytes"] / machine.level_of(row["bytes"]).rate
            ns = _measured_time_for_target(row, self.target)
            if not MEMORY_BOUND.holds(round(100 * ns / least)):
                times.append(ns)
        if not times:
            return None
        rate = machine.vector * max(machine.vector_bytes // size_of(op.result.type.dtype), 1)
        return max(round(sum(times) / len(times) / max(estimated_element_count(op.result), 1) * rate), 1)


def _measured_time_for_target(row: Mapping[str, Any], target: Target) -> float:
    """Return the time in a row of a record for ``target``, by its name or else its kind; 0 if there is none."""
    ns = row["ns"].get(target.name) or row["ns"].get(target.kind, 0.0)
    return float(ns)


def location_name(loc: Loc) -> str:
    """Return the name of a location in the model, as records and bundles write it."""
    return loc.traced_by or str(loc)


def digest_of_program(module: Module) -> str:
    """Return the digest of an imported module: its ops and their types in order, without constants and locations."""
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


def check_cost_record_program(record: Mapping[str, Any], module: Module) -> None:
    """Check that ``record`` was measured on ``module``, as it was imported.

    Raises
    ------
    StaleCosts
        If it was measured on another program.
    """
    digest = digest_of_program(module)
    if record and record["program"] != digest:
        loc = next(f.loc for f in module.functions.values() if f.public)
        message = f"the costs are stale: they were measured on program {record['program']}, this one is {digest}"
        hint = "measure a bundle of this model with `aotc profile -o`, and compile with that record"
        raise StaleCosts.at(loc, message, hint=hint)
