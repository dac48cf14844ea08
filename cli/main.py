"""The ``aotc`` command: its table of subcommands, and the exit codes of failures.

1: an error in the model, the bundle, the call or an option's value (a message, no traceback). 2: a bug in aotc, or an
invalid command line. 3: a result differs or has NaN elements. A command imports its dependencies when it
runs, so ``aotc run`` starts without the compiler.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from io import TextIOWrapper
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from aotc import __version__
from aotc_cli.shared.interrupt import INTERRUPTED, end_interrupted, resend_dropped_interrupts
from aotc_cli.shared.iree_options import IreeOptionCommand
from aotc_cli.shared.option_groups import Panel

_NAMES = (
    "compile", "run", "serve", "upgrade", "update-weights", "shard-weights", "lint", "explain", "report", "diff",
    "check", "inspect", "dump", "bench", "profile", "tune", "verify", "sign", "targets", "doctor",
)  # fmt: skip
"""The subcommands in the order of the help; each has a module of its name in ``aotc_cli.commands``."""

_EPILOG = "Start with: aotc doctor; aotc compile model.mlir -o model.vmfb; aotc run model.vmfb --random"
_STYLE: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


class _Command(IreeOptionCommand):
    """A typer command whose help lists options in groups, and examples as lines to copy."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:
        """Return the words of the usage line, without the braces that typer puts around arguments."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the arguments, the options without a group, then the groups in the order of their table."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *Panel)}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                record = (re.sub(" <.*>$", "", record[0]), record[1])  # the type of an argument, which its name implies
                groups[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the examples: captions end with a colon and begin a paragraph, commands are indented."""
        with formatter.section("Examples"):
            for line in filter(None, (self.epilog or "").splitlines()):
                if line.endswith(":"):
                    formatter.write_paragraph()
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")
                    continue
                indent = " " * (formatter.current_indent + 2)
                parts = wrap(line, formatter.width - len(indent) - 2, break_on_hyphens=False, break_long_words=False)
                formatter.write(f" \\\n{indent}  ".join([indent + parts[0], *parts[1:]]) + "\n")


class _Subcommands(Mapping[str, Any]):
    """Lazy mapping of subcommands by name: a lookup imports the module, so a process pays for one command."""

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        module = import_module(f"aotc_cli.commands.{name.replace('-', '_')}")
        alone = typer.Typer(add_completion=False, **_STYLE)
        alone.command(name, cls=_Command, epilog=module.EXAMPLES, short_help=module.SUMMARY)(module.command)
        return get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


class _AotcCommand(TyperGroup):
    """The ``aotc`` command with its subcommands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Subcommands()})


app = typer.Typer(
    cls=_AotcCommand,
    help="Compile JAX and StableHLO models ahead of time to one file, and run it without JAX.",
    epilog=_EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_STYLE,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aotc {__version__}")
        raise typer.Exit


@app.callback()
def _top_level_options(
    version: bool = typer.Option(
        False, "-V", "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def _failure_message(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of a failure."""
    from aotc.diagnostics import CompileError, InternalError
    from aotc.guard import internal_error, machine_error
    from aotc.options import Options
    from aotc.vmfb.errors import BundleError, CallError

    if isinstance(error, (CompileError, BundleError, CallError)):
        return _with_error_prefix(str(error)), 1
    if isinstance(error, InternalError):
        return str(error), 2
    machine = machine_error(error)
    if machine is not None:
        return str(machine), 1
    command = shlex.join(["aotc", *sys.argv[1:]])
    return str(internal_error(error, f"in {command}", Options(), repeat=command)), 2


def _with_error_prefix(message: str) -> str:
    """Prefix a message with ``error:`` unless its first line contains that already."""
    return message if "error: " in message.partition("\n")[0] else f"error: {message}"


def _coloured_labels(message: str) -> str:
    """Colour the labels of an error message if stderr is a terminal and colours are allowed."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return message
    message = re.sub(r"\berror:", "\033[1;31merror:\033[0m", message, count=1)
    return re.sub(r"^( +)(found|expected|try):", "\\1\033[36m\\2:\033[0m", message, flags=re.MULTILINE)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning of aotc as a sentence, and other warnings as Python does."""
    ours = category.__module__.partition(".")[0] == "aotc"
    text = f"warning: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed; else the next opened file would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def main() -> None:
    """Run the command line and exit."""
    warnings.showwarning = _show_warning
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may contain arbitrary bytes
    try:
        with resend_dropped_interrupts():
            app()
    except KeyboardInterrupt:
        end_interrupted()
    except SystemExit as end:  # typer converts an interrupt to this silently
        if end.code == INTERRUPTED:
            end_interrupted()
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        message, code = _failure_message(error)
        print(_coloured_labels(message), file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
