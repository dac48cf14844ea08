"""For each row of the cost table, small programs on either side of its decision.

A case is a function, the shapes of its arguments (f32 by default) and its deviations from the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

lax = jax.lax
GPU = "cuda:sm_90"
V3, V4, VNNI, MATRIX = "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4-vnni", "cpu:x86-64-amx"
ARM, SQUARES, SVE, LONG = (f"cpu:aarch64-{name}" for name in ("dotprod", "bf16", "sve256", "sve512"))


@dataclass(frozen=True)
class Case:
    """A program: a function with the types of its arguments."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    level: int = 2
    target: str = V4
    spec: str = "..."  # of the first argument: which of its sizes only a call knows
    memory_limit: int = 0
    quantize: str = "none"

    def exported(self) -> jax.export.Exported:
        """Return the ``jax.export`` of the program."""
        types = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes]
        specs = [self.spec, *["..."] * (len(types) - 1)]
        types = [jax.export.symbolic_args_specs((t,), (s,))[0] for t, s in zip(types, specs, strict=True)]
        return jax.export.export(jax.jit(self.function), platforms=["cpu"])(*types)

    def arguments(self) -> list[np.ndarray]:
        """Return random arguments."""
        rng = np.random.default_rng(0)
        make = (lambda s: rng.integers(0, 5, s)) if np.dtype(self.dtype).kind in "iu" else rng.standard_normal
        return [np.asarray(make(shape)).astype(self.dtype) for shape in self.shapes]


def case(function: Callable[..., Any], *shapes: tuple[int, ...], **more: Any) -> Case:
    """Return a case of a function with arguments of these shapes."""
    return Case(function, shapes, **more)


def pair(function: Callable[..., Any], below: Any, above: Any, **more: Any) -> tuple[Case, Case]:
    """Return cases of one function for two lists of shapes; a tuple of ints is a single shape."""
    lists = [[s] if isinstance(s, tuple) else s for s in (below, above)]
    return case(function, *lists[0], **more), case(function, *lists[1], **more)


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Return a constant with different elements."""
    return (np.arange(np.prod(shape)) % 17 + 1).reshape(shape).astype(dtype)


def noise(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Return a constant of random elements, which no formula describes."""
    return np.random.default_rng(0).integers(1, 99, shape).astype(dtype)


def repeated(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return ``step`` applied ``count`` times."""
    return lambda x: reduce(lambda y, n: step(y), range(count), x)


def transposed(count: int) -> Callable[..., Any]:
    """Return ``count`` reshapes of a matrix with a transpose around each."""
    return repeated(lambda x: x.T.reshape(48, 12).T.reshape(24, 24), count)


def window(size: Any, stride: int = 1, how: Any = lax.add, start: float = 0.0) -> Callable[[Any], Any]:
    """Return a window reduction, such as a pooling."""

    def apply(x: Any) -> Any:
        sizes = size if isinstance(size, tuple) else (size,)
        return lax.reduce_window(x, start, how, sizes, (stride,) * len(sizes), "VALID")

    return apply


def loop(step: Callable[..., Any], trips: int = 3) -> Callable[..., Any]:
    """Return a while loop of ``trips`` iterations of ``step``."""
    return lambda *state: lax.fori_loop(0, trips, lambda _, s: step(*s), state)


def swapped(a: Any, b: Any) -> Any:
    """Return the states of a loop in which a branch swaps them."""
    step = lambda i, s: lax.cond(s[2] > 0, lambda x, y: (y, x), lambda x, y: (x, y.at[i].set(x[i])), *s[:2])
    return lax.fori_loop(0, 3, lambda i, s: (*step(i, s), -s[2]), (a, b, a[0]))


def chosen(a: Any, b: Any) -> Any:
    """Return the states of a loop in which a select chooses between them."""
    return lax.fori_loop(0, 3, lambda i, s: (jnp.where(s[0][i] > s[1][i], s[1], s[0]), s[1].at[i].add(i)), (a, b))


def nested_lookups(x: Any) -> Any:
    """Return the gradient of lookups in nested loops."""

    def loss(x: Any) -> Any:
        inner = lambda i: lambda c, k: (jnp.sin(c + x[i + k]), None)
        outer = lambda c, i: (lax.scan(inner(i), c, jnp.arange(2))[0], None)
        return lax.scan(outer, jnp.ones(x.shape[1]), jnp.arange(3))[0].sum()

    return jax.grad(loss)(x)


def taken(x: Any, y: Any) -> Any:
    """Return the elements of ``x`` at places that ``y`` determines."""
    return lax.gather(
        x, y.astype("int32")[:, None], lax.GatherDimensionNumbers((), (0,), (0,)), (1,), mode="clip"
    )


def convolved(x: Any, w: Any) -> Any:
    """Return a convolution of images whose channels are the last dim."""
    kept = x.dtype if x.dtype.kind == "f" else jnp.int32
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, preferred_element_type=kept)


def images(channels: int, outputs: int) -> list[tuple[int, ...]]:
    """Return the shapes of an image of 24 x 32 pixels and of a 3 x 3 convolution kernel."""
    return [(1, 24, 32, channels), (3, 3, channels, outputs)]


def hoisted(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, s: s + jnp.sin(y)[: s.shape[0]], x)


def solve(a: Any, b: Any, left: bool = True) -> Any:
    lower = jnp.eye(a.shape[0]) * 9 + jnp.tril(a) / a.shape[0]
    return lax.linalg.triangular_solve(lower, b, left_side=left, lower=True)


def solve_rows(a: Any, b: Any) -> Any:
    return solve(a, b, left=False)


def cholesky(x: Any) -> Any:
    return jnp.linalg.cholesky(x @ x.T / x.shape[0] + 4 * jnp.eye(x.shape[0]))


def integer_product(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, preferred_element_type=jnp.int32)


SUM = lambda x: x.sum()
COLUMNS = lambda x: x.sum(0)
LAST = lambda x: x.sum(-1)
LARGEST = lambda x: jnp.argmax(x, -1)
PRODUCT = jnp.matmul
EXACT = lambda x, y: jnp.matmul(x, y, precision="highest")  # no tensor cores: f32 as it is
SOFTMAX = jax.nn.softmax
SPREAD = lambda x: (jax.nn.logsumexp(x, -1), x.var(-1))
SORT = lambda x: jnp.sort(x, 0)
CUMSUM = lambda x: jnp.cumsum(x, x.ndim - 1)
TWICE = lambda x: x * 2
PLUS = lambda x, y: x + y


def folded(constant: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda x: x + constant().sum()


PASSES = {
    "region_ops": (case(repeated(jnp.sin, 3), (8,)), case(repeated(jnp.sin, 100), (8,))),
    "region_buffers": pair(lambda *xs: sum(xs), [(8,)] * 2, [(8,)] * 45),
    "repeated_moves": (case(lambda x: x.T * 2, (4, 5)), case(repeated(lambda x: jnp.flip(x[:-1], 0).T, 20), (30, 31))),
    "strided_bytes": pair(lambda x: x.T + 1, (8, 8), (80, 80)),
    "repeated_work": (
        case(lambda x, y: jnp.broadcast_to(x + 1, y.shape) * y, (64,), (2, 64)),
        case(lambda x, y: jnp.broadcast_to(jnp.sin(x), y.shape) * y, (64,), (8, 64)),
    ),
    "repeated_work_o3": pair(
        lambda x, y: jnp.broadcast_to(jnp.sin(x), y.shape) * y, [(64,), (2, 64)], [(64,), (8, 64)], level=3
    ),
    "region_work": (
        case(lambda x: jnp.sin((x + 1) - LAST(x + 1)[:, None]), (4, 100)),
        case(lambda x: (x * x + 1) + (x * x + 1)[::-1], (64,)),
    ),
    "stage_work": (
        case(lambda b, x: SOFTMAX(x + (b + 1)), (16,), (4, 16)),
        case(lambda b, x: SOFTMAX(x + jnp.sin(b)), (16,), (4, 16)),
    ),
    "hoisted_bytes": pair(hoisted, [(4,), (4,)], [(4,), (1 << 19,)]),
    "long_scan": pair(CUMSUM, (100,), (40_000,)),
    "few_scans": pair(CUMSUM, (2, 40_000), (9, 40_000)),
    "short_scan": pair(CUMSUM, (8,), (40,)),
    "window_terms": (
        case(window((3, 3), how=lax.max, start=-jnp.inf), (9, 9)),
        case(window((6, 6), how=lax.max, start=-jnp.inf), (9, 9)),
    ),
    "window_length": (case(window(16), (400,)), case(window(80), (400,))),
    "window_overlap": (case(window(80, 40), (4000,)), case(window(80), (4000,))),
    "reduced_elements": pair(SUM, (1000,), (70_000,)),
    "enough_results": pair(COLUMNS, (8192, 16), (259, 4096)),
    "reduced_terms": pair(COLUMNS, (70, 1024), (8192, 16)),
    "reduction_extent": pair(SUM, (64, 2048), (300, 300)),
    "few_parts": pair(SUM, (65_537,), (70_000,)),
    "few_rows": pair(LAST, (4, 70_000), (8, 70_000)),
    "folded_bytes": (
        case(folded(lambda: jnp.sin(numbers(9))), (4,)), case(folded(lambda: jnp.sin(numbers(30_000))), (4,)),
    ),
    "folded_growth": (
        case(folded(lambda: jnp.sin(noise(30_000))), (4,)),
        # JAX itself converts constants since 0.11, but not what is computed of them
        case(folded(lambda: lax.convert_element_type(lax.neg(noise(30_000, dtype="int8")), jnp.float32)), (4,)),
    ),
    "folded_broadcast": (
        case(lambda x: x + jnp.broadcast_to(numbers(4), (2, 4)), (2, 4)),
        case(lambda x: x + jnp.broadcast_to(numbers(64), (9, 64)), (9, 64)),
    ),
    "folded_flops": (
        case(folded(lambda: jnp.matmul(numbers(8, 8), numbers(8, 8))), (4,)),
        case(folded(lambda: jnp.matmul(numbers(180, 180), numbers(180, 180))), (4,)),
    ),
    "splat_elements": (case(lambda x: x * numbers(4), (4,)), case(lambda x: x * numbers(100), (100,))),
    "dft_points": pair(lambda x: jnp.fft.fft(x).real, (64,), (1 << 14,)),
}  # fmt: skip

PRODUCTS = {
    "stream_rows": pair(PRODUCT, [(4, 64), (64, 96)], [(8, 64), (64, 96)]),
    "wide_stream_rows": pair(PRODUCT, [(2, 64), (64, 96)], [(4, 64), (64, 96)]),
    "tiny_flops": pair(PRODUCT, [(5, 8), (8, 16)], [(16, 64), (64, 96)]),
    "packed_percent": (
        case(PRODUCT, (64, 512), (512, 144), memory_limit=10_000_000),
        case(PRODUCT, (64, 512), (512, 144), memory_limit=600_000),
    ),
    "in_place_elements": pair(PRODUCT, [(8, 64), (64, 96)], [(8, 512), (512, 144)]),
    "small_rows": pair(PRODUCT, [(8, 64), (64, 64)], [(16, 64), (64, 64)]),
    "whole_flops": pair(PRODUCT, [(32, 64), (64, 96)], [(128, 64), (64, 96)]),
    "few_tile_rows": pair(PRODUCT, [(12, 1024), (1024, 96)], [(13, 1024), (1024, 96)]),
    "unrolled_terms": pair(PRODUCT, [(8, 8), (8, 8)], [(8, 64), (64, 8)], dtype="int32"),
    "narrow_gain": pair(convolved, images(1, 16), images(1, 2)),
    "gpu_extent": pair(EXACT, [(4, 512), (512, 64)], [(64, 512), (512, 64)], target=GPU),
    "gpu_terms": pair(EXACT, [(4, 64), (64, 64)], [(4, 512), (512, 64)], target=GPU),
    "gpu_idle_blocks": pair(EXACT, [(64, 64), (64, 64)], [(4096, 64), (64, 4096)], target=GPU),
}

LOOPS = {
    "scalar_depth": (case(repeated(lambda x: x * 0.5 + 1, 2), (8,)), case(repeated(lambda x: x * 0.5 + 1, 10), (8,))),
    "index_atoms": (case(transposed(3), (24, 24)), case(transposed(14), (24, 24))),
    "short_item": pair(PLUS, [(64, 100), (100,)], [(64, 600), (600,)]),
    "whole_axis": pair(TWICE, (1000,), (10_000,)),
    "segments": (
        case(lambda *xs: jnp.concatenate(xs) + 1, (3,), (4,)), case(lambda *xs: jnp.concatenate(xs) + 1, *[(3,)] * 12),
    ),
    "unrolled_window": (case(window(3), (40,)), case(window(20), (40,))),
    "unrolled_code": pair(loop(lambda x: (jnp.sin(jnp.sin(x)),)), (2,), (8,)),
    "few_across": pair(lambda x: x.transpose(3, 1, 2, 0), (2, 30, 31, 16), (8, 30, 31, 16)),
    "unrolled_steps": pair(loop(lambda x: (jnp.sin(x),)), (4,), (20,)),
    "row_scratch": pair(SOFTMAX, (8, 100), (8, 70_000)),
    "repeated_stage_work": (case(lambda x: (x + 1) - LAST(x + 1)[:, None], (4, 100)), case(SOFTMAX, (4, 100))),
    "short_row": pair(LAST, (8, 16), (8, 128)),
    "thread_row": pair(LAST, (8, 16), (8, 128), target=GPU),
    "small_reduction": pair(LAST, (8, 16), (8000, 16), target=GPU),
    "row_statements": (case(LAST, (32_768, 1024), target=GPU), case(LARGEST, (32_768, 1024), target=GPU)),
    "lane_threads": pair(TWICE, (1000,), (1 << 20,), target=GPU),
    "lane_statements": (
        case(TWICE, (1 << 20,), target=GPU),
        case(repeated(lambda x: x * x + x, 40), (1 << 21,), dtype="int8", target=GPU),
    ),
    "turned_extent": pair(lambda x: x.T + 1, (8, 4000), (64, 64), target=GPU),
    "gpu_idle_rows": pair(SOFTMAX, (100, 70_000), (140, 70_000), target=GPU),
    "factor_rows": pair(cholesky, (8, 8), (128, 128)),
    "solve_rows": pair(solve, [(8, 8), (8, 8)], [(40, 40), (40, 40)]),
    "few_solved_rows": pair(solve_rows, [(8, 8), (3, 8)], [(8, 8), (4, 8)]),
    "merged_row": pair(jnp.sort, (16,), (1000,)),
    "inserted": (case(lambda x: lax.top_k(x, 4), (1000,)), case(lambda x: lax.top_k(x, 100), (1000,))),
    "inserted_row": pair(lambda x: lax.top_k(x, 30), (2, 50), (2, 100)),
    "loop_value": pair(loop(lambda x: (jnp.sin(x),)), (8,), (5000,)),
    "loop_elements": pair(loop(lambda *xs: tuple(x + 1 for x in xs)), (8,), [(4096,)] * 10),
    "loop_buffers": pair(loop(lambda *xs: tuple(x + 1 for x in xs)), (), [()] * 70),
    "loop_flops": pair(loop(lambda x: (jnp.sin(x),)), (8,), (4096,)),
    "alternated_bytes": pair(loop(lambda a, b: (b, a + b[::-1])), [(8,)] * 2, [(5000,)] * 2),
    "exchanged_bytes": pair(swapped, [(8,)] * 2, [(5000,)] * 2),
    "inner_sum": pair(nested_lookups, (8, 1000), (80, 1000)),
    "branched_bytes": pair(chosen, [(8,)] * 2, [(5000,)] * 2),
    "serial_ns": pair(TWICE, (8,), (1 << 20,)),
}  # fmt: skip



def with_zeros(count: int, x: Any) -> Any:
    """Return ``count`` zeros and another result."""
    return x + 1, jnp.zeros(count)


def two_chains(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return independent matmuls, which only shared memory could prevent from running concurrently."""
    return jnp.sin(x @ x).sum(1), jnp.cos(y @ x).sum(1)


def products_then_sums(x: jax.Array) -> list[jax.Array]:
    """Return sums of matmuls that are all computed before the first sum."""
    return [p.sum(1) for p in [x @ (x * n) for n in range(1, 6)]]


MEMORY = {
    "filled_bytes_cpu": tuple(case(partial(with_zeros, n), (8,)) for n in (8, 9000)),
    "padded_part": pair(
        loop(lambda x, y: (x + jnp.pad(y, (x.size - y.size, 0)), y)), [(64,), (60,)], [(64,), (8,)], dtype="int32"
    ),
    "spread_bytes": pair(two_chains, [(64, 64), (64, 64)], [(512, 512), (512, 512)]),
    "spread_percent": pair(two_chains, [(512, 512), (16, 512)], [(512, 512), (512, 512)]),
    "reordered_percent": (case(products_then_sums, (256, 256)), case(two_chains, (64, 64), (64, 64))),
}


def sorts_before_a_chain(*xs: jax.Array) -> list[jax.Array]:
    """Return sorts without readers, followed in the program by sorts that depend on each other."""
    alone, chain = [jnp.sort(x) for x in xs[:-1]], xs[-1]
    for _ in range(len(xs) - 2):
        chain = jnp.sort(jnp.flip(chain))
    return [*alone, chain]


ORDERS = {"order_gain": pair(sorts_before_a_chain, [(3000,), (3000,), (6000,)], [(3000,)] * 5)}


def of_sorted_rows(x: jax.Array) -> jax.Array:
    """Return sorted rows, and an elementwise function of them in the order of the first rows."""
    return jnp.tanh(jnp.sort(x, -1))


def of_last_rows_first(x: jax.Array) -> jax.Array:
    """Return an elementwise function of sorted rows in the reverse order of rows."""
    return jnp.tanh(jnp.sort(x, -1)[::-1])


TILES = {
    "tile_gain": pair(of_sorted_rows, (8, 20_000), (5, 20_000)),
    "first_tile": (case(of_sorted_rows, (5, 20_000)), case(of_last_rows_first, (5, 20_000))),
}

def iterations(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the result of a loop of matmuls."""
    return lax.fori_loop(0, 16, lambda i, c: jnp.tanh(c @ w * 0.01), x)


def loops(*xs: jax.Array) -> list[jax.Array]:
    """Return independent loops, which only shared memory could prevent from running concurrently."""
    return [iterations(x, x) for x in xs]


def loops_of_unknown_iterations(*xs: jax.Array) -> list[jax.Array]:
    """Return independent loops whose numbers of iterations depend on the data."""
    return [lax.while_loop(lambda c: jnp.abs(c).sum() > 1, lambda c, x=x: jnp.tanh(c @ x * 0.01), x) for x in xs]


def loops_of_large_values(*xs: jax.Array) -> list[jax.Array]:
    """Return independent loops with small carried values and large intermediate ones."""
    return [lax.fori_loop(0, 5, lambda i, c, x=x: jnp.tanh(x * c @ x * 0.01).sum(0) * 0.01, x[0]) for x in xs]


OVERLAP = {
    "few_claims": pair(TWICE, (10_000,), (1 << 22,)),
    "overlap_ns": pair(loops_of_unknown_iterations, (128, 128), [(128, 128)] * 2),
    "known_overlap_ns": pair(loops, (128, 128), [(128, 128)] * 2),
    "overlap_percent": pair(loops, [(512, 512), (64, 64)], [(128, 128)] * 2),
    "overlap_memory": (case(loops, *[(200, 200)] * 4), case(loops_of_large_values, *[(300, 300)] * 4)),
}

LIMITS = {**TILES, **PASSES, **PRODUCTS, **LOOPS, **MEMORY, **ORDERS, **OVERLAP}


def sizes(function: Callable[..., Any], shapes: Callable[[int], Any], *ns: int, **more: Any) -> list[Case]:
    """Return cases of one function for several sizes."""
    return [case(function, *shapes(n), **more) for n in ns]


def right(k: int, m: int = 8, n: int = 96) -> list[tuple[int, int]]:
    """Return the shapes of a matmul of ``k`` terms."""
    return [(m, k), (k, n)]


LARGE, TALL = sizes(PRODUCT, lambda m: right(256, m, 256), 8, 24, 401), partial(sizes, PRODUCT, lambda m: right(64, m))

# Below, at and above the size, where above is no multiple of it.
GPU_ROWS = sizes(LAST, lambda n: [(300, n)], 1000, 1024, 70_003, target=GPU)
GPU_SOFTMAX = sizes(SOFTMAX, lambda n: [(300, n)], 1000, 32_768, 33_003, target=GPU)
GPU_VECTORS = sizes(TWICE, lambda n: [(n,)], (1 << 20) - 4, 1 << 20, (1 << 20) + 3, target=GPU)
GPU_TURNED = sizes(lambda x: x.T + 1, lambda n: [(n, 128)], 60, 64, 65, target=GPU)
GPU_COLUMNS = sizes(lambda x: x.sum(0), lambda n: [(400, n)], 100, 128, 130, target=GPU)
GPU_PARTS = sizes(SUM, lambda n: [(n,)], 300_000, 1 << 20, (1 << 20) + 1, target=GPU)

BLOCKS = {
    "channels_first": sizes(convolved, lambda n: images(n, 2), 1, 3, 8),
    "pixel_sums": sizes(convolved, lambda n: images(2, n), 1, 2, 5, 7),
    "quad_rate": sizes(convolved, lambda n: images(4, n), 1, 2, 3, dtype="int8"),
    "in_place_tiles": sizes(lambda x, y: x @ y, lambda n: [(n, 300), (300, 260)], 28, 29, 43, 90, spec="m, _"),
    "copy_readers": sizes(lambda x, y: x @ y, lambda n: [(n, 300), (300, 260)], 160, 168, 170, spec="m, _"),
    "across_elements": sizes(lambda x: x.transpose(1, 0, 2), lambda n: [(37, 5, n)], 60, 64, 70),
    "turned_rows": sizes(lambda x: x.T, lambda n: [(600, n)], 15, 16, 17),
    **dict.fromkeys(("turned_tile", "turned_elements"), sizes(lambda x: x.T, lambda n: [(n, 144)], 112, 128, 256, 384)),
    "item_elements": sizes(PLUS, lambda n: [(7, n), (n,)], 1000, 1024, 1030),
    "chunk": sizes(TWICE, lambda n: [(n,)], 4000, 8192, 8200),
    "scan_lanes": sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(40, n)], 200, 256, 300),
    "scan_chunk": sizes(CUMSUM, lambda n: [(2, n)], 200, 256, 300, spec="_, n"),
    "scan_parts": sizes(CUMSUM, lambda n: [(n,)], 33_000, 65_536, 65_537),
    "fewest_scan_parts": sizes(CUMSUM, lambda n: [(n,)], 16 * 2053, 15 * 2203, 32_771),
    "reduction_parts": sizes(SUM, lambda n: [(n,)], 70_000, 65_536, 65_537),
    "stream_vectors": sizes(PRODUCT, lambda n: right(64, 2, n), 112, 128, 130),
    "narrow_stream_vectors": sizes(PRODUCT, lambda n: right(64, 4, n), 48, 64, 70),
    "tile_rows": TALL(10, 14, 15), "set_rows": sizes(PRODUCT, lambda m: right(1024, m, 64), 6, 7, 20),
    "set_period": sizes(PRODUCT, lambda k: right(k, 14, 64), 1000, 1024, 1040),
    "aarch64_tile_rows": TALL(10, 11, 12, target=ARM),
    "column_tile_rows": sizes(PRODUCT, lambda m: right(64, m, 16), 20, 24, 25),
    "square_sums": sizes(integer_product, lambda m: right(64, m, 64), 10, 12, 13, dtype="int8", target=SQUARES),
    "sve_sums": sizes(PRODUCT, lambda m: right(64, m, 48), 7, 8, 10, target=LONG),
    "sve_square_sums": sizes(integer_product, lambda m: right(64, m, 64), 8, 10, 11, dtype="int8", target=SVE),
    "grouped_tile_rows": sizes(integer_product, lambda m: right(64, m, 64), 10, 12, 13, dtype="int8"),
    "grouped_tile_rows_16": sizes(integer_product, lambda m: right(64, m, 64), 5, 8, 9, dtype="int8", target=V3),
    "matrix_item_flops": sizes(PRODUCT, lambda n: right(512, n, 512), 270, 300, 600, dtype="bfloat16", target=MATRIX),
    "item_flops": LARGE, "large_items": LARGE, "min_items": LARGE, "many_items": LARGE,
    "reduced_columns": sizes(COLUMNS, lambda n: [(40, n)], 100, 128, 130),
    **dict.fromkeys(("row_elements", "row_registers", "long_row_threads", "unrolled_vectors"), GPU_ROWS),
    **dict.fromkeys(("kept_registers", "kept_registers_long"), GPU_SOFTMAX),
    **dict.fromkeys(("lane_bytes", "lane_elements"), GPU_VECTORS),
    **dict.fromkeys(("block_threads", "turned_edge", "turned_bytes"), GPU_TURNED),
    **dict.fromkeys(("column_threads", "column_rows", "gpu_block_columns"), GPU_COLUMNS),
    **dict.fromkeys(("gpu_blocks", "gpu_part_terms"), GPU_PARTS),
    "row_part": sizes(SPREAD, lambda n: [(2, n)], 65_540, 1 << 16, 98_309),
    "fewest_row_parts": sizes(SPREAD, lambda n: [(1, n)], 1 << 17, 1 << 20),
    "least_part": sizes(SPREAD, lambda n: [(2, n)], 511 * 130, 1 << 17, 514 * 131),
    "gpu_row_part": sizes(SOFTMAX, lambda n: [(4, n)], 65_540, 1 << 17, 98_309, target=GPU),
    "inserted_block": sizes(lambda x: lax.top_k(x, 4), lambda n: [(2, n)], 35, 36, 69),
    "selection_spare": sizes(lambda x: lax.top_k(jnp.sort(x, 1), 30), lambda n: [(2, n)], 780, 3072, 4001),
    "update_window": sizes(lambda x, y: x.at[np.array([1, 1, 0])].add(y), lambda n: [(4, n), (3, n)], 50, 64, 70),
    "dft_elements": sizes(lambda x: jnp.fft.fft(x, axis=0).real, lambda n: [(64, n)], 100, 128, 130),
    "dft_lanes": sizes(lambda x: jnp.fft.fft(x, axis=0).real, lambda n: [(1024, n)], 10, 16, 17),
    "solve_columns": sizes(solve, lambda n: [(8, 8), (8, n)], 50, 64, 70),
    **dict.fromkeys(("claim_ns", "max_claims"), sizes(TWICE, lambda n: [(n,)], 10_000, 1 << 20, (1 << 20) + 3)),
    "item_blocks": sizes(of_sorted_rows, lambda n: [(n, 40)], 500, 512, 517),
    "order_workers": [ORDERS["order_gain"][1]],
}  # fmt: skip

# Programs whose kernels or prices change with an estimate.
ESTIMATES = {
    "unknown_size": case(TWICE, (8,), spec="n"),
    "unknown_terms": case(lambda x: x.T @ x, (512, 768), spec="n, _"),
    "unknown_tiles": case(PRODUCT, (8, 512), (512, 768), spec="n, _"),
    "dear_work": case(jnp.sin, (8,)),
    "load_work": case(lambda x, y: jnp.sin((x + y) - LAST(x + y)[:, None]), (4, 100), (4, 100)),
    "test_work": case(lambda x: LAST(jnp.sin(jnp.pad(x, ((0, 0), (0, 1))))), (4, 100)),
    "clamp_work": case(lambda x, y: jnp.sin(taken(x, y) + taken(x, y)[::-1]), (100,), (64,)),
    "loop_trips": case(lambda x: lax.while_loop(lambda s: s[0] < 9, lambda s: jnp.sin(s) + 1, x), (8,)),
    "scan_work": case(CUMSUM, (40,)),
    "scatter_work": BLOCKS["update_window"][0],
    "top_k_work": LOOPS["inserted"][0],
    "digit_work": case(SORT, (1000,)),
    "merge_work": case(SORT, (16,)),
    "dft_work": case(lambda x: jnp.fft.fft(x).real, (64,)),
    "random_work": case(lambda x: lax.rng_bit_generator(x, (8,))[1], (4,), dtype="uint32"),
}
