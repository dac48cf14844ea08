"""Sizes assumed for symbolic dims when no call has determined them: in predictions, reports and sample arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aotc.vmfb.errors import ArgumentValueError

# Size of a symbolic dim without a typical size: between a batch of one and large batches.
ASSUMED_SIZE = 16

_RENAMED = re.compile(r"^(.+)_dim_*$")
"""What the compiler calls a dim named like a loop variable of its kernels: ``s_dim`` for ``s``."""

_NAME = re.compile(r"[^\W\d]\w*")


def assumed_size(dim: str, typical: Mapping[str, int]) -> int:
    """Return the typical size of the symbol ``dim``, or ``ASSUMED_SIZE`` if the model has none."""
    return typical.get(dim, ASSUMED_SIZE)


def dim_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the symbols in the dims of arguments in order of first occurrence; ``rows`` are manifest entries."""
    names = (name for row in rows for dim in row["dims"] if isinstance(dim, str) for name in _NAME.findall(dim))
    return [name for name in dict.fromkeys(names) if name not in ("max", "min")]


def kernel_sizes_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a kernel's dims as text, with the names that the model gives them: ``b=8, s=16``."""
    names = (_RENAMED.sub(r"\1", name) for name in sizes)
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes.values(), strict=True))


def assumed_text(sizes: Mapping[str, int], typical: Collection[str]) -> str:
    """Format assumed sizes, such as ``b=8 assumed (typical), s=16 assumed``.

    ``typical`` has the symbols whose size is a typical one of the model.
    """
    texts = (f"{name}={size} assumed{' (typical)' * (name in typical)}" for name, size in sizes.items())
    return ", ".join(texts)


def check_dims(sizes: Collection[str], arguments: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse sizes of symbols that occur in no dim of a function's ``arguments``.

    Raises
    ------
    ArgumentValueError
    """
    known = dim_names(arguments)
    for name in sizes:
        if name not in known:
            expected = ", ".join(sorted(known)) or "none: all sizes are fixed"
            raise ArgumentValueError(where, f"no dim is called {name}", expected=expected)


def assumed_sizes(
    arguments: Sequence[Mapping[str, Any]], typical: Mapping[str, int], excluded: Collection[str] = ()
) -> dict[str, int]:
    """Return the assumed size of each symbol in the dims of ``arguments`` that is not in ``excluded``."""
    return {name: assumed_size(name, typical) for name in dim_names(arguments) if name not in excluded}
