"""The ``aotc`` command: its table of subcommands, and how failures become exit codes.

1: the model, the bundle or the call is at fault (a message, no traceback). 2: aotc is,
or the command line cannot be read. A command imports what it needs when it runs, so that
``aotc run`` starts without a compiler.
"""

from __future__ import annotations

import sys

import typer

from aotc import __version__
from aotc_cli import bench, check, compile, doctor, dump, inspect, lint, run, targets, verify

_EPILOG = "Start with: aotc doctor; aotc compile model.mlir -o model.vmfb; aotc run model.vmfb --random"
_COMPILER_MODULES = frozenset({"jax", "jaxlib", "numba", "llvmlite", "ziglang", "safetensors"})
_CUDA_MODULES = frozenset({"cuda", "numba_cuda", "nvidia"})

app = typer.Typer(
    help="Compile JAX and StableHLO models ahead of time to one file, and run it without JAX.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for module in (compile, run, lint, check, inspect, dump, bench, verify, targets, doctor):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog=module.EXAMPLES, short_help=module.SUMMARY)(module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aotc {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _explain(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code of a failure, or None if it is an unknown one."""
    from aotc.diagnostics import CompileError, InternalError
    from aotc.vmfb.errors import BundleError, VmError

    match error:
        case CompileError() | BundleError() | VmError():
            return str(error), 1
        case InternalError():
            return str(error), 2
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] in _COMPILER_MODULES:
            return f"error: this needs {error.name}, which is not installed\n  try: pip install 'aotc[compile]'", 1
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] in _CUDA_MODULES:
            return f"error: this needs {error.name}, which is not installed\n  try: pip install 'aotc[cuda-compile]'", 1
        case OSError() if error.filename:
            return f"{error.filename}: error: {error.strerror}", 1
        case MemoryError():
            return "error: out of memory\n  try: a machine with more of it, or a smaller batch", 1
    return None


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        found = _explain(error)
        if found is None:
            raise
        print(found[0], file=sys.stderr)
        sys.exit(found[1])


if __name__ == "__main__":
    main()
