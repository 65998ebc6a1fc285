"""Whether and how a capture is verified, and what a plan says of it. What was verified once is remembered."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from autoplan.capture.frontend.cache import cache_folder, capture_key, code_hash, store_capture
from autoplan.errors import CaptureError, PinError
from autoplan.verify.check import Outcome, verify_whole
from autoplan.verify.cost import LIMIT_S
from autoplan.verify.runs import VerifyTask
from autoplan.verify.shallow import verify_shallow

VERIFY_CHOICES = (True, False, "required")
# the code that a comparison runs; what captures is in the key of the captured graph
_CODE = (
    "capture",
    "ir",
    "ops",
    "program",
    "verify",
    "codegen",
    "runtime",
    "search",
    "cost_models",
    "config",
    "schedules",
)


def check_verify(verify: object) -> bool | str:
    """One of the choices. PinError for anything else."""
    for choice in VERIFY_CHOICES:
        if verify is choice or (isinstance(verify, str) and verify == choice):
            return choice
    raise PinError(f"verify={verify!r} does not exist; use True, False or 'required'")


def verify_capture(task: VerifyTask, verify: bool | str = True, folder: Path | None = None) -> str:
    """Compare a captured graph with its module, as far as `verify` asks for it, and say what was found.

    Args:
        verify: True: where it costs some seconds at most, else on fewer layers of a Hugging Face config, else not at
            all. 'required': whatever it costs. False: not at all.
        folder: of what is remembered; None: that of the captured graphs.

    Returns: a line for the plan, 'capture verified ...' or 'capture not verified: why'.
    Raises: CaptureError for a graph that is not its module (the first value that differs is named), and with 'required'
        where the two could not be compared.
    """
    if verify is False:
        return "capture not verified: verify=False"
    path = _remembered(task, folder)
    if path is not None and path.exists():
        try:
            return str(json.loads(path.read_text())["verified"])
        except (KeyError, TypeError, ValueError):  # damaged: verified anew
            path.unlink(missing_ok=True)
    limit_s = math.inf if verify == "required" else LIMIT_S
    whole = verify_whole(task, limit_s)
    outcome = whole if whole.done else verify_shallow(task, limit_s)
    if not outcome.done:
        outcome = Outcome(False, "; ".join(x for x in (whole.text, outcome.text) if x))
        if verify == "required":
            raise CaptureError(
                f"verify='required', but the captured graph of {task.graph.name} could not be compared with the "
                f"module: {outcome.text}; verify=True trains with it all the same"
            )
        return f"capture not verified: {outcome.text}"
    text = f"capture verified {outcome.text}"
    if path is not None:
        store_capture(path, json.dumps({"verified": text}))
    return text


def _remembered(task: VerifyTask, folder: Path | None) -> Path | None:
    """Where the outcome for this model and graph is kept; None for a model whose code is not known by its version."""
    model = None if task.loss_fn is not None else capture_key(task.model, task.example)
    if model is None:
        return None
    key = [model, task.graph.content_hash, str(task.dtype), code_hash(*_CODE)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return (folder or cache_folder()) / "verified" / f"{name}.json"
