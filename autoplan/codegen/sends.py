"""Collectives of attention over cut sequences, for the ledger: what `autoplan.runtime.context` and `ring` perform."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from autoplan.config.context_methods import ContextMethod
from autoplan.errors import RuleError
from autoplan.ir.symbols import Expr

Send = tuple[str, str, str, Expr, str]  # what, kind, axis, bytes, phase


def attention_sends(
    method: ContextMethod,
    names: Sequence[str],
    sizes: Sequence[Expr],
    heads: Sequence[int],
    grads: Sequence[bool],
) -> list[Send]:
    """Of one attention.

    Args:
        names, sizes, heads, grads: of queries, keys, values and output: bytes and heads of one rank, before any
            exchange, and whether a gradient flows through it.

    Raises:
        RuleError: heads that the method cannot spread.
    """
    text = method.heads_obstacle(heads[0], heads[1])
    if text is not None:
        raise RuleError(f"attention over cut sequences by {method.name}: {text}")
    exchange, rest = ("cpu", "cpr") if method.is_product else ("cp", "cp")
    r, out = method.ranks, list[Send]()
    times = [1 if k in (0, 3) else method.repeats(count) for k, count in enumerate(heads)]
    sizes = [size.scale(Fraction(n)) for size, n in zip(sizes, times, strict=True)]
    if method.ulysses > 1:
        for name, size, grad in zip(names, sizes, grads, strict=True):
            out += [(name, "all_to_all", exchange, size, phase) for phase in ("forward", "backward")[: 1 + grad]]
    keys = list(zip(names, sizes, grads, strict=True))[1:3]
    if method.inner == "gather":
        for name, size, grad in keys:
            whole = size.scale(Fraction(r))
            out.append((name, "all_gather", rest, whole, "forward"))
            if grad:
                out.append((name, "reduce_scatter", rest, whole, "backward"))
    if method.inner == "ring":
        what, size = f"{names[1]}, {names[2]}", sizes[1] + sizes[2]
        again, back = any(grads[:3]), any(grads[1:3])
        phases = ["forward"] + ["backward"] * (again + back)
        out += [(what, "send_recv", rest, size, phase) for _ in range(r - 1) for phase in phases]
    return out


def document_sends(method: ContextMethod, name: str, size: Expr) -> list[Send]:
    """Of one attention that stays inside documents: every rank learns whose tokens are whose. `size`: of one rank."""
    out, axes = list[Send](), ("cpu", "cpr") if method.is_product else ("cp", "cp")
    for ranks, axis in zip((method.ulysses, method.ranks), axes, strict=True):
        if ranks > 1:
            size = size.scale(Fraction(ranks))
            out.append((name, "all_gather", axis, size, "forward"))
    return out
