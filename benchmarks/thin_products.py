"""Products that memory bounds beside XLA: ``python benchmarks/thin_products.py --threads 1 --only row``.

One to eight rows times a matrix, a matrix times one to eight columns, batches of these; all operands are arguments.
Both engines are asked in turn, round by round, and with them a loop that reads as many bytes as the matrix has, by as
many threads: the last column is the share of its speed that aotc has. At one thread the time is the processor's, which
other work on the machine changes little; at more it is the wall's.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
Call = Callable[[], Any]
Shape = tuple[int, ...]
SIZES = ((256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192))
OTHERS = ((65536, 128), (16384, 512), (512, 16384), (768, 50257), (1000, 1003), (4099, 4097), (11008, 4096))
LANES = "<16 x float>"


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Shape, ...], str]]:
    """Yield names, functions, shapes of arguments, the matrix first, and dtypes."""
    import jax

    def row(w: Any, x: Any) -> Any:
        return x @ w

    def column(w: Any, x: Any) -> Any:
        return w @ x

    def dense(w: Any, x: Any, b: Any) -> Any:
        return jax.nn.gelu(x @ w + b)

    def dense_column(w: Any, x: Any, b: Any) -> Any:
        return jax.nn.gelu(w @ x + b[:, None])

    for k, n in (*SIZES, *OTHERS):
        yield f"row {k} x {n}", row, ((k, n), (1, k)), "float32"
        yield f"column {k} x {n}", column, ((k, n), (n, 1)), "float32"
    for few in (2, 3, 4, 5, 8):
        for k, n in ((1024, 1024), (4096, 4096), (4099, 4097)):
            yield f"{few} rows {k} x {n}", row, ((k, n), (few, k)), "float32"
            yield f"{few} columns {k} x {n}", column, ((k, n), (n, few)), "float32"
    for batch, k, n in ((8, 1024, 1024), (64, 256, 256), (1000, 64, 64), (12, 64, 2048), (12, 2048, 64)):
        yield f"batch {batch} of row {k} x {n}", row, ((batch, k, n), (batch, 1, k)), "float32"
        yield f"batch {batch} of column {k} x {n}", column, ((batch, k, n), (batch, n, 1)), "float32"
        yield f"batch {batch} of 4 columns {k} x {n}", column, ((batch, k, n), (batch, n, 4)), "float32"
    for few in (1, 4, 8):
        yield f"{few} rows, bias, gelu 4096 x 4096", dense, ((4096, 4096), (few, 4096), (4096,)), "float32"
        yield f"{few} columns, bias, gelu 4096 x 4096", dense_column, ((4096, 4096), (4096, few), (4096,)), "float32"
        yield f"{few} rows turned 4096 x 4096", lambda w, x: x.T @ w, ((4096, 4096), (4096, few)), "float32"
        yield f"{few} columns turned 4096 x 4096", lambda w, x: w @ x.T, ((4096, 4096), (few, 4096)), "float32"
        for dtype in ("bfloat16", "float16"):
            yield f"{few} rows {dtype} 4096 x 4096", row, ((4096, 4096), (few, 4096)), dtype
            yield f"{few} columns {dtype} 4096 x 4096", column, ((4096, 4096), (4096, few)), dtype


def reader() -> Callable[[int, int], None]:
    """Return a function that reads so many bytes at an address, 512 a turn, as fast as they come."""
    import ctypes

    import llvmlite.binding as llvm

    from aotc.kernels.numba_aot import target_machine
    from aotc.targets import resolve

    sums = [f"%x{i} = phi {LANES} [zeroinitializer, %entry], [%y{i}, %loop]" for i in range(8)]
    for i in range(8):
        sums += [f"%p{i} = getelementptr i8, ptr %now, i64 {64 * i}", f"%v{i} = load {LANES}, ptr %p{i}, align 4"]
        sums += [f"%y{i} = fadd {LANES} %x{i}, %v{i}"]
    kept = [f"%q{i} = getelementptr i8, ptr %o, i64 {64 * i}" for i in range(8)]
    kept += [f"store {LANES} %y{i}, ptr %q{i}, align 4" for i in range(8)]
    text = "\n".join([
        "define void @run(ptr %p, ptr %o, i64 %turns) {", "entry:", "br label %loop", "loop:",
        "%n = phi i64 [0, %entry], [%m, %loop]", *sums[:8], "%at = mul i64 %n, 512",
        "%now = getelementptr i8, ptr %p, i64 %at", *sums[8:], "%m = add i64 %n, 1", "%c = icmp slt i64 %m, %turns",
        "br i1 %c, label %loop, label %end", "end:", *kept, "ret void", "}",
    ])  # fmt: skip
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target_machine(resolve("cpu")[0]))
    engine.finalize_object()
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("run"))

    def read(address: int, size: int) -> None:
        room = (ctypes.c_char * 512)()
        run(address, ctypes.addressof(room), size // 512)

    read.engine = engine  # type: ignore[attr-defined]  # which holds the code
    return read


def operands(shapes: tuple[Shape, ...], dtype: str) -> list[Any]:
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng(0)
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    return [(random.standard_normal(shape, "float32") / 4).astype(kind) for shape in shapes]


def measure(function: Any, arguments: list[Any], read: Any, given: argparse.Namespace) -> tuple[float, ...]:
    """Return the median times of ours, XLA's and the loop's, and the median ratio of ours to XLA's."""
    import jax
    import numpy as np

    import aotc
    from benchmarks.behind import sample

    jitted = jax.jit(function)
    there = jax.device_put(arguments)
    module = aotc.load(aotc.compile(jitted, *arguments), threads=given.threads)
    want = np.asarray(jitted(*there)).astype("float64")
    got = module.invoke("main", *arguments)[0].astype("float64")
    largest = float(np.abs(want).max(initial=1e-6))
    np.testing.assert_allclose(got, want, rtol=0, atol=(1e-4 if arguments[0].dtype == "float32" else 2e-2) * largest)
    matrix = arguments[0]
    part = matrix.nbytes // given.threads // 512 * 512
    starts = [matrix.ctypes.data + i * part for i in range(given.threads)]
    pool = ThreadPoolExecutor(given.threads)
    reads: Call = lambda: read(starts[0], part)
    if given.threads > 1:
        reads = lambda: list(pool.map(lambda at: read(at, part), starts))
    calls = [lambda: module.invoke("main", *arguments), lambda: jax.block_until_ready(jitted(*there)), reads]
    clock = time.process_time if given.threads == 1 else time.perf_counter
    rounds = [[sample(call, clock, given.seconds) for call in calls] for _ in range(given.rounds + 1)][1:]
    ours, theirs, alone = (statistics.median(times) for times in zip(*rounds))
    return ours, theirs, alone, statistics.median(a / b for a, b, _ in rounds)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases in whose name this pattern is found")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.03, help="per engine and round")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if given.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    read = reader()
    print(f"| product, {given.threads} threads | aotc us | XLA us | aotc / XLA | GB/s | share of reading |")
    print("|---|---|---|---|---|---|")
    for name, function, shapes, dtype in cases():
        if not re.search(given.only, name):
            continue
        arguments = operands(shapes, dtype)
        ours, theirs, alone, ratio = measure(function, arguments, read, given)
        speed = arguments[0].nbytes / ours * 1e-9
        row = f"| {name} | {1e6 * ours:.1f} | {1e6 * theirs:.1f} | {ratio:.2f} | {speed:.1f} | {alone / ours:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
