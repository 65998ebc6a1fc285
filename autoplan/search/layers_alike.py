"""Recompute that is alike in all layers: Megatron's modules, and its selective recompute.

With fused kernels a search decides how many layers recompute all of themselves. Frameworks can also recompute a part of
every layer: the attention core (`selective`), or some of Megatron's modules. Each such choice is a search of its own,
for plans that are faster than the one that was found:

- modules, at the degrees of that plan, if it recomputes or offloads anything;
- `selective`, at all degrees, where attention keeps its scores. These are most of what a layer keeps, and recomputing
  them costs a few percent (Korthikanti et al., 2022), so that whole layers are seldom worth recomputing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoplan.config.kernels import Attention
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.recompute import NONE, SELECTIVE, kinds_in, modules_choice
from autoplan.errors import PinError
from autoplan.program.legality import broken
from autoplan.search import clock
from autoplan.search.certificate import Certificate, SearchResult, Status
from autoplan.search.infeasible import NotFasterError
from autoplan.search.intra import StoppedError
from autoplan.search.joined import COUNTS, joined_certificates, joined_plans
from autoplan.search.request import PlanRequest
from autoplan.search.stack_settings import at_degrees

# Modules by what a byte that they free costs: what is computed again is element-wise, or small products, or large ones.
_CHEAPEST_FIRST = ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "core_attn", "moe")
_WORDS = "recompute alike in all layers: "
_PHASE = "evaluation"  # to which the time counts
_LEAST_S = 1.0  # of a search that begins
_Search = Callable[[PlanRequest], SearchResult]


def with_layers_alike(
    request: PlanRequest, result: SearchResult | NotFasterError, search: _Search, until_s: float
) -> SearchResult:
    """Return the result, or a better one whose layers recompute alike. Its certificate names what was searched.

    Args:
        result: what the search without them found; NotFasterError if nothing is below `below_s` of the request.
        search: searches one request.
        until_s: when the time of the request is over, by `clock`.

    Raises: NotFasterError, if nothing is below `below_s` with them either.
    """
    r, began_s = request, time.perf_counter()
    may = r.mode is Mode.FUSED and "recompute" not in r.pins and not _certificate(result).stopped
    words = list[str]()
    if may and r.options.attention is Attention.UNFUSED and clock.now_s() < until_s:
        with suppress(PinError):  # the stack cannot do it
            result = _everywhere(r, result, search, until_s)
            words.append(f"{SELECTIVE} everywhere")
    if isinstance(result, NotFasterError):
        raise result
    if may and not result.certificate.stopped:
        result, tried = _at_degrees(r, result, search, until_s)
        words += [f"{', '.join(tried)} at the degrees of the best plan"] if tried else []
    if not words:
        return result
    spent_s, c = time.perf_counter() - began_s, result.certificate
    return _with(
        result,
        restrictions=(*c.restrictions, _WORDS + "; ".join(words)),
        solve_time_s=c.solve_time_s + spent_s,
        by_phase_s={**c.by_phase_s, _PHASE: c.by_phase_s.get(_PHASE, 0.0) + spent_s},
    )


def _everywhere(
    request: PlanRequest, result: SearchResult | NotFasterError, search: _Search, until_s: float
) -> SearchResult | NotFasterError:
    """Return the result with `selective` at all degrees, which its certificate covers, too. PinError if illegal."""
    r, one, one_s = request, _certificate(result), _below_s(request, result)
    found, two = _searched(replace(r, top=1, by_kind=False), SELECTIVE, result, search, until_s)
    best_s = one_s if found is None else found.fastest_s
    both = joined_certificates(one, one_s, two, best_s, best_s, r.allowed_gap)
    if found is None:
        if isinstance(result, NotFasterError):
            return NotFasterError(str(result), both)
        return replace(result, certificate=both)
    plans = found if isinstance(result, NotFasterError) else joined_plans(r, result, found)
    return replace(plans, certificate=both)


def _at_degrees(
    request: PlanRequest, result: SearchResult, search: _Search, until_s: float
) -> tuple[SearchResult, list[str]]:
    """Return the result with modules at the degrees of its fastest plan, and the sets of modules that were searched."""
    fastest, tried = result.fastest, list[str]()
    degrees = replace(at_degrees(request, fastest), gap=0.0)
    for how in module_sets(request, fastest):
        if clock.now_s() > until_s or result.certificate.stopped:
            break
        try:
            found, certificate = _searched(degrees, how, result, search, until_s)
        except PinError:  # not legal with all of the plan's choices
            continue
        if found is not None:
            result = joined_plans(request, result, found)
        if certificate.status == Status.INTERRUPTED:
            result = _with(result, status=Status.INTERRUPTED)
        else:
            tried.append(how)
    return result, tried


def _searched(
    request: PlanRequest, how: str, result: SearchResult | NotFasterError, search: _Search, until_s: float
) -> tuple[SearchResult | None, Certificate]:
    """Return what a search finds with a recompute choice that is faster than the result, and what it proves.

    None if nothing is faster; its certificate is then about the step of the result. PinError if no degrees are legal.
    """
    left_s = max(_LEAST_S, until_s - clock.now_s())
    pins, below_s = {**request.pins, "recompute": how}, _below_s(request, result)
    try:
        found = search(replace(request, pins=pins, below_s=below_s, time_limit_s=left_s))
    except NotFasterError as error:
        return None, _certificate(error)
    except StoppedError:  # no layout was found in time
        return None, _unknown(result, Status.TIME_LIMIT)
    except KeyboardInterrupt:
        return None, _unknown(result, Status.INTERRUPTED)
    return found, found.certificate


def _certificate(result: SearchResult | NotFasterError) -> Certificate:
    if result.certificate is None:
        raise RuntimeError("a search that found nothing faster has no certificate") from None
    return result.certificate


def _below_s(request: PlanRequest, result: SearchResult | NotFasterError) -> float:
    return request.below_s if isinstance(result, NotFasterError) else result.fastest_s


def _unknown(result: SearchResult | NotFasterError, status: Status) -> Certificate:
    """Return the certificate of a search that ended before it knew any bound."""
    nothing: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"illegal_by_rule": {}, "too_big_by_term": {}}
    return replace(_certificate(result), **nothing, intra_gap=0.0, gap=1.0, status=status)


def module_sets(request: PlanRequest, config: ParallelConfig) -> list[str]:
    """Return the sets of modules to try at the degrees of a plan: none where memory does not bind."""
    if kinds_in(config.recompute) <= {NONE} and not config.offload:
        return []
    there = [m for m in _CHEAPEST_FIRST if _is_legal(request, config, modules_choice([m]))]
    sets = [*([m] for m in there), *(there[:n] for n in range(2, len(there) + 1))]
    return list(dict.fromkeys(modules_choice(some) for some in sets))


def _is_legal(request: PlanRequest, config: ParallelConfig, how: str) -> bool:
    return broken(config.but(recompute=how), request.facts, request.scope) is None


def _with(result: SearchResult, **changes: Any) -> SearchResult:
    return replace(result, certificate=replace(result.certificate, **changes))
