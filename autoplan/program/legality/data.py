"""Legality rules of the batch and of its sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

from autoplan.config.parallel import ParallelConfig
from autoplan.program.context_pins import method_obstacle
from autoplan.program.facts import Facts
from autoplan.program.legality.rule import Rule, Scope


def _batch(*names: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        values = [getattr(c, name) for name in names]
        product = math.prod(values)
        if f.batch is None or f.batch % product == 0:
            return None
        given = " x ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        return f"{given}{f' = {product}' if len(names) > 1 else ''} does not divide the global batch of {f.batch}"

    return found


def _whole_batch(c: ParallelConfig, f: Facts) -> str | None:
    made = c.dp * c.micro_batch_size * c.num_micro_batches
    if f.batch is None or made == f.batch:
        return None
    return (
        f"dp={c.dp} x micro_batch_size={c.micro_batch_size} x num_micro_batches={c.num_micro_batches} = {made}, but "
        f"the global batch is {f.batch}"
    )


def _unsplit(name: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        value = getattr(c, name)
        if value == 1 or f.model is None or f.model.batch_obstacle is None:
            return None
        return f"{name}={value}: {f.model.batch_obstacle}, so the batch cannot be split"

    return found


def _parts(c: ParallelConfig, f: Facts) -> str | None:
    if c.cp == 1 or f.seq_len is None:
        return None
    if f.model is not None and f.model.graph.parts and f.model.context_obstacle is None:
        odd = (n for runs in f.model.graph.parts.values() for _, n in runs if n % c.cp)
        size = next(odd, None)
        return (
            None if size is None else f"{size} tokens of {f.model.name} cannot be cut into equal parts over cp={c.cp}"
        )
    if f.seq_len % (2 * c.cp) == 0:
        return None
    return f"seq_len={f.seq_len} cannot be cut into {2 * c.cp} equal chunks over cp={c.cp}"


_LENGTHS = {"s": "seq_len", "t": "target_len"}


def _no_target(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or f.target_len in (None, f.seq_len):
        return None
    if f.model.graph.has_target or "t" in f.model.graph.bounds:  # the latter: of one length
        return None
    return f"target_len={f.target_len}, but {f.model.name} has no second sequence with a length of its own"


def _positions(symbol: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        length, rows = f.length(symbol), None if f.model is None else f.model.positions.get(symbol)
        if f.model is None or length is None or rows is None or length <= rows:
            return None
        return f"{_LENGTHS[symbol]}={length}, but {f.model.name} has {rows} learned positions"

    return found


def _bounds(symbol: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        length, bounds = f.length(symbol), None if f.model is None else f.model.graph.bounds.get(symbol)
        if f.model is None or length is None or bounds is None:
            return None
        low, high = bounds
        if low <= length and (high is None or length <= high):
            return None
        if symbol == "s" and f.model.graph.parts:
            return f"seq_len={length}: the tokens of {f.model.name} are those of its example, {low} in this unit"
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        return (
            f"sequences of {length} tokens: the forward of {f.model.name} depends on the length, and this graph is "
            f"valid for {allowed}"
        )

    return found


def _uncut(target: bool) -> Callable[[ParallelConfig, Facts], str | None]:
    """Return the rule that cp needs a sequence that can be cut, for models with two lengths (`target`) or one."""

    def found(c: ParallelConfig, f: Facts) -> str | None:
        if c.cp == 1 or f.model is None or f.model.graph.has_target is not target:
            return None
        reason = f.model.context_obstacle
        return None if reason is None else f"cp={c.cp}: {reason}"

    return found


def _method_alone(c: ParallelConfig, f: Facts) -> str | None:
    if c.context_method is None or c.cp > 1:
        return None
    return f"context_method={c.context_method!r} needs cp to be pinned too"


def _method(c: ParallelConfig, f: Facts) -> str | None:
    if c.context_method is None:
        return None
    if c.cp == 1:
        return f"context_method={c.context_method!r} needs cp of at least 2"
    if f.model is None:
        return None
    return method_obstacle(f.model.graph, c.context_method, c.cp, c.tp)


NO_METHOD = "the pinned context_method does not exist at this tp"
RULES: tuple[Rule, ...] = (
    Rule("dp does not divide the global batch", ("dp", "global_batch_size"), _batch("dp")),
    Rule("the batch cannot be split", ("dp",), _unsplit("dp")),
    *(
        Rule("the micro-batches do not make the global batch", (*names, "global_batch_size"), _batch(*names))
        for names in (
            ("micro_batch_size",),
            ("num_micro_batches",),
            ("dp", "micro_batch_size"),
            ("dp", "num_micro_batches"),
            ("micro_batch_size", "num_micro_batches"),
        )
    ),
    Rule(
        "the micro-batches do not make the global batch",
        ("num_micro_batches", "micro_batch_size", "dp", "global_batch_size"),
        _whole_batch,
    ),
    Rule("the batch cannot be split", ("num_micro_batches",), _unsplit("num_micro_batches")),
    Rule("no second sequence", ("target_len",), _no_target),
    *(Rule("learned positions", (name,), _positions(symbol)) for symbol, name in _LENGTHS.items()),
    *(Rule("the length that was captured", (name,), _bounds(symbol)) for symbol, name in _LENGTHS.items()),
    Rule("the sequence cannot be cut into equal chunks", ("seq_len", "cp"), _parts),
    Rule("the sequence cannot be cut", ("cp",), _uncut(target=True)),
    Rule("the sequence cannot be cut", ("cp",), _uncut(target=False), Scope.EXECUTED),
    Rule("a pinned context_method without cp", ("cp", "context_method"), _method_alone, of_pins=True),
    Rule(NO_METHOD, ("context_method", "cp", "tp"), _method),
)
