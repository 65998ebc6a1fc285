"""A line per step, with the plan's prediction beside it: on the screen, in a file, in TensorBoard.

    log = autoplan.StepLog(pm, "train.jsonl")
    for batch in loader:
        loss = pm.step(batch)
        pm.optimizer.step()
        log(loss)                      # on every rank

The file has one JSON object per line: a head with what the plan predicts, then the rows. `autoplan compare PLAN LOG`
reads it. The lines stay readable whatever ends the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from autoplan.files import AppendedFile
from autoplan.runtime.failure import guarded
from autoplan.runtime.host_memory import peak_resident_bytes
from autoplan.runtime.state_methods import TrainingPoint

if TYPE_CHECKING:
    from autoplan.runtime.model import ParallelModel

LOG_VERSION = 1


class Writer(Protocol):
    """A writer of values by name: torch.utils.tensorboard's SummaryWriter, or anything alike."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take one value."""


@dataclass(frozen=True)
class StepRow:
    """The measurements of the steps since the row before.

    Attributes:
        step: number of steps so far. num_steps: of those that this row is about.
        step_s: seconds per step, with everything between two calls of the log: data, optimizer, evaluation.
        tokens_per_s: of all ranks. mfu: with attention in full, as the plan counts it; None without a prediction.
        peak_bytes: the most on any rank since the start: of tensors on a GPU, of the process on a CPU.
    """

    step: int
    num_steps: int
    loss: float
    step_s: float
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: int


class StepLog:
    """Measures and writes down the steps of a program.

    Args:
        pm: the program.
        path: the file, written by rank 0; an earlier one is replaced. None: no file.
        every: steps per row.
        writer: gets loss, seconds, tokens per second, MFU and memory of every row on rank 0.
        show: what rank 0 does with each line of text; None: nothing.
        tokens_per_sample: None: what the plan was made for.

    Raises:
        ValueError: `every` below 1.
        OSError: the file cannot be written.

    Example:
        >>> import torch, autoplan
        >>> model, batch = torch.nn.Linear(8, 8), {"input": torch.ones(4, 8)}
        >>> def loss_fn(output, batch):
        ...     return output.square().mean()
        >>> pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss_fn, global_batch_size=4)
        >>> lines = []
        >>> log = autoplan.StepLog(pm, show=lines.append)
        >>> for _ in range(2):
        ...     row = log(pm.step(batch))
        >>> any("loss" in line for line in lines)
        True
    """

    def __init__(
        self,
        pm: ParallelModel,
        path: str | Path | None = None,
        *,
        every: int = 1,
        writer: Writer | None = None,
        show: Callable[[str], object] | None = print,
        tokens_per_sample: float | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self._pm, self._every, self._writer, self._show = pm, every, writer, show
        self._estimate: Any = getattr(pm.plan, "estimate", None)
        self._tokens_per_sample = tokens_per_sample
        if tokens_per_sample is None and self._estimate is not None:
            self._tokens_per_sample = self._estimate.tokens_per_step / pm.plan.global_batch_size
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        self._file: AppendedFile | None = None
        if path is not None and self._first:
            self._file = AppendedFile(path, json.dumps(self._head()) + "\n")
        self._from = TrainingPoint(pm.progress.num_steps, pm.progress.num_samples, time.perf_counter())

    def _head(self) -> dict[str, Any]:
        pm, e = self._pm, self._estimate
        predicted = None
        if e is not None:
            peak = e.peak_memory_bytes if pm.device.type == "cpu" else e.peak_allocated_bytes
            predicted = {
                "step_s": [e.step_time_s.low, e.step_time_s.mid, e.step_time_s.high],
                "tokens_per_s": e.tokens_per_s,
                "mfu": e.mfu,
                "peak_bytes": peak.mid,
            }
        return {
            "autoplan_step_log": LOG_VERSION,
            "model": pm.spec.model,
            "graph": getattr(pm.plan, "graph_hash", ""),
            "plan": str(pm.plan).splitlines()[0] if pm.plan is not None else "",
            "device": pm.device.type,
            "world": pm.mesh.world_size,
            "predicted": predicted,
        }

    @guarded("StepLog")
    def __call__(self, loss: torch.Tensor | float) -> StepRow | None:
        """Call it on every rank once per step, after the update. Returns the row, on every rank, if it is due."""
        loaded = self._pm.last_load
        if loaded is not None and loaded.at_s > self._from.at_s:  # steps before a load are not among those after it
            self._from = loaded
        steps, samples, since = self._from
        progress = self._pm.progress
        num = progress.num_steps - steps
        if num < self._every:
            return None
        value = float(loss)  # waits for the device, so that the time is that of finished steps
        now = time.perf_counter()
        seconds = (now - since) / num
        rate = None
        if self._tokens_per_sample is not None:
            rate = (progress.num_samples - samples) * self._tokens_per_sample / (now - since)
        mfu = (
            None if rate is None or self._estimate is None else self._estimate.mfu * rate / self._estimate.tokens_per_s
        )
        row = StepRow(progress.num_steps, num, value, seconds, rate, mfu, self._peak_bytes())
        if self._first:
            self._write(row)
        self._from = TrainingPoint(progress.num_steps, progress.num_samples, time.perf_counter())
        return row

    def _peak_bytes(self) -> int:
        """Return the most memory of any rank. A collective."""
        device = self._pm.device
        mine = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
        if self._pm.mesh.world_size == 1:
            return mine
        found = torch.tensor(mine, dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def _write(self, row: StepRow) -> None:
        if self._file is not None:
            self._file.append(json.dumps(asdict(row)) + "\n")
        if self._show is not None:
            self._show(self.line(row))
        if self._writer is not None:
            for name, value in asdict(row).items():
                if name not in ("step", "num_steps") and value is not None:
                    self._writer.add_scalar(f"autoplan/{name}", value, row.step)

    def line(self, row: StepRow) -> str:
        """Return a row as text."""
        parts = [f"step {row.step}", f"loss {row.loss:.4f}"]
        expected = "" if self._estimate is None else f" (predicted {self._estimate.step_time_s.mid:.3g})"
        parts.append(f"{row.step_s:.3g} s{expected}")
        if row.tokens_per_s is not None:
            parts.append(f"{row.tokens_per_s:,.0f} tokens/s")
        if row.mfu is not None:
            parts.append(f"MFU {100 * row.mfu:.1f} %")
        return " | ".join([*parts, f"{row.peak_bytes / 1e9:.2f} GB"])
