"""CRC-32 of joined pieces from the CRCs of the pieces, so that pieces are summed by several threads and no byte twice."""

from __future__ import annotations

from functools import cache, lru_cache

_POLYNOMIAL = 0xEDB88320  # zip's CRC-32, bits reversed: bit 31 is the coefficient of x^0


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces joined, from that of each and the length of the second."""
    return _times(_power(second_bytes), first) ^ second if second_bytes else first


@cache
def _squared(k: int) -> int:
    """Return x^(2^k) modulo the polynomial."""
    if k == 0:
        return 1 << 30  # x
    return _times(_squared(k - 1), _squared(k - 1))


@lru_cache(1024)
def _power(num_bytes: int) -> int:
    """Return x^(8 * num_bytes) modulo the polynomial: what that many more bytes do to a CRC."""
    product, bits, k = 1 << 31, num_bytes, 3
    while bits:
        if bits & 1:
            product = _times(_squared(k), product)
        bits >>= 1
        k += 1
    return product


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
