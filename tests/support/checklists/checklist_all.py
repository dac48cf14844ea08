"""The whole table of the checklist: its import fills ``CASES``, once."""

from support.checklists import checklist_control as control
from support.checklists import checklist_elements as elements
from support.checklists import checklist_reductions as reductions
from support.checklists.checklist import CASES

for fill in (
    elements.elementwise,
    elements.broadcasting,
    elements.comparisons_and_conversions,
    elements.movement,
    elements.indexing,
    reductions.windows,
    reductions.normalization,
    reductions.contraction,
    reductions.solvers,
    control.sizes,
    control.sizes_of_dims,
    control.control,
    control.processes,
):
    fill()

__all__ = ["CASES"]
