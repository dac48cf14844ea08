"""What fusion decided, and why: written where it decides, read by ``aotc explain fusion``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aotc.ir.tensor_ir import Op
from aotc.lowering.passes.fusion.outline import Group


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ops that a region took or refused.

    Attributes
    ----------
    ops : tuple of Op
        What was to join.
    region : Group
        What it was to join; later it may have become part of another.
    taken : bool
    reason : str
    """

    ops: tuple[Op, ...]
    region: Group
    taken: bool
    reason: str


@dataclass
class FusionRecord:
    """The verdicts on a module in the order in which they were made, and the group behind each outlined function."""

    verdicts: list[Verdict] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)

    def decide(self, ops: Sequence[Op], region: Group, refusal: str, reason: str) -> bool:
        """Note the verdict, refused if there is a ``refusal``; return whether ``ops`` are taken."""
        self.verdicts.append(Verdict(tuple(ops), region, not refusal, refusal or reason))
        return not refusal
