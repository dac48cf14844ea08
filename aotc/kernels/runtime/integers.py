"""Integer operations of StableHLO: division by 0 gives -1, shifts beyond the width give 0 or the sign.

The results have 64 bits; a kernel casts them to its type, which wraps.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64


@njit
def signed_div(a, b):
    """Return the quotient of signed integers, rounded towards 0; -1 for a divisor of 0."""
    a, b = int64(a), int64(b)
    if b == 0:
        return int64(-1)
    if b == -1:
        return -a
    quotient = a // b
    return quotient + 1 if quotient * b != a and (a < 0) != (b < 0) else quotient


@njit
def unsigned_div(a, b):
    """Return the quotient of unsigned integers; all ones for a divisor of 0."""
    a, b = uint64(a), uint64(b)
    if b == uint64(0):
        return ~uint64(0)
    return a // b


@njit
def signed_rem(a, b):
    """Return the remainder of signed integers, with the sign of ``a``; ``a`` for a divisor of 0."""
    a, b = int64(a), int64(b)
    if b == 0:
        return a
    if b == -1:
        return int64(0)
    return a - signed_div(a, b) * b


@njit
def unsigned_rem(a, b):
    """Return the remainder of unsigned integers; ``a`` for a divisor of 0."""
    a, b = uint64(a), uint64(b)
    if b == uint64(0):
        return a
    return a - (a // b) * b


@njit
def unsigned_pow(a, b):
    """Return a power of unsigned integers, modulo 2**64."""
    base, exponent, result = uint64(a), uint64(b), uint64(1)
    while exponent != uint64(0):
        if exponent & uint64(1):
            result = result * base
        base, exponent = base * base, exponent >> uint64(1)
    return result


@njit
def signed_pow(a, b):
    """Return a power of signed integers, modulo 2**64; a negative exponent gives 0, except for 1 and -1."""
    a, b = int64(a), int64(b)
    if b < 0:
        if a == 1 or (a == -1 and b % 2 == 0):
            return int64(1)
        return int64(-1) if a == -1 else int64(0)
    return int64(unsigned_pow(uint64(a), uint64(b)))


@njit
def integer_sign(x):
    """Return -1, 0 or 1."""
    return (x > 0) - (x < 0)


@njit
def shift_left(x, count, bits):
    """Return ``x << count``; 0 if the count is not less than ``bits``."""
    count = int64(count)
    return uint64(x) << uint64(count) if 0 <= count < bits else uint64(0)


@njit
def shift_right(x, count, bits):
    """Return unsigned ``x >> count``; 0 if the count is not less than ``bits``."""
    count = int64(count)
    return uint64(x) >> uint64(count) if 0 <= count < bits else uint64(0)


@njit
def shift_right_signed(x, count, bits):
    """Return signed ``x >> count``; the sign if the count is not less than ``bits``."""
    count = int64(count)
    return int64(x) >> (count if 0 <= count < bits else bits - 1)


@njit
def bit_count(x):
    """Return the number of ones of an unsigned integer."""
    rest, count = uint64(x), 0
    while rest != uint64(0):
        rest, count = rest & (rest - uint64(1)), count + 1
    return count


@njit
def leading_zeros(x, bits):
    """Return the number of zeros above the highest one of an unsigned integer of ``bits``."""
    rest, count = uint64(x), bits
    while rest != uint64(0):
        rest, count = rest >> uint64(1), count - 1
    return count


@njit
def saturate_signed(x, bits):
    """Return a float as the nearest signed integer of ``bits`` towards 0; 0 for NaN."""
    if x != x:
        return int64(0)
    low = -(int64(1) << (bits - 1))
    if x <= low:
        return low
    if x >= -np.float64(low):
        return -(low + 1)
    return int64(x)


@njit
def saturate_unsigned(x, bits):
    """Return a float as the nearest unsigned integer of ``bits`` towards 0; 0 for NaN."""
    if x != x or x <= 0:
        return uint64(0)
    high = uint64(2) * ((uint64(1) << uint64(bits - 1)) - uint64(1)) + uint64(1)
    if x >= np.float64(high):
        return high
    if x >= 9223372036854775808.0:
        return uint64(int64(x - 9223372036854775808.0)) + uint64(9223372036854775808)
    return uint64(int64(x))
