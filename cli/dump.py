"""``aotc dump``: kernels, host programs and command buffers of a bundle as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from aotc.vmfb.bundle import Bundle

SUMMARY = "Print kernels, host programs and command buffers."
EXAMPLES = """
aotc dump model.vmfb --kernels

aotc dump model.vmfb --kernels --kernel=softmax

aotc dump model.vmfb --bytecode --command-buffers

aotc dump model.vmfb --asm | less
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file."),
    kernels: bool = typer.Option(False, "--kernels", help="The Python function that each kernel is."),
    bytecode: bool = typer.Option(False, "--bytecode", help="The host program of each function."),
    command_buffers: bool = typer.Option(False, "--command-buffers", help="What is dispatched, in which order."),
    asm: bool = typer.Option(False, "--asm", help="Machine code (needs objdump)."),
    kernel: str = typer.Option("", help="Only kernels whose name contains this."),
    target: str = typer.Option("", help="Only variants whose target contains this."),
) -> None:
    """Print kernels, host programs and command buffers of a bundle; everything but machine code by default."""
    from aotc.vmfb.bundle import open_bundle

    opened = open_bundle(str(bundle))
    _check_names(opened, kernel, target)
    every = not (kernels or bytecode or command_buffers or asm or kernel)
    for variant in opened.manifest["variants"]:
        if target not in variant["target"]:
            continue
        if kernels or every or (kernel and not asm):
            print("\n".join(_kernels(opened, variant, kernel)))
        if bytecode or every:
            print("\n".join(_bytecode(variant)))
        if command_buffers or every:
            print("\n".join(_command_buffers(opened, variant)))
        if asm:
            print(_assembly(opened, variant, kernel))


def _check_names(opened: Bundle, kernel: str, target: str) -> None:
    """Refuse names that nothing in the bundle contains."""
    from aotc.vmfb.errors import BundleError

    variants = opened.manifest["variants"]
    targets = [v["target"] for v in variants]
    kernels = [row["name"] for v in variants if target in v["target"] for row in v["kernels"]]
    for what, wanted, names in (("target", target, targets), ("kernel", kernel, kernels)):
        if wanted and not any(wanted in name for name in names):
            shown = ", ".join(dict.fromkeys(names[:20])) + (", ..." if len(names) > 20 else "")
            raise BundleError(opened.where, f"no {what} has {wanted!r} in its name", expected=f"a part of: {shown}")


def _kernels(opened: Bundle, variant: dict[str, Any], wanted: str) -> Iterator[str]:
    from aotc.vmfb.errors import BundleError

    texts = (opened.manifest.get("debug") or {}).get("kernels")
    if texts is None:
        hint = "compile again without --no-debug-info"
        raise BundleError(opened.where, "the bundle holds no kernel text", hint=hint)
    for row in variant["kernels"]:
        if wanted in row["name"]:
            entry = texts.get(f"{variant['target']}/{row['name']}", {"text": "", "loc": ""})
            yield f"# {variant['target']} {row['name']}{' from ' + entry['loc'] if entry['loc'] else ''}"
            yield entry["text"]


def _bytecode(variant: dict[str, Any]) -> Iterator[str]:
    from aotc.vmfb.assembly import disassemble

    for name, program in variant["functions"].items():
        yield f"# {variant['target']} function {name}: {program['registers']} registers"
        yield disassemble(program["code"])


def _command_buffers(opened: Bundle, variant: dict[str, Any]) -> Iterator[str]:
    import numpy as np

    names = [kernel["name"] for kernel in variant["kernels"]]
    for number, row in enumerate(variant["command_buffers"]):
        words = np.frombuffer(opened.checked(row["code"]), "<i8").tolist()
        yield f"# {variant['target']} command buffer {number}: {len(words)} words, {row['parameters']} parameters"
        yield from node_lines(words, 0, len(words), names, 0)
        yield ""


def node_lines(words: list[int], at: int, end: int, names: list[str], depth: int) -> Iterator[str]:
    """Yield the lines of the nodes in ``words[at:end]``; recursion is as deep as loops nest."""
    from aotc.vmfb.abi import CASE, GRAPH, WHILE

    indent = "  " * depth
    while at < end:
        kind, length = words[at], words[at + 1]
        match kind:
            case _ if kind == GRAPH:
                yield f"{indent}graph of {words[at + 2]}{', serial' if words[at + 4] else ''}"
                for number in range(words[at + 2]):
                    yield f"{indent}  {number}: {_command(words, at + words[at + 5 + number], names)}"
            case _ if kind == WHILE:
                body = at + 6 + words[at + 2]
                yield f"{indent}while {_place(words[at + 4 : at + 6])}: condition"
                yield from node_lines(words, at + 6, body, names, depth + 1)
                yield f"{indent}do"
                yield from node_lines(words, body, body + words[at + 3], names, depth + 1)
            case _ if kind == CASE:
                start = at + 5 + words[at + 2]
                for branch, size in enumerate(words[at + 5 : start]):
                    yield f"{indent}case {_place(words[at + 3 : at + 5])} == {branch}"
                    yield from node_lines(words, start, start + size, names, depth + 1)
                    start += size
        at += length


def _command(words: list[int], at: int, names: list[str]) -> str:
    from aotc.vmfb.abi import COPY

    kind, kernel, items, grain, _, successors, places, dims = words[at : at + 8]
    first = at + 8 + successors
    shown = [_place(words[first + 2 * i : first + 2 * i + 2]) for i in range(places)]
    values = [_operand(word) for word in words[first + 2 * places : first + 2 * places + dims]]
    after = f" then {', '.join(map(str, words[at + 8 : first]))}" if successors else ""
    if kind == COPY:
        return f"copy {shown[0]} -> {shown[1]}, {values[0]} bytes{after}"
    given = f" dims({', '.join(values)})" if values else ""
    return f"{names[kernel]}({', '.join(shown)}){given} x{_operand(items)} by {_operand(grain)}{after}"


def _operand(word: int) -> str:
    return f"p{word >> 1}" if word & 1 else str(word >> 1)


def _place(pair: list[int]) -> str:
    return f"slot{pair[0]}" + ("" if pair[1] == 0 else f"+{_operand(pair[1])}")


def _assembly(opened: Bundle, variant: dict[str, Any], wanted: str) -> str:
    from aotc.vmfb.errors import BundleError
    from aotc_cli.native_code import disassemble, kernel_ranges

    if variant.get("library") is None:
        raise BundleError(opened.where, f"{variant['target']} has no CPU machine code")
    data, names = opened.checked(variant["library"]), [kernel["name"] for kernel in variant["kernels"]]
    ranges = kernel_ranges(data, len(names))
    return "\n".join(f"# {name}\n{disassemble(data, *at)}" for name, at in zip(names, ranges) if wanted in name)
