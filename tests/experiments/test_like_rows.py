"""Plain flags with --like give the price of a published row that leaves everything else to its framework."""

from dataclasses import replace
from typing import Any

import pytest
from made_up import QWEN, case_of

from autoplan.cost_models.quantity import Quantity
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
    ("composer@23.10", {"source": "llm-foundry", "gpu": "A100", "tp": "1", "dp": "16"}),
    ("composer@22.12", {"source": "llm-foundry scripts/train/benchmarking/README.md:300", "gpu": "A100", "tp": "1"}),
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
    asked, seconds = priced_like(case, like)
    assert seconds == price(case.task).estimates[0].step_time_s
    assert (asked.precision, asked.options) == (case.task.precision, case.task.settings[0].options)


@pytest.mark.parametrize(("like", "fields"), [
    ("torch-eager@24.06", {"source": "NVIDIA/Megatron-LM README"}),  # another stack
    ("megatron-bridge@25.06", {**QWEN, "ep": "8", "source": "Megatron-Bridge", "notes": "container 25.11"}),  # version
    ("megatron-lm@24.06", {"source": "NVIDIA/Megatron-LM README", "flags": "no overlap; CUDA_LAUNCH_BLOCKING=1"}),
])  # fmt: skip
def test_other_settings_give_another_price(like: str, fields: dict[str, str]) -> None:
    """The negative control: a row of other settings than those of the stack is told apart."""
    case = case_of(**{**STATED, **fields})
    assert priced_like(case, like)[1] != price(case.task).estimates[0].step_time_s


def test_a_recipe_holds_for_its_model_alone() -> None:
    notes = QWEN["notes"] + "; container 26.04"
    fields = {**QWEN, "model": "Qwen3_30B_a3B", "ep": "8", "source": "Megatron-Bridge", "notes": notes}
    case = case_of(**{**STATED, **fields})
    named, other = (priced_like(case, "megatron-bridge@26.04", name)[1] for name in ("", "some"))
    assert named != other


def priced_like(case: Any, like: str, name: str = "") -> tuple[PlanRequest, Quantity]:
    """Return the request and the step of a row by plain flags and a stack."""
    task, stated = case.task, case.task.settings[0].config
    graph = replace(graph_of(task.shape), name=name or case.row["model"])
    precision = task.precision.split("-")[0]
    asked = PlanRequest(graph, task.cluster, task.seq_len, task.global_batch_size, precision=precision, like=like)
    given = {name: getattr(stated, name) for name in ("tp", "pp", "dp", "ep", "micro_batch_size")}
    return asked, estimate_config(asked, checked_config(asked, given)).estimate.step_time_s
