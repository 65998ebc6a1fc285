"""What an export must say so that the framework runs it as it is, read in the sources of the targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from configurations import CLUSTER, graph_of, request

from autoplan.config.parallel import Dispatcher, Launch, ParallelConfig
from autoplan.errors import PinError
from autoplan.exporters.door import export_setup, read_config
from autoplan.exporters.setup import Setup
from autoplan.stacks.like import read_like

PLAIN = ParallelConfig(dp=16, zero_stage=1, num_micro_batches=4)
EXPERTS = ["attn", "moe_router", "moe_preprocess"]


def setup(to: str, model: str = "llama-3.1-8b", config: ParallelConfig = PLAIN, **options: object) -> Setup:
    made = Setup.of(request(model, to), config)
    return replace(made, options=replace(made.options, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "launch", "captured"), [
    ("llama-3.1-8b", Launch.GRAPHS, []), ("mixtral-8x7b", Launch.GRAPHS, EXPERTS),
    ("mixtral-8x7b", Launch.ROUTER_GRAPHS, EXPERTS[1:]),
])  # fmt: skip
def test_graphs_capture_what_has_no_dynamic_sizes(model: str, launch: Launch, captured: list[str]) -> None:
    text = export_setup(setup("megatron-lm", model, launch=launch), "megatron-lm").text
    flag = f"--cuda-graph-modules {' '.join(captured)}\n"
    assert "--cuda-graph-impl transformer_engine" in text and ((flag in text) if captured else "modules" not in text)
    recipe = export_setup(setup("megatron-bridge", model, launch=launch), "megatron-bridge").text
    assert f"cfg.model.cuda_graph_modules = {captured}\n" in recipe and "cuda_graph_scope = None" in recipe


def test_graphs_of_layers_exclude_full_recompute(tmp_path: Path) -> None:
    """megatron/core/transformer/transformer_config.py: `full recompute is only supported with full iteration`."""
    full = setup("megatron-lm", "mixtral-8x7b", PLAIN.but(recompute="full"), launch=Launch.GRAPHS)
    export = export_setup(full, "megatron-lm")
    (lost,) = (line for line in export.not_said if line.startswith("launch"))
    assert "cuda-graph" not in export.text and "full recompute" in lost and lost.endswith("it runs async")
    path = tmp_path / "plan.sh"
    path.write_text(export.text.replace("--bf16", "--bf16 --cuda-graph-impl transformer_engine"))
    (fault,) = read_config(path, graph=graph_of("mixtral-8x7b"), cluster=CLUSTER).faults
    assert "full recompute" in fault and fault.endswith("nearest: without cuda_graph_impl")


@pytest.mark.parametrize(("device", "connections", "backend"), [
    ("h100-sxm5-80gb", 1, "deepep"), ("b200-sxm-180gb", 32, "deepep"), ("gb200-nvl72", 32, "hybridep"),
])  # fmt: skip
def test_a_device_is_known_by_its_record(device: str, connections: int, backend: str) -> None:
    made = setup("megatron-lm", "mixtral-8x7b", PLAIN.but(ep=2, etp=1), dispatcher=Dispatcher.FLEX)
    made = replace(made, task=replace(made.task, device=device))
    text = export_setup(made, "megatron-lm").text
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={connections}\n" in text and f"flex-dispatcher-backend {backend}" in text


def test_fsdp_of_lightning_wraps_layers() -> None:
    text = export_setup(setup("lightning", config=PLAIN.but(zero_stage=3)), "lightning").text
    assert "def trainer(layer, **settings):" in text and "auto_wrap_policy={layer}" in text


def test_a_shipped_configuration_in_8_bits_is_not_taken_for_16() -> None:
    """torchtitan's llama3_405b has a Float8LinearConverter, and some compile the loss alone."""
    text = export_setup(setup("torchtitan", "llama-3.1-405b", PLAIN.but(zero_stage=3)), "torchtitan").text
    assert 'config = llama3_405b()\n    config.model_spec = model_registry("405B")' in text
    assert "config.compile.components = ['model', 'loss']" in text
    older = setup("torchtitan", "llama-3.1-405b", PLAIN.but(zero_stage=3))
    older = replace(older, task=replace(older.task, device="a100-sxm4-80gb"))
    text = export_setup(older, "torchtitan").text
    assert "from my_configs import base" in text and "llama3_405b" not in text and "model_registry" not in text


@pytest.mark.parametrize(("pp", "schedule", "virtual", "layers"), [
    (1, "1F1B", 1, range(2, 32, 3)), (2, "Interleaved1F1B", 2, (2, 5, 16, 19, 22, 10, 13, 24, 27, 30)),
])  # fmt: skip
def test_every_nth_layer_of_a_rank_is_recomputed(
    pp: int, schedule: str, virtual: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """torchtitan 0.2.2 counts the layers that a process wraps, over its stages (`_layer_sac_count`)."""
    of_stages = ParallelConfig(dp=16 // pp, pp=pp, schedule=schedule, virtual_stages=virtual, zero_stage=1)
    plain = of_stages.but(num_micro_batches=4 * pp, stages=(8,) * (pp * virtual) if pp > 1 else None)
    names = setup("torchtitan@0.2.2").task.layers
    again = plain.but(recompute={names[k]: "full" for k in layers})
    export = export_setup(setup("torchtitan@0.2.2", config=again), "torchtitan@0.2.2")
    assert 'mode = "selective"\nselective_ac_option = "3"' in export.text
    assert not any(line.startswith("recompute") for line in export.not_said)
    path = tmp_path / "job.toml"
    path.write_text(export.text)
    says = read_config(path, "torchtitan@0.2.2", graph=graph_of("llama-3.1-8b"), cluster=CLUSTER).says
    assert says["recompute"] == dict.fromkeys((names[k] for k in sorted(layers)), "full")
    path.write_text(export.text.replace('selective_ac_option = "3"', 'selective_ac_option = "three"'))
    with pytest.raises(PinError, match="use op, or a number of layers"):
        read_config(path, "torchtitan@0.2.2", graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)


@pytest.mark.parametrize(("config", "line", "fault"), [
    (PLAIN.but(dp=8, pp=2, num_micro_batches=8), "pipelines", True),
    (PLAIN.but(dp=8, pp=2, num_micro_batches=8, zero_stage=3), "pipelines", True),
    (PLAIN.but(ep=2, etp=1), "need a dispatcher", False),
])  # fmt: skip
def test_graphs_of_torchtitan_exclude_what_it_refuses(
    config: ParallelConfig, line: str, fault: bool, tmp_path: Path
) -> None:
    """They are its default since August 2026, so that a file that is silent about them is refused, too."""
    export = export_setup(setup("torchtitan", "mixtral-8x7b", config, launch=Launch.GRAPHS), "torchtitan")
    assert "disable_cuda_graphs = True" in export.text and export.not_said[0].startswith("launch=graphs")
    path = tmp_path / "plan.py"
    path.write_text(export.text.replace("disable_cuda_graphs = True", "disable_cuda_graphs = False"))
    found = read_config(path, graph=graph_of("mixtral-8x7b"), cluster=CLUSTER)
    (text,) = found.faults if fault else found.warnings
    assert line in text and text.endswith("nearest: disable_cuda_graphs=True")


def test_graphs_of_torchtitan_take_the_default_of_resharding() -> None:
    """Always resharding cannot be captured, and without pipelines the default does the same."""
    three = PLAIN.but(zero_stage=3)
    text = export_setup(setup("torchtitan", config=three, launch=Launch.GRAPHS), "torchtitan").text
    assert "fsdp_reshard_after_forward = 'default'" in text and "disable_cuda_graphs = False" in text
    piped = three.but(dp=8, pp=2, num_micro_batches=8)
    assert "fsdp_reshard_after_forward = 'always'" in export_setup(setup("torchtitan", config=piped), "torchtitan").text


@pytest.mark.parametrize("to", ["megatron-lm", "megatron-bridge"])
def test_activations_of_first_layers_go_to_the_host(to: str, tmp_path: Path) -> None:
    """Whole layers without pipelines, which Bridge has a switch for; in pipelines modules of layers with experts."""
    path = tmp_path / ("plan.sh" if to == "megatron-lm" else "plan.py")
    for model, pp, count in (("llama-3.1-8b", 1, 8), ("mixtral-8x7b", 2, 4), ("mixtral-8x7b", 2, 16)):
        plain = PLAIN.but(dp=16 // pp, pp=pp, num_micro_batches=4 * pp)
        layers = setup(to, model).task.layers
        held = {name: "offload" for k, name in enumerate(layers) if k % (32 // pp) < count}
        export = export_setup(setup(to, model, plain.but(recompute=held), launch=Launch.ASYNC), to)
        assert not any(line.startswith("recompute") for line in export.not_said)
        path.write_text(export.text)
        says = read_config(path, graph=graph_of(model), cluster=CLUSTER).says
        assert says["recompute"] == held
        if to == "megatron-bridge":
            assert f"cfg.model.cpu_offloading = {pp == 1}\n" in export.text
            path.write_text(export.text.replace("cpu_offloading = True", "cpu_offloading = False"))
            off = read_config(path, graph=graph_of(model), cluster=CLUSTER).says["recompute"]
            assert off == ("none" if pp == 1 else held)
        elif pp == 2:
            fraction = "--activation-offload-fraction 0.25"
            assert "--fine-grained-activation-offloading" in export.text and (fraction in export.text) is (count == 4)


def test_a_few_modules_on_the_host_have_no_price(tmp_path: Path) -> None:
    """DeepSeek's recipes offload core_attn and attn_proj: named, and priced without."""
    path = tmp_path / "plan.sh"
    text = export_setup(setup("megatron-lm", "mixtral-8x7b"), "megatron-lm").text
    path.write_text(
        text.replace("--bf16", "--bf16 --fine-grained-activation-offloading --offload-modules core_attn attn_proj")
    )
    found = read_config(path, graph=graph_of("mixtral-8x7b"), cluster=CLUSTER)
    assert found.says["recompute"] == "none"
    assert {"fine_grained_activation_offloading", "offload_modules"} <= set(found.not_read)


def test_maxtext_exchanges_heads_on_tpus_alone(tmp_path: Path) -> None:
    """configs/types.py: Ulysses needs hardware=tpu, and Transformer Engine's attention no packing without its limit."""
    config = ParallelConfig(dp=8, cp=2, zero_stage=3, num_micro_batches=8, context_method="ulysses")
    export = export_setup(setup("maxtext", config=config), "maxtext")
    assert "context_parallel_strategy:" not in export.text and "packing: false" in export.text
    assert export.not_said[0].startswith("context_method=ulysses") and "on TPUs also" in export.not_said[0]
    tpu = setup("maxtext", config=config)
    tpu = replace(tpu, task=replace(tpu.task, device="tpu-v5p"))
    text = export_setup(tpu, "maxtext").text
    assert "context_parallel_strategy: ulysses" in text and "packing" not in text
    path = tmp_path / "plan.yaml"
    path.write_text(export.text.replace("packing: false", "packing: true\ncontext_parallel_strategy: ulysses"))
    found = read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER).faults
    nearest = [text.partition("nearest: ")[2] for text in found]
    assert nearest == ["context_parallel_strategy=all_gather", "packing=false"]


@pytest.mark.parametrize("to", ["megatron-lm", "megatron-bridge"])
def test_an_optimizer_on_the_host_is_precision_aware(to: str, tmp_path: Path) -> None:
    """validate_args asks for the option, whose code the offload is in; masters on the host are whole all the same."""
    path = tmp_path / ("plan.sh" if to == "megatron-lm" else "plan.py")
    export = export_setup(setup(to, config=PLAIN.but(offload=("optimizer",))), to)
    assert not any(line.startswith("precision") for line in export.not_said)
    assert "use-precision-aware-optimizer" in export.text or "use_precision_aware_optimizer = True" in export.text
    path.write_text(export.text.replace("    --use-precision-aware-optimizer\n", ""))
    faults = read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER).faults
    assert len(faults) == (to == "megatron-lm") and all("--use-precision-aware" in text for text in faults)


RECIPE = """
def recipe():
    cfg = qwen3_pretrain_config()
    cfg.mixed_precision = _perf_precision("bf16")
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 1
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.model.seq_length = 4096
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = ["moe_router", "moe_preprocess"]
    cfg.comm_overlap.tp_comm_overlap = False
    return cfg
"""


def test_one_overlap_of_a_recipe_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    says = read_config(path, graph=graph_of("mixtral-8x7b"), cluster=CLUSTER).says
    usual = read_like("megatron-bridge@26.08").on("h100-sxm5-80gb", "mixtral-8x7b").options("h100-sxm5-80gb").overlap
    assert set(says["overlap"]) == set(usual) - {"tp"} and "tp" in usual
    assert says["launch"] == "router_graphs"


@pytest.mark.parametrize(("once", "written"), [(True, False), (False, True)])
def test_trainer_is_told_when_gradients_are_sent(once: bool, written: bool, tmp_path: Path) -> None:
    export = export_setup(setup("transformers", config=PLAIN.but(zero_stage=3), reduce_once=once), "transformers")
    assert ("sync_each_batch" in export.text) is written and not export.not_said
    path = tmp_path / "plan.json"
    path.write_text(export.text)
    assert read_config(path, "transformers", cluster=CLUSTER).says.get("reduce_once", True) is once


def test_gradients_sent_once_are_named_where_a_target_sends_each() -> None:
    """ZeRO 2 of Automodel sends gradients of every micro-batch; the price of a plan that does not says so."""
    export = export_setup(setup("automodel", config=PLAIN.but(zero_stage=2)), "automodel")
    assert any(line.startswith("reduce_once=True: automodel") for line in export.not_said)


def test_what_a_file_leaves_open_is_not_called_none() -> None:
    config = ParallelConfig(dp=8, cp=2, zero_stage=3, num_micro_batches=8, context_method="ring")
    (said,) = export_setup(setup("torchtitan", config=config), "torchtitan").not_said
    assert said.startswith("context_method=ring: torchtitan") and said.endswith("the file does not say what it runs")
