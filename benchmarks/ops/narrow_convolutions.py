"""Convolutions with 1 to 5 output channels.

Signals, images and their gradients, strides within a row, dilation, groups, f32 and f64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import signal

from benchmarks import options, report, timing
from benchmarks.peers.jax_jit import aotc_and_jax_calls


def convolution(**more: Any) -> Callable[[Any, Any], Any]:
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NCHW", "OIHW", "NCHW"), **more}
    return lambda x, w: lax.conv_general_dilated(x, w, **options)


def of_signals(stride: int, padding: str) -> Callable[[Any, Any], Any]:
    """Return a convolution of one-dimensional signals."""
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


def run(
    only: options.Only = "", threads: options.Threads = 2, rounds: options.Rounds = 15, seconds: options.Seconds = 0.01
) -> None:
    """Print a row for each program and dtype."""
    clock = timing.pin(threads)
    table = report.Table("convolution", report.us("aotc"), report.us("XLA"), report.ratio("aotc/XLA"))
    known = {f"{name}, {dtype}": (name, dtype) for name in PROGRAMS for dtype in ("f32", "f64")}
    for case in options.select(known, only):
        name, dtype = known[case]
        function, *shapes = PROGRAMS[name]
        rng = np.random.default_rng(0)
        arguments = [rng.standard_normal(shape).astype(dtype[0] + str(int(dtype[1:]) // 8)) for shape in shapes]
        with jax.enable_x64(True):
            calls = aotc_and_jax_calls(function, arguments, threads)
            times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        table.add(case, times.median("aotc"), times.median("XLA"), times.ratio("aotc", "XLA"))
