"""All thresholds of lowering, collected from the modules that define them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from aotc.lowering.threshold import CostRow

ROOT = Path(__file__).parents[2]
KINDS = ("Limit", "BlockSize", "Estimate")


@dataclass(frozen=True)
class Found:
    """A threshold and its place.

    Attributes
    ----------
    module : str
        Module below ``aotc.lowering``, with dots.
    name : str
        Name of the variable, in lower case.
    row : CostRow
        The threshold.
    """

    module: str
    name: str
    row: CostRow


def _rows_of(path: Path) -> list[Found]:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = []
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))) if kind in KINDS:
                module = dotted.removeprefix("aotc.lowering.")
                found.append(Found(module, name.lower(), getattr(import_module(dotted), name)))
    return found


def all_rows() -> list[Found]:
    """Return every threshold of the package ``aotc.lowering``."""
    return [found for path in sorted((ROOT / "aotc/lowering").rglob("*.py")) for found in _rows_of(path)]
