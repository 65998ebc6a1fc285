"""Which optimizers may run on shards: those that update each element from that element's own gradient and state."""

from __future__ import annotations

import torch

ELEMENTWISE = frozenset("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split())


def check_elementwise(optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
    """Refuse an optimizer that needs whole tensors (LBFGS, Adafactor, Muon, ...) when tensors are sharded.

    A class of your own that is element-wise says so with a class attribute `autoplan_elementwise = True`.

    Raises:
        ValueError: names the class and what works.
    """
    name = type(optimizer).__name__
    known = type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE
    if sharded and not known and not getattr(optimizer, "autoplan_elementwise", False):
        raise ValueError(
            f"optimizer {name} is not known to be element-wise and tensors are sharded; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or set the class attribute autoplan_elementwise = True if each "
            "element's update depends on that element only"
        )
