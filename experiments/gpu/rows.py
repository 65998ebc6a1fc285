"""What the parts of experiments/gpu share: rows that are written as they are found, timing and peaks on a device."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One finding. passed: None where the figures are to be read, not judged."""

    part: str
    name: str
    figures: Mapping[str, float | int | str]
    passed: bool | None = None
    note: str = ""


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file of them."""
    with path.open("a") as out:
        out.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file. A process that was killed may have left half a line."""
    out = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            out.append(Row(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return out


@dataclass(frozen=True)
class Run:
    """How a part runs, and where its rows go.

    folder: of all parts; `profile.json` is the profile of the device, once it is measured.
    end_s: of `time.monotonic`, when this part is to be done.
    """

    part: str
    device_type: str
    quick: bool
    folder: Path
    end_s: float

    @property
    def device(self) -> torch.device:
        """The device that everything is measured on."""
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def cuda(self) -> bool:
        """Whether there is an accelerator."""
        return self.device_type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until this part is to be done."""
        return self.end_s - time.monotonic()

    @property
    def rows(self) -> Path:
        """Where the rows of this part are."""
        return self.folder / f"{self.part}.rows"

    @property
    def profile(self) -> Path:
        """Where the profile of this device is, or will be."""
        return self.folder / "profile.json"

    def write(self, name: str, passed: bool | None = None, note: str = "", **figures: float | int | str) -> None:
        """Add a row."""
        append_row(self.rows, Row(self.part, name, figures, passed, note))

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What fails inside is a row that failed, and the next case runs. Nothing runs when the time is over."""
        if self.left_s <= 0:
            raise TimeoutError(f"no time left for {name}")
        try:
            yield
        except Exception as exc:  # whatever a device does that no CPU did is a finding
            where = traceback.extract_tb(exc.__traceback__)[-1]
            reason = " ".join(str(exc).split())[:300]
            self.write(name, False, f"{type(exc).__name__} at {Path(where.filename).name}:{where.lineno}: {reason}")
            traceback.print_exc()

    def wait(self) -> None:
        """Until the device is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def median_s(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Median wall time of `work`, the device's part included, after two that are not timed."""
        found = []
        for i in range(-2, repeats or (3 if self.quick else 10)):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            if i >= 0:
                found.append(time.perf_counter() - begin)
        return statistics.median(found)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most that is allocated while `work` runs, above what was there before."""
        if not self.cuda:
            from experiments.shared.storage_counter import StorageCounter

            with StorageCounter() as live:
                work()
            return live.peak_bytes
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before


def difference(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """L2 norm of the difference over that of the truth, in float64 on the host."""
    a, b = mine.detach().to("cpu", torch.float64), truth.detach().to("cpu", torch.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    scale = float(b.norm())
    return float((a - b).norm()) / (scale if scale > 0 else 1.0)


def worst_difference(mine: Mapping[str, Any], truth: Mapping[str, Any]) -> float:
    """Return the worst of `difference` over names. KeyError if the names differ."""
    if set(mine) != set(truth):
        raise KeyError(f"only one side has {sorted(set(mine) ^ set(truth))[:3]}")
    return max((difference(mine[name], truth[name]) for name in truth), default=0.0)
