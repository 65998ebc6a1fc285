"""Layers for tokens after the next in the files of frameworks: written, read back, and compared with the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import CLUSTER, graph_of, request, runs

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.exporters.door import export_setup, read_config
from autoplan.exporters.megatron_stages import layout_stages, layout_text
from autoplan.exporters.setup import Setup, values
from autoplan.program.facts import Facts
from autoplan.stacks.like import read_like

PLAIN, WITH = "deepseek-v3", "deepseek-v3@mtp=1"
PIPELINE = ParallelConfig(
    dp=4, pp=4, ep=4, zero_stage=1, micro_batch_size=1, num_micro_batches=16, recompute="full", schedule="1F1B"
)
# layers per stage of 61 and one more, and what Megatron's layout says of them; none where its flags do without
CUTS = (
    ((16, 15, 15, 16), "Et*16|t*15|t*15|t*15mL"),
    ((20, 20, 21, 1), "Et*20|t*20|t*21|mL"),
    ((15, 15, 15, 17), "Et*15|t*15|t*15|t*16mL"),
    ((20, 20, 20, 2), "Et*20|t*20|t*20|tmL"),
)


@pytest.mark.parametrize(("stages", "layout"), CUTS)
@pytest.mark.parametrize("to", ["megatron-lm", "megatron-bridge"])
def test_the_layers_are_written_and_read_back(to: str, stages: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    setup = Setup.of(request(WITH, to), PIPELINE.but(stages=stages))
    made = export_setup(setup, to)
    assert layout in made.text and not any("mtp" in line for line in made.not_said + made.elsewhere)
    path = tmp_path / made.file
    path.write_text(made.text)
    assert runs(path, to, WITH, {}) == values(setup)
    found = read_config(path, to, graph=graph_of(WITH), cluster=CLUSTER)
    assert not any("mtp" in line for line in found.warnings)
    (warning,) = (w for w in read_config(path, to, graph=graph_of(PLAIN), cluster=CLUSTER).warnings if "mtp" in w)
    assert "mtp_num_layers=1, but deepseek-v3 has 0" in warning and warning.endswith(WITH)


def test_equal_stages_of_the_decoder_need_no_layout() -> None:
    """Megatron puts these layers into the last stage by itself; Llama has 32 others."""
    model = "llama-3.1-8b@mtp=2"
    made = export_setup(
        Setup.of(request(model, "megatron-lm"), PIPELINE.but(ep=1, stages=(8, 8, 8, 10))), "megatron-lm"
    )
    assert "layout" not in made.text and "--mtp-num-layers 2" in made.text
    assert layout_text((8, 8, 8, 10), 2) == "Et*8|t*8|t*8|t*8mmL"
    assert layout_stages("Et*8|t*8|t*8|t*8mmL", 2) == (8, 8, 8, 10) and layout_stages("Ett|ttmL") == (2, 2)


def test_a_recipe_has_the_layers_that_its_stack_adds(tmp_path: Path) -> None:
    """A plan without them says so to a recipe of Bridge, which has one for DeepSeek-V3; a file that changes a recipe
    without a word about them is one with them."""
    made = export_setup(
        Setup.of(request(PLAIN, "megatron-bridge"), PIPELINE.but(stages=(16, 15, 15, 15))), "megatron-bridge"
    )
    assert "mtp_num_layers = None" in made.text
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from megatron.bridge.recipes.deepseek import deepseek_v3_pretrain_config\n"
        "cfg = deepseek_v3_pretrain_config()\n"
        "cfg.model.tensor_model_parallel_size = 2\ncfg.model.pipeline_model_parallel_size = 4\n"
    )
    said = {}
    for name in (PLAIN, WITH):
        found = read_config(recipe, graph=graph_of(name), cluster=CLUSTER, lenient=True)
        said[name] = [warning for warning in found.warnings if "mtp" in warning]
    assert len(said[PLAIN]) == 1 and not said[WITH]


@pytest.mark.parametrize("to", ["deepspeed", "torchtitan", "accelerate"])
def test_where_they_are_the_users_it_is_said(to: str) -> None:
    config = ParallelConfig(dp=16, zero_stage=3, micro_batch_size=1, num_micro_batches=4)
    made = export_setup(Setup.of(request("gpt2@mtp=1", to), config), to)
    assert "mtp=1: the model" in made.elsewhere
    assert "mtp=1: the model" not in export_setup(Setup.of(request("gpt2", to), config), to).elsewhere


def test_a_price_for_a_stack_that_adds_them_says_so() -> None:
    like = read_like("megatron-bridge@26.08").on("h100-sxm5-80gb", PLAIN)
    cluster = Cluster.parse(CLUSTER)
    wanted = "1 layer for tokens after the next, which deepseek-v3@mtp=1 prices"
    for model, number in ((PLAIN, 1), (WITH, 0), ("gpt2", 0)):
        notes = Facts.of(graph_of(model), cluster, like=like.on("h100-sxm5-80gb", model)).notes
        assert notes.count(f"megatron-bridge@26.08 adds {wanted}") == number
        # the model's own config.json names the layer, too, which transformers leaves out
        assert Facts.of(graph_of(model), cluster).notes.count(f"its config names {wanted}") == number
