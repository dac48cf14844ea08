"""What becomes of a fault of the compiler: an error that names the stage and a folder."""

from __future__ import annotations

import traceback
from pathlib import Path
from tempfile import mkdtemp

from aotc.diagnostics import InternalError
from aotc.ir.tensor_ir import Module
from aotc.ir.tensor_text import print_module
from aotc.options import Options


def internal_error(error: Exception, where: str, module: Module, options: Options) -> InternalError:
    """Return what to raise for ``error``; the module that ``where`` was given goes to a folder with the traceback."""
    folder = Path(options.dump_ir or mkdtemp(prefix="aotc-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "before.txt").write_text(print_module(module))
    except Exception:
        (folder / "before.txt").write_text("the IR could not be printed")
    (folder / "traceback.txt").write_text(traceback.format_exc())
    return InternalError(
        f"{where}: {type(error).__name__}: {error}", str(folder), "aotc compile with --verify-each --dump-ir DIR"
    )
