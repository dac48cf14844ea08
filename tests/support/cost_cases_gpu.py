"""Cases of :mod:`support.cost_cases` for the rows of the cost table about GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from support.cost_cases import CUMSUM, GPU, Case, case, cholesky, chosen, loop, pair, repeated, sizes, solve, swapped

lax = jax.lax


def scattered(x: Any, y: Any) -> Any:
    """Return ``x`` with ``y`` added to its first elements, repeatedly."""
    return x.at[jnp.arange(y.shape[0]) % 3].add(y)


def factored(x: Any) -> Any:
    """Return LU factors."""
    return lax.linalg.lu(x)[0]


def largest_of(size: int) -> Callable[[Any], Any]:
    """Return the sum of squares of the largest elements of windows."""
    return lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (size,), (1,), "VALID") ** 2).sum()


def added_rows(x: Any, u: Any) -> Any:
    """Return an array with rows added."""
    return x.at[jnp.arange(u.shape[0]) * 7 % x.shape[0]].add(u)


def transformed(x: Any) -> Any:
    """Return the real parts of the transforms of rows."""
    return jnp.fft.fft(x).real


def largest(k: int) -> Any:
    """Return the function that finds the ``k`` largest of each row."""
    return lambda x: lax.top_k(x, k)


def iterations(count: int, steps: int = 1) -> Any:
    """Return a loop of ``count`` iterations, each of ``steps`` steps."""
    return lambda x: lax.fori_loop(0, count, lambda n, y: repeated(lambda z: z * 0.5 + 1, steps)(y), x)


def by_halves(keys: int) -> Any:
    """Return the function that sorts by ``keys`` keys."""
    return lambda x: lax.sort([x * n for n in range(keys)], num_keys=keys)


def with_others(count: int) -> Any:
    """Return the function that sorts ``count`` arrays by the first."""
    return lambda x: lax.sort([x * n for n in range(count)], num_keys=1)


def gpu_sizes(function: Any, shapes: Any, *ns: int, **more: Any) -> list[Case]:
    """Return cases of one function for several sizes."""
    return sizes(function, shapes, *ns, target=GPU, **more)


def row_of(x: Any, table: Any) -> Any:
    """Return a sum with a row of ``table`` that the data select."""
    return x + lax.dynamic_index_in_dim(table, x[0].astype("int32"), 0, keepdims=False), table


def until_large(x: Any) -> Any:
    """Return a state that cannot overwrite its operand, from a loop whose number of iterations depends on the data."""
    return lax.while_loop(lambda x: x[0] < 100, lambda x: x + x[::-1] + 1, x)


SINES = repeated(jnp.sin, 30)
SINE, MANY = loop(lambda x: (jnp.sin(x),)), loop(lambda x: (SINES(x),))
LOOPS = {
    "loop_flops_cuda": (case(SINE, (8,), target=GPU), case(MANY, (8,), target=GPU)),
    "alternated_bytes_cuda": pair(until_large, (8,), (1 << 22,), target=GPU),
    "exchanged_bytes_cuda": pair(swapped, [(8,)] * 2, [(3 << 20,)] * 2, target=GPU),
    "branched_bytes_cuda": pair(chosen, [(8,)] * 2, [(3 << 20,)] * 2, target=GPU),
    "loop_block_flops": pair(MANY, (100,), (4000,), target=GPU),
    "loop_block_bytes": pair(loop(row_of), [(100,), (10, 100)], [(100,), (1000, 100)], target=GPU),
    "loop_block_value": pair(loop(lambda x: (x + 1,)), (100,), (3000,), target=GPU),
    "loop_own_flops": (
        case(loop(lambda x, y: (jnp.sin(x), y + x)), (), (100,), target=GPU),
        case(loop(lambda x, y: (SINES(x), y + x)), (), (100,), target=GPU),
    ),
    "loop_turns": (case(SINE, (100,), target=GPU), case(loop(lambda x: (jnp.sin(x),), 10_000), (100,), target=GPU)),
}


def multiplied(x: Any, w: Any) -> Any:
    """Return the sums of products of rows of ``x`` with ``w``."""
    return lax.scan(lambda c, row: (c + jnp.tanh(row @ w + c), ()), jnp.zeros((x.shape[1], w.shape[1])), x)[0]


def multiplied_often(x: Any, w: Any) -> Any:
    """Return sums of matmuls in a loop whose number of iterations is an element of an argument."""
    count = x[0, 0, 0].astype("int32")
    start = jnp.zeros((x.shape[1], w.shape[1]))
    return lax.fori_loop(0, count, lambda i, c: jnp.tanh(x[i % x.shape[0]] @ w + c), start)


STEP = loop(lambda c, w: (jnp.tanh(c @ w), w), 100)
LONG_STEP = loop(lambda x: (jnp.sin(x) + x[::-1],), 100)
GRIDS = {
    "hoisted_product_rows": pair(multiplied, [(10, 4, 32), (32, 64)], [(10, 200, 32), (32, 64)], target=GPU),
    "hoisted_product_bytes": pair(multiplied, [(10, 4, 32), (32, 64)], [(9000, 100, 32), (32, 128)], target=GPU),
    "hoisted_product_waste": pair(multiplied_often, [(10, 4, 32), (32, 64)], [(200, 4, 32), (32, 64)], target=GPU),
    "loop_grid_flops": pair(STEP, [(16, 256), (256, 256)], [(64, 2048), (2048, 2048)], target=GPU),
    "loop_grid_bytes": pair(loop(row_of), [(4000,), (50, 4000)], [(4000,), (5000, 4000)], target=GPU),
    "loop_grid_value": pair(LONG_STEP, (10_000,), (5_000_000,), target=GPU),
}


def steps(m: int) -> Any:
    """Return the argument shapes of a loop step on ``m`` rows."""
    return lambda n: [(m, n), (n, n)]


GRID_BLOCKS = {
    "loop_grid_threads": gpu_sizes(LONG_STEP, lambda n: [(n,)], 9000, 32_768, 40_000),
    "loop_grid_blocks": gpu_sizes(LONG_STEP, lambda n: [(n,)], 20_000, 65_536, 70_000),
    "loop_product_rows": gpu_sizes(STEP, lambda m: [(m, 256), (256, 256)], 8, 16, 40),
    "loop_product_cols": gpu_sizes(STEP, steps(4), 256, 1024, 1100),
    "loop_product_part": gpu_sizes(STEP, lambda m: [(m, 512), (512, 512)], 2, 4, 7),
    "loop_product_terms": gpu_sizes(STEP, steps(16), 257, 512),
    "loop_stage_bytes": gpu_sizes(STEP, steps(16), 512, 1536),
    "loop_stage_reads": gpu_sizes(STEP, steps(8), 256, 768),
}


def spread_over(x: Any, w: Any, v: Any) -> Any:
    """Return sums along either axis of products with a column that is broadcast to the size of a matrix."""
    column = jnp.broadcast_to(x[:, None], w.shape) + 1
    return (column * w).sum(0), (column * v).sum(1)


SUMS = gpu_sizes(lambda x: x.sum(0), lambda n: [(400, n)], 100, 128, 130)
LIMITS = {
    "recomputed_bytes": pair(spread_over, [(64,), *[(64, 128)] * 2], [(256,), *[(256, 512)] * 2], target=GPU),
    "narrow_elements": pair(lambda x: x.sum(0), (4096, 1000), (4200, 1000), target=GPU),
    "narrow_blocks": pair(lambda x: x.sum(0), (4000, 376), (4000, 392), target=GPU),
    **GRIDS,
    "gpu_region_ops": (
        case(repeated(jnp.sin, 3), (8,), target=GPU), case(repeated(lambda x: x * x + 1, 100), (8,), target=GPU),
    ),
    "unrolled_turns": (case(iterations(3), (5000,), target=GPU), case(iterations(20), (5000,), target=GPU)),
    "unrolled_ops": (case(iterations(3), (5000,), target=GPU), case(iterations(3, 60), (5000,), target=GPU)),
    "short_carried": (case(iterations(3), (50,), target=GPU), case(iterations(3), (5000,), target=GPU)),
    **LOOPS,
    "thread_sort": pair(jnp.sort, (4, 20), (4, 100), target=GPU),
    "kept_of_run": (case(largest(8), (1, 5000), target=GPU), case(largest(1500), (1, 5000), target=GPU)),
    "digit_sort_keys": (
        case(by_halves(2), (1, 70_000), target=GPU), case(by_halves(3), (1, 70_000), target=GPU),
    ),
    "digit_sort_moved": (
        case(with_others(2), (1, 70_000), target=GPU), case(with_others(5), (1, 70_000), target=GPU),
    ),
    "merged_sort": pair(jnp.sort, (1, 5000), (1, 70_000), target=GPU),
    "serial_updates": pair(scattered, [(8,), (10,)], [(8,), (100,)], target=GPU),
    "dense_scatter": pair(scattered, [(50,), (100,)], [(5000,), (100,)], target=GPU),
    "crowded_cells": pair(scattered, [(50,), (70_000,)], [(5000,), (70_000,)], target=GPU),
    "crowded_updates": pair(scattered, [(50,), (100,)], [(50,), (70_000,)], target=GPU),
    "summed_row": pair(added_rows, [(50, 8), (100, 8)], [(50, 40), (100, 40)], target=GPU),
    "filled_bytes": pair(scattered, [(50,), (100,)], [(5000,), (10_000,)], target=GPU),
    "short_column": pair(lambda x: jnp.cumsum(x, 0), (100, 4096), (200, 4096), target=GPU),
    "column_scan_blocks": pair(lambda x: jnp.cumsum(x, 0), (200, 1000), (200, 4096), target=GPU),
    "counted_updates": pair(added_rows, [(50, 40), (100, 40)], [(50, 40), (9000, 40)], target=GPU),
    "jacobi_bytes": pair(jnp.linalg.eigh, (4, 4), (160, 160), target=GPU),
    "windows_of_element": tuple(case(jax.grad(largest_of(size)), (60,), target=GPU) for size in (3, 30)),
    "panel_rows": pair(factored, (40, 4), (520, 4), target=GPU),
    "block_factor": pair(jnp.linalg.qr, (8, 8), (300, 300), target=GPU),
    "thread_triangle": pair(cholesky, (4, 4), (20, 20), target=GPU),
}

BLOCKS = {
    **GRID_BLOCKS,
    **dict.fromkeys(("narrow_bytes", "narrow_columns", "narrow_rows"), SUMS),
    "loop_block_threads": gpu_sizes(loop(lambda x: (x + 1,)), lambda n: [(n,)], 100, 512, 700),
    "gpu_sort_bytes": gpu_sizes(jnp.sort, lambda n: [(2, n)], 4000, 4096, 4100),
    "merged_each": gpu_sizes(jnp.sort, lambda n: [(2, n)], 100, 128, 130),
    "merge_ways_unknown": gpu_sizes(by_halves(3), lambda n: [(2, n)], 100, spec="_, n"),
    "digit_threads": gpu_sizes(jnp.sort, lambda n: [(2, n)], 70_000, 131_072),
    "lane_digits": gpu_sizes(jnp.sort, lambda n: [(2, n)], 70_000, 131_072),
    "digit_sort_bytes": gpu_sizes(with_others(4), lambda n: [(2, n)], 70_000, 131_072),
    "crowded_threads": gpu_sizes(scattered, lambda n: [(50,), (n,)], 1 << 16, 70_001),
    "crowded_each": gpu_sizes(scattered, lambda n: [(50,), (n,)], 1 << 17, 131_073),
    "summed_part": gpu_sizes(added_rows, lambda n: [(50, 40), (n, 40)], 32, 33, 100),
    "counted_warps": gpu_sizes(added_rows, lambda n: [(50, 40), (n, 40)], 32, 33, 100),
    "jacobi_lane_bytes": gpu_sizes(jnp.linalg.eigh, lambda n: [(n, n)], 3, 40),
    "jacobi_sweeps": gpu_sizes(jnp.linalg.eigh, lambda n: [(n, n)], 1, 2, 9),
    "factor_warps": gpu_sizes(jnp.linalg.qr, lambda n: [(4, n)], 63, 64, 65),
    "pivot_panel_bytes": gpu_sizes(factored, lambda n: [(n, n)], 8, 32, 40),
    "panel_group_bytes": gpu_sizes(factored, lambda n: [(9, n)], 33, 40, 60),
    "panel_threads": gpu_sizes(factored, lambda n: [(n, 60)], 33, 70),
    "columns_of_warp": gpu_sizes(jnp.linalg.qr, lambda n: [(8, n)], 3, 4, 5),
    "triangle_threads": gpu_sizes(cholesky, lambda n: [(n, n)], 20, 64),
    "panel_bytes": gpu_sizes(cholesky, lambda n: [(n, n)], 32, 37),
    "triangle_tile": gpu_sizes(cholesky, lambda n: [(n, n)], 36, 39),
    "mirror_bytes": gpu_sizes(cholesky, lambda n: [(n, n)], 16, 33),
    "solved_columns": gpu_sizes(solve, lambda n: [(16, 16), (16, n)], 20, 32, 35),
    "dft_thread_points": gpu_sizes(transformed, lambda n: [(2, n)], 15, 16, 30),
    "dft_threads": gpu_sizes(transformed, lambda n: [(2, n)], 2000, 4096, 5000),
    "gpu_scan_threads": gpu_sizes(CUMSUM, lambda n: [(2, n)], 2000, 2048, 2100),
    "gpu_scan_bytes": gpu_sizes(CUMSUM, lambda n: [(2, n)], 100, 256, 300),
    "gpu_scan_blocks": gpu_sizes(CUMSUM, lambda n: [(n, 5000)], 500, 1024, 1100),
    "gpu_scan_part": gpu_sizes(CUMSUM, lambda n: [(1, n)], 4000, 4096, 65_537),
    "column_scan_bytes": gpu_sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(200, n)], 2048, 2050, 4096),
    "column_scan_each": gpu_sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(n, 2048)], 129, 144, 1000),
    "column_scan_threads": gpu_sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(n, 2048)], 512, 513, 2000),
    "gpu_scan_columns": gpu_sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(64, n)], 1000, 1 << 17, 131_075),
    "gpu_scan_column_part": gpu_sizes(lambda x: jnp.cumsum(x, 0), lambda n: [(n, 10)], 60, 64, 67),
}
