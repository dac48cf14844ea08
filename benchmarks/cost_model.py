"""How well the cost model predicts: ``python benchmarks/cost_model.py``.

Each case of a corpus is compiled, and each of its kernels is run alone on one core. Printed are the rank correlation of
predicted and measured times (Spearman), over all kernels and by group, and where they are furthest apart.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

SIZES = (16, 300, 4_096, 50_000, 1_000_000, 4_000_000)
WANTED = 0.8


@dataclass(frozen=True, slots=True)
class Case:
    """A function and the shapes of its arguments, f32 unless it says otherwise."""

    group: str
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel: what the model says and what the clock says, in nanoseconds."""

    case: Case
    kernel: str
    predicted: float
    measured: float
    bound: str


def elementwise() -> Iterator[Case]:
    import jax.numpy as jnp

    functions = {
        "add": lambda x: x + 1, "exp": jnp.exp, "sin": jnp.sin, "tanh": jnp.tanh, "div": lambda x: 1 / (x + 3),
        "mixed": lambda x: x * x * 3 - x + jnp.sqrt(jnp.abs(x)), "convert": lambda x: x.astype("float16"),
    }  # fmt: skip
    for name, function in functions.items():
        for n in SIZES:
            yield Case("elementwise", f"{name} [{n}]", function, ((n,),))
    for n in SIZES[:5]:
        yield Case("elementwise", f"add i8 [{n}]", lambda x: x + x, ((n,),), "int8")
        yield Case("elementwise", f"log f64 [{n}]", lambda x: jnp.log(x + 9), ((n,),), "float64")


def movement() -> Iterator[Case]:
    import jax.numpy as jnp

    for n in (8, 64, 512, 2000):
        yield Case("movement", f"transpose [{n}, {n}]", lambda x: x.T + 1, ((n, n),))
        yield Case("movement", f"broadcast [{n}] to [{n}, {n}]", lambda x, y: x[None] * y[:, None], ((n,), (n,)))
        yield Case("movement", f"pad [{n}, {n}]", lambda x: jnp.pad(x, 3), ((n, n),))
        yield Case("movement", f"strided slice [{n}, {n}]", lambda x: x[::2, ::2] * 2, ((n, n),))
        yield Case("movement", f"concatenate [{n}, {n}]", lambda x, y: jnp.concatenate([x, y], 1), ((n, n), (n, n)))


def reductions() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    for rows, columns in ((4, 4), (300, 16), (16, 3_000), (1_000, 1_000), (3, 300_000), (100_000, 30)):
        shape = f"[{rows}, {columns}]"
        for axis in (0, 1):
            yield Case("reductions", f"sum {axis} {shape}", partial(jnp.sum, axis=axis), ((rows, columns),))
        yield Case("reductions", f"max {shape}", partial(jnp.max, axis=1), ((rows, columns),))
        yield Case("reductions", f"argmax {shape}", partial(jnp.argmax, axis=1), ((rows, columns),))
        yield Case("reductions", f"softmax {shape}", partial(jax.nn.softmax, axis=1), ((rows, columns),))
    for n in SIZES:
        yield Case("reductions", f"sum [{n}]", jnp.sum, ((n,),))


def products() -> Iterator[Case]:
    import jax.numpy as jnp

    for m, k, n in ((4, 4, 4), (16, 16, 16), (1, 512, 512), (64, 64, 64), (128, 768, 256), (512, 512, 512)):
        yield Case("products", f"matmul {m} {k} {n}", jnp.matmul, ((m, k), (k, n)))
        yield Case("products", f"matmul i32 {m} {k} {n}", jnp.matmul, ((m, k), (k, n)), "int32")
        yield Case("products", f"matmul by rows {m} {k} {n}", lambda x, y: x @ y.T, ((m, k), (n, k)))
    for b, m in ((4, 8), (8, 64), (64, 64)):
        yield Case("products", f"batched {b} {m}", jnp.matmul, ((b, m, m), (b, m, m)))


def convolutions() -> Iterator[Case]:
    import jax

    def conv(x: Any, w: Any, groups: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, numbers, groups)

    for size, channels, features in ((6, 4, 8), (14, 16, 32), (28, 32, 64), (56, 64, 64)):
        x = (1, size, size, channels)
        yield Case("convolutions", f"3x3 {size} {channels} {features}", conv, (x, (3, 3, channels, features)))
        yield Case("convolutions", f"1x1 {size} {channels} {features}", conv, (x, (1, 1, channels, features)))
        depthwise = partial(conv, groups=channels)
        yield Case("convolutions", f"depthwise {size} {channels}", depthwise, (x, (3, 3, 1, channels)))


def sorts() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    for n in (16, 1_000, 30_000, 1_000_000):
        yield Case("sorts", f"sort [{n}]", jnp.sort, ((n,),))
        yield Case("sorts", f"argsort [{n}]", jnp.argsort, ((n,),))
        yield Case("sorts", f"top_k 8 of [{n}]", lambda x: jax.lax.top_k(x, 8), ((n,),))
    yield Case("sorts", "sort rows [300, 300]", partial(jnp.sort, axis=1), ((300, 300),))
    yield Case("sorts", "sort columns [300, 300]", partial(jnp.sort, axis=0), ((300, 300),))


def indexing() -> Iterator[Case]:
    import jax.numpy as jnp

    def take(x: Any) -> Any:
        return x[(jnp.arange(x.shape[0]) * 7919 + x[:, 0].astype("int32")) % x.shape[0]]

    def add(x: Any) -> Any:
        return jnp.zeros_like(x).at[(jnp.arange(x.shape[0]) * 7919 + x[:, 0].astype("int32")) % x.shape[0]].add(x)

    for rows, width in ((8, 1), (1_000, 1), (1_000, 64), (100_000, 1), (30_000, 64), (1_000_000, 1)):
        yield Case("indexing", f"gather {rows} rows of {width}", take, ((rows, width),))
        yield Case("indexing", f"scatter-add {rows} rows of {width}", add, ((rows, width),))


def scans() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    for n in SIZES[:5]:
        yield Case("scans", f"cumsum [{n}]", jnp.cumsum, ((n,),))
    for axis in (0, 1):
        yield Case("scans", f"cumsum {axis} [1000, 1000]", partial(jnp.cumsum, axis=axis), ((1000, 1000),))
        yield Case("scans", f"cummax {axis} [64, 100]", partial(jax.lax.cummax, axis=axis), ((64, 100),))


def windows() -> Iterator[Case]:
    import jax

    def pool(x: Any, size: int) -> Any:
        return jax.lax.reduce_window(x, -float("inf"), jax.lax.max, (1, size, size, 1), (1, 2, 2, 1), "SAME")

    def rows(x: Any) -> Any:
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (5,), (1,), "SAME")

    for size, channels in ((4, 3), (28, 16), (112, 64)):
        for window in (2, 3):
            yield Case(
                "windows", f"pool {window} {size} {channels}", partial(pool, size=window), ((1, size, size, channels),)
            )
    for n in SIZES[:5]:
        yield Case("windows", f"moving sum [{n}]", rows, ((n,),))


GROUPS = (elementwise, movement, reductions, products, convolutions, sorts, indexing, scans, windows)


def measure(case: Case, repeat: int) -> Iterator[Row]:
    """Yield a row for each kernel of a case that is run."""
    import jax
    import numpy as np

    import aotc
    from aotc.ir.loop.parser import parse_kernel
    from aotc.lowering.cost_model.predict import predict
    from aotc.targets import host

    rng = np.random.default_rng(0)
    with jax.enable_x64(case.dtype == "float64"):
        arguments = [(rng.standard_normal(s) * 3).astype(case.dtype) for s in case.shapes]
        bundle = aotc.compile(case.function, *arguments, source=False)
    module = aotc.load(bundle, threads=1)
    texts = {name: text for name, text, *_ in module._executable.kernel_texts() or ()}
    for row in module.profile("main", *arguments, repeat=repeat)["kernels"]:
        said = predict(parse_kernel(texts[row["name"]]), host(), row["sizes"])
        yield Row(case, row["name"], said.ns, row["ns"]["cpu"], said.bound)


def ranks(values: list[float]) -> list[float]:
    """Return the place of each value in order, equal ones sharing theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for at in order[begin:end]:
            found[at] = (begin + end - 1) / 2
        begin = end
    return found


def spearman(rows: list[Row]) -> float:
    """Return the correlation of the ranks of predicted and measured times."""
    a, b = (ranks([getattr(r, key) for r in rows]) for key in ("predicted", "measured"))
    middle = (len(rows) - 1) / 2
    products_, squares = sum((x - middle) * (y - middle) for x, y in zip(a, b)), sum((x - middle) ** 2 for x in a)
    return products_ / max((squares * sum((y - middle) ** 2 for y in b)) ** 0.5, 1e-9)


def report(rows: list[Row], worst: int) -> None:
    """Print the correlation of all and of each group, and the kernels that are furthest off."""
    print("| group | kernels | rank correlation | median of predicted / measured |\n|---|---|---|---|")
    groups = dict.fromkeys(r.case.group for r in rows)
    for group in (*groups, ""):
        some = [r for r in rows if group in ("", r.case.group)]
        middle = sorted(r.predicted / r.measured for r in some)[len(some) // 2]
        print(f"| {group or '**all**'} | {len(some)} | {spearman(some):.3f} | {middle:.2f} |")
    print("\nfurthest off:\n\n| case | kernel | predicted | measured | ratio | bound |\n|---|---|---|---|---|---|")
    for r in sorted(rows, key=lambda r: -abs(log(r.predicted / r.measured)))[:worst]:
        times = f"{r.predicted / 1e3:.2f} us | {r.measured / 1e3:.2f} us | {r.predicted / r.measured:.2f}"
        print(f"| {r.case.group}: {r.case.name} | {r.kernel} | {times} | {r.bound} |")


def main() -> None:
    """Read the command line; measure, print; fail below what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name, or whose group's name, has this in it")
    parser.add_argument("--repeat", type=int, default=7, help="rounds, of which the quickest counts")
    parser.add_argument("--worst", type=int, default=15, help="kernels to list")
    parser.add_argument("--all", action="store_true", help="print each kernel")
    args = parser.parse_args()
    rows: list[Row] = []
    for group in GROUPS:
        for case in group():
            if args.only in case.group or args.only in case.name:
                rows += measure(case, args.repeat)
    if args.all:
        for r in rows:
            print(f"{r.case.group}: {r.case.name} {r.kernel} {r.predicted:.0f} {r.measured:.0f} {r.bound}")
    report(rows, args.worst)
    if not args.only and spearman(rows) < WANTED:
        sys.exit(f"the rank correlation is below {WANTED}")


if __name__ == "__main__":
    main()
