"""Single operations for ``benchmarks ops latency``: groups of cases, each with its arguments and its tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SIZES = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A function, its arguments, and its allowed error relative to the largest value."""

    name: str
    function: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    tolerance: float = 1e-5


def sorting() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    for n in SIZES:
        x, i = rng.standard_normal(n).astype("float32"), rng.integers(-(2**31), 2**31, n).astype("int32")
        yield Case(f"sort f32 [{n}]", jnp.sort, (x,), 0)
        yield Case(f"sort i32 [{n}]", jnp.sort, (i,), 0)
        yield Case(f"argsort f32 [{n}]", jnp.argsort, (x,), 0)
        yield Case(f"sort f32 with i32 [{n}]", lambda x, i: jax.lax.sort((x, i), num_keys=1), (x, i), 0)
    x = rng.standard_normal((1000, 1000)).astype("float32")
    yield Case("sort f32 [1000, 1000] rows", lambda x: jnp.sort(x, 1), (x,), 0)
    yield Case("sort f32 [1000, 1000] columns", lambda x: jnp.sort(x, 0), (x,), 0)
    i = rng.integers(0, 100, (2, 100_000)).astype("int32")
    yield Case("sort by two i32 keys [100000]", lambda i: jax.lax.sort((i[0], i[1]), num_keys=2), (i,), 0)


def selection() -> Iterator[Case]:
    import jax
    import numpy as np

    rng = np.random.default_rng(1)
    for shape in ((1, 50_000), (8, 50_000), (1, 1_000_000)):
        x = rng.standard_normal(shape).astype("float32")
        for k in (1, 10, 100, 1000):
            yield Case(f"top_k {k} f32 {list(shape)}", lambda x, k=k: jax.lax.top_k(x, k), (x,), 0)
    x = rng.standard_normal((16, 131_072)).astype("float32")
    up = np.sort(x, 1)
    for order, rows in (("random", x), ("ascending", up), ("descending", up[:, ::-1].copy()), ("equal", x * 0)):
        for k in (8, 16, 64, 100, 1000):
            name = f"top_k {k} f32 {list(x.shape)} {order}"
            yield Case(name, lambda x, k=k: jax.lax.top_k(x, k), (rows,), 0)


def indexing() -> Iterator[Case]:
    import jax
    import numpy as np

    rng = np.random.default_rng(2)
    for rows, width in ((1_000, 1), (100_000, 1), (100_000, 16), (20_000, 128), (1_000_000, 1)):
        x = rng.standard_normal((rows, width)).astype("float32")
        i = rng.integers(0, rows // 10, rows).astype("int32")
        out = np.zeros((rows // 10, width), "float32")
        yield Case(f"scatter-add {rows} rows of {width}", lambda o, i, x: o.at[i].add(x), (out, i, x))
        yield Case(
            f"segment_sum sorted {rows} rows of {width}",
            lambda x, i, n=rows // 10: jax.ops.segment_sum(x, i, n, indices_are_sorted=True),
            (x, np.sort(i)),
        )
        order = rng.permutation(rows).astype("int32")
        yield Case(f"scatter-set {rows} rows of {width}", lambda o, i, x: o.at[i].set(x), (x * 0, order, x), 0)
        yield Case(f"scatter-max {rows} rows of {width}", lambda o, i, x: o.at[i].max(x), (out, i, x))
        yield Case(f"gather {rows} rows of {width}", lambda x, i: x[i], (x, i), 0)


def scans() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(3)
    for n in SIZES:
        yield Case(f"cumsum f32 [{n}]", jnp.cumsum, (rng.standard_normal(n).astype("float32"),), 1e-4)
    x = rng.standard_normal((1000, 1000)).astype("float32")
    yield Case("cumsum f32 [1000, 1000] rows", lambda x: jnp.cumsum(x, 1), (x,), 1e-4)
    yield Case("cumsum f32 [1000, 1000] columns", lambda x: jnp.cumsum(x, 0), (x,), 1e-4)
    yield Case("cummax f32 [1000, 1000] rows", lambda x: jax.lax.cummax(x, 1), (x,), 0)
    yield Case("cumlogsumexp f32 [100, 1000] rows", lambda x: jax.lax.cumlogsumexp(x, 1), (x[:100],), 1e-4)
    x = x[:100].reshape(-1)
    yield Case("associative_scan f32 [100000]", lambda x: jax.lax.associative_scan(jnp.add, x), (x,), 1e-4)


def randomness() -> Iterator[Case]:
    import jax
    import numpy as np

    key = np.array([1, 2], "uint32")
    for n in SIZES:
        yield Case(f"threefry bits [{n}]", lambda k, n=n: jax.random.bits(k, (n,)), (key,), 0)
        yield Case(f"uniform [{n}]", lambda k, n=n: jax.random.uniform(k, (n,)), (key,), 1e-6)
        yield Case(f"normal [{n}]", lambda k, n=n: jax.random.normal(k, (n,)), (key,), 1e-5)
    yield Case("permutation [100000]", lambda k: jax.random.permutation(k, 100_000), (key,), 0)
    logits = np.zeros((64, 1000), "float32")
    yield Case("categorical [64, 1000]", jax.random.categorical, (key, logits), 0)


def transforms() -> Iterator[Case]:
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(4)
    for shape in ((1024,), (4096,), (65536,), (1 << 20,), (1000, 1000), (256, 1024), (100, 1009), (10007,)):
        x = rng.standard_normal(shape).astype("float32")
        yield Case(f"fft c64 {list(shape)}", jnp.fft.fft, (x.astype("complex64"),))
        yield Case(f"rfft f32 {list(shape)}", jnp.fft.rfft, (x,))
    x = rng.standard_normal((512, 512)).astype("complex64")
    yield Case("fft2 c64 [512, 512]", jnp.fft.fft2, (x,))


def elementwise() -> Iterator[Case]:
    import jax
    import numpy as np

    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal(100_000) * 3 for _ in range(2))
    one = ["exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "logistic"]
    for dtype, part in (("f32", "float32"), ("f64", "float64"), ("c64", "float32"), ("c128", "float64")):
        a, b = x.astype(part), y.astype(part)
        real = dtype[0] == "f"
        a, b = (a, b) if real else (a + 1j * b, b - 1j * a[::-1])
        for name in one + (["cbrt", "erf", "erfc", "erf_inv"] if real else ["abs", "sign"]):
            given = np.abs(a) if real and name in ("log", "log1p", "sqrt", "rsqrt") else a
            given = a / (1 + np.abs(a)) if name == "erf_inv" else given
            yield Case(f"{name} {dtype} [100000]", getattr(jax.lax, name), (given,), 1e-3)
        for name in ("mul", "div", "pow"):
            given = np.abs(a) if real and name == "pow" else a
            yield Case(f"{name} {dtype} [100000]", getattr(jax.lax, name), (given, b), 1e-3)
        for name in ("rem", "atan2") if real else ():
            yield Case(f"{name} {dtype} [100000]", getattr(jax.lax, name), (a, b), 1e-3)
        for name in ("softplus", "log_sigmoid", "mish") if real else ():  # of logarithms
            yield Case(f"{name} {dtype} [100000]", getattr(jax.nn, name), (a,), 1e-3)


def rows() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(6)
    x, image = rng.standard_normal((512, 2048)), rng.standard_normal((8, 56, 56, 64))
    window = (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    whole: dict[str, Callable[..., Any]] = {
        "max": lambda x: x.max(-1), "argmax": lambda x: x.argmax(-1), "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax, "logsumexp": lambda x: jax.nn.logsumexp(x, -1), "gelu": jax.nn.gelu,
        "standardize": lambda x: jax.nn.standardize(x, -1),
    }  # fmt: skip
    for name, dtype, tolerance in (("f32", "float32", 1e-5), ("bf16", ml_dtypes.bfloat16, 2e-2)):
        for function, call in whole.items():
            yield Case(f"{function} {name} [512, 2048]", call, (x.astype(dtype),), tolerance)
        pooled = lambda x: jax.lax.reduce_window(x, jnp.array(-jnp.inf, x.dtype), jax.lax.max, *window)
        yield Case(f"pooling {name} [8, 56, 56, 64]", pooled, (image.astype(dtype),), 0)


def transposes() -> Iterator[Case]:
    """Yield cases that read or write an array across its rows."""
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(8)
    array = lambda *shape: rng.standard_normal(shape).astype("float32")
    x, y = array(1024, 1024), array(1024, 1024)
    yield Case("x.T [1024, 1024]", lambda x: x.T, (x,), 0)
    for shape in ((8, 8, 8, 8, 8), (64, 64, 64), (128, 3, 3, 256)):
        yield Case(f"axes reversed {list(shape)}", lambda x: x.T, (array(*shape),), 0)
    yield Case("x.T i8 [1024, 1024]", lambda x: x.T, (x.astype("int8"),), 0)
    yield Case("x.T + 1 [1024, 1024]", lambda x: x.T + 1, (x,))
    yield Case("x.T + 1 bf16 [1024, 1024]", lambda x: x.T + 1, (x.astype(ml_dtypes.bfloat16),), 1e-2)
    yield Case("x.T + y [1024, 1024]", lambda x, y: x.T + y, (x, y))
    yield Case("tanh(x.T) [1024, 1024]", lambda x: jnp.tanh(x.T), (x,))
    yield Case("(x * y).T [1024, 1024]", lambda x, y: (x * y).T, (x, y))
    yield Case("x.T - mean [1024, 1024]", lambda x: x.T - x.mean(1), (x,))
    yield Case("x + x.T [2048, 2048]", lambda x: x + x.T, (array(2048, 2048),))
    yield Case("channels first [8, 64, 64, 128]", lambda x: x.transpose(0, 3, 1, 2) * 2, (array(8, 64, 64, 128),))
    last = lambda x: jnp.maximum(x.transpose(0, 2, 3, 1), 0)
    yield Case("relu, channels last [8, 128, 64, 64]", last, (array(8, 128, 64, 64),))
    yield Case("matrices turned, and 1 [32, 256, 256]", lambda x: x.swapaxes(1, 2) + 1, (array(32, 256, 256),))


GROUPS = (sorting, selection, indexing, scans, randomness, transforms, elementwise, rows, transposes)
