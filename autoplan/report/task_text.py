"""The task of a request in words: its batch, how it is set up, and what is pinned."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.config import numbers
from autoplan.config.choices import option_texts
from autoplan.search.planner import PlanRequest


def task_line(r: PlanRequest) -> str:
    """Return the batch and the settings of a request in one line."""
    return f"{batch_text(r)} = {numbers.scaled(r.seq_len * r.global_batch_size)} tokens per step, {settings_text(r)}"


def settings_text(r: PlanRequest) -> str:
    """Return how a request is set up, for example `bf16, eager, like torchtitan@26.08, pinned tp=8`."""
    like = "" if r.facts.like is None else f", like {r.facts.like.name}"
    pins = f", pinned {pins_text(r.pins)}" if r.pins else ""
    return f"{r.precision}, {r.mode}{like}{_run_options(r)}{pins}"


def pins_text(pins: Mapping[str, object]) -> str:
    """Return pins as the command line takes them: `tp=8 stages=10,11,11`."""
    return " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in pins.items())


def batch_text(r: PlanRequest) -> str:
    """Return the batch of a step, for example `8,192 tokens (target 512) x 64 sequences`."""
    target = f" (target {r.target_len:,})" if r.target_len is not None else ""
    plural = "s" if r.global_batch_size > 1 else ""
    return f"{r.seq_len:,} tokens{target} x {r.global_batch_size:,} sequence{plural}"


def _run_options(request: PlanRequest) -> str:
    """Return the options that differ from the defaults."""
    said = option_texts(request.options, request.precision)
    said += [f"adapters {request.adapters}"] if request.adapters is not None else []
    said += [f"constants of {request.constants_file}"] if request.constants_file is not None else []
    return "".join(f", {text}" for text in said)
