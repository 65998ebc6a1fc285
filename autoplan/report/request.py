"""Read the options of `plan`, `estimate` and `whatif` into a PlanRequest."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoplan.catalog import load_model
from autoplan.config.choices import options_of
from autoplan.config.numbers import read_count
from autoplan.config.parallel import Mode, precision_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.errors import PinError
from autoplan.report.arguments import read_pin_words
from autoplan.search.planner import PlanRequest
from autoplan.sweeps.whatif import check_sweep, read_constants


def import_from_here() -> None:
    """Let Python find `package.module:factory` in the current folder, as `python -m` would."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def read_request(
    model: str,
    cluster: str,
    seq_len: str,
    global_batch_size: str,
    *,
    pins: Sequence[str] | None = None,
    precision: str,
    mode: str,
    profile: str | None,
    options: Mapping[str, Any],
    constants: Path | None,
    top: int = 1,
    time_limit: float = 60.0,
    runnable: bool = False,
    target_len: str | None = None,
) -> PlanRequest:
    """Return the request. Everything else is read and checked before the model is loaded, which may take long.

    `options`: in the form that `options_of` takes.
    """
    if not math.isfinite(time_limit):
        raise PinError(f"--time-limit {time_limit} must be a finite number of at least 1")
    where = Cluster.parse(cluster)
    if mode not in tuple(Mode):
        raise PinError(f"mode {mode!r} is not known; use {', '.join(Mode)}")
    precision_of(precision)
    tokens = read_count(seq_len, "--seq-len")
    batch = read_count(global_batch_size, "--global-batch-size")
    check_sweep(tokens, batch)
    fixed, run_options = read_pin_words(pins or ()), options_of(options)
    known, file = read_constants(constants)
    measured = Profile.load(profile) if profile is not None else None
    if measured is not None and measured.device_type != where.device_type:
        raise PinError(
            f"profile {measured.name} was measured on {measured.device_type} devices, the cluster {where} has "
            f"{where.device_type} devices"
        )
    if ":" in model:
        import_from_here()
    return PlanRequest(
        graph=load_model(model),
        cluster=where,
        seq_len=tokens,
        global_batch_size=batch,
        pins=fixed,
        precision=precision,
        mode=Mode(mode),
        profile=measured,
        profile_file=profile,
        options=run_options,
        constants=known,
        constants_file=file,
        top=top,
        time_limit_s=time_limit,
        executed=runnable,
        target_len=None if target_len is None else read_count(target_len, "--target-len"),
    )
