"""Command lines and calls of the API that nobody meant: an error of ours and its exit code, never a traceback.

Half of the cases are command lines of ``aotc``, run in the process; half load a bundle and call it.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.errors import BundleError, CallError
from aotc_cli.main import main

PATIENCE = 60.0  # seconds: commands compile
GOLDEN = Path(__file__).parents[1] / "golden_bundles"
NAMES = ("add", "mlp", "iota", "sort", "update")
MODEL = """
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %y = stablehlo.add %a, %a : tensor<2xf32>
  return %y : tensor<2xf32>
}
"""
WORDS = (
    "4xf32=1,2,3,4", "4xf32", "3x8xf32=0.5", "f32=3", "i64=6", "3", "-1", "1e400", "nan", "2x2xi32=[1 2][3 4]",
    "0x3xf32", "4xf32=@nothing.npy", "@nothing.npz", "@", "=", "", "x", "4x", "xf32", "4xq7", "4xf32=1,2", "4xf32=a",
    "9999999xf32=1,2", "-4xf32", "4xf32=[[1]", "4xbf16=1", "2xc64=(1,2),(3,4)", "2xi4=7", "1e3xf32", "\0", "é", " ",
    "../x", "/dev/null", "/",
)  # fmt: skip
OPTIONS = (
    "--input=", "--input=", "--function=", "--random", "--output=", "--device=", "--threads=", "--dim=", "--json",
    "--help", "--target=", "--weights=", "--jobs=", "--bisect=", "--specialize=", "--custom-calls=", "--oracle=",
    "--trace-dispatch-tensors=",
)  # fmt: skip
COMMANDS = ("run", "run", "run", "inspect", "dump", "verify", "targets", "lint", "bench", "compile", "what", "")
ODD: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 1.5, True, "", "main", "cpu", "cuda", "cuda:9", "cpu:x", b"", b"AOTCVMFB", [], {}, (), [None],
    ["cpu"], {"a": 1}, object(), 1 << 70, float("nan"), 1j, np.float32(2), np.zeros(0), np.zeros((4,), "f4"),
    np.ones((2, 2)), np.array("text"), np.array([object()]), np.arange(8, dtype="f4")[::2], np.zeros(4, ">f4"),
    memoryview(b"12345678"), lambda *a: a, "nothing.vmfb", "\0", "/", "/dev/null",
)  # fmt: skip


@cache
def folder() -> Path:
    """A folder for what commands write."""
    return Path(tempfile.mkdtemp(prefix="aotc-fuzz-"))


def case(number: int) -> str:
    """Run one command line, or call the API once."""
    rng = random.Random(number)
    return command_line(rng) if number % 2 else call(rng)


def command_line(rng: random.Random) -> str:
    """Run a command line; exit codes are those that the pages name."""
    model = folder() / "model.mlir"
    model.write_text(MODEL if rng.random() < 0.6 else MODEL.replace(rng.choice(MODEL), rng.choice("%(<x"), 1))
    files = [str(GOLDEN / f"{rng.choice(NAMES)}.vmfb"), str(model), rng.choice(WORDS)]
    words = [rng.choice(COMMANDS), *rng.choices(files, (6, 3, 1), k=rng.choice((0, 1, 1, 1, 2)))]
    for _ in range(rng.randrange(4)):
        option = rng.choice(OPTIONS)
        words.append(option + rng.choice(WORDS) if option.endswith("=") else option)
    if words[0] == "compile":
        words.append(f"-o={folder() / 'out.vmfb'}")
    elif words[0] == "bench":
        words.append("--runs=1")
    sys.argv = ["aotc", *(word.replace("\0", "?") for word in words)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code or 0
    if code not in (0, 1, 2, 3) or "internal error" in err.getvalue() or "Traceback" in err.getvalue():
        raise AssertionError(f"{sys.argv} exits with {code}: {err.getvalue()[-1500:]}")
    return f"exit {code}"


def call(rng: random.Random) -> str:
    """Load, look at and call with odd values."""
    try:
        path = GOLDEN / f"{rng.choice(NAMES)}.vmfb"
        source = rng.choice((path, path, path, path.read_bytes(), rng.choice(ODD)))
        more = {key: rng.choice(ODD) for key in ("devices", "threads", "custom_calls", "verify") if rng.random() < 0.12}
        module = aotc.load(source, **more)
        repr(module)
        with np.load(path.with_suffix(".npz")) as held:
            arguments = [held[name] for name in sorted(held.files) if name.startswith("a")]
        for n in range(len(arguments)):
            if rng.random() < 0.4:
                arguments[n] = rng.choice(ODD)
        arguments += rng.choices(ODD, k=rng.choice((0, 0, 0, 1)))
        more = {key: rng.choice(ODD) for key in ("out", "donate") if rng.random() < 0.2}
        if rng.random() < 0.1:
            more["trace"] = folder() / "trace"
        if rng.random() < 0.3:
            module(*arguments)
        else:
            module.invoke("main" if rng.random() < 0.9 else rng.choice(ODD), *arguments, **more)
    except (BundleError, CallError, CompileError) as error:
        return type(error).__name__
    return "runs"
