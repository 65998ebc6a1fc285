"""A plan with adapters by the name of a model is rehearsed: its graph is that of the name, with them."""

from __future__ import annotations

from command_line import run

import autoplan


def test_a_plan_with_adapters_is_rehearsed() -> None:
    """The embedding of GPT-2 is tied, frozen and held once."""
    task = ("gpt2", "--cluster", "1x2xh100-sxm5-80gb", "--seq-len", "64", "--global-batch-size", "2")
    done = run("plan", *task, "--adapters", "lora:4", "--pin", "zero_stage=0", "--runnable", "--json")
    assert done.exit_code == 0, done.output
    (report,) = autoplan.rehearse(autoplan.Plan.from_json(done.stdout), "0").ranks
    assert report.rank == 0
