"""Record the decisions of fusion and their reasons, for ``aotc explain fusion``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aotc.ir.tensor.ir import Op
from aotc.lowering.passes.fuse.outline import Group


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision of fusion: whether ops joined a region, and the reason.

    Attributes
    ----------
    ops : tuple of Op
        The ops that could have joined.
    region : Group
        The group of the region, which may later have been merged into another one.
    taken : bool
    reason : str
    """

    ops: tuple[Op, ...]
    region: Group
    taken: bool
    reason: str


@dataclass
class FusionRecord:
    """Decisions of fusion about a module.

    Attributes
    ----------
    verdicts : list of Verdict
        In the order of the decisions.
    groups : dict of str to Group
        The group of each outlined function.
    absorbed : dict of Group to Group
        The region that each absorbed group became part of.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    absorbed: dict[Group, Group] = field(default_factory=dict)

    def verdicts_about(self, group: Group) -> list[Verdict]:
        """Return the recorded decisions about ``group`` and about all groups merged into it."""
        return [v for v in self.verdicts if self._final_group(v.region) is group]

    def _final_group(self, group: Group) -> Group:
        while group in self.absorbed:
            group = self.absorbed[group]
        return group

    def record_decision(self, ops: Sequence[Op], region: Group, refusal: str, reason: str) -> bool:
        """Record a decision, a refusal unless ``refusal`` is empty; return True if ``ops`` join the region."""
        self.verdicts.append(Verdict(tuple(ops), region, not refusal, refusal or reason))
        return not refusal
