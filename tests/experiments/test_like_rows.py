"""Plain flags with --like give the price of a published row that leaves everything else to its framework."""

from dataclasses import replace

import pytest
from made_up import QWEN, case_of

from autoplan.report.degrees import checked_config
from autoplan.search.planner import estimate_config
from autoplan.search.request import PlanRequest
from experiments.published.graphs import graph_of
from experiments.published.validate import price

STATED = {"tp": "2", "dp": "8", "zero_stage": "", "recompute": ""}


@pytest.mark.parametrize(("like", "fields"), [
    ("megatron-lm@24.06", {"source": "NVIDIA/Megatron-LM README"}),
    ("megatron-bridge@25.11", {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "notes": "container 25.11"}),
    ("megatron-bridge@26.04", {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "notes": "container 26.04"}),
    ("megatron-deepspeed@22.06", {"source": "DeepSpeed", "gpu": "A100"}),
    ("composer@23.06", {"source": "llm-foundry", "gpu": "A100", "tp": "1", "dp": "16"}),
    ("automodel@25.08", {"source": "Automodel"}),
    ("torchtitan@25.08", {"source": "torchtitan", "flags": "compile"}),
    ("internevo@24.03", {"source": "InternEvo", "gpu": "A100"}),
    ("maxtext@25.08", {"source": "maxtext"}),
    ("megatron-bridge@25.11", {**QWEN, "ep": "8", "source": "Megatron-Bridge", "notes": "container 25.11"}),
    ("megatron-bridge@26.04", {  # a recipe of this model
        **QWEN, "model": "Qwen3_30B_a3B", "ep": "8", "source": "Megatron-Bridge",
        "notes": QWEN["notes"] + "; container 26.04",
    }),
    ("megatron-lm@24.06", {"source": "NVIDIA/Megatron-LM README", "pp": "2", "dp": "4", "schedule": "1F1B"}),
])  # fmt: skip
def test_plain_flags_like_a_stack_give_the_price_of_its_row(like: str, fields: dict[str, str]) -> None:
    case = case_of(**{**STATED, **fields})
    task, stated = case.task, case.task.settings[0].config
    precision = task.precision.split("-")[0]
    graph = replace(graph_of(task.shape), name=case.row["model"])
    asked = PlanRequest(graph, task.cluster, task.seq_len, task.global_batch_size, precision=precision, like=like)
    given = {name: getattr(stated, name) for name in ("tp", "pp", "dp", "ep", "micro_batch_size")}
    planned = estimate_config(asked, checked_config(asked, given))
    assert planned.estimate.step_time_s == price(task).estimates[0].step_time_s
    assert (asked.precision, asked.options) == (task.precision, task.settings[0].options)
