"""Compare a captured graph with its module by running both: the loss and every gradient, in float64, in this process.

The module runs as its user would run it (in its training or evaluation mode, with its loss) on float64 copies of its
parameters and buffers, so it does not change. The graph runs as the program of one device, through the emitter, text
and kernels of every plan.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.lengths import lengths_of
from autoplan.errors import CaptureError, GraphError
from autoplan.verify.cost import LIMIT_S, USUAL_S, Cost, cost_of
from autoplan.verify.first import explain_difference
from autoplan.verify.one_device import compile_one_device, load_stage
from autoplan.verify.runs import ADVICE, NotComparable, VerifyTask, Wrong, copies_of, run_graph, run_module
from autoplan.verify.sample import draw_batch, has_mask, longest_window, sizes_to_try
from autoplan.verify.wide import WIDE, wide_batch

# Relative to the loss, and to the largest element of a gradient. Equal functions differ by the rounding of float64,
# 1e-15 to 1e-13 (verification.py); the smallest mistake that was tried, an epsilon of 1e-5 for 1e-6 in a norm, gives
# 1e-6.
TOLERANCE = 1e-8
# Relative to the largest element of all gradients: a gradient that is zero but for rounding (a bias of keys) is not
# compared with itself.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Verification:
    """The result of a verification. `done`: whether it was compared; `text`: the line for the plan."""

    done: bool
    text: str


def compare_runs(
    task: VerifyTask, sizes: Mapping[str, int], *, moved: bool = True, whole_sample: bool = True
) -> Verification:
    """Run graph and module on one batch and compare them. `moved`: see `copies_of`; `whole_sample`: see `draw_batch`.

    Raises:
        CaptureError: names the first value that differs.
        NotComparable: if the module cannot run in float64.
    """
    batch = wide_batch(draw_batch(task.graph, task.example, sizes, whole_sample=whole_sample))
    tensors = copies_of(task.model, moved)
    want = run_module(task, tensors, batch)
    compiled = compile_one_device(task.graph)
    got = run_graph(task, load_stage(compiled.text), compiled, tensors, batch)
    trained = [n for n, p in task.graph.params.items() if p.trainable]
    error = abs(float(got.loss - want.loss)) / max(abs(float(want.loss)), ROUNDING)
    wrong = differing(trained, got.gradients, want.gradients)
    if not error <= TOLERANCE or wrong:
        losses = float(got.loss), float(want.loss)
        again = float(run_module(task, copies_of(task.model, moved), batch, backward=False).loss)
        if not abs(again - losses[1]) <= TOLERANCE * max(abs(losses[1]), ROUNDING):
            raise CaptureError(
                f"two calls of {type(task.model).__name__} and its loss with the same parameters and batch give "
                f"{losses[1]:.8g} and {again:.8g}: one of them keeps a value for the next call (a count, a warm-up), "
                "and a program would have that of the capture; give what changes as an input (a tensor with one value "
                "per sample)"
            )
        raise CaptureError(explain_difference(task, compiled, tensors, batch, losses, wrong))
    _compare_buffers(task, got.buffers, want.buffers, tensors.buffers)
    window = _window(task)
    unseen = f"; windows of {window:,} tokens are longer" if window >= sizes.get("s", math.inf) else ""
    unseen += "" if whole_sample or not has_mask(task.example) else "; no sample of nothing but padding"
    shown = ", ".join(f"{x}={n}" for x, n in sorted(sizes.items()))
    count = f"{len(trained)} gradients" if len(trained) != 1 else "1 gradient"
    updated = len(want.buffers)
    beside = f"loss, {count} and {updated} buffer{'s' if updated != 1 else ''}" if updated else f"loss and {count}"
    text = f"in float64: {beside} within {TOLERANCE:g} of the module ({shown}{unseen})"
    return Verification(True, text)


def _compare_buffers(
    task: VerifyTask,
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> None:
    """Raise CaptureError, naming it, for a buffer that a forward leaves with other values than the module's.

    Args:
        got: those that the graph updates; others stay as they were, `before`.
    """
    every = {n: got.get(n, before[n]).to(WIDE) for n in want}
    wrong = [w for n in want for w in differing([n], every, {n: want[n].to(WIDE)})]
    if wrong:
        first, number = wrong[0], f"{len(wrong)} buffer{'s' if len(wrong) != 1 else ''}"
        raise CaptureError(
            f"the captured graph of {task.graph.name} is not the module: a forward leaves {number} with other "
            f"values; of {first.name}, the largest element is {first.got:.6g}, in the module {first.want:.6g}; "
            f"they differ by up to {first.error:.3g}. {ADVICE}"
        )


def differing(names: list[str], got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[Wrong]:
    """Return the gradients that differ by more than the tolerance; a parameter without a gradient has zeros."""

    def largest(t: torch.Tensor | None) -> float:
        return 0.0 if t is None or not t.numel() else float(t.abs().max())

    whole, out = max((largest(g) for g in want.values()), default=0.0), []
    for name in names:
        mine, theirs = got.get(name), want.get(name)
        error = largest(
            mine - theirs if mine is not None and theirs is not None else mine if theirs is None else theirs
        )
        if not error <= TOLERANCE * largest(theirs) + ROUNDING * whole:
            out.append(Wrong(name, largest(mine), largest(theirs), error))
    return out


def choose_sizes(task: VerifyTask, limit_s: float) -> tuple[dict[str, int] | None, Cost | None]:
    """Choose the longest sequences that usually cost little, or longer ones if a window needs them.

    Returns:
        (sizes, their cost), or (None, the least cost) if all sizes exceed the limit or the memory.
    """
    s, t = lengths_of(task.graph, task.model, task.example)
    example = {"s": s, **({} if t is None else {"t": t})}
    window, least = _window(task), None
    found: list[tuple[dict[str, int], float]] = []
    for sizes in sizes_to_try(task.graph, example):
        try:
            least = cost_of(task.graph, sizes)
        except GraphError:  # a shape that is a whole number for some lengths only
            continue
        if least.seconds <= limit_s and least.fits:
            found.append((sizes, least.seconds))
    if not found:
        return None, least
    chosen = next((sizes for sizes, seconds in found if seconds <= USUAL_S), found[-1][0])
    longer = [sizes for sizes, _ in found if sizes.get("s", 0) > window]
    return (longer[-1] if longer and chosen.get("s", 0) <= window else chosen), least


def _window(task: VerifyTask) -> int:
    """Return the longest sliding window of the graph, or of a Hugging Face config, in case the graph lost it."""
    config = getattr(task.model, "config", None)
    name = getattr(config, "attribute_map", {}).get("sliding_window", "sliding_window")
    wanted = inspect.getattr_static(config, name, None)  # configs whose layers have windows of their own do not say it
    return max(longest_window(task.graph), wanted if isinstance(wanted, int) else 0)


def without_values(model: nn.Module) -> list[str]:
    """Return the tensors of a model that have no values."""
    tensors = (*model.named_parameters(), *all_buffers(model))
    return [name for name, tensor in tensors if tensor.is_meta or isinstance(tensor, FakeTensor)]


def verify_whole(task: VerifyTask, limit_s: float = LIMIT_S) -> Verification:
    """Compare graph and module at sizes that cost at most `limit_s`. The outcome says why if it is not done.

    Raises:
        CaptureError: if the graph is not the module.
    """
    without = without_values(task.model)
    if without:
        return Verification(False, f"{without[0]} has no values")
    sizes, cost = choose_sizes(task, limit_s)
    if sizes is None:
        return Verification(False, f"it would take about {cost} on this host")
    return compare_or_say(task, sizes)


def compare_or_say(task: VerifyTask, sizes: Mapping[str, int]) -> Verification:
    """Run `compare_runs` on moved values; if the module cannot run on them, on its exact values. Says why if neither
    works.

    Each is tried first with a sample of nothing but padding, on which many modules give NaN.
    """
    reason = ""
    for moved, whole_sample in itertools.product((True, False), (True, False) if has_mask(task.example) else (False,)):
        try:
            return compare_runs(task, sizes, moved=moved, whole_sample=whole_sample)
        except NotComparable as exc:
            reason = str(exc)
    return Verification(False, reason)
