"""Detection of non-finite values, and reproducers of calls that end the process, for ``aotc run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotc.vmfb.module import LoadedModule


def watched_call(module: LoadedModule, name: str, values: Sequence[Any]) -> tuple[list[Any], bool]:
    """Run a function one dispatch at a time; return its results, and True if a dispatch produces NaN or infinity."""
    from aotc.vmfb.profile.finite_watch import run_with_finite_watch

    results, found = run_with_finite_watch(module.get_function(name), values)
    for odd in found:
        print(odd, file=sys.stderr)
    if not found:
        print("no kernel computes NaN or infinity", file=sys.stderr)
    return results, bool(found)


@contextmanager
def reproducer_on_failure(
    folder: Path | None, bundle: Path, name: str, values: Sequence[Any], threads: int | None
) -> Iterator[None]:
    """Write a reproducer of a call to ``folder`` before the call, and remove it after success.

    The process may end during the call, so the reproducer must be complete beforehand.

    Raises
    ------
    CallError
        If the folder is not empty, or cannot be written.
    """
    if folder is None:
        yield
        return
    made = _written_reproducer(folder, bundle, name, values, threads)
    try:
        yield
    except BaseException:
        print(f"to repeat: sh {shlex.quote(str(folder / 'run.sh'))}", file=sys.stderr)
        raise
    for path in made:
        path.unlink(missing_ok=True)
    folder.rmdir()


def _written_reproducer(
    folder: Path, bundle: Path, name: str, values: Sequence[Any], threads: int | None
) -> list[Path]:
    """Write bundle, inputs and a shell script that repeats the call; return the files."""
    import numpy as np

    from aotc.vmfb.errors import CallError
    from aotc_cli.shared.inputs import save_array

    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CallError("", "the folder of --reproducer is not empty", folder, "an empty one, or none yet")
        made.append(folder / "model.vmfb")
        made[0].write_bytes(bundle.read_bytes())
        for number, x in enumerate(values):
            made.append(folder / f"input{number}.npy")
            save_array(str(made[-1]), np.asarray(x), False)
        words = ["aotc", "run", "model.vmfb", f"--function={name}", *(f"--input=@{p.name}" for p in made[1:])]
        words += [f"--threads={threads}"] if threads else []
        made.append(folder / "run.sh")
        made[-1].write_text(f'cd "$(dirname "$0")" && {shlex.join(words)}\n')
    except OSError as error:
        raise CallError("", f"cannot write what repeats the call: {error.strerror or error}", folder) from error
    return made
