"""The random numbers of autoplan's programs one by one, in Python's numbers."""

from __future__ import annotations

import math

WORDS = (1 << 64) - 1


def mixed(z: int) -> int:
    """SplitMix64's output function in Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORDS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORDS
    return z ^ (z >> 31)


def number(name: str, rng: tuple[int, int, int], site: int, position: int, *parameters: float) -> float:
    """One number of a distribution, from its definition (autoplan/runtime/draws.py)."""
    golden = 0x9E3779B97F4A7C15
    state = mixed((rng[0] + golden) & WORDS)
    state = mixed((state + (rng[1] + 1) * golden) & WORDS)
    state = mixed((state + (site + 1) * golden) & WORDS)
    bits = mixed((state + (position + 1) * golden) & WORDS)
    other = mixed((mixed((state + 0xD1B54A32D192ED03) & WORDS) + (position + 1) * golden) & WORDS)
    open_interval = ((bits >> 12) + 0.5) / 2**52
    if name == "uniform":
        return (bits >> 11) / 2**53
    if name == "normal":
        return math.sqrt(-2 * math.log(open_interval)) * math.cos(2 * math.pi * (other >> 11) / 2**53)
    if name == "exponential":
        return -math.log(open_interval)
    if name == "bernoulli":
        return float((bits >> 11) < round(parameters[0] * 2**53))
    low, high = map(int, parameters)
    return float(low + (bits >> 1) % (high - low))
