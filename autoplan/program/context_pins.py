"""Methods of context parallelism by block: read a pin, check that it is legal, list the legal methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from autoplan.config.context_methods import ContextMethod, methods, read_method
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import AttentionHeads, attention_heads, kv_ranks

MethodChoice = tuple[tuple[str, str], ...]  # (block, name of its method)


def _obstacle(method: ContextMethod, found: Sequence[AttentionHeads], tp: int, major: int) -> str | None:
    for op in found:
        heads = op.heads // tp if op.heads % tp == 0 else op.heads
        text = method.heads_obstacle(heads, op.kv_heads // math.gcd(major, op.kv_heads))
        if text is not None:
            return f"{text} at {op.where}"
    return None


def legal_methods(graph: ModelGraph, cp: int, tp: int) -> dict[str, list[ContextMethod]]:
    """Return the methods that the heads of every block with attention allow under tp."""
    heads = attention_heads(graph, of_sequences=True)
    major = kv_ranks(graph, tp)
    return {block: [m for m in methods(cp) if _obstacle(m, found, tp, major) is None] for block, found in heads.items()}


def combinations(options: Mapping[str, Sequence[ContextMethod]]) -> list[MethodChoice]:
    """Return every choice of one method per block. All products in one choice have the same two axes."""
    factors = {m.ulysses for found in options.values() for m in found if m.is_product}
    out: dict[MethodChoice, None] = {}
    for u in (None, *sorted(factors)):
        allowed = [
            [(block, m.name) for m in found if not m.is_product or m.ulysses == u] for block, found in options.items()
        ]
        out |= dict.fromkeys(tuple(sorted(chosen)) for chosen in itertools.product(*allowed))
    return list(out)


def worth_looking_at(
    options: Mapping[str, Sequence[ContextMethod]],
    figures: Callable[[ContextMethod, Sequence[str]], Mapping[str, Sequence[float]]],
) -> dict[str, list[ContextMethod]]:
    """Return the methods of every block that no other method equals or beats in every figure.

    The first of equals stays. A product needs a mesh that other blocks may need, too: it is left out only for a method
    that needs no mesh of its own, or the same one.

    Args:
        figures: numbers, less is better, of some blocks under one method that is legal in all of them.
    """
    found: dict[str, list[tuple[ContextMethod, Sequence[float]]]] = {block: [] for block in options}
    for method in dict.fromkeys(m for legal in options.values() for m in legal):
        blocks = [block for block, legal in options.items() if method in legal]
        for block, numbers in figures(method, blocks).items():
            found[block].append((method, numbers))
    return {block: [m for k, (m, _) in enumerate(of) if not _beaten(k, of)] for block, of in found.items()}


def _beaten(k: int, found: Sequence[tuple[ContextMethod, Sequence[float]]]) -> bool:
    method, mine = found[k]
    for other, (rival, theirs) in enumerate(found):
        if rival.is_product and (not method.is_product or rival.ulysses != method.ulysses):
            continue
        pairs = list(zip(theirs, mine, strict=True))
        if other != k and all(a <= b for a, b in pairs) and (other < k or any(a < b for a, b in pairs)):
            return True
    return False


def method_obstacle(graph: ModelGraph, given: str | Mapping[str, str], cp: int, tp: int) -> str | None:
    """Return why a model cannot have this `context_method` with these degrees, or None."""
    try:
        _methods(graph, given, cp, tp)
    except PinError as error:
        return str(error)
    return None


def chosen_methods(graph: ModelGraph, config: ParallelConfig) -> dict[str, ContextMethod]:
    """Return the method of every block with attention that `config.context_method` names; empty if it is None.

    Raises:
        PinError: a name or method is not possible; the message says which.
    """
    given = config.context_method
    return {} if given is None else _methods(graph, given, config.cp, config.tp)


def _methods(graph: ModelGraph, given: str | Mapping[str, str], cp: int, tp: int) -> dict[str, ContextMethod]:
    blocks = attention_heads(graph, of_sequences=True)
    if isinstance(given, Mapping):
        for name in given:
            if name not in blocks:
                known = ", ".join(blocks) or "none"
                raise PinError(f"context_method names {name!r}, which is not a block with attention; use {known}")
        missing = [name for name in blocks if name not in given]
        if missing:
            raise PinError(f"context_method leaves out {missing[0]}; give a method for every block with attention")
        wanted = {block: given[block] for block in blocks}
    else:
        wanted = dict.fromkeys(blocks, given)
    found = {block: read_method(name, cp) for block, name in wanted.items()}
    if not blocks:
        read_method(given, cp)
    major = kv_ranks(graph, tp)
    for block, method in found.items():
        text = _obstacle(method, blocks[block], tp, major)
        if text is not None:
            raise PinError(f"context_method={method.name!r}: {text}")
    factors = sorted({m.ulysses for m in found.values() if m.is_product})
    if len(factors) > 1:
        raise PinError(
            f"context_method: products with ulysses{factors[0]} and with ulysses{factors[1]} need two different meshes"
        )
    return found
