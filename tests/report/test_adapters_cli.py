"""`--adapters` on the command line: prices, plan files, proposed commands and what-ifs agree."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_line import TASK, one_line_error, run

from autoplan.catalog import load_model
from autoplan.config.adapters import Adapters
from autoplan.program.adapters import with_adapters
from autoplan.sweeps.whatif import whatif

WORDS = (*TASK, "--adapters", "qlora:8:c_attn,c_fc")


def test_a_plan_with_adapters_is_priced_again_to_the_last_digit(tmp_path: Path) -> None:
    planned = run("plan", *WORDS, "--pin", "tp=1,pp=1", "--json")
    data = json.loads(planned.stdout)
    graph = with_adapters(load_model("gpt2"), Adapters(8, ("c_attn", "c_fc"), packed=True))
    assert data["request"]["adapters"] == "qlora:8:c_attn,c_fc" and data["model"]["num_params"] == graph.num_params
    assert data["made_for"]["graph"] == graph.content_hash and "weights in 4 bits" in data["priced_not_executed"]
    file = tmp_path / "plan.json"
    file.write_text(planned.stdout)
    again = json.loads(run("estimate", str(file), "--json").stdout)
    assert again["plan"] == data["plan"] and again["estimate"] == data["estimate"]
    text = run("plan", *WORDS, "--pin", "tp=1,pp=1").stdout
    proposed = text[text.index("Next: autoplan estimate") :].split("autoplan ", 2)[1].replace("\\\n", " ")
    priced = json.loads(run(*shlex.split(proposed), "--json").stdout)
    assert priced["estimate"]["step_time_s"] == data["estimate"]["step_time_s"]
    assert "adapters qlora:8:c_attn,c_fc" in text


def test_a_sweep_with_adapters() -> None:
    table = whatif("gpt2", "1x2xh100-sxm5-80gb", 1024, 16, vary={"tp": [1]}, pins={"pp": 1}, adapters="lora:8")
    whole = whatif("gpt2", "1x2xh100-sxm5-80gb", 1024, 16, vary={"tp": [1]}, pins={"pp": 1})
    assert table["step_time_s"][0] < whole["step_time_s"][0]
    assert table["peak_memory_bytes"][0] < whole["peak_memory_bytes"][0]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ("lora:16:q_proj", "no linear layer of gpt2 is named q_proj; there are c_attn, c_proj, c_fc"),
        ("lora", "write lora:16, lora:16:q_proj,v_proj or qlora:16:all-linear"),
    ],
)
def test_adapters_that_are_wrong_are_one_line(adapters: str, message: str) -> None:
    assert message in one_line_error(run("plan", *TASK, "--adapters", adapters), 2)
