"""Import of random numbers: the bit generator, and ``rng``, which has no state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import stablehlo

from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.random import PARITY, ROTATIONS
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy

GOLDEN = 0x9E3779B97F4A7C15  # spreads the numbers of the generators over the keys


def _import_rng_bit_generator(state: ImportState, op: Any) -> None:
    (old_state,) = state.operands(op)
    bind_random_bits(state, op, old_state, state.static_type(op.results[1].type))


def bind_random_bits(state: ImportState, op: Any, old_state: Value, result: TensorType) -> None:
    """Bind the results of a bit generator: its new state, and bits of type ``result``; the old one is ``old_state``.

    All integer types use the same bits, in the order in which JAX packs them.
    """
    own, attrs = old_state.type, {"algorithm": stablehlo.RngAlgorithmAttr(op.attributes["rng_algorithm"]).value}
    parts = 64 // DTYPES[own.dtype].bits if kind_of(own.dtype) in "iu" else 1
    words = own
    sized = own.rank == 1 and isinstance(own.shape[0], int)
    if sized and own.dtype != "u64" and parts in (1, 2) and own.shape[0] % parts == 0:
        words = TensorType("u64", (own.shape[0] // parts,))
        pairs = TensorType(own.dtype, (*words.shape, parts) if parts > 1 else words.shape)
        old_state = state.one("bitcast", [_reshaped_state(state, old_state, pairs)], {}, [words])
    after, bits = state.emit("rng_bit_generator", [old_state], attrs, [words, result])
    if words != own:
        after = _reshaped_state(state, state.one("bitcast", [after], {}, [pairs]), own)
    state.bind(op, [after, bits])


def _reshaped_state(state: ImportState, v: Value, to: TensorType) -> Value:
    return v if v.type == to else state.one("reshape", [v], {}, [to])


def _import_threefry2x32(state: ImportState, op: Any) -> None:
    """Import ``threefry2x32``, JAX's custom call on GPUs: 20 rounds on arrays of keys and counters.

    Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".
    """
    key0, key1, x0, x1 = state.data_operands(op)
    emit = lambda fn, a, b: state.one(fn, [a, b])
    add = partial(emit, "add")
    keys = [key0, key1, emit("xor", emit("xor", key0, key1), _random_constant_like(state, PARITY, key0))]
    x0, x1 = add(x0, keys[0]), add(x1, keys[1])
    for block in range(5):
        for by in ROTATIONS[block % 2]:
            x0 = add(x0, x1)
            left, right = (_random_constant_like(state, n, x1) for n in (by, 32 - by))
            x1 = emit("xor", x0, emit("or", emit("shl", x1, left), emit("shr_logic", x1, right)))
        x0 = add(x0, keys[(block + 1) % 3])
        x1 = add(add(x1, keys[(block + 2) % 3]), _random_constant_like(state, block + 1, x1))
    state.bind(op, [x0, x1])


def _import_rng(state: ImportState, op: Any) -> None:
    """Import ``rng`` as Philox keyed by the op's number in the module: every call returns the same numbers."""
    a, b, size = state.operands(op)
    shape = state.dims_of(size, "the shape of rng")
    low, high = (state.broadcast_scalar(v, shape) for v in (a, b))
    normal = stablehlo.RngDistributionAttr(op.attributes["rng_distribution"]).value == "NORMAL"
    bind = _random_integers if kind_of(a.type.dtype) in "iub" else _random_normal if normal else _random_uniform
    state.bind(op, [bind(state, low, high, shape)])


def _random_bits(state: ImportState, dtype: str, shape: Sequence[Dim]) -> Value:
    """Return bits from a new generator; its key is derived from the number of generators so far."""
    state.session.generators += 1
    key = np.array([state.session.generators * GOLDEN % 2**64, 0], np.uint64)
    start = state.constant(key, TensorType("u64", (2,)))
    result_types = [start.type, TensorType(dtype, tuple(shape))]
    return state.emit("rng_bit_generator", [start], {"algorithm": "PHILOX"}, result_types)[1]


def _random_constant_like(state: ImportState, value: float, like: Value) -> Value:
    return state.constant(np.array(value).astype(to_numpy(like.type.dtype)), like.type)


def _random_unit_floats(state: ImportState, dtype: str, shape: Sequence[Dim]) -> Value:
    """Return random floats in ``[0, 1)`` that are multiples of the dtype's epsilon."""
    wide = "f64" if dtype == "f64" else "f32"
    word, digits = ("u64", 53) if wide == "f64" else ("u32", 24)
    bits = _random_bits(state, word, shape)
    drop = _random_constant_like(state, DTYPES[word].bits - digits, bits)
    whole = state.convert(state.one("shr_logic", [bits, drop]), wide)
    return state.one("mul", [whole, _random_constant_like(state, 2.0**-digits, whole)])


def _random_uniform(state: ImportState, low: Value, high: Value, shape: Sequence[Dim]) -> Value:
    """Return uniform floats ``low + u (high - low)``, with ``u`` in ``[0, 1)``."""
    unit = state.convert(_random_unit_floats(state, low.type.dtype, shape), low.type.dtype)
    return state.one("add", [low, state.one("mul", [unit, state.one("sub", [high, low])])])


def _random_normal(state: ImportState, mean: Value, deviation: Value, shape: Sequence[Dim]) -> Value:
    """Return normally distributed floats ``mean + deviation sqrt(2) erf_inv(2 u - 1)``; no ``u`` is 0 or 1."""
    unit = _random_unit_floats(state, mean.type.dtype, shape)
    step = 2.0**-53 if unit.type.dtype == "f64" else 2.0**-24
    twice = state.one("mul", [unit, _random_constant_like(state, 2.0, unit)])
    centred = state.one("sub", [twice, _random_constant_like(state, 1.0 - step, unit)])
    standard = state.one("mul", [state.one("erf_inv", [centred]), _random_constant_like(state, 2.0**0.5, unit)])
    return state.one("add", [mean, state.one("mul", [state.convert(standard, mean.type.dtype), deviation])])


def _random_integers(state: ImportState, low: Value, high: Value, shape: Sequence[Dim]) -> Value:
    """Return uniform integers ``low + bits mod (high - low)``, or random bits for booleans."""
    dtype = low.type.dtype
    if dtype == "i1":
        bits = _random_bits(state, "u32", shape)
        return state.convert(state.one("and", [bits, _random_constant_like(state, 1, bits)]), "i1")
    word = f"u{max(DTYPES[dtype].bits, 8)}"
    span = state.convert(state.one("sub", [high, low]), word)
    return state.one("add", [low, state.convert(state.one("rem", [_random_bits(state, word, shape), span]), dtype)])


RANDOM: dict[str, Importer] = {"stablehlo.rng_bit_generator": _import_rng_bit_generator, "stablehlo.rng": _import_rng}

RANDOM_CALLS: dict[str, Importer] = {f"{prefix}_threefry2x32_ffi": _import_threefry2x32 for prefix in ("cu", "hip")}
