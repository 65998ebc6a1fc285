"""Lower bounds of the 1F1B step, which `autoplan.search.cuts` is built on, as plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def lower_bound_1f1b(chunk_s: Sequence[float], num_micro_batches: int, send_s: Sequence[float] = ()) -> float:
    """`max_s (m T_s + sum_{i<s} T_i)`: no step of GPipe or 1F1B, with one chunk per stage, is shorter.

    Args:
        chunk_s: T_s, forward plus backward of one micro-batch on each stage.
        send_s: per boundary, forward plus backward; none: 0.

    Proof: stage s starts after the forwards of the first micro-batch on the stages before it, computes m T_s, and after
    its last backward those of the same micro-batch follow on the stages before it.
    """
    sends = send_s or [0.0] * (len(chunk_s) - 1)
    before = accumulate((t + send for t, send in zip(chunk_s, sends, strict=False)), initial=0.0)
    return max(num_micro_batches * t + b for t, b in zip(chunk_s, before, strict=True))


def bound_1f1b(
    forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int, send_s: Sequence[float] = ()
) -> float:
    """A lower bound of the 1F1B step that knows forwards from backwards; never below `lower_bound_1f1b`.

    With w_s = min(m, p - s) forwards before the first backward of stage s (m: fewer micro-batches than stages), and

        E_s = (w_s - 1) (max_{t<=s} f_t - f_s + max_{t<=s} b_t - b_s)    slower stages before s, filling and draining
        A_s = m T_s + sum_{i<s} T_i + E_s                                 stage s is never idle in between
        D_s = sum_i T_i + (m - 1) T_s - (w_s - 1) (f_s + b_s - max_{t<=s} b_t)    it waits for its first backward

    the bound is max_s max(A_s, D_s), sums over stages with the sends between them. Both are lengths of paths through
    the actions. A_s: the forwards 0 .. w_s - 1 on stage t, the last of them on to s, everything else on s up to
    backward m - w_s, that one back to t', where the rest of the backwards follow. D_s: forward 0 through all stages
    and back to s, from there as before. A_s needs the stages up to s only, D_s those and the sum over all, so both
    serve a dynamic programme from left to right.
    """
    num_stages = len(forward_s)
    sends = [*send_s, 0.0] if send_s else [0.0] * num_stages
    total = sum(forward_s) + sum(backward_s) + sum(sends)
    best = before = most_f = most_b = 0.0
    for s, (f, b, send) in enumerate(zip(forward_s, backward_s, sends, strict=True)):
        warm = num_micro_batches if num_micro_batches < num_stages else num_stages - s
        most_f, most_b = max(most_f, f), max(most_b, b)
        drain = (warm - 1) * (most_b - b)
        alone = num_micro_batches * (f + b) + before + (warm - 1) * (most_f - f) + drain
        waits = total + (num_micro_batches - 1) * (f + b) - (warm - 1) * f + drain
        best = max(best, alone, waits)
        before += f + b + send
    return best
