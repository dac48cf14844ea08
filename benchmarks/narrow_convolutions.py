"""Convolutions of few output channels beside XLA: ``python benchmarks/narrow_convolutions.py [--threads 2]``.

Signals, images and their gradients, strides within a row, dilation, groups, f32 and f64. Calls in turn; the tenth part
of the times is the row's. Results are compared with XLA's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import signal

ROUNDS = 60


def convolution(**more: Any) -> Callable[[Any, Any], Any]:
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NCHW", "OIHW", "NCHW"), **more}
    return lambda x, w: lax.conv_general_dilated(x, w, **options)


def of_signals(stride: int, padding: str) -> Callable[[Any, Any], Any]:
    return convolution(window_strides=(stride,), padding=padding, dimension_numbers=("NCH", "OIH", "NCH"))


def sobel(x: Any, w: Any) -> Any:
    return jnp.sqrt(signal.convolve2d(x, w, mode="same") ** 2 + signal.convolve2d(x, w.T, mode="same") ** 2)


PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = {
    "convolve2d, same": (lambda x, w: signal.convolve2d(x, w, mode="same"), (128, 128), (5, 5)),
    "correlate2d, valid": (lambda x, w: signal.correlate2d(x, w, mode="valid"), (128, 128), (3, 3)),
    "convolve, full": (jnp.convolve, (4096,), (33,)),
    "correlate, same": (lambda x, w: jnp.correlate(x, w, mode="same"), (4096,), (65,)),
    "convolve, valid": (lambda x, w: jnp.convolve(x, w, mode="valid"), (100_000,), (9,)),
    "strides, 1 channel of 3": (convolution(window_strides=(2, 2)), (1, 3, 128, 128), (1, 3, 3, 3)),
    "strides, 4 channels of 3": (convolution(window_strides=(2, 2)), (1, 3, 128, 128), (4, 3, 3, 3)),
    "stride within a row": (convolution(window_strides=(1, 2)), (1, 8, 64, 64), (2, 8, 5, 5)),
    "dilation": (convolution(rhs_dilation=(2, 2)), (1, 4, 96, 96), (1, 4, 3, 3)),
    "dilation within a row": (convolution(rhs_dilation=(1, 3)), (1, 2, 96, 96), (3, 2, 3, 3)),
    "groups": (convolution(feature_group_count=2), (1, 4, 64, 64), (4, 2, 3, 3)),
    "depthwise 3 x 3": (convolution(feature_group_count=3), (1, 3, 128, 128), (3, 1, 3, 3)),
    "depthwise 7 x 7": (convolution(feature_group_count=3), (1, 3, 128, 128), (3, 1, 7, 7)),
    "depthwise, strides": (convolution(feature_group_count=4, window_strides=(2, 2)), (1, 4, 128, 128), (4, 1, 3, 3)),
    "Sobel": (sobel, (256, 256), (3, 3)),
    "gradient of an image": (lambda x, w: sum(g * g for g in jnp.gradient(x)) * w, (256, 256), (1, 1)),
    "signal, stride 3": (of_signals(3, "VALID"), (1, 1, 8192), (1, 1, 15)),
    "signal, stride 2, 2 channels of 4": (of_signals(2, "SAME"), (1, 4, 4096), (2, 4, 7)),
}


def measure(name: str, dtype: str, threads: int) -> tuple[float, float]:
    """Return the microseconds of aotc and of XLA."""
    import aotc

    function, *shapes = PROGRAMS[name]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    jitted, there = jax.jit(function), jax.device_put(arguments)
    module = aotc.load(aotc.compile(jitted, *arguments), threads=threads)
    np.testing.assert_allclose(module.invoke("main", *arguments)[0], jitted(*there), rtol=1e-3, atol=1e-3)
    times: list[list[float]] = [[], []]
    calls = lambda: module.invoke("main", *arguments), lambda: jax.block_until_ready(jitted(*there))
    for _ in range(ROUNDS):
        for call, row in zip(calls, times):
            begin = time.perf_counter()
            call()
            row.append(1e6 * (time.perf_counter() - begin))
    ours, xla = (sorted(row)[ROUNDS // 10] for row in times)
    return ours, xla


def main() -> None:
    """Print a row for each program and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all without one")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| program | dtype | aotc | XLA | aotc / XLA |\n|---|---|---|---|---|")
    for name in options.names or PROGRAMS:
        for dtype in ("float32", "float64"):
            ours, xla = measure(name, dtype, options.threads)
            print(f"| {name} | {dtype} | {ours:.0f} us | {xla:.0f} us | {ours / xla:.2f} |", flush=True)


if __name__ == "__main__":
    main()
