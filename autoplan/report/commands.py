"""Command lines that a report proposes: `autoplan estimate ...` prices the very plan that it follows.

The words of ParallelConfig and RunOptions follow from their records (`choice_words`); `settings` adds the other inputs
of a price. A value is omitted only if it equals the default of the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autoplan.config.choices import choice_words
from autoplan.config.parallel import ParallelConfig
from autoplan.config.planning import DEFAULT_RISK, TOLERANCES
from autoplan.program.facts import latent_attention, layer_calls
from autoplan.search.request import PlanRequest
from autoplan.sweeps.whatif import STEP_ONLY, RunTask


def _given(flag: str, value: object, default: object = None) -> list[str]:
    """Return a flag and its value; nothing if the value is the default."""
    return [] if value == default else [flag, str(value)]


def task(model: str, cluster: str, request: PlanRequest) -> list[str]:
    """Return the words for the task, as all commands take them."""
    words = [model, "--cluster", cluster, "--seq-len", str(request.seq_len)]
    return [*words, "--global-batch-size", str(request.global_batch_size)]


def settings(request: PlanRequest, searched: bool = True) -> list[str]:
    """Return the words for the setup of the run and the sources of its price, as all commands take them.

    Args:
        searched: names the stack, which limits a search; a price needs only its settings.
    """
    like = request.facts.like
    if like is None or not searched:
        words = _given("--precision", request.precision, "bf16") + _given("--mode", str(request.mode), "eager")
        words += choice_words(request.options)
    else:
        precision = like.precision_word(request.precision, latent_attention(request.graph))
        words = ["--like", like.name, "--precision", precision, "--mode", str(request.mode)]
        words += choice_words(request.options, against=like.defaults(request.cluster.device.name))
    words += _given("--adapters", request.adapters)
    if request.profile is not None:
        words += ["--profile", request.profile_file or request.profile.name]
    words += _given("--constants", request.constants_file)
    return words + _given("--target-len", request.target_len)


def run_words(run: RunTask) -> list[str]:
    """Return the words for the size of the whole run and its assumptions."""
    if run.tokens is None:
        return []
    words = ["--tokens", _count(run.tokens)]
    given = run.assumptions.given.items()
    return words + [word for name, value in given for word in ("--assume", f"{name}={value!r}")]


def _count(tokens: float) -> str:
    """Return a number as `--tokens` takes it, without rounding: `100B`, `1500`."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= factor and tokens % factor == 0:
            return f"{tokens / factor:.0f}{unit}"
    return f"{tokens:.0f}" if tokens == int(tokens) else repr(tokens)


def estimate_command(
    model: str, cluster: str, request: PlanRequest, config: ParallelConfig, run: RunTask = STEP_ONLY
) -> list[str]:
    """Return the words of the command line that prices this plan to the same figures."""
    words = ["autoplan", "estimate", *task(model, cluster, request), *choice_words(config, layer_calls(request.graph))]
    return [*words, *settings(request, searched=False), *_executed(request), *run_words(run)]


def _planning(request: PlanRequest) -> list[str]:
    """Return the words that limit a search: pins, risk of memory, error within which plans are equal, proof."""
    given = (_given(record.flag, getattr(request, record.name), record.default) for record in TOLERANCES)
    return [*_pins(request), *(word for each in given for word in each)]


def _pins(request: PlanRequest) -> list[str]:
    texts = {n: ",".join(map(str, v)) if isinstance(v, tuple | list) else v for n, v in request.pins.items()}
    return [word for name, text in texts.items() for word in ("--pin", f"{name}={text}")]


def plan_command(model: str, cluster: str, request: PlanRequest, run: RunTask = STEP_ONLY) -> list[str]:
    """Return the words of the command line that plans this task."""
    asked = [*task(model, cluster, request), *settings(request), *_planning(request)]
    return ["autoplan", "plan", *asked, *_executed(request), *run_words(run)]


def explain_words(model: str, cluster: str, request: PlanRequest, run: RunTask = STEP_ONLY) -> list[str]:
    """Return the words of the command line that says why the plan of this task is the best."""
    return ["autoplan", "explain", *plan_command(model, cluster, request, run)[2:]]


def fit_words(model: str, cluster: str, request: PlanRequest) -> list[str]:
    """Return the words of the command line that tries ways to make this task fit."""
    asked = [*task(model, cluster, request), *settings(request), *_pins(request)]
    risk = _given("--memory-risk", request.memory_risk, DEFAULT_RISK)
    return ["autoplan", "fit", *asked, *risk, *_executed(request)]


def whatif_command(model: str, cluster: str, request: PlanRequest, vary: str, run: RunTask = STEP_ONLY) -> list[str]:
    """Return the words of the command line that varies one thing of this task."""
    asked = [*task(model, cluster, request), *settings(request), *_planning(request), *run_words(run)]
    return ["autoplan", "whatif", *asked, *_executed(request), "--vary", vary]


def _executed(request: PlanRequest) -> list[str]:
    return ["--runnable"] if request.executed else []


def wrapped(words: Sequence[str], width: int) -> list[str]:
    """Break a command line into lines of about `width` columns, between words and with a backslash."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line + (" \\" if k < len(lines) - 1 else "") for k, line in enumerate(lines)]
