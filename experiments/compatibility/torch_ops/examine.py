"""What becomes of an operation of the database: of its samples one by one, and of all of them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

from experiments.compatibility.fuzz.examine import Crashed, Finding, examine
from experiments.compatibility.fuzz.plans import FuzzPlan
from experiments.compatibility.one_by_one import CRASHED, EQUAL, NOT_RUN, REFUSED, WRONG, Row, Task, short
from experiments.compatibility.torch_ops.programs import programs
from experiments.compatibility.torch_ops.samples import Entry, entries

PLANS = (FuzzPlan(dp=2), FuzzPlan(tp=2, layout=1))  # beside one device
MESH = "2"  # where every split that a rule claims is run
MOST = 4  # samples of one operation
COUNTED = PROGRAMS, RUNS, SPLITS, REFUSALS, WHOLE = (
    "programs",
    "equal runs",
    "splits",
    "refused",
    "needs the whole batch",
)
_LEFT_OUT = {
    r"empty|resize_": "its results are what the memory had before",
    r"^_segment_reduce\.offsets$": "PyTorch's kernel ends the process on samples that are stacked",
    r"^sgn$": "torch's simulation of ranks (LocalTensorMode) dies in its backward, which gives tensors of no memory",
}
_SPLIT_BY_LOSS = re.compile(r"^linalg\.eig$")  # not node by node: some losses alone have a gradient (of eigenvectors)
_WHOLE_BATCH = "so the batch cannot be split"
# parts of a refusal that differ between samples of one cause
_PLACE = re.compile(r"\w+\.py:\d+(?: \(.*?\): |:? ?)|torch\.export cannot capture Model: ")


def reason(text: str) -> str:
    """Return a refusal without its place and numbers."""
    return re.sub(r"\d+", "N", _PLACE.sub("", text.split("; nearest legal")[0])).strip()


def examine_entry(entry: Entry, most: int = MOST) -> Row:
    """Return what became of an operation or module: of its worst sample, or of the best that is not refused.

    Returns:
        A row whose `parity` has counts by `COUNTED`, and every reason of a refusal with its number of samples.
    """
    counts, reasons, finding = Counter[str](), Counter[str](), None
    for names, why in _LEFT_OUT.items():
        if re.search(names, entry.name):
            return Row(entry.group, entry.name, NOT_RUN, why)
    try:
        found = list(programs(entry, most))
    except Exception as exc:  # the database's own samples, of other sizes than it has
        return Row(entry.group, entry.name, NOT_RUN, short(exc))
    for program in found:
        counts[PROGRAMS] += 1
        try:
            outcome = examine(program, PLANS, "" if _SPLIT_BY_LOSS.search(entry.name) else MESH)
        except Finding as exc:
            finding = finding or exc
            continue
        counts[RUNS] += len(outcome.equal)
        counts[SPLITS] += outcome.num_splits
        for where, why in outcome.refused:
            whole = _WHOLE_BATCH in why
            counts[WHOLE if whole else REFUSALS] += 1
            if not whole:
                reasons[reason(why if where == "capture" else f"plan: {why}")] += 1
    told = tuple((name, str(n)) for c in (counts, reasons) for name, n in c.items() if n)
    if finding is not None:
        kind = CRASHED if isinstance(finding, Crashed) else WRONG
        return Row(entry.group, entry.name, kind, f"{type(finding).__name__}: {finding}", parity=told)
    if counts[RUNS]:
        return Row(entry.group, entry.name, EQUAL, parity=told)
    why = next(iter(reasons), "no sample learns by numbers that are finite and the same in every run")
    return Row(entry.group, entry.name, REFUSED if reasons else NOT_RUN, why, parity=told)


def tasks(only: str, most: int = MOST) -> Sequence[Task]:
    """Return the examination of every operation and module whose name matches."""
    found = [e for e in entries() if re.search(only, e.name)]
    return [Task(e.group, e.name, functools.partial(examine_entry, e, most)) for e in found]
