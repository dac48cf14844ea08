"""Matmuls and convolutions of the suite ``products``: function, dtype, shapes of the operands, operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "i8": np.int8, "f32": np.float32}
KINDS |= {"f64": np.float64, "f8": ml_dtypes.float8_e4m3fn}


def matmul(a: Any, b: Any) -> Any:
    return a @ b


def matmul_nt(a: Any, b: Any) -> Any:
    return a @ b.T


def dense(a: Any, b: Any, bias: Any) -> Any:
    return jax.nn.gelu(a @ b + bias)


def residual(a: Any, b: Any, bias: Any, x: Any) -> Any:
    return x + (a @ b + bias)


def integers(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def short(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def scores(a: Any, b: Any) -> Any:
    return jnp.einsum("bqhd,bkhd->bhqk", a, b)


def convolution(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def by_twos(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_kernel(step: Any, x: Any, w: Any, g: Any) -> Any:
    """Return the gradient of a convolution for its kernel, from the gradient ``g`` of its result."""
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return jax.vjp(lambda w: jax.lax.conv_general_dilated(x, w, (step, step), "SAME", **layout), w)[1](g)[0]


kernel_gradient, kernel_gradient_by_twos = partial(of_kernel, 1), partial(of_kernel, 2)


def highest(a: Any, b: Any) -> Any:
    return jnp.dot(a, b, precision="highest")


# Function, dtype, shapes of the operands, floating-point operations.
CASES = {
    "4096^3 bf16": (matmul, "bf16", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 f16": (matmul, "f16", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 bf16 gelu": (dense, "bf16", [(4096, 4096), (4096, 4096), (4096,)], 2 * 4096**3),
    "4096^3 tf32": (matmul, "tf32", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 tf32 NT": (matmul_nt, "tf32", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 i8 NT": (integers, "i8", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "64x64x65536 bf16": (matmul, "bf16", [(64, 65536), (65536, 64)], 2 * 64 * 64 * 65536),
    "8x4096x16384 bf16": (matmul, "bf16", [(8, 16384), (16384, 4096)], 2 * 8 * 4096 * 16384),
    "1x4096x4096 bf16": (matmul, "bf16", [(1, 4096), (4096, 4096)], 2 * 4096 * 4096),
    "16x4096x4096 bf16": (matmul, "bf16", [(16, 4096), (4096, 4096)], 2 * 16 * 4096 * 4096),
    "1x768x3072 bf16": (matmul, "bf16", [(1, 768), (768, 3072)], 2 * 768 * 3072),
    "128x3072x768 bf16 gelu": (dense, "bf16", [(128, 768), (768, 3072), (3072,)], 2 * 128 * 3072 * 768),
    "128x768x3072 bf16": (matmul, "bf16", [(128, 3072), (3072, 768)], 2 * 128 * 3072 * 768),
    "1024x768x768 bf16 residual": (
        residual, "bf16", [(1024, 768), (768, 768), (768,), (1024, 768)], 2 * 1024 * 768 * 768
    ),
    "1024x3072x768 bf16 gelu": (dense, "bf16", [(1024, 768), (768, 3072), (3072,)], 2 * 1024 * 3072 * 768),
    "1024x768x3072 bf16": (matmul, "bf16", [(1024, 3072), (3072, 768)], 2 * 1024 * 3072 * 768),
    "8192x3072x768 bf16 gelu": (dense, "bf16", [(8192, 768), (768, 3072), (3072,)], 2 * 8192 * 3072 * 768),
    "8192x768x3072 bf16": (matmul, "bf16", [(8192, 3072), (3072, 768)], 2 * 8192 * 3072 * 768),
    "8192x768x3072 bf16 residual": (
        residual, "bf16", [(8192, 3072), (3072, 768), (768,), (8192, 768)], 2 * 8192 * 768 * 3072
    ),
    "1024x768x3072 tf32 residual": (
        residual, "tf32", [(1024, 3072), (3072, 768), (768,), (1024, 768)], 2 * 1024 * 768 * 3072
    ),
    "1024x3072x768 tf32": (matmul, "tf32", [(1024, 768), (768, 3072)], 2 * 1024 * 3072 * 768),
    "8x12x1024x64 bf16 scores": (scores, "bf16", [(8, 1024, 12, 64), (8, 1024, 12, 64)], 2 * 96 * 1024 * 1024 * 64),
    "1000x1001x999 bf16 odd": (matmul, "bf16", [(1000, 999), (999, 1001)], 2 * 1000 * 1001 * 999),
    "conv 16x56x56x64 3x3 bf16": (
        convolution, "bf16", [(16, 56, 56, 64), (3, 3, 64, 64)], 2 * 16 * 56 * 56 * 64 * 9 * 64
    ),
    "conv 16x14x14x256 3x3 tf32": (
        convolution, "tf32", [(16, 14, 14, 256), (3, 3, 256, 256)], 2 * 16 * 14 * 14 * 256 * 9 * 256
    ),
    "4096^3 f8 NT": (short, "f8", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "1024x3072x768 f8 NT": (short, "f8", [(1024, 768), (3072, 768)], 2 * 1024 * 3072 * 768),
    "2048^3 f64": (matmul, "f64", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
    "4096^3 f64": (matmul, "f64", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "2048^3 f64 NT": (matmul_nt, "f64", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
    "512^3 f64": (matmul, "f64", [(512, 512), (512, 512)], 2 * 512**3),
    "1000x1001x999 f64 odd": (matmul, "f64", [(1000, 999), (999, 1001)], 2 * 1000 * 1001 * 999),
    "64x64x65536 f64": (matmul, "f64", [(64, 65536), (65536, 64)], 2 * 64 * 64 * 65536),
    "conv 16x14x14x256 3x3 f64": (
        convolution, "f64", [(16, 14, 14, 256), (3, 3, 256, 256)], 2 * 16 * 14 * 14 * 256 * 9 * 256
    ),
    "2048^3 f32 highest": (highest, "f32", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
}  # fmt: skip


# Of ResNet-50: image, channels, taps, results, pixels' step.
LAYERS = [
    (224, 3, 7, 64, 2), (56, 64, 1, 256, 1), (56, 64, 3, 64, 1), (56, 128, 3, 128, 2), (56, 256, 1, 512, 2),
    (28, 512, 1, 128, 1), (28, 128, 3, 128, 1), (14, 256, 1, 1024, 1), (14, 256, 3, 256, 1), (7, 512, 1, 2048, 1),
    (7, 512, 3, 512, 1),
]  # fmt: skip
for _images in (1, 16):
    for _size, _c, _taps, _n, _step in LAYERS:
        for _kind in ("bf16", "tf32"):
            CASES[f"resnet b{_images} {_size}x{_size}x{_c} {_taps}x{_taps}/{_step} {_n} {_kind}"] = (
                by_twos if _step == 2 else convolution, _kind,
                [(_images, _size, _size, _c), (_taps, _taps, _c, _n)],
                2 * _images * (_size // _step) ** 2 * _taps**2 * _c * _n,
            )  # fmt: skip

# Gradients of kernels, of 16 images: image, channels, taps, results, pixels' step.
GRADIENTS = [
    (56, 64, 3, 64, 1), (28, 128, 3, 128, 1), (14, 256, 3, 256, 1), (28, 128, 3, 128, 2), (7, 512, 3, 512, 1),
    (56, 64, 1, 256, 1),
]  # fmt: skip
for _size, _c, _taps, _n, _step in GRADIENTS:
    for _kind in ("bf16", "tf32"):
        CASES[f"kernel gradient {_size}x{_size}x{_c} {_taps}x{_taps}/{_step} {_n} {_kind}"] = (
            kernel_gradient_by_twos if _step == 2 else kernel_gradient, _kind,
            [(16, _size, _size, _c), (_taps, _taps, _c, _n), (16, _size // _step, _size // _step, _n)],
            2 * 16 * (_size // _step) ** 2 * _taps**2 * _c * _n,
        )  # fmt: skip


def operands_of(kind: Any, shapes: Any) -> Any:
    """Return random operands, the same for all engines."""
    random = np.random.default_rng(0)
    if kind == "i8":
        return [random.integers(-128, 128, s).astype(np.int8) for s in shapes]
    draws = np.float64 if kind == "f64" else np.float32
    return [random.standard_normal(s, draws).astype(KINDS[kind]) for s in shapes]
