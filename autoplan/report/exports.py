"""Exports on the command line and in Python: a plan file as the input of another framework.

    export = autoplan.export_plan("plan.json", "megatron-lm")
    Path(export.file).write_text(export.text)

JSON of schema 1 (report.data):

    {"schema": 1, "status": "ok", "command": "export", "plan": file, "to": target, "version": YY.MM,
     "file": str, "text": str, "launch": [line], "elsewhere": [name=value: where], "not_said": [name=value: why]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.exporters.door import Export, export_setup
from autoplan.exporters.setup import Setup
from autoplan.exporters.targets import target_of
from autoplan.plans.document import chosen
from autoplan.plans.record import Plan
from autoplan.report.data import report, to_text
from autoplan.report.files import check_writable, write_text
from autoplan.report.output import say_note
from autoplan.report.plan_file import PlanFile, read_plan_file
from autoplan.report.written import written_of
from autoplan.search.planner import PlanRequest


def export_plan(
    plan: str | Path | Plan | PlanFile | PlanRequest, to: str, *, config: ParallelConfig | None = None, file: str = ""
) -> Export:
    """Return a plan as the input of another framework.

    Args:
        plan: a plan file (what `autoplan plan --json` or `estimate --json` printed), what `autoplan.plan` returned, or
            the request of a plan, which then is `config`.
        to: NAME or NAME@VERSION of a target (`autoplan.exporters.targets.TARGETS`). A version is a month YY.MM, or a
            release.
        config: of a plan file, taken in place of its own.
        file: the name of the file in the launch command.

    Raises:
        PinError: a request without a configuration; a degree that the target cannot say. What else it cannot say is in
            `Export.not_said`.

    Example:
        >>> from autoplan import Cluster, ParallelConfig, PlanRequest, export_plan, load_model
        >>> request = PlanRequest(load_model("gpt2"), Cluster.parse("2xh100"), 1024, 16)
        >>> found = export_plan(request, "torchtitan", config=ParallelConfig(dp=2, zero_stage=3, micro_batch_size=8))
        >>> "data_parallel_shard_degree = 2" in found.text
        True
    """
    if isinstance(plan, PlanRequest):
        if config is None:
            raise PinError("a request is exported with a configuration: give config=, for example that of search_plan")
        return export_setup(Setup.of(plan, config), to, file)
    if isinstance(plan, Plan):
        plan = PlanFile(written_of(plan.to_data(), Path(plan.model)))
    known = plan if isinstance(plan, PlanFile) else read_plan_file(Path(plan))
    return export_setup(Setup.of(known.request, config or known.config), to, file)


def export_command(plan: Path, to: str, out: Path | None, as_json: bool) -> None:
    """Write the answer of `autoplan export`."""
    target_of(to)
    if out is not None:
        check_writable(out)
    found = export_plan(plan, to, file="" if out is None else str(out))
    if out is not None:
        write_text(out, found.text)
    if as_json:
        typer.echo(to_text(export_report(str(plan), found)))
        return
    if out is None:
        typer.echo(found.text, nl=False)
    else:
        typer.echo(f"wrote {out}: {found.target}@{found.version}")
    for kind, lines in (("set elsewhere", found.elsewhere), ("not said", found.not_said), ("run it", found.launch)):
        for line in lines:
            say_note(f"{kind}: {line}")


def export_report(plan: str, found: Export) -> dict[str, Any]:
    """Return the answer of `autoplan export` as plain data."""
    return report("export", plan=plan, to=found.target, **chosen(found, "version file text launch elsewhere not_said"))
