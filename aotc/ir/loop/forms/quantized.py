"""Quantized weights: rounding, and the panels that tiles read.

Quantization is symmetric: a weight is an integer times the scale of its column and of its group of ``terms`` along k.
The largest magnitude of a group is represented by 127 (8 bits) or 7 (4 bits).

Panels are bytes, of shape ``([B,] P, G, chunk)``. Chunk ``(p, g)`` has the ``cols`` scales of panel p's columns in
group g, as f32, and then the group's terms, one row of ``cols`` after the other. An 8-bit term is a byte. With 4 bits a
byte has two terms of a column, the first one in the low half. So a tile reads a single stream of memory.
"""

from __future__ import annotations

import numpy as np

SCALE_BYTES = 4


def step_bytes(cols: int, bits: int) -> int:
    """Return the bytes of one step along k of ``cols`` columns: one 8-bit term of each, or two 4-bit terms."""
    return cols * bits * (8 // bits) // 8


def chunk_bytes(cols: int, bits: int, terms: int) -> int:
    """Return the bytes of a chunk: ``terms`` of ``cols`` columns, with the scales."""
    return cols * SCALE_BYTES + cols * terms * bits // 8


def quantize(weights: np.ndarray, bits: int, terms: int) -> tuple[np.ndarray, np.ndarray]:
    """Return integers ([B,] K, N) and scales ([B,] G, N) of ``weights`` ([B,] K, N), in groups of ``terms`` along K.

    The last group may be shorter. A group of zeros has the scale 0.
    """
    *lead, k, n = weights.shape
    most, count = (1 << (bits - 1)) - 1, -(-k // terms)
    wide = np.zeros((*lead, count * terms, n), np.float32)
    wide[..., :k, :] = weights
    runs = wide.reshape(*lead, count, terms, n)
    scales = (np.abs(runs).max(-2) / np.float32(most)).astype(np.float32)
    with np.errstate(over="ignore"):
        scales = np.where(np.isfinite(scales * np.float32(most)), scales, np.nextafter(scales, np.float32(0)))
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None, :]
    integers = np.clip(np.rint(runs / divisor), -most, most).astype(np.int8)
    return integers.reshape(wide.shape)[..., :k, :], scales


def dequantize(integers: np.ndarray, scales: np.ndarray, terms: int) -> np.ndarray:
    """Return the f32 weights of integers ([B,] K, N) and scales ([B,] G, N)."""
    each = np.repeat(scales, terms, axis=-2)[..., : integers.shape[-2], :]
    return integers.astype(np.float32) * each


def pack(integers: np.ndarray, scales: np.ndarray, cols: int, bits: int, terms: int) -> np.ndarray:
    """Return the panels of integers ([B,] K, N) and scales ([B,] G, N), zero-padded in K and N."""
    *lead, k, n = integers.shape
    count, panels = scales.shape[-2], -(-n // cols)
    wide = np.zeros((*lead, count * terms, panels * cols), np.int8)
    wide[..., :k, :n] = integers
    per = 8 // bits
    split = np.moveaxis(wide.reshape(*lead, count, terms // per, per, panels, cols), -2, -5).view(np.uint8)
    rows = split[..., 0, :] if per == 1 else split[..., 0, :] & 15 | split[..., 1, :] << 4
    factors = np.zeros((*lead, count, panels * cols), np.float32)
    factors[..., :n] = scales
    heads = np.ascontiguousarray(np.moveaxis(factors.reshape(*lead, count, panels, cols), -2, -3)).view(np.uint8)
    return np.concatenate([heads, rows.reshape(*lead, panels, count, -1)], -1)


def unpack(panels: np.ndarray, cols: int, bits: int) -> np.ndarray:
    """Return the f32 weights ([B,] K, N) of panels, with the padding of K and N."""
    *lead, count, runs, _ = panels.shape
    head, per = cols * SCALE_BYTES, 8 // bits
    scales = np.ascontiguousarray(panels[..., :head]).view(np.float32)
    rows = panels[..., head:].reshape(*lead, count, runs, -1, 1, cols)
    if per == 1:
        terms = rows.view(np.int8)
    else:
        signed = np.concatenate([rows << 4, rows], -2).view(np.int8)
        terms = signed >> 4
    wide = terms.reshape(*lead, count, runs, -1, cols).astype(np.float32) * scales[..., None, :]
    return np.moveaxis(wide.reshape(*lead, count, -1, cols), -3, -2).reshape(*lead, -1, count * cols)
