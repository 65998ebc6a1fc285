"""Warnings that name the line of the user's script from which a call came into autoplan."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

_INNER = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))  # no scripts


def warn_script(text: str, *, every_rank: bool = False) -> None:
    """Warn of the innermost line that is neither autoplan's nor torch's; on rank 0, or on every rank that gets here."""
    if not every_rank and dist.is_initialized() and dist.get_rank() != 0:
        return
    if torch.compiler.is_compiling():  # dynamo knows warnings, no frames
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
