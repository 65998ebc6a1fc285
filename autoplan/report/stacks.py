"""Listings of the stacks (profiles/stacks): their versions, settings, abilities, and where these are written."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from autoplan.config.choices import option_data, option_texts
from autoplan.config.recompute import RecomputeMix
from autoplan.plans.document import chosen
from autoplan.report.data import report, to_text
from autoplan.report.tables import print_fitting
from autoplan.report.text import console, next_commands
from autoplan.stacks.records import Abilities, Era, Stack, stack, stacks, version_of

_ABLE = "modes degrees schedules recompute recompute_mix zero_stages offload precisions dispatcher launch"


def stacks_command(name: str | None, as_json: bool) -> None:
    """Write the answer of `autoplan stacks`. `name`: one stack; None: all."""
    if as_json:
        print(to_text(report("stacks", stacks=stacks_data() if name is None else [stack_data(stack(name))])))
    elif name is None:
        print_fitting(console(), _COLUMNS, list(stacks_rows()), ("versions since", "recompute"), left=6)
    else:
        show_stack(console(), name)


def stack_data(found: Stack) -> dict[str, Any]:
    """Return one stack as plain data."""
    return {
        **chosen(found, "name about default_version executed equal_stages chunks moments_16"),
        "kernels": chosen(found.kernels, "modes recompute zero_stages source"),
        "gradients_16": str(found.gradients_16),
        "native_since": found.native_since,
        "gradients_32_since": None if math.isinf(found.gradients_32_since) else found.gradients_32_since,
        "whole_experts_since": found.whole_experts_since,
        "kept_gathered": [str(where) for where in found.kept_gathered],
        "eras": [
            {"version": era.version, "options": option_data(era.options), "source": era.source, "can": _able(era.can)}
            for era in found.eras
        ],
        "changes": [
            {**chosen(change, "since matches source"), "options": _texts(change.options)} for change in found.changes
        ],
        "remainders": [chosen(each, "since until precisions with_moments source") for each in found.remainders],
        "mtp": [chosen(each, "since matches layers source") for each in found.mtp],
        "sources": dict(found.sources),
    }


def _texts(options: Any) -> dict[str, Any]:
    return {n: sorted(v) if isinstance(v, frozenset) else v for n, v in options.items()}


def _able(can: Abilities) -> dict[str, Any]:
    return chosen(can, f"{_ABLE} source")


def stacks_data() -> list[dict[str, Any]]:
    """Return every stack as plain data."""
    return [stack_data(found) for found in stacks().values()]


_COLUMNS = ("stack", "mode", "ZeRO", "recompute", "versions since", "is")


def stacks_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of every stack."""
    for found in stacks().values():
        kernels = found.kernels
        versions = " ".join(era.version for era in found.eras)
        yield found.name, kernels.modes[0], str(kernels.zero_stages[0]), kernels.recompute[0], versions, found.about


_LAST_YEAR = 2100.0  # a year beyond it has no end


def _options_text(era: Era) -> str:
    return ", ".join(option_texts(era.options)) or "PyTorch's defaults"


def _gradients_text(found: Stack) -> str:
    since = found.gradients_32_since
    return (
        f"{found.gradients_16}, in bf16 until {version_of(since)}" if math.isfinite(since) else str(found.gradients_16)
    )


def _lines(found: Stack) -> list[tuple[str, str, str]]:
    """Return (what, text, source) of everything but the eras."""
    kernels, can, sources = found.kernels, found.eras[-1].can, found.sources
    lines = [
        ("mode", str(kernels.modes[0]), kernels.source),
        ("recompute", kernels.recompute[0], ""),
        ("ZeRO", str(kernels.zero_stages[0]), ""),
        ("gradients in 16 bits", _gradients_text(found), sources.get("gradients_16", "")),
    ]
    if found.native_since is not None:
        since = "" if found.native_since < 1 else f" since {version_of(found.native_since)}"
        lines.append(("bf16 is native", f"no masters{since}; bf16-grad32 has them", sources["native"]))
    if found.moments_16:
        lines.append(("moments in 16 bits", "with latent attention", sources["moments_16"]))
    for each in found.remainders:
        until = "" if each.until > _LAST_YEAR else f" until {version_of(each.until)}"
        since = "" if each.since < 1 else f" since {version_of(each.since)}"
        moments = " with moments in 16 bits" if each.with_moments else ""
        text = f"16 bits beside a bfloat16 parameter in {_joined(each.precisions)}{moments}{since}{until}"
        lines.append(("masters", text, each.source))
    if found.kept_gathered:
        lines.append(("stays gathered", f"in {_joined(found.kept_gathered)} (as ZeRO 1)", sources["kept_gathered"]))
    if found.whole_experts_since is not None:
        lines.append(("etp", f"1 since {version_of(found.whole_experts_since)}", sources["whole_experts"]))
    if found.equal_stages:
        lines.append(("stages", "equal numbers of layers", ""))
    for layers in found.mtp:
        since, added = f" since {version_of(layers.since)}", f"{layers.layers} for tokens after the next"
        lines.append(("layers added", f"{added} in {layers.matches}{since}", layers.source))
    lines.append(("can", "", can.source))
    for name in _ABLE.split():
        lines.append((f"  {name}", _joined(getattr(can, name)), ""))
    return lines


def _joined(values: Any) -> str:
    if isinstance(values, RecomputeMix):
        return values.words
    return ", ".join(map(str, values)) or "nothing else"


def show_stack(out: Console, name: str) -> None:
    """Print everything that is known about one stack."""
    found = stack(name)
    out.print(f"{found.name}: {found.about}", style="bold")
    for what, text, source in _lines(found):
        _line(out, what, text + (f" [{source}]" if source else ""))
    out.print()
    out.print(f"options by version ({found.name} without a version is {found.default_version})", style="bold")
    for era in found.eras:
        _line(out, era.version, f"{_options_text(era)} [{era.source}]")
    for change in found.changes:
        changed = ", ".join(
            f"{n}={_joined(v) if isinstance(v, list) else v}" for n, v in _texts(change.options).items()
        )
        _line(out, f"from {version_of(change.since)} on", f"where {change.matches}: {changed} [{change.source}]")
    task = ["--cluster", "2x8xh100-sxm5-80gb", "--seq-len", "8k", "--global-batch-size", "256"]
    next_commands(out, [["autoplan", "plan", "llama-3.1-8b", "--like", found.name, *task]])


def _line(out: Console, what: str, text: str) -> None:
    wrapped = textwrap.wrap(text, out.width - 25, break_long_words=False, break_on_hyphens=False) or [""]
    for i, line in enumerate(wrapped):
        out.print(f"  {what if i == 0 else '':<22} {line}", soft_wrap=True)
