"""Random bits: the counter-based generators of StableHLO."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from aotc.ir.opset.spec import Arrays, Attrs, Constraint, OpSpec, Types, op_spec_table, require_rule, static_sizes
from aotc.vmfb.dtypes import to_numpy

# Rotation distances of Threefry-2x32 for even and odd blocks of four rounds, and the constant that is mixed into its
# third key word (Salmon et al.).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def _infer_random_bits(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(len(given) == 2, "rng_bit_generator: the result types must be given")
    require_rule(given[0] == types[0], f"rng_bit_generator: the state is {types[0]} but {given[0]} comes back")
    require_rule(
        attrs["algorithm"] in ("DEFAULT", "THREE_FRY", "PHILOX"), f"rng_bit_generator: algorithm {attrs['algorithm']}"
    )
    rooms = (2,) if attrs["algorithm"] == "THREE_FRY" else (2, 3)
    fits = types[0].dtype == "u64" and types[0].rank == 1 and types[0].shape[0] in rooms
    expected = " or ".join(f"u64[{n}]" for n in rooms)
    require_rule(
        fits, f"rng_bit_generator: the state is {types[0]}, expected {expected}, or as many bits in other integers"
    )
    return given


def _state_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for size in types[0].shape[:1]:
        yield Constraint("le", 2, size, "a state of {1} words, expected 2 or 3")
        yield Constraint("le", size, 3, "a state of {0} words, expected 2 or 3")


def _rotate_bits(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def threefry(key: tuple[int, int], x0: np.ndarray, x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Threefry-2x32 (20 rounds) of the counters ``x0, x1`` (u32 arrays)."""
    keys = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ PARITY)]
    with np.errstate(over="ignore"):
        x0, x1 = x0 + keys[0], x1 + keys[1]
        for block in range(5):
            for by in ROTATIONS[block % 2]:
                x0 = x0 + x1
                x1 = _rotate_bits(x1, by) ^ x0
            x0 = x0 + keys[(block + 1) % 3]
            x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def philox(key: tuple[int, int], counter: list[np.ndarray]) -> list[np.ndarray]:
    """Return Philox-4x32 (10 rounds) of four u32 counter arrays."""
    k0, k1 = key
    for _ in range(10):
        p0 = counter[0].astype(np.uint64) * np.uint64(0xD2511F53)
        p1 = counter[2].astype(np.uint64) * np.uint64(0xCD9E8D57)
        high0, high1 = ((p >> np.uint64(32)).astype(np.uint32) for p in (p0, p1))
        low0, low1 = p0.astype(np.uint32), p1.astype(np.uint32)
        counter = [high1 ^ counter[1] ^ np.uint32(k0), low1, high0 ^ counter[3] ^ np.uint32(k1), low0]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def _split_64_bits(x: int) -> tuple[int, int]:
    return x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF


def _counter_words(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore"):
        wide = np.uint64(start & 0xFFFFFFFFFFFFFFFF) + np.arange(count, dtype=np.uint64)
    return wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)


def _join_32_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def _three_fry_words(state: np.ndarray, shape: tuple[int, ...], wide: bool) -> tuple[np.ndarray, int]:
    """Return random words (u64 or u32) of ``shape``, and the increment of the state's counter.

    Each counter value gives two 32-bit words. As in XLA, the two are interleaved along one dim: the first of even size,
    or else the first of the largest dims.
    """
    if wide or not shape:
        count = math.prod(shape)
        x0, x1 = threefry(_split_64_bits(int(state[0])), *_counter_words(int(state[1]), count))
        return (_join_32_bits(x0, x1) if wide else x0), count
    even = [i for i, n in enumerate(shape) if n % 2 == 0]
    dim = even[0] if even else shape.index(max(shape))
    half = [(n + 1) // 2 if i == dim else n for i, n in enumerate(shape)]
    count = math.prod(half)
    x0, x1 = (x.reshape(half) for x in threefry(_split_64_bits(int(state[0])), *_counter_words(int(state[1]), count)))
    pairs = np.stack([x0, x1], axis=dim + 1).reshape([2 * n if i == dim else n for i, n in enumerate(half)])
    return np.take(pairs, range(shape[dim]), axis=dim).reshape(-1), count


def _philox_words(state: np.ndarray, shape: tuple[int, ...], wide: bool) -> tuple[np.ndarray, int]:
    per, size = 2 if wide else 4, math.prod(shape)
    count = (size + per - 1) // per
    low, high = _counter_words(int(state[1]), count)
    extra = int(state[2] if len(state) > 2 else state[0])  # as XLA: a short state repeats its key
    tail = [np.full(count, part, np.uint32) for part in _split_64_bits(extra)]
    w = philox(_split_64_bits(int(state[0])), [low, high, *tail])
    if wide:
        return np.stack([_join_32_bits(w[0], w[1]), _join_32_bits(w[2], w[3])], axis=-1).reshape(-1)[:size], count
    return np.stack(w, axis=-1).reshape(-1)[:size], count


def _reference_random_bits(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    (state,), result = arrays, types[1]
    dtype = to_numpy(result.dtype)
    generate = _three_fry_words if attrs["algorithm"] == "THREE_FRY" else _philox_words
    words, moved = generate(state, static_sizes(result), dtype.itemsize == 8)
    after = np.array(state)
    with np.errstate(over="ignore"):
        after[1] += np.uint64(moved)
    unsigned = words.astype(f"u{dtype.itemsize}")
    return [after, unsigned.view(dtype).reshape(static_sizes(result))]


RANDOM = op_spec_table(
    OpSpec(
        "rng_bit_generator",
        _infer_random_bits,
        _reference_random_bits,
        ("algorithm",),
        of_format=True,
        tolerance=0,
        constraints=_state_sizes_constraints,
    )
)
