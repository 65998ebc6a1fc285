"""The table of published measurements: its columns and rows as text, and why a row may not be priced."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import published_defaults as tables
from published_defaults import Framework, find

from autoplan.cost_models.errors import AutoplanError

COLUMNS = (
    "id campaign source trust model params_b layers hidden ffn_hidden heads kv_heads vocab seq_len moe_experts "
    "moe_topk gpu gpu_mem_gb n_gpus gpus_per_node internode tp sp pp vpp dp cp ep zero_stage micro_batch "
    "global_batch recompute precision schedule flags step_time_s tokens_per_s_per_gpu tflops_per_gpu tflops_kind "
    "peak_mem_gb mem_kind notes"
).split()


class Unpriced(AutoplanError):
    """Why a row cannot be priced."""


class Unstated(Unpriced):
    """The row lacks a dimension, a degree, or anything that was measured: no planner could price it."""


@dataclass(frozen=True)
class Row:
    """One line of the file, as text. `line`: its number there."""

    line: int
    fields: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.fields[column]

    def number(self, column: str) -> float | None:
        """A number, None where it is blank: `1,024` and `~5.2` too. AutoplanError names the line."""
        text = self[column].replace(",", "").lstrip("~")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise AutoplanError(f"line {self.line}: {column}={text!r} is not a number") from None
        if not math.isfinite(value):
            raise AutoplanError(f"line {self.line}: {column}={text!r} must be finite")
        return value

    def count(self, column: str) -> int | None:
        """A whole number, None where it is blank."""
        value = self.number(column)
        return None if value is None else int(value)

    def needed(self, column: str) -> int:
        """A whole number of at least 1. Unstated where the row does not state it."""
        value = self.count(column)
        if value is None or value < 1:
            raise Unstated(f"{column} is not stated")
        return value

    @property
    def out_of_memory(self) -> bool:
        """True for a run that is published because it did not fit: it says so and has no time."""
        timed = any(self[column] for column in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"))
        return not timed and re.search(r"\bOOM\b|out of memory", f"{self['notes']} {self['flags']}", re.I) is not None

    @property
    def framework(self) -> Framework:
        """What trained the model."""
        return find(tables.FRAMEWORKS, f"{self['source']} {self['flags']}") or Framework.OTHER

    def noted(self, name: str) -> int:
        """`name=NUMBER` in the notes, else 0."""
        match = re.search(rf"\b{name}=(\d+)", self["notes"])
        return int(match.group(1)) if match else 0


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; one without campaigns has them in its ids, as `campaign_NUMBER`.

    AutoplanError for a file that cannot be read or lacks columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ()) and c != "campaign"]
            if missing:
                raise AutoplanError(f"{path}: no column {', '.join(missing)}")
            return [Row(reader.line_num, _fields(line)) for line in reader]
    except OSError as exc:
        raise AutoplanError(f"{path}: cannot be read ({exc.strerror})") from exc


def _fields(line: Mapping[str, str | None]) -> dict[str, str]:
    fields = {c: (line.get(c) or "").strip() for c in COLUMNS}
    return {**fields, "campaign": fields["campaign"] or re.sub(r"_\d+$", "", fields["id"])}
