"""One random stream for each of many environments, bit for bit the one that Gymnasium gives it, in 32 bytes.

Gymnasium gives environment i of a vector ``numpy.random.Generator(PCG64(SeedSequence(seed + i)))``. As objects, 100,000
of these take a tenth of a gigabyte, and seconds to make. Here they are one array of states, and their draws are NumPy
arithmetic over all environments that start an episode.

Sources: M. O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number
Generation" (PCG-XSL-RR 128/64) and "Developing a seed_seq Alternative"; F. Brown, "Random Number Generation with
Arbitrary Strides" (k steps of a linear congruential generator as one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.core.errors import InvalidArgument, InvalidType

Ids = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
HalfWords = npt.NDArray[np.uint32]
Seed = int | Sequence[int | None] | None

_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_BITS_64, _BITS_128 = 2**64 - 1, 2**128 - 1
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_BLOCK = 4096  # environments at once: keeps the temporary arrays small
_FEW = 16  # up to so many environments NumPy's own generator is faster: 8 µs for each, against 200 µs at once


class Streams:
    """The random streams of ``num_envs`` environments, each unpredictable until it is seeded."""

    def __init__(self, num_envs: int) -> None:
        words = np.random.SeedSequence().generate_state(4 * num_envs, np.uint64)
        self.state: Words = words.reshape(num_envs, 4).astype(np.uint64)
        """``[num_envs, 4]``: high and low half of the state, high and low half of the increment."""
        self.state[:, 3] |= np.uint64(1)  # an increment is odd
        self._one = np.random.Generator(np.random.PCG64(0))

    def seed(self, seed: Seed, ids: Ids) -> None:
        """Seed those of ``ids``: environment i by ``seed + i``, or by ``seed[i]`` where that is not None.

        Raises:
            InvalidArgument: a seed is negative, or 2**64 or more, or there is not one for each environment.
            InvalidType: a seed is no int.
        """
        if seed is None:
            return
        if isinstance(seed, Sequence):
            if len(seed) != len(self.state):
                raise InvalidArgument(f"{len(seed)} seeds were given for {len(self.state)} environments")
            given = [(i, one) for i in ids.tolist() if (one := seed[i]) is not None]
            for _, one in given:
                _check(one, 1)
            ids = np.array([i for i, _ in given], np.int64)
            seeds = np.array([one for _, one in given], np.uint64)
        else:
            _check(seed, len(self.state))
            seeds = np.uint64(seed) + ids.astype(np.uint64)
        for part in _blocks(len(ids)):
            self.state[ids[part]] = _seeded(seeds[part])

    def uniform(self, ids: Ids, low: float | Floats, high: float | Floats, count: int) -> Floats:
        """``count`` numbers from each stream of ``ids``, uniform in [``low``, ``high``): ``[len(ids), count]``."""
        return low + (np.asarray(high) - low) * self._units(ids, count)

    def _units(self, ids: Ids, count: int) -> Floats:
        if len(ids) <= _FEW:
            return self._one_by_one(self._one.random, ids, count)
        drawn = np.empty((len(ids), count))
        for part in _blocks(len(ids)):
            states = _after(self.state[ids[part]], count)
            self.state[ids[part], :2] = states[:, -1]
            drawn[part] = _unit(states)
        return drawn

    def normal(self, ids: Ids, count: int) -> Floats:
        """``count`` standard normal numbers from each stream of ``ids``: ``[len(ids), count]``.

        NumPy's method takes a varying number of draws, so NumPy draws them, one environment after the other.
        """
        return self._one_by_one(self._one.standard_normal, ids, count)

    def _one_by_one(self, draw: Callable[[int], Floats], ids: Ids, count: int) -> Floats:
        drawn, bits = np.empty((len(ids), count)), self._one.bit_generator
        for row, i in enumerate(ids.tolist()):
            high, low, high_increment, low_increment = map(int, self.state[i])
            words = {"state": high << 64 | low, "inc": high_increment << 64 | low_increment}
            bits.state = {"bit_generator": "PCG64", "state": words, "has_uint32": 0, "uinteger": 0}
            drawn[row] = draw(count)
            after = bits.state["state"]["state"]
            self.state[i, :2] = after >> 64, after & _BITS_64
        return drawn


def _check(seed: object, num_envs: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise InvalidType(f"a seed is an int, not {type(seed).__name__}")
    if not 0 <= int(seed) <= 2**64 - num_envs:
        raise InvalidArgument(f"a seed is at least 0 and at most 2**64 less the number of environments, not {seed}")


def _blocks(count: int) -> list[slice]:
    return [slice(at, at + _BLOCK) for at in range(0, count, _BLOCK)]


# ------------------------------------------------------------------------------------------------------------- PCG64


def _product(a: Words, b: Words) -> Words:
    """Of 128-bit numbers, modulo 2**128; the halves, high and low, are the last dimension."""
    a_high, a_low, b_high, b_low = a[..., 0], a[..., 1], b[..., 0], b[..., 1]
    a1, a0, b1, b0 = a_low >> _HALF, a_low & _LOW, b_low >> _HALF, b_low & _LOW
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    carry = (middle & _LOW) + a0 * b1
    high = a1 * b1 + (middle >> _HALF) + (carry >> _HALF) + a_high * b_low + a_low * b_high
    return np.stack((high, a_low * b_low), axis=-1)


def _sum(a: Words, b: Words) -> Words:
    low = a[..., 1] + b[..., 1]
    carry = (low < a[..., 1]).astype(np.uint64)
    return np.stack((a[..., 0] + b[..., 0] + carry, low), axis=-1)


@functools.cache
def _strides(count: int) -> tuple[Words, Words]:
    """``a`` and ``c`` such that j + 1 steps take a state s with increment i to ``a[j] * s + c[j] * i``."""
    a, c, found_a, found_c = 1, 0, [], []
    for _ in range(count):
        a, c = a * _MULTIPLIER & _BITS_128, (c * _MULTIPLIER + 1) & _BITS_128
        found_a.append((a >> 64, a & _BITS_64))
        found_c.append((c >> 64, c & _BITS_64))
    return np.array(found_a, np.uint64), np.array(found_c, np.uint64)


def _after(streams: Words, count: int) -> Words:
    """The states after 1, …, ``count`` steps: ``[n, count, 2]``."""
    a, c = _strides(count)
    return _sum(_product(a, streams[:, None, :2]), _product(c, streams[:, None, 2:]))


def _unit(states: Words) -> Floats:
    """What a generator in these states gives, as a float in [0, 1)."""
    high, low = states[..., 0], states[..., 1]
    turn = high >> np.uint64(58)
    word = high ^ low
    turned = np.bitwise_or(word >> turn, word << (np.uint64(64) - turn & np.uint64(63)))
    return np.ldexp((turned >> np.uint64(11)).astype(np.float64), -53)


# ------------------------------------------------------------------------------------------------------ SeedSequence


def _seeded(seeds: Words) -> Words:
    """The streams of these seeds: ``[n, 4]``."""
    state = _generate(_mixed(seeds))
    increment = _sum(_product(state[:, 2:], np.array([0, 2], np.uint64)), np.array([0, 1], np.uint64))
    first = _sum(state[:, :2], increment)
    a, _ = _strides(1)
    return np.concatenate((_sum(_product(first, a), increment), increment), axis=1)


def _mixed(seeds: Words) -> list[HalfWords]:
    constant = 0x43B0D7E5

    def scramble(word: HalfWords) -> HalfWords:
        nonlocal constant
        word = word ^ np.uint32(constant)
        constant = constant * 0x931E8875 & 0xFFFFFFFF
        word = word * np.uint32(constant)
        return word ^ word >> np.uint32(16)

    zero = np.zeros(len(seeds), np.uint32)
    entropy = ((seeds & _LOW).astype(np.uint32), (seeds >> _HALF).astype(np.uint32), zero, zero)
    pool = [scramble(word) for word in entropy]
    for source in range(4):
        for target in range(4):
            if source != target:
                word = pool[target] * np.uint32(0xCA01F9DD) - scramble(pool[source]) * np.uint32(0x4973F715)
                pool[target] = word ^ word >> np.uint32(16)
    return pool


def _generate(pool: list[HalfWords]) -> Words:
    constant, words = 0x8B51F9DD, []
    for i in range(8):
        word = pool[i % 4] ^ np.uint32(constant)
        constant = constant * 0x58F38DED & 0xFFFFFFFF
        word = word * np.uint32(constant)
        words.append((word ^ word >> np.uint32(16)).astype(np.uint64))
    return np.stack([words[i] | words[i + 1] << _HALF for i in range(0, 8, 2)], axis=1)
