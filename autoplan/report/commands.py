"""Command lines that a report proposes: `autoplan estimate ...` prices the very plan that it follows.

Every field of ParallelConfig has its words in `_DEGREES`, every field of RunOptions in `option_words`, and what else
a price depends on in `settings`: nothing of a plan is left to the defaults of the command unless it is equal to them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.whole_run import Assumptions
from autoplan.program.pins import layer_calls
from autoplan.report.arguments import option_words, recompute_text
from autoplan.report.label import methods_text
from autoplan.search.layouts import PlanRequest

_DEFAULTS = ParallelConfig()


def _given(flag: str, value: object, default: object = None) -> list[str]:
    """A flag and its value; nothing for the default."""
    return [] if value == default else [flag, str(value)]


def _listed(flag: str, values: Sequence[object] | None) -> list[str]:
    return [] if values is None else [flag, ",".join(map(str, values))]


_Words = Callable[[ParallelConfig, PlanRequest], list[str]]
# By field of ParallelConfig: its words of `autoplan estimate`.
_DEGREES: Mapping[str, _Words] = {
    "dp": lambda c, r: ["--dp", str(c.dp)],
    "tp": lambda c, r: ["--tp", str(c.tp)],
    "pp": lambda c, r: ["--pp", str(c.pp)],
    "cp": lambda c, r: _given("--cp", c.cp, 1),
    "ep": lambda c, r: _given("--ep", c.ep, 1),
    "etp": lambda c, r: _given("--etp", c.tp if c.etp is None else c.etp, c.tp),
    "context_method": lambda c, r: (
        [] if c.context_method is None else ["--context-method", methods_text(c.context_method)]
    ),
    "zero_stage": lambda c, r: ["--zero", str(c.zero_stage)],
    "micro_batch_size": lambda c, r: ["--micro-batch-size", str(c.micro_batch_size)],
    "num_micro_batches": lambda c, r: [],  # what the global batch leaves
    "zero_replicas": lambda c, r: _given("--zero-replicas", c.zero_replicas, 1),
    "offload": lambda c, r: ["--offload", "+".join(c.offload)] if c.offload else [],
    "virtual_stages": lambda c, r: _given("--virtual-stages", c.virtual_stages, 1),
    "schedule": lambda c, r: ["--schedule", c.schedule] if (c.schedule, c.virtual_stages) != ("1F1B", 1) else [],
    "recompute": lambda c, r: _given("--recompute", recompute_text(c.recompute, layer_calls(r.graph)), "none"),
    "stages": lambda c, r: _listed("--stages", c.stages if c.pp * c.virtual_stages > 1 else None),
    "state_slack": lambda c, r: _given("--state-slack", c.state_slack, _DEFAULTS.state_slack),
}


def task(model: str, cluster: str, request: PlanRequest) -> list[str]:
    """Words for what is planned for, as all commands take them."""
    words = [model, "--cluster", cluster, "--seq-len", str(request.seq_len)]
    return [*words, "--global-batch-size", str(request.global_batch_size)]


def settings(request: PlanRequest) -> list[str]:
    """Words for how the run is set up and what its price rests on, as all commands take them."""
    words = _given("--precision", request.precision, "bf16") + _given("--mode", str(request.mode), "eager")
    words += option_words(request.options)
    if request.profile is not None:
        words += ["--profile", request.profile_file or request.profile.name]
    words += _given("--constants", request.constants_file)
    return words + _given("--target-len", request.target_len)


def run_words(tokens: float | None, assumed: Assumptions | None) -> list[str]:
    """Words for the size of the whole run and what is assumed of it."""
    words = [] if tokens is None else ["--tokens", f"{tokens:.0f}" if tokens == int(tokens) else repr(tokens)]
    given = {} if assumed is None or tokens is None else assumed.given
    return words + [word for name, value in given.items() for word in ("--assume", f"{name}={value!r}")]


def estimate_command(
    model: str,
    cluster: str,
    request: PlanRequest,
    config: ParallelConfig,
    tokens: float | None = None,
    assumed: Assumptions | None = None,
) -> list[str]:
    """Return the words of the command line that prices this plan again, to the same figures."""
    words = ["autoplan", "estimate", *task(model, cluster, request)]
    for name in _DEGREES:
        words += _DEGREES[name](config, request)
    return [*words, *settings(request), *_executed(request), *run_words(tokens, assumed)]


def plan_command(model: str, cluster: str, request: PlanRequest) -> list[str]:
    """Return the words of the command line that plans this task."""
    return ["autoplan", "plan", *task(model, cluster, request), *settings(request), *_executed(request)]


def whatif_command(model: str, cluster: str, request: PlanRequest, vary: str) -> list[str]:
    """Return the words of the command line that varies one thing of this task."""
    return ["autoplan", "whatif", *task(model, cluster, request), *settings(request), "--vary", vary]


def _executed(request: PlanRequest) -> list[str]:
    return ["--runnable"] if request.executed else []


def wrapped(words: Sequence[str], width: int) -> list[str]:
    """A command line in lines of about `width` columns, broken between words where a shell reads on."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line + (" \\" if k < len(lines) - 1 else "") for k, line in enumerate(lines)]
