"""What ``aotc compile`` and ``aotc lint`` share: options, and how warnings are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from warnings import catch_warnings, simplefilter

import typer

SPECIALIZE_HELP = "b=1,8: compile once more for these sizes of dim b; a call takes the code that fits."
DEVICE_HELP = "d0=cpu: a device that the model names, and its target."
DEFAULT_DEVICE_HELP = "The device of what nothing places, in a model that names several."
PLACE_HELP = "auto: the cost model places large ops on devices; said: affinities do."
TRANSFERS_HELP = "Refuse a model that takes more transfers; -1 is any number."
STACK_HELP = "Bytes of a thread's stack that a kernel's arrays may take, if less than the target's; 0 is the target's."
SHARED_HELP = "Bytes of shared memory that a GPU's block may have, if less than the target's; 0 is the target's."
CALLBACKS_HELP = "drop: leave out calls back into Python whose results nobody reads."


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Print the warnings of the block when it has ended well, without the place in Python that raised them."""
    with catch_warnings(record=True) as warned:
        simplefilter("always", UserWarning)
        yield
    for warning in warned:
        print(f"warning: {warning.message}", file=sys.stderr)


def parse_specialized(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """Return ``{"b": (1, 8)}`` for ``b=1,8``."""
    found = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        numbers = [n.strip() for n in sizes.split(",")]
        if not name or not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=SIZE,SIZE...", param_hint="--specialize")
        found[name] = tuple(map(int, numbers))
    return found


def devices_of(texts: list[str]) -> dict[str, str]:
    """Return ``{"d0": "cpu"}`` for ``d0=cpu``."""
    devices = {}
    for text in texts:
        name, _, target = text.partition("=")
        if not name or not target:
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=TARGET", param_hint="--device")
        devices[name] = target
    return devices
