"""``aotc dump``: print kernels, host programs and command buffers of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from aotc_cli.shared.option_groups import BUNDLE_HELP, Panel

if TYPE_CHECKING:
    from aotc.vmfb.abi import Command, Control, Node, Place
    from aotc.vmfb.bundle import OpenedBundle

OUTPUT_HELP = "With --kernels: write the kernels as Numba functions to this .py file; running it checks them."
SUMMARY = "Print kernels, host programs and command buffers."
EXAMPLES = """
Print all kernels as Python functions:

aotc dump model.vmfb --kernels

Print the kernels of softmax:

aotc dump model.vmfb --kernels --kernel=softmax

Write the kernels to a file, and check them with Numba:

aotc dump model.vmfb --kernels -o kernels.py && python kernels.py

Print the host program and the commands of each call:

aotc dump model.vmfb --bytecode --command-buffers

Print the machine code:

aotc dump model.vmfb --asm | less

Print the model:

aotc dump model.vmfb --source
"""


_PRINTED = ("--bytecode", "--command-buffers", "--asm", "--source")  # contents that --output does not write


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help=BUNDLE_HELP),
    kernels: bool = typer.Option(
        False, "--kernels", rich_help_panel=Panel.CONTENT, help="Print each kernel as a Python function."
    ),
    bytecode: bool = typer.Option(
        False, "--bytecode", rich_help_panel=Panel.CONTENT, help="Print the host program of each function."
    ),
    command_buffers: bool = typer.Option(
        False, "--command-buffers", rich_help_panel=Panel.CONTENT, help="Print the kernel launches and copies in order."
    ),
    asm: bool = typer.Option(
        False, "--asm", rich_help_panel=Panel.CONTENT,
        help="Print machine code (needs objdump), PTX, or SASS (needs nvdisasm).",
    ),
    source: bool = typer.Option(
        False, "--source", rich_help_panel=Panel.CONTENT,
        help="Print the StableHLO, without large constants (needs aotc[compile]).",
    ),
    kernel: str = typer.Option("", metavar="TEXT", help="Only kernels whose name contains this text."),
    target: str = typer.Option("", metavar="TEXT", help="Only targets whose name contains this text."),
    output: Path = typer.Option(None, "-o", "--output", metavar="FILE.py", help=OUTPUT_HELP),
) -> None:
    """Print kernels, host programs and command buffers of a bundle; default: all three."""
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.errors import bundle_errors
    from aotc.vmfb.verify.program import check_functions

    opened = open_bundle(str(bundle))
    _check_names(opened, kernel, target)
    if output is not None:
        wanted = zip(_PRINTED, (bytecode, command_buffers, asm, source), strict=True)
        if others := [option for option, value in wanted if value]:
            raise typer.BadParameter(f"it writes kernels only; leave out {', '.join(others)}", param_hint="-o")
        _write_kernels(opened, output, kernel, target)
        return
    every = not (kernels or bytecode or command_buffers or asm or kernel or source)
    if source:
        from aotc.recompile import source_text

        print(source_text(opened))
    with bundle_errors(opened, "shown"):
        check_functions(opened)
        shown = [v for v in opened.manifest["variants"] if target in v["target"]]
        for variant in shown:
            if kernels or every or (kernel and not asm):
                print("\n".join(_kernel_lines(opened, variant, kernel)))
            if bytecode or every:
                print("\n".join(_bytecode_lines(opened, variant)))
            if command_buffers or every:
                print("\n".join(_command_buffer_lines(opened, variant)))
    for variant in shown if asm else ():
        for text in _assembly_lines(opened, variant, kernel):
            print(text)


def _check_names(opened: OpenedBundle, kernel: str, target: str) -> None:
    """Refuse names that match nothing in the bundle."""
    from aotc.vmfb.errors import BundleError

    variants = opened.manifest["variants"]
    targets = [v["target"] for v in variants]
    kernels = [row["name"] for v in variants if target in v["target"] for row in v["kernels"]]
    for what, wanted, names in (("target", target, targets), ("kernel", kernel, kernels)):
        if wanted and not any(wanted in name for name in names):
            shown = ", ".join(dict.fromkeys(names[:20])) + (", ..." if len(names) > 20 else "")
            raise BundleError(opened.where, f"no {what} has {wanted!r} in its name", expected=f"a part of: {shown}")


def _kernel_lines(opened: OpenedBundle, variant: dict[str, Any], wanted: str) -> Iterator[str]:
    """Yield the text of each kernel of a variant, or of the kernel ``wanted``."""
    texts = _stored_kernel_texts(opened)
    for row in variant["kernels"]:
        if wanted in row["name"]:
            entry = texts.get(f"{variant['target']}/{row['name']}", {"text": "", "loc": ""})
            yield f"# {variant['target']} {row['name']}{' from ' + entry['loc'] if entry['loc'] else ''}"
            if plan := entry.get("plan"):
                yield f"# plan: {plan}"
            yield entry["text"]


def _write_kernels(opened: OpenedBundle, output: Path, wanted: str, target: str) -> None:
    """Write the kernels of the first variant that has such kernels as a Python module."""
    from aotc.ir.loop.parser import parse_kernel
    from aotc.kernels.numba_front.module_text import module_text
    from aotc.targets import resolve_targets
    from aotc.vmfb.errors import BundleError
    from aotc.vmfb.host.files import write_atomically
    from aotc_cli.commands.compile import check_output

    check_output(output, opened.where)
    texts = _stored_kernel_texts(opened)
    parts = [
        (v["target"], part, row["name"])
        for v in opened.manifest["variants"]
        if target in v["target"]
        for part, rows in _code_parts(v)
        for row in rows
        if wanted in row["name"]
    ]
    if not parts:
        raise BundleError(opened.where, "no variant has kernels with such names", hint="leave out -o to print them")
    first, kernels = parts[0][0], []
    for variant, part, name in parts:
        if variant == first:
            row = texts[f"{variant}/{name}"]
            (own,) = resolve_targets("cpu" if part.get("library") is not None else part["target"])
            kernels.append((parse_kernel(row["text"]), own, _kernel_comments(row)))
    write_atomically(str(output), [module_text(kernels, opened.where).encode()])


def _code_parts(variant: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the manifest entry of each target with code in a variant, with its kernels."""
    begin = 0
    for part in variant.get("parts", [variant]):
        end = begin + part.get("count", len(variant["kernels"]))
        yield part, variant["kernels"][begin:end]
        begin = end


def _kernel_comments(row: dict[str, Any]) -> str:
    """Return the lines of comments above a kernel: its source location and plan."""
    lines = [f"# from {row['loc']}"] if row["loc"] else []
    lines += [f"# plan: {row['plan']}"] if "plan" in row else []
    return "".join(f"{line}\n" for line in lines)


def _stored_kernel_texts(opened: OpenedBundle) -> dict[str, Any]:
    """Return the texts and locations of kernels that the bundle stores."""
    from aotc.vmfb.errors import BundleError

    texts = (opened.manifest.get("debug") or {}).get("kernels")
    if texts is None:
        hint = "compile again without --no-debug-info"
        raise BundleError(opened.where, "the bundle contains no kernel text", hint=hint)
    return texts


def _bytecode_lines(opened: OpenedBundle, variant: dict[str, Any]) -> Iterator[str]:
    """Yield the disassembled host programs of a variant."""
    from aotc.vmfb.assembly import disassemble
    from aotc.vmfb.manifest import signatures_and_programs

    for name, (_, program) in signatures_and_programs(opened.manifest, variant).items():
        yield f"# {variant['target']} function {name}: {program['registers']} registers"
        yield disassemble(program["code"])


def _command_buffer_lines(opened: OpenedBundle, variant: dict[str, Any]) -> Iterator[str]:
    """Yield the command buffers of a variant as text."""
    from aotc.vmfb.verify.buffers import load_command_buffers

    names = [kernel["name"] for kernel in variant["kernels"]]
    buffers = load_command_buffers(opened, variant)
    for number, (words, nodes) in enumerate(zip(buffers.words, buffers.nodes)):
        parameters = variant["command_buffers"][number]["parameters"]
        yield f"# {variant['target']} command buffer {number}: {len(words)} words, {parameters} parameters"
        yield from node_lines(nodes, names)
        yield ""


def node_lines(nodes: Sequence[Node], names: list[str], indent: str = "") -> Iterator[str]:
    """Yield the lines of command-buffer nodes; ``names`` are the names of the kernels."""
    from aotc.vmfb.abi import Case, Control, Graph, WhileNode

    inner = indent + "  "
    for node in nodes:
        match node:
            case Graph():
                yield f"{indent}graph of {len(node.commands)}{', serial' if node.serial else ''}"
                for number, command in enumerate(node.commands):
                    if isinstance(command, Control):
                        yield f"{inner}{number}: control{_after_text(command)}"
                        yield from node_lines(command.nodes, names, inner + "  ")
                    else:
                        yield f"{inner}{number}: {_command_text(command, names)}"
            case WhileNode():
                yield f"{indent}while {_place_text(node.place)}: condition"
                yield from node_lines(node.condition, names, inner)
                yield f"{indent}do"
                yield from node_lines(node.body, names, inner)
            case Case():
                for number, branch in enumerate(node.branches):
                    yield f"{indent}case {_place_text(node.place)} == {number}"
                    yield from node_lines(branch, names, inner)


def _command_text(command: Command, names: list[str]) -> str:
    """Format a command: its kernel or copy, places, items and dependencies."""
    from aotc.vmfb.abi import COPY, operand_text

    places = [_place_text(place) for place in command.places]
    dims = ", ".join(map(operand_text, command.dims))
    after = _after_text(command)
    if command.kind == COPY:
        return f"copy {places[0]} -> {places[1]}, {dims} bytes{after}"
    call = f"{names[command.kernel]}({', '.join(places)}){f' dims({dims})' if dims else ''}"
    return f"{call} x{operand_text(command.items)} by {operand_text(command.grain)}{after}"


def _after_text(command: Command | Control) -> str:
    after = f" then {', '.join(map(str, command.successors))}" if command.successors else ""
    return after + "".join(f", by tiles of {t.producer}, halo {t.halo}" for t in command.tiles)


def _place_text(place: Place) -> str:
    from aotc.vmfb.abi import operand_text

    slot, offset = place
    return f"slot{slot}" + (f"+{operand_text(offset)}" if offset else "")


def _assembly_lines(opened: OpenedBundle, variant: dict[str, Any], wanted: str) -> Iterator[str]:
    """Yield the machine code of each kernel: CPU instructions, PTX, or SASS of cubins."""
    from aotc.vmfb.devices.cuda.loaded_kernels import kernel_images
    from aotc.vmfb.devices.mixed.spaces import Spaces
    from aotc.vmfb.native_code import disassemble_machine_code, kernel_ranges

    parts = Spaces(opened, variant).parts if "parts" in variant else [variant]
    for part in parts:
        names = [kernel["name"] for kernel in part["kernels"]]
        if not any(wanted in name for name in names):
            continue
        if part.get("library") is not None:
            data = opened.verified_segment(part["library"])
            ranges = kernel_ranges(data, len(names))
            texts = (disassemble_machine_code(data, *at) if wanted in name else "" for name, at in zip(names, ranges))
        else:
            codes = kernel_images(opened, part)
            texts = (_gpu_text(code, "ptx" in part) if wanted in name else "" for name, code in zip(names, codes))
        yield from (f"# {name}\n{text}" for name, text in zip(names, texts) if wanted in name)


def _gpu_text(code: bytes | memoryview | None, is_ptx: bool) -> str:
    """Return the machine code of a GPU kernel as text."""
    from aotc.vmfb.native_code import disassemble_cubin

    if code is None:
        return "// an exchange between ranks, which NCCL or the host carries out"
    return bytes(code).rstrip(b"\0").decode() if is_ptx else disassemble_cubin(code)
