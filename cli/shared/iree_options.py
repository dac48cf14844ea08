"""IREE's spellings of options: accepted by commands with an equivalent option, and hidden from the help.

For example, ``--iree-hal-target-device=device_a=local[0]`` is ``--device device_a=cpu``. The names are those of
``iree-compile``; ``--annotate-input-affinities`` and ``--fuse=aggressive`` appear in descriptions of its behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

_CPUS = ("local", "local-sync", "local-task", "llvm-cpu")


def _device_option_value(text: str) -> str:
    """Convert ``device_a=local[0]`` to ``device_a=cpu``: the target replaces the driver and its device number."""
    name, equals, target = text.partition("=")
    kind = re.sub(r"\[[0-9]+\]$", "", target)
    return f"{name}{equals}{'cpu' if kind in _CPUS else kind}"


VALUES: dict[str, tuple[str, Callable[[str], str]]] = {
    "--iree-hal-target-device": ("--device", _device_option_value),
    "--iree-hal-default-device": ("--default-device", str),
    "--iree-llvmcpu-stack-allocation-limit": ("--stack-limit", str),
    "--iree-llvmgpu-shared-memory-limit": ("--shared-memory-limit", str),
    "--iree-opt-level": ("--opt-level", lambda text: text.removeprefix("O")),
}
"""Options with a value: the option of aotc, and a function that converts the value."""

FLAGS: dict[str, tuple[str, str]] = {
    "--iree-stream-annotate-input-affinities": ("--annotate-affinities", ""),
    "--annotate-input-affinities": ("--annotate-affinities", ""),
    "--iree-dispatch-creation-enable-aggressive-fusion": ("--opt-level", "3"),
}
"""Flags: the option of aotc, and its value, if any."""


def translate_iree_options(args: Sequence[str], known: frozenset[str]) -> Iterator[str]:
    """Translate IREE's spellings of options to aotc's in a command's arguments."""
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        ours, convert = VALUES.get(name, ("", str))
        flag, level = FLAGS.get(name, ("", ""))
        if arg == "--":
            yield from (arg, *rest)
        elif ours in known:
            yield f"{ours}={convert(value if equals else next(rest, ''))}"
        elif flag in known:
            if not equals or _is_true(name, value):
                yield f"{flag}={level}" if level else flag
        elif name == "--fuse" and "--opt-level" in known:
            found = value if equals else next(rest, "")
            if found != "aggressive":
                raise typer.BadParameter(f"{found!r}: expected aggressive, which is -O3", param_hint=name)
            yield "--opt-level=3"
        else:
            yield arg


def _is_true(name: str, value: str) -> bool:
    if value.lower() not in ("true", "1", "false", "0"):
        raise typer.BadParameter(f"{value!r}: expected true or false", param_hint=name)
    return value.lower() in ("true", "1")


class IreeOptionCommand(TyperCommand):
    """A typer command that also accepts IREE's spellings of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command's arguments after translating IREE's spellings of options."""
        known = frozenset(option for parameter in self.params for option in parameter.opts)
        return super().parse_args(ctx, list(translate_iree_options(args, known)))
