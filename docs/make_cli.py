"""Write ``docs/cli.md``: each command with its arguments, options and examples, from the command line itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HEAD = """\
# The command line

<!-- Written by `python docs/make_cli.py` from the commands themselves; a test fails when it is out of date. -->

[The quickstart](get_started/quickstart_cli.md) shows the common ones with their output.

| Exit code | Meaning |
|---|---|
| 0 | success |
| 1 | an error in the model, bundle, call or value of an option; `lint`: an op is refused; `doctor`: a part is missing |
| 2 | an unknown option, a missing argument, an option that does not fit the others or the model, or a bug in aotc |
| 3 | `check`: a result differs; `run --nan-watch`: a result has NaN or infinite elements |
| 130 | Ctrl-C |
| 141 | the reader of the output has closed its pipe |
"""


def page() -> str:
    """Return the text of the page."""
    os.environ["COLUMNS"] = "100"
    import typer.main

    from aotc_cli.main import app

    group: Any = typer.main.get_command(app)
    commands = [group.commands[name] for name in group.commands]
    rows = [f"| [`aotc {c.name}`](#aotc-{c.name}) | {_cell(c.short_help or '')} |" for c in commands]
    parts = [HEAD, "| Command | Purpose |\n|---|---|", "\n".join(rows) + "\n"]
    return "\n".join([*parts, *(_section(c) for c in commands)])


def _section(command: Any) -> str:
    """Return the section of a command: what it does, arguments, options, examples."""
    context = command.make_context(command.name, [], resilient_parsing=True)
    parts = [f"## aotc {command.name}\n", _prose(command.help or command.short_help or "")]
    usage = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    parts.append(f"```console\n$ aotc {command.name} [OPTIONS] {' '.join(usage)}".rstrip() + "\n```\n")
    for title, rows in _options(command, context).items():
        parts += [f"**{title}**\n"] if title else []
        parts.append("| Option | Meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    if command.epilog:
        lines = [line.strip() for line in command.epilog.splitlines()]
        examples = "\n".join(f"$ {line}" if line.startswith("aotc") else f"# {line}" for line in lines if line)
        parts.append(f"```console\n{examples}\n```\n")
    return "\n".join(parts)


def _options(command: Any, context: Any) -> dict[str, list[str]]:
    """Return the rows of each group of options, in the order of the help; those without a group come first."""
    from aotc_cli.shared.option_groups import Panel

    groups: dict[str, list[str]] = {title: [] for title in ("", *Panel)}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            row = f"| `{record[0].partition(' <')[0]}` | {_cell(record[1])} |"
            groups[getattr(parameter, "rich_help_panel", None) or ""].append(row)
    return {title: rows for title, rows in groups.items() if rows}


def _prose(text: str) -> str:
    """Return paragraphs of a help text, each on a line."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")).strip() + "\n"


def _cell(text: str) -> str:
    """Return a text for a cell of a table; names in angle brackets are no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page())
