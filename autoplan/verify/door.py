"""Decide whether and how a capture is verified, and write the line that a plan gets. Outcomes are kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from autoplan.capture.frontend.cache import capture_key
from autoplan.errors import CaptureError, PinError
from autoplan.files import cache_folder, code_hash, keep_cached, read_cached
from autoplan.ir.graph import ModelGraph
from autoplan.verify.check import Verification, verify_whole
from autoplan.verify.cost import LIMIT_S
from autoplan.verify.evaluation import verified_evaluation
from autoplan.verify.runs import VerifyTask
from autoplan.verify.shallow import verify_shallow

VERIFY_CHOICES = (True, False, "required")
# packages of the code that a comparison runs; those that capture are in the key of the captured graph
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
    """Return `verify` if it is one of the choices. Raises PinError for anything else."""
    for choice in VERIFY_CHOICES:
        if verify is choice or (isinstance(verify, str) and verify == choice):
            return choice
    raise PinError(f"verify={verify!r} does not exist; use True, False or 'required'")


def verify_capture(task: VerifyTask, verify: bool | str = True, folder: Path | None = None) -> str:
    """Compare a captured graph with its module as far as `verify` asks for it, and say what was found.

    Args:
        verify: True: the whole model if that costs some seconds at most, else fewer layers of a Hugging Face config,
            else nothing. 'required': at any cost. False: nothing.
        folder: folder of the remembered outcomes; None: inside the folder of the captured graphs.

    Returns:
        A line for the plan, 'capture verified ...' or 'capture not verified: why'.

    Raises:
        CaptureError: if the graph is not its module (names the first value that differs), and with 'required' if the
            two could not be compared.
    """
    if verify is False:
        return "capture not verified: verify=False"
    path = _remembered(task, folder)
    kept = None if path is None else read_cached(path)
    if kept is not None:
        with suppress(KeyError, TypeError, ValueError):  # damaged: verify again
            return str(json.loads(kept)["verified"])
    limit_s = math.inf if verify == "required" else LIMIT_S
    whole = verify_whole(task, limit_s)
    outcome = whole if whole.done else verify_shallow(task, limit_s)
    if not outcome.done:
        outcome = Verification(False, "; ".join(x for x in (whole.text, outcome.text) if x))
        if verify == "required":
            raise CaptureError(
                f"verify='required', but the captured graph of {task.graph.name} could not be compared with the "
                f"module: {outcome.text}; verify=True trains with it all the same"
            )
        return f"capture not verified: {outcome.text}"
    text = f"capture verified {outcome.text}"
    if path is not None:
        keep_cached(path, json.dumps({"verified": text}))
    return text


def verify_evaluation(
    task: VerifyTask, capture: Callable[[], ModelGraph], verify: bool | str = True, folder: Path | None = None
) -> ModelGraph:
    """Return the graph of a task with the graph of its evaluation, where it needs one, compared with the module.

    Args:
        capture: returns the graph with that of the evaluation, or with the reason why there is none.
        verify, folder: as for `verify_capture`. False: the graph as it is.
    """
    if verify is False:
        return task.graph
    path = _remembered(task, folder)
    path = None if path is None else path.with_name(f"{path.stem}-evaluation.json")
    if path is not None and read_cached(path) is not None:
        return task.graph
    graph = verified_evaluation(task, math.inf if verify == "required" else LIMIT_S, capture)
    if path is not None and graph == task.graph:
        keep_cached(path, json.dumps({"evaluation": "as captured"}))
    return graph


def _remembered(task: VerifyTask, folder: Path | None) -> Path | None:
    """Return the file of this outcome; None if the model's version does not identify its code."""
    model = None if task.loss_fn is not None else capture_key(task.model, task.example)
    if model is None:
        return None
    key = [model, task.graph.content_hash, str(task.dtype), code_hash(*_CODE)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return (folder or cache_folder("graphs")) / "verified" / f"{name}.json"
