"""The arrays of `autoplan.search.state_bounds`: seconds and bytes of many candidates of one workload, prices of bytes.

A bound takes, for every unit, the recompute choice h with the least  R_uh + y K_uh + x H_uh : its seconds, the bytes
that it keeps on the device at a price y, and those that it keeps on the host at a price x. Any prices give a bound.
Good ones are what the choices of the convex front cost per byte that they free; for choices on the host also the price
of a byte there at which the best of them is as dear as the best of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models.arrays import Array

_BEYOND = 4.0  # price of a byte where no choice frees enough, over that of the dearest choice


@dataclass(frozen=True)
class PassTimes:
    """Arrays of candidates; rows are candidates.

    Attributes:
        forward, backward: seconds by kind of unit.
        inputs: of a backward the part that the stage before waits for: all of it, unless the schedule splits it.
        counts: units of each kind.
        beside: the seconds per step outside of passes.
    """

    forward: Array
    backward: Array
    inputs: Array
    counts: Array
    beside: Array


@dataclass(frozen=True)
class Prices:
    """By candidate, prices of a byte on the device and of one on the host, in pairs."""

    device: Array
    host: Array


@dataclass(frozen=True)
class Alike(PassTimes):
    """Passes over equal units, bounded together with their memory. All bytes are in bytes of activations.

    Attributes:
        states: by kind of unit.
        again, kept: the seconds (row, choice, kind) and bytes (choice, kind) of recompute choices; inf, both, of those
            that a kind does not have.
        transient: bytes (choice, kind) that the backward of a unit needs for a time.
        room: the bytes that states and activations of the fullest moment may take.
        free_saved: bytes that every stage holds per micro-batch besides its units'.
        moved: bytes (choice, kind) that choices keep on the host.
        host_states, host_room: as `states` and `room`, on the host.
        prices: of bytes on the device alone.
        both: of bytes on both; no columns if no choice keeps any on the host, or any number fits there.
    """

    states: Array
    again: Array
    kept: Array
    transient: Array
    room: Array
    free_saved: float
    moved: Array
    host_states: Array
    host_room: Array
    prices: Array
    both: Prices

    def rows(self, at: NDArray[np.int64]) -> Alike:
        """Return the arrays of some candidates."""
        return Alike(
            self.forward[at],
            self.backward[at],
            self.inputs[at],
            self.counts,
            self.beside[at],
            self.states[at],
            self.again[at],
            self.kept,
            self.transient,
            self.room[at],
            self.free_saved,
            self.moved,
            self.host_states[at],
            self.host_room[at],
            self.prices[at],
            Prices(self.both.device[at], self.both.host[at]),
        )

    def least(self, price: Array, host: Array | None = None) -> Array:
        """Return the least of seconds and bytes at prices, over recompute choices: by candidate, price and kind.

        Args:
            price: by candidate, price and kind (or 1), of a byte on the device.
            host: likewise of a byte on the host; None: 0.
        """
        return least_of(self.again, self.kept, self.moved, price, host)


def least_of(again: Array, kept: Array, moved: Array, price: Array, host: Array | None = None) -> Array:
    """Return `Alike.least` of these seconds (row, choice, kind) and bytes."""
    out = np.full((*price.shape[:2], kept.shape[1]), np.inf)
    there = [bool(row.any()) for row in moved] if host is not None else []
    for k, size in enumerate(np.where(np.isinf(kept), 0.0, kept)):
        each = again[:, None, k] + price * size
        if host is not None and there[k]:
            each += host * moved[k]
        np.minimum(out, each, out=out)
    return out


def prices_of(seconds: Array, counts: Array, again: Array, kept: Array, moved: Array) -> tuple[Array, Prices]:
    """Return by candidate the prices of a byte worth trying: on the device alone, and on device and host.

    They are 0, what choices cost per byte that they free, and more: those of the convex front of the kind of unit with
    most activations.

    Args:
        seconds: of all passes of a micro-batch, by candidate.
        counts, again, kept, moved: as for `Alike`; `moved` is 0 where any number of bytes fits the host.
    """
    main = int(np.argmax(kept[0] * counts))
    dearest = seconds[:, None] / max(1.0, float(kept[0, main]))
    each, sizes, there = again[:, :, main], kept[:, main], moved[:, main]
    device = _slopes(each, sizes, dearest)
    if not there.any():
        return device, Prices(device[:, :0], device[:, :0])
    others = _slopes(each[:, there == 0], sizes[there == 0], dearest)[:, 1:]  # at no price of the device nothing moves
    dear, cheap = (
        np.min([each[:, [k]] + others * sizes[k] for k in some if sizes[k] < np.inf], axis=0)
        for some in (np.flatnonzero(there == 0), np.flatnonzero(there))
    )
    return device, Prices(others, np.maximum(0.0, dear - cheap) / there.max())


def _slopes(again: Array, kept: Array, dearest: Array) -> Array:
    """Return by candidate 0, what the choices of the front cost per byte, and a price above all of them.

    Args:
        dearest: by candidate, the price to be exceeded where no choice costs anything.
    """
    choices, rows = np.unique(again, axis=0, return_inverse=True)  # most candidates have equal ones
    found = [_front(each, kept) for each in choices]
    most = max(map(len, found))
    out = np.array([prices + prices[-1:] * (most - len(prices)) for prices in found])[rows.ravel()]
    dear = out.max(axis=1, keepdims=True)
    return np.concatenate([out, _BEYOND * np.where(dear > 0, dear, dearest)], axis=1)


def _front(again: Array, kept: Array) -> list[float]:
    """Return 0 and what the choices of the convex front cost per byte, cheapest first."""
    at, prices = 0, [0.0]
    while (less := np.flatnonzero(kept < kept[at])).size:
        slopes = (again[less] - again[at]) / (kept[at] - kept[less])
        best = np.lexsort((kept[less], slopes))[0]  # of equal slopes, the one that frees most
        prices.append(max(0.0, float(slopes[best])))
        at = int(less[best])
    return prices
