"""The table of published measurements: its columns and rows as text, and why a row may not be priced."""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError
from experiments.published import reading
from experiments.published.defaults import Framework, find

COLUMNS = (
    "id campaign source trust model params_b layers hidden ffn_hidden heads kv_heads vocab seq_len moe_experts "
    "moe_topk gpu gpu_mem_gb n_gpus gpus_per_node internode tp sp pp vpp dp cp ep zero_stage micro_batch "
    "global_batch recompute precision schedule flags step_time_s tokens_per_s_per_gpu tflops_per_gpu tflops_kind "
    "peak_mem_gb mem_kind notes"
).split()


MEASURED_TIMES = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")


class Unpriced(AutoplanError):
    """Why a row cannot be priced."""


class Unstated(Unpriced):
    """The row lacks a dimension, a degree, or anything that was measured: no planner could price it."""


class Unmeasured(AutoplanError):
    """Why a row that is priced is compared with nothing."""


@dataclass(frozen=True)
class Row:
    """One row of the file, as text. `line`: number of its last line there; `faults`: what is wrong with the text."""

    line: int
    fields: Mapping[str, str]
    faults: tuple[str, ...] = ()

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

    def positive(self, column: str) -> float | None:
        """A number above 0, None where it is blank. Unpriced names any other."""
        value = self.number(column)
        if value is not None and value <= 0:
            raise Unpriced(f"{column}={self[column]}: must be above 0")
        return value

    def count(self, column: str) -> int | None:
        """A whole number, None where it is blank. Unpriced names a part of one, and less than 0."""
        value = self.number(column)
        if value is None:
            return None
        if value < 0 or value != int(value):
            raise Unpriced(f"{column}={self[column]}: must be a whole number of at least 0")
        return int(value)

    def needed(self, column: str) -> int:
        """A whole number of at least 1. Unstated where the row does not state it, Unpriced for another number."""
        value = self.count(column)
        if value is None:
            raise Unstated(f"{column} is not stated")
        if value < 1:
            raise Unpriced(f"{column}={self[column]}: must be at least 1")
        return value

    def measured(self, column: str) -> float | None:
        """Return what was measured, None where it is blank. Unmeasured for what nothing can be compared with."""
        try:
            value = self.number(column)
        except AutoplanError as exc:
            raise Unmeasured(f"not compared: {column}={self[column]} is not a finite number") from exc
        if value is not None and value <= 0:
            raise Unmeasured(f"not compared: {column}={self[column]} is not above 0")
        return value

    @property
    def num_devices(self) -> int:
        """As stated, else what all degrees give. Unstated where these are not all stated, either."""
        degrees = [self.count(column) for column in ("tp", "pp", "dp")]
        if not self["n_gpus"] and all(degrees):
            return math.prod(n for n in (*degrees, self.count("cp")) if n)
        return self.needed("n_gpus")

    @property
    def out_of_memory(self) -> bool:
        """True for a run that is published because it did not fit: it says so and has no time."""
        timed = any(self[column] for column in MEASURED_TIMES)
        return not timed and re.search(r"\bOOM\b|out of memory", f"{self['notes']} {self['flags']}", re.I) is not None

    @property
    def framework(self) -> Framework:
        """What trained the model."""
        found = find(reading.FRAMEWORKS, f"{self['source']} {self['flags']}") or Framework.OTHER
        if found is Framework.BRIDGE_LIBRARY and re.search(reading.PERFORMANCE_RECIPE, self["notes"], re.IGNORECASE):
            return Framework.NEMO
        return found

    @property
    def stated(self) -> str:
        """What the source of the row states beside its columns."""
        return reading.stated_by(self["source"])

    def noted(self, name: str) -> int:
        """`name=NUMBER` in the notes, else in what the source states, else 0."""
        match = re.search(rf"\b{name}=(\d+)", f"{self['notes']} {self.stated}")
        return int(match.group(1)) if match else 0


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; one without campaigns has them in its ids, as `campaign_NUMBER`.

    A byte order mark and line ends of any system are read over; a line that is not UTF-8 is read as Windows-1252, as
    Excel writes it, and its row says so. AutoplanError for a file that cannot be read, is empty or lacks columns.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise AutoplanError(f"{path}: cannot be read ({exc.strerror})") from exc
    lines = data.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data:
        raise AutoplanError(f"{path}: is no text in UTF-8; store it as CSV in UTF-8")
    texts, others = [], set()
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(line.decode("cp1252", errors="replace"))
            others.add(number)
    reader = csv.DictReader(texts, restkey=_MORE)
    rows: list[Row] = []
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if not names:
            raise AutoplanError(f"{path}: is empty; its first line must name the columns {', '.join(COLUMNS[:3])}, ...")
        missing = [c for c in COLUMNS if c not in names and c != "campaign"]
        if missing:
            raise AutoplanError(f"{path}: no column {', '.join(missing)}")
        start = reader.line_num + 1
        for fields in reader:
            end = reader.line_num
            rows.append(Row(end, _fields(fields), _faults(fields, len(names), others & set(range(start, end + 1)))))
            start = end + 1
    except csv.Error as exc:
        raise AutoplanError(f"{path}: line {reader.line_num} is no line of a CSV file: {exc}") from exc
    return rows


_MORE = "more"  # fields behind the last column


def _fields(line: Mapping[str, Any]) -> dict[str, str]:
    fields = {c: (line.get(c) or "").strip() for c in COLUMNS}
    return {**fields, "campaign": fields["campaign"] or re.sub(r"_\d+$", "", fields["id"])}


def _faults(line: Mapping[str, Any], num_columns: int, others: set[int]) -> tuple[str, ...]:
    """Return what is wrong with a line as text."""
    out = [f"line {number} is not UTF-8: read as Windows-1252" for number in sorted(others)]
    if _MORE in line:
        out.append(f"{num_columns + len(line[_MORE])} fields in a table of {num_columns} columns: the last are left")
    if any(value is None for value in line.values()):
        num_fields = sum(value is not None for value in line.values())
        out.append(f"{num_fields} fields in a table of {num_columns} columns: the rest is blank")
    return tuple(out)
