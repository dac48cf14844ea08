"""Quantized types in NumPy, by the specification."""

from __future__ import annotations

import numpy as np

from aotc.frontend.quantized.types import Quantization, parse_quantization
from aotc.vmfb.dtypes import to_numpy

A = "!quant.uniform<i8:f32, 0.05:-30>"
B = "!quant.uniform<i8:f32, 0.127:7>"
COARSE = "!quant.uniform<i8:f32, 2.53:7>"
CENTERED = "!quant.uniform<i8:f32, 0.127>"
AXIS = "!quant.uniform<i8:f32:1, {0.05:-30,0.1:0,0.25:12,0.125:7}>"
SYMMETRIC = "!quant.uniform<i8<-127:127>:f32:1, {0.05,0.1,0.25}>"
NIBBLES = "!quant.uniform<i4:f32:1, {0.5,1.0,2.5}>"
WIDE = "!quant.uniform<i32:f32, 0.00635>"


def storage(t: str, *shape: int) -> str:
    q = parse_quantization(t)
    return f"tensor<{''.join(f'{n}x' for n in shape)}{q.storage.replace('u', 'ui')}>"


def tensor(t: str, *shape: int) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{t}>"


def facts(t: str, rank: int) -> tuple[Quantization, np.ndarray, np.ndarray]:
    """Return the record with scales and zeros as arrays that broadcast over a tensor of ``rank`` dims."""
    q = parse_quantization(t)
    shape = [1] * rank
    if q.axis is not None:
        shape[q.axis] = len(q.scales)
    return q, np.array(q.scales, to_numpy(q.expressed)).reshape(shape), np.array(q.zeros, np.int64).reshape(shape)


def quantized(x: np.ndarray, t: str) -> np.ndarray:
    """Quantize ``x`` in NumPy, by the specification."""
    q, scales, zeros = facts(t, x.ndim)
    with np.errstate(all="ignore"):
        whole = np.rint(x.astype(scales.dtype) / scales).astype(np.float64)
    whole = np.where(np.isnan(whole), 0, np.clip(whole + zeros, q.low, q.high))
    return whole.astype(np.int64).astype(to_numpy(q.storage))


def numbers(v: np.ndarray, t: str) -> np.ndarray:
    """Dequantize ``v`` in NumPy, by the specification."""
    _, scales, zeros = facts(t, v.ndim)
    return (v.astype(np.int64) - zeros).astype(scales.dtype) * scales
