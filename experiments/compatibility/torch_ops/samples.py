"""The database of PyTorch: its operations and modules, with sample inputs of even sizes.

`torch.testing._internal` makes the samples from a few sizes that stand in its modules (S = 5, ...). They are set to
even numbers, so that most dims can be cut in two. Samples of several seeds have the same shapes and other values.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SIZES = {"S": (5, 6), "XS": (3, 4), "M": (10, 10), "L": (20, 12)}  # as they are, and as they are set
_MOST_TRIED = 4000  # samples of one operation that are looked at
_SEEDED = "wrapper_set_seed"  # calls an operation after torch.manual_seed(42)
_OPTIONS_OF_PLACE = ("device", "dtype")


@dataclass(frozen=True)
class Drawn:
    """One sample: the arguments of a call.

    Attributes:
        finish: makes results comparable (an eigenvector up to its sign).
        make: the module that is called; None: the operation of the entry is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]
    make: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Entry:
    """An operation or a module class of the database.

    Attributes:
        group: "operation" or "module".
        call: the operation; None for a module, whose samples say how it is made.
        draw: gives the samples.
    """

    group: str
    name: str
    call: Callable[..., Any] | None
    draw: Callable[[], Iterator[Drawn]]

    def samples(self, seed: int) -> Iterator[Drawn]:
        """Yield the samples of a seed. All seeds give the same shapes."""
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            random.seed(seed)
            yield from itertools.islice(self.draw(), _MOST_TRIED)


@functools.cache
def database() -> tuple[Any, Any]:
    """Return PyTorch's lists of OpInfo and ModuleInfo, which make samples of even sizes from now on.

    The lists stand in the package of PyTorch's own tests, which derives its test cases from expecttest's. No test case
    is used here, so that without expecttest those of unittest do as well. Nor are operations that may draw called with
    a seed of their own, which a capture refuses.
    """
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ModuleNotFoundError:
            stand_in: Any = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for size, (before, after) in _SIZES.items():
                if getattr(module, size, None) == before:
                    setattr(module, size, after)
            if hasattr(module, _SEEDED):
                setattr(module, _SEEDED, lambda op, *args, **kwargs: op(*args, **kwargs))
    return op_db, module_db


def entries() -> list[Entry]:
    """Return every operation and module that has samples in float64."""
    ops, modules = database()
    found = []
    for op in ops:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if torch.float64 in op.dtypes:
            found.append(Entry("operation", name, op.op, functools.partial(_of_op, op)))
    for info in modules:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            name = info.name if training else f"{info.name}, eval"
            found.append(Entry("module", name, None, functools.partial(_of_module, info, training)))
    return found


def _of_op(op: Any) -> Iterator[Drawn]:
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd):
        yield Drawn((sample.input, *sample.args), sample.kwargs, sample.output_process_fn_grad)


def _of_module(info: Any, training: bool) -> Iterator[Drawn]:
    how = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
    for sample in info.module_inputs_func(info, **how):
        if sample.forward_input is not None:
            make = functools.partial(_made, info.module_cls, sample.constructor_input, training)
            yield Drawn(tuple(sample.forward_input.args), sample.forward_input.kwargs, lambda out: out, make)


def _made(kind: type[nn.Module], given: Any, training: bool) -> nn.Module:
    named = {k: v for k, v in given.kwargs.items() if k not in _OPTIONS_OF_PLACE}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*given.args, **named).double().train(training)


def spread(items: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the items, evenly spread, with the first and the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
