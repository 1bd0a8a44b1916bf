"""A keyed permutation of 0..n-1 in constant memory: position in an epoch -> window."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


def permute(
    index: NDArray[np.int64], size: int, *, seed: int, epoch: int, name: str = ""
) -> NDArray[np.int64]:
    """Where each `index` (0 <= index < size) goes under the permutation of (seed, epoch, name).

    A balanced Feistel network (Luby & Rackoff 1988) over the smallest even number of bits that
    covers `size`; values that fall outside are walked through it again until they fall inside
    (cycle walking, Black & Rogaway 2002), which keeps it a permutation of exactly 0..size-1.
    """
    assert size > 0 and int(index.min()) >= 0 and int(index.max()) < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(f"{seed}/{epoch}/{name}" if name else f"{seed}/{epoch}")
    value = _feistel(index.astype(np.uint64), half, keys)
    while (outside := value >= size).any():
        value[outside] = _feistel(value[outside], half, keys)
    return value.astype(np.int64)


def _round_keys(key: str) -> list[np.uint64]:
    digest = hashlib.sha256(key.encode()).digest()
    return [np.uint64(int.from_bytes(digest[8 * i : 8 * i + 8], "little")) for i in range(_ROUNDS)]


def _feistel(value: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014); wraps modulo 2^64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
