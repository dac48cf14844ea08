"""Cases of the cost model by group: functions and the shapes of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

SIZES = (16, 300, 4_096, 50_000, 1_000_000, 4_000_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A function and the shapes of its arguments, f32 by default."""

    group: str
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"


def elementwise() -> Iterator[Case]:
    """Yield cases of elementwise functions of different cost, sizes and dtypes."""
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
