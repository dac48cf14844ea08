"""Loops of a Fourier transform's passes, and one loop for several passes.

Consecutive passes of one radix have the same butterfly and access the same offsets, each in its own planes. A loop over
passes has the butterfly's code once. A jump behind it, which is the same during a whole pass and so well predicted,
leads to the multiplications and stores of each pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from aotc.ir.loop.forms.fft import FftStage


@dataclass(frozen=True, slots=True)
class Walk:
    """The loop of a pass: ``parts`` of ``run`` elements, in vectors of ``lanes``, ``step`` elements apart.

    ``groups`` is the number of ``p`` in a vector; with 0 a vector has ``q`` of a single ``p``, the number of the part.
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


def leaves_registers(radix: int) -> bool:
    """Return True if a butterfly of this radix leaves registers free."""
    return radix & (radix - 1) == 0


def iteration_space_of_pass(stage: FftStage, most: int) -> Walk:
    """Return the iteration space of an FFT pass, with vectors of at most ``most`` lanes."""
    s, m = stage.s, stage.m
    if m > 1 and most // s > 1:
        groups = min(most // s, m)
        return Walk(groups, ceil_power_of_two(groups * s), 1, m * s, groups * s)
    lanes = min((floor_power_of_two if m == 1 else ceil_power_of_two)(s), most)
    return Walk(0, lanes, m, s, lanes)


# Radix of consecutive passes of a transform that share the code of one butterfly, in a loop over passes. Smaller
# butterflies are no longer than the jump behind them. The results and constants of an odd radix fill the registers.
# Time with a shared butterfly, against one butterfly for each pass, Zen 5: radix 8 0.98 to 1.02, 4 up to 1.07 (128
# points), 3 1.03, 7 1.07.
SHARED_RADIX = 8


def group_passes(passes: list[FftStage]) -> list[list[FftStage]]:
    """Group the passes of one signal: consecutive ones that share a butterfly, whose vectors are all whole."""
    found = [passes[:1]]
    for before, stage in pairwise(passes):
        if before.s > 1 and before.radix == stage.radix == SHARED_RADIX:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


@dataclass(frozen=True, slots=True)
class SharedPassLoop:
    """The text of a loop over several passes, around the code that loads and the code that stores.

    Attributes
    ----------
    name : str
        Prefix of its blocks and values.
    before : str
        The block before it.
    walks : list of Walk
        Iteration spaces of the passes.
    sources : list of int
        Offsets of the planes that they read.
    """

    name: str
    before: str
    walks: list[Walk]
    sources: list[int]

    @property
    def part(self) -> str:
        """Return the register with the number of the loop's current part."""
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

    def begin(self) -> list[str]:
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
            pairs = ", ".join(f"[ {value}, %{edge} ]" for value, edge in zip(values, edges, strict=True))
            lines.append(f"%{n}_{column} = phi i64 {pairs}")
        lines += [f"br label %{n}_outer", f"{n}_outer:"]
        lines.append(f"{self.part} = phi i64 [ 0, %{n} ], [ {self.part}_next, %{n}_outer_end ]")
        lines += [f"%{n}_behind = mul i64 {self.part}, %{n}_run", f"%{n}_begin = add i64 %{n}_behind, %{n}_from"]
        lines += [f"br label %{n}_inner", f"{n}_inner:"]
        lines.append(f"%{n}_turn = phi i64 [ 0, %{n}_outer ], [ %{n}_turn_next, %{n}_inner_end ]")
        lines.append(f"{self.at} = call i64 @llvm.umin.i64(i64 %{n}_turn, i64 %{n}_last)")
        return [*lines, f"{self.place} = add i64 %{n}_begin, {self.at}"]

    def choose(self) -> str:
        """Return the jump to the store code of the current FFT pass."""
        names = [f"%{self.name}_write{k}" for k in range(len(self.walks))]
        return self._select_by_pass(names[-1], list(enumerate(names[:-1])))

    def write(self, number: int) -> str:
        """Return the label of the code that stores the results of FFT pass ``number``."""
        return f"{self.name}_write{number}:"

    def written(self) -> str:
        """Return the line that ends the store code of an FFT pass."""
        return f"br label %{self.name}_inner_end"

    def end(self) -> list[str]:
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
        listed = " ".join(f"i64 {k}, label {name}" for k, name in cases)
        return f"switch i64 %{self.name}_pass, label {other} [ {listed} ]"
