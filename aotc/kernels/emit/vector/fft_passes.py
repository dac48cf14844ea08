"""Loops of a Fourier transform's passes, and a single loop for several passes.

Consecutive passes of one radix have the same butterfly and access the same offsets, each in its own planes. A loop over
passes contains the butterfly's code once. A jump behind the butterfly leads to the multiplications and stores of each
pass; its target changes only between passes, so it is predicted well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from aotc.ir.loop.forms.fft import FftStage


@dataclass(frozen=True, slots=True)
class PassIterationSpace:
    """The iteration space of a pass: ``parts`` of ``run`` elements, in vectors of ``lanes`` that start every ``step``.

    ``groups`` is the number of ``p`` in a vector. With 0, a vector has the ``q`` of a single ``p``, the index of the
    part.
    """

    groups: int
    lanes: int
    parts: int
    run: int
    step: int


def floor_power_of_two(n: int) -> int:
    """Return the greatest power of two that is at most ``n``."""
    return 1 << n.bit_length() - 1


def ceil_power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def butterfly_leaves_registers(radix: int) -> bool:
    """Return True if a butterfly of this radix leaves vector registers free."""
    return radix & (radix - 1) == 0


def iteration_space_of_pass(stage: FftStage, most: int) -> PassIterationSpace:
    """Return the iteration space of an FFT pass, with vectors of at most ``most`` lanes."""
    s, m = stage.s, stage.m
    if m > 1 and most // s > 1:
        groups = min(most // s, m)
        return PassIterationSpace(groups, ceil_power_of_two(groups * s), 1, m * s, groups * s)
    lanes = min((floor_power_of_two if m == 1 else ceil_power_of_two)(s), most)
    return PassIterationSpace(0, lanes, m, s, lanes)


# Radix of consecutive passes of a transform that share the code of one butterfly, in a loop over passes. Smaller
# butterflies are no longer than the jump behind them. The results and constants of an odd radix fill the registers.
# Time with a shared butterfly, against one butterfly for each pass, Zen 5: radix 8 0.98 to 1.02, 4 up to 1.07 (128
# points), 3 1.03, 7 1.07.
SHARED_RADIX = 8


def group_passes(passes: list[FftStage]) -> list[list[FftStage]]:
    """Group the passes of a single signal: consecutive passes of the shared radix form one group."""
    found = [passes[:1]]
    for before, stage in pairwise(passes):
        if before.s > 1 and before.radix == stage.radix == SHARED_RADIX:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


@dataclass(frozen=True, slots=True)
class SharedPassLoop:
    """Text of a loop over several passes, to be written around the code of the loads and of the stores.

    Attributes
    ----------
    name : str
        Prefix of the loop's blocks and values.
    before : str
        Label of the block before the loop.
    walks : list of PassIterationSpace
        Iteration spaces of the passes.
    sources : list of int
        Offset of the planes that each pass reads.
    """

    name: str
    before: str
    walks: list[PassIterationSpace]
    sources: list[int]

    @property
    def part(self) -> str:
        """Return the register with the index of the current part of the iteration space."""
        return f"%{self.name}_part"

    @property
    def at(self) -> str:
        """Return the register with the offset of the iteration's vector in its part."""
        return f"%{self.name}_at"

    @property
    def place(self) -> str:
        """Return the register with the memory offset of the iteration's vector."""
        return f"%{self.name}_place"

    @property
    def after(self) -> str:
        """Return the label of the block after the loop."""
        return f"{self.name}_after"

    def begin_iteration(self) -> list[str]:
        """Return the lines that start an iteration, before a vector is loaded."""
        n, edges = self.name, [self.before, *(f"{self.name}_enter{k}" for k in range(1, len(self.walks)))]
        columns = {
            "pass": range(len(self.walks)),
            "from": self.sources,
            "parts": [w.parts for w in self.walks],
            "run": [w.run for w in self.walks],
            "step": [w.step for w in self.walks],
            "last": [w.run - w.step for w in self.walks],
        }
        lines = [f"br label %{n}", f"{n}:"]
        for column, values in columns.items():
            incoming = ", ".join(f"[ {value}, %{edge} ]" for value, edge in zip(values, edges, strict=True))
            lines.append(f"%{n}_{column} = phi i64 {incoming}")
        lines += [f"br label %{n}_outer", f"{n}_outer:"]
        lines.append(f"{self.part} = phi i64 [ 0, %{n} ], [ {self.part}_next, %{n}_outer_end ]")
        lines += [f"%{n}_behind = mul i64 {self.part}, %{n}_run", f"%{n}_begin = add i64 %{n}_behind, %{n}_from"]
        lines += [f"br label %{n}_inner", f"{n}_inner:"]
        lines.append(f"%{n}_turn = phi i64 [ 0, %{n}_outer ], [ %{n}_turn_next, %{n}_inner_end ]")
        lines.append(f"{self.at} = call i64 @llvm.umin.i64(i64 %{n}_turn, i64 %{n}_last)")
        return [*lines, f"{self.place} = add i64 %{n}_begin, {self.at}"]

    def jump_to_store_code(self) -> str:
        """Return the line that jumps to the store code of the current pass."""
        names = [f"%{self.name}_write{k}" for k in range(len(self.walks))]
        return self._select_by_pass(names[-1], list(enumerate(names[:-1])))

    def store_code_label(self, number: int) -> str:
        """Return the label of the store code of pass ``number``."""
        return f"{self.name}_write{number}:"

    def end_store_code(self) -> str:
        """Return the line that ends the store code of a pass."""
        return f"br label %{self.name}_inner_end"

    def end_iteration(self) -> list[str]:
        """Return the lines that end an iteration, after a vector is stored."""
        n = self.name
        again = range(1, len(self.walks))
        return [
            f"{n}_inner_end:",
            f"%{n}_turn_next = add i64 %{n}_turn, %{n}_step",
            f"%{n}_turns = icmp ult i64 %{n}_turn_next, %{n}_run",
            f"br i1 %{n}_turns, label %{n}_inner, label %{n}_outer_end",
            f"{n}_outer_end:",
            f"{self.part}_next = add i64 {self.part}, 1",
            f"%{n}_more = icmp ult i64 {self.part}_next, %{n}_parts",
            f"br i1 %{n}_more, label %{n}_outer, label %{n}_end",
            f"{n}_end:",
            self._select_by_pass(f"%{self.after}", [(k - 1, f"%{n}_enter{k}") for k in again]),
            *(line for k in again for line in (f"{n}_enter{k}:", f"br label %{n}")),
            f"{self.after}:",
        ]

    def _select_by_pass(self, other: str, cases: list[tuple[int, str]]) -> str:
        """Return a switch on the current pass, with a default label and ``cases`` of (pass, label)."""
        listed = " ".join(f"i64 {k}, label {name}" for k, name in cases)
        return f"switch i64 %{self.name}_pass, label {other} [ {listed} ]"
