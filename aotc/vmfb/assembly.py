"""Assembler and disassembler of host programs; ``aotc dump`` prints this text.

One instruction a line, ``name operand, operand``. A ``number:`` in front is optional and checked; ``#`` starts a
comment.
"""

from __future__ import annotations

import json
import re
from typing import Any

from aotc.vmfb.isa import BY_NAME, ISA, KINDS, Dt, Ins, Text

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,\s]+)\s*(?:,|$)')


def disassemble(code: list[list[Any]]) -> str:
    """Convert the instructions of a host program to text, one line each."""
    lines = []
    for number, (opcode, *operands) in enumerate(code):
        row = ISA[opcode]
        shown = ", ".join(_operand_text(kind, x) for kind, x in zip(row.kinds, operands, strict=True))
        lines.append(f"{number}: {row.name} {shown}".rstrip())
    return "\n".join(lines) + "\n"


def _operand_text(kind: type, value: Any) -> str:
    if kind is Text:
        return json.dumps(value)
    if kind is Ins:
        return "[" + ", ".join(f"r{r}" for r in value) + "]"
    return f"{kind.prefix}{value}"  # type: ignore[attr-defined]


def assemble(text: str) -> list[list[Any]]:
    """Parse the text of a host program to instructions as in a bundle.

    Raises
    ------
    ValueError
        Its message has the line and the problem.
    """
    code: list[list[Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        body = _without_comment(line).strip()
        if not body:
            continue
        try:
            code.append(_read_assembly_line(body, len(code)))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}: {line.strip()}") from None
    return code


def _without_comment(line: str) -> str:
    """Remove a comment that starts with ``#``, except inside of a quoted message."""
    quoted = False
    for i, character in enumerate(line):
        if character == '"' and (i == 0 or line[i - 1] != "\\"):
            quoted = not quoted
        elif character == "#" and not quoted:
            return line[:i]
    return line


def _read_assembly_line(body: str, position: int) -> list[Any]:
    """Parse one line, without its comment, to an encoded instruction; ``position`` is the number of the instruction."""
    label, colon, rest = body.partition(":")
    if colon and label.isdigit():
        if int(label) != position:
            raise ValueError(f"this is instruction {position}")
        body = rest.strip()
    name, _, rest = body.partition(" ")
    row = BY_NAME.get(name)
    if row is None:
        raise ValueError(f"no instruction {name!r}")
    operands = _split_operands(rest)
    if len(operands) != len(row.kinds):
        raise ValueError(f"{name} has {len(row.kinds)} operands, not {len(operands)}")
    return [row.opcode, *(_parse_operand(kind, x) for kind, x in zip(row.kinds, operands, strict=True))]


def _split_operands(text: str) -> list[str]:
    """Split operands at the commas outside of brackets and quotes."""
    found, end = [], 0
    text = text.strip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise ValueError("cannot read the operands")
        found.append(match.group(1))
        end = match.end()
    return found


def _parse_operand(kind: type, text: str) -> Any:
    """Parse one operand of the kind (register, integer, text, ...) that its instruction expects."""
    if kind is Text:
        return json.loads(text)
    if kind is Ins:
        if not text.startswith("["):
            raise ValueError(f"expected a list of registers, found {text}")
        return [_parse_number("r", part) for part in text[1:-1].split(",") if part.strip()]
    prefix: str = kind.prefix  # type: ignore[attr-defined]
    if kind is Dt:
        if not text.startswith(prefix):
            raise ValueError(f"expected a dtype such as %f32, found {text}")
        return text[1:]
    return _parse_number(prefix, text)


def _parse_number(prefix: str, text: str) -> int:
    text = text.strip()
    digits = text.removeprefix(prefix)
    if not text.startswith(prefix) or not re.fullmatch(r"-?[0-9]+", digits):
        raise ValueError(f"expected {prefix}N, found {text}")
    return int(digits)


def bytecode_document() -> str:
    """Return the text of ``docs/bytecode.md``, the generated reference of the instruction set."""
    lines = [
        "# Bytecode of the host program",
        "",
        "Generated from the table in `aotc/vmfb/isa.py` by `python -m aotc.vmfb.assembly`; do not edit.",
        "",
        "A function's program is a list of instructions `[opcode, operand, ...]` over registers that hold 64-bit",
        "integers. It does shape arithmetic, allocates, and submits command buffers; it never touches an element.",
        "Slots number the pointer table of a submission: arguments, results, the arena, the constants.",
        "All operands are checked once, when the bundle is loaded.",
        "",
        "| opcode | text | meaning |",
        "|---|---|---|",
    ]
    for row in sorted(ISA.values(), key=lambda row: row.opcode):
        text = " ".join([row.name, ", ".join(row.names)]).rstrip()
        lines.append(f"| `{row.opcode:#04x}` | `{text}` | {row.run.__doc__} |")
    lines += ["", "| operand | as text | is |", "|---|---|---|"]
    for kind in KINDS:
        lines.append(f"| {kind.__name__} | `{_operand_example(kind)}` | {kind.__doc__} |")
    return "\n".join(lines) + "\n"


def _operand_example(kind: type) -> str:
    prefix: str = kind.prefix  # type: ignore[attr-defined]
    return {'"': '"n is {0}"', "[": "[r0, r1]", "%": "%i32"}.get(prefix, f"{prefix}3")


if __name__ == "__main__":
    print(bytecode_document(), end="")
