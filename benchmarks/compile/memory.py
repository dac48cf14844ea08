"""Peak memory of compiling one large constant.

In multiples of the constant's size. Each form of the model is compiled in its own process; the memory of that process
after all imports and a small compilation is subtracted. ``before`` is the part of the peak before aotc starts: the
input itself, and for a function JAX's export.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import children, options, report, timing

SIDE = 4096  # columns of the constant
FORMS = ("function", "bytecode", "text", "file")


def peak() -> int:
    """Return the peak memory of this program in bytes (``ru_maxrss`` would include its parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def model(rows: int, product: bool) -> tuple[Any, Any]:
    """Return a function with a constant of ``rows`` x 4096 numbers, and an example argument."""
    import jax
    import numpy as np

    w = np.random.default_rng(0).standard_normal((rows, SIDE), dtype=np.float32)
    if product:
        return jax.jit(lambda x: x @ w), np.ones((8, rows), np.float32)
    return jax.jit(lambda x: w + x), np.ones(SIDE, np.float32)


def hexadecimal_module(rows: int) -> str:
    """Return a module that adds its argument to a constant, whose elements are written in hexadecimal."""
    import numpy as np

    w = np.random.default_rng(0).standard_normal((rows, SIDE), dtype=np.float32)
    t = f"tensor<{rows}x{SIDE}xf32>"
    return f"""func.func @main(%x: {t}) -> {t} {{
      %w = stablehlo.constant dense<"0x{w.tobytes().hex().upper()}"> : {t}
      %y = stablehlo.add %w, %x : {t}
      return %y : {t}
    }}"""


def make_input(form: str, rows: int, product: bool) -> Any:
    """Return the input of ``aotc.compile`` for a form of the model, such as text, a file or a function."""
    import jax
    import jax.export

    if form == "text":
        return hexadecimal_module(rows).encode()
    function, example = model(rows, product)
    if form == "function":
        return function, example
    code = jax.export.export(function)(example).mlir_module_serialized
    if form == "bytecode":
        return code
    path = Path(tempfile.mkdtemp()) / "model.mlirbc"
    path.write_bytes(code)
    return path


def measure(form: str, rows: int, product: bool) -> tuple[float, float, float]:
    """Compile one form; return both peaks in multiples of the constant's size, and the seconds of the compilation."""
    import numpy as np

    import aotc

    os.environ["AOTC_CACHE_DIR"] = tempfile.mkdtemp()
    aotc.compile(*model(4, product))
    # the input is made by another process, so that what making it took is not counted
    rest: list[Any] = []
    if form == "function":
        begin = resident_bytes()
        source, *rest = make_input(form, rows, product)
    else:
        path = Path(os.environ["AOTC_CACHE_DIR"]) / "input"
        code = f"from benchmarks.compile import memory; memory.save({form!r}, {rows}, {product}, {str(path)!r})"
        subprocess.run([sys.executable, "-c", code], check=True, env=children.environment())
        begin = resident_bytes()
        source = path if form == "file" else path.read_bytes()
    size = 4 * rows * SIDE
    if form == "function":
        import jax.export

        jax.export.export(source)(*rest)
    before = peak() - begin
    start = time.perf_counter()
    data = aotc.compile(source, *rest)
    seconds = time.perf_counter() - start
    assert len(data) >= size
    assert np.frombuffer(data, np.uint8, 4).tobytes()
    return before / size, (peak() - begin) / size, seconds


def save(form: str, rows: int, product: bool, path: str) -> None:
    """Write the input of ``form`` to a file."""
    made = make_input("bytecode" if form == "file" else form, rows, product)
    Path(path).write_bytes(made)


def run(
    only: options.Only = "",
    mb: Annotated[int, typer.Option(help="Size of the constant.")] = 400,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print a row for each form: a sum with the constant, and a matmul with it."""
    mb = 1 if timing.SMOKE else mb
    rows = (mb << 20) // (4 * SIDE)
    if one:
        form, _, product = one.partition(" ")
        print(json.dumps(measure(form, rows, bool(product))))
        return
    table = report.Table(f"form, {mb} MB", report.Column("before"), report.Column("peak"), report.Column("seconds"))
    names = [f"{form}{kind}" for kind in ("", " matmul") for form in FORMS if form + kind != "text matmul"]
    for name in options.select(names, only, smallest="bytecode"):
        printed = children.output(children.suite("compile", "memory", "--one", name, "--mb", mb))
        table.add(name, *json.loads(printed.splitlines()[-1]))
