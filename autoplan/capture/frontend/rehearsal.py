"""A run of the model on fake tensors before it is exported: which layers repeat others, which masks it uses as tensors.

Both are known only when a layer has run. An export that learns one of them too late is done again, and costs ten times
as much as this run, in which sizes are numbers and nothing is recorded. It decides nothing: the export checks what it
expects, and a model that does not run on fake tensors is exported without a rehearsal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.capture.frontend.buffers import attributes_restored, buffers_copied
from autoplan.capture.frontend.layer_tracer import LayerTracer
from autoplan.capture.frontend.masks import Ledger, MaskUsed

_log = logging.getLogger(__name__)


def rehearse_capture(
    run: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    tracer: LayerTracer,
    ledger: Ledger,
    around: Callable[[], AbstractContextManager[object]],
) -> frozenset[str]:
    """Return the layers that repeat another one, and note in the ledger the masks that are used as tensors.

    Args:
        run: calls the model with the inputs in their order (`inputs.LossModule`).
        around: makes the context of an export.
    """
    try:
        while not _runs(run, example_inputs, ledger, around):
            tracer.reset()
    except Exception as error:  # of any type; the export says what is wrong
        _log.debug("no rehearsal: %s: %s", type(error).__name__, error)
        return frozenset()
    return frozenset(tracer.repeats)


def _runs(
    run: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    ledger: Ledger,
    around: Callable[[], AbstractContextManager[object]],
) -> bool:
    """Run the model once. Return False if it used a mask as a tensor that was none."""
    # models ask whether they are exported, and take other branches
    exporting = patch.multiple(torch.compiler, is_compiling=lambda: True, is_exporting=lambda: True)
    with (
        attributes_restored(run, every=True),
        around(),
        exporting,
        buffers_copied(run),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        try:
            run(*(torch.zeros(t.shape, dtype=t.dtype) for t in example_inputs.values()))
        except MaskUsed:
            if ledger.again():
                return False
            raise
    return not ledger.again()
