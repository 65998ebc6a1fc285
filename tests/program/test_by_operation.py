"""Recompute by operation: every second product of a layer is computed again, as torchtitan does by default."""

from __future__ import annotations

import pytest
from one_stage import predicted
from parity import SEQ, Case

from autoplan import Cluster, ParallelConfig, PlanRequest, estimate_config, load_model
from autoplan.config.parallel import Mode
from autoplan.errors import PinError
from autoplan.program.activation_bytes import Activations
from autoplan.report.degrees import checked_config
from autoplan.search.estimate import Planned
from autoplan.stacks.like import read_like


def _priced(mode: Mode, recompute: str, tp: int = 1, links: str = "") -> Planned:
    cluster = Cluster.parse(f"2xh100{links}")
    request = PlanRequest(load_model("llama-3.2-1b"), cluster, 2048, 4, precision="bf16", mode=mode)
    return estimate_config(request, ParallelConfig(dp=2 // tp, tp=tp, num_micro_batches=2 * tp, recompute=recompute))


def _layer() -> tuple[list[str], Activations]:
    graph, _, blocks = predicted(Case("llama"), 12)
    return [n.name for n in graph.blocks["layer"].nodes], blocks["layer"]


def test_results_of_attention_and_every_second_product_are_kept() -> None:
    """Of queries, keys, values, output, gate, up and down: queries, values, gate; down's result no backward reads."""
    names, layer = _layer()
    width = 32 + 32 + 16 + 32 + 4 + 48  # input, queries, values, attention with its sums, gate
    assert layer.choice_bytes["products"] == 12 * SEQ * width * 4
    again = [names[i] for i in layer.group_ops["products"] if names[i].endswith("_proj")]
    assert again == ["k_proj", "o_proj", "up_proj"]
    assert "attention" not in {names[i] for i in layer.group_ops["products"]}


def test_its_seconds_and_bytes_lie_between_none_and_full() -> None:
    plans = [_priced(Mode.COMPILED, how).estimate for how in ("none", "products", "full")]
    seconds = [plan.step_time_s.mid for plan in plans]
    memory = [plan.peak_memory_bytes.mid for plan in plans]
    assert seconds == sorted(seconds)
    assert memory == sorted(memory, reverse=True)


def test_what_tensor_parallelism_gathers_is_gathered_again() -> None:
    """Results of reduce-scatters are kept, those of gathers are not."""
    added = []
    for links in ("", "@scaleup=50"):
        none, products = (_priced(Mode.EAGER, how, 2, links).estimate.step_time_s.mid for how in ("none", "products"))
        added.append(products - none)
    assert added[1] > 1.5 * added[0]


def test_of_torchtitan_it_is_the_default_and_the_memory_is_that_of_a_published_run() -> None:
    """Llama 3.1 8B in 8 bits on 32 H200, two sequences of 8,192 tokens: 47.96 GiB (pytorch/torchtitan, benchmarks/
    llama3-8b_h200_202506_trainy-whitefiber.md). With the attention core alone 96 GB were predicted."""
    like = read_like("torchtitan@25.06", {"precision": "fp8"})
    cluster = Cluster.parse("4x8xh200-sxm-141gb@nic=400")
    request = PlanRequest(load_model("llama-3.1-8b"), cluster, 8192, 64, precision="fp8", like=like)
    config = checked_config(request, {"dp": 32, "zero_stage": 3, "micro_batch_size": 2})
    assert config.recompute == "products"
    assert estimate_config(request, config).estimate.peak_memory_bytes.mid == pytest.approx(47.96 * 2**30, rel=0.06)


def test_modules_of_megatron_are_not_its_operations() -> None:
    with pytest.raises(PinError, match="priced with mode eager or compiled"):
        _priced(Mode.FUSED, "products")
