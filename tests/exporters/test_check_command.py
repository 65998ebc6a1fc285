"""`autoplan check`: a framework's own input is legal or not, fits or not, and has a better plan or not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import one_line_error, run
from typer.testing import CliRunner

from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.exporters.door import read_config

CLUSTER = "2x8xh100-sxm5-80gb"
TASK = ("llama-3.2-1b", "--cluster", CLUSTER)
RUN = ("--seq-len", "4k", "--global-batch-size", "64")
TITAN = """
[training]
local_batch_size = {mbs}
global_batch_size = 64
seq_len = 4096
[parallelism]
tensor_parallel_degree = {tp}
data_parallel_shard_degree = {dp}
"""


def titan(folder: Path, tp: int = 2, dp: int = 8, mbs: int = 1) -> str:
    path = folder / "train.toml"
    path.write_text(TITAN.format(tp=tp, dp=dp, mbs=mbs))
    return str(path)


def checked(*words: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["check", *words, "--json"], prog_name="autoplan")
    assert result.exit_code == code, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_a_legal_file_has_the_price_of_estimate(tmp_path: Path) -> None:
    path = titan(tmp_path)
    found = checked(path, *TASK, "--no-better", "--tokens", "1T")
    priced = json.loads(run("estimate", *TASK, "--from", path, "--json", "--tokens", "1T").stdout)
    assert (found["status"], found["fits"], found["faults"], found["shortage"]) == ("ok", True, [], None)
    assert found["estimate"] == priced["estimate"] and found["plan"] == priced["plan"]
    assert (found["target"], found["search"], found["better"]) == ("torchtitan", None, None)


def test_a_better_plan_is_exported_and_has_none_better(tmp_path: Path) -> None:
    path, plan, out = titan(tmp_path, tp=8, dp=2), tmp_path / "plan.json", tmp_path / "better.toml"
    found = checked(path, *TASK, "--out", str(plan))
    better, own = found["better"], found["estimate"]["step_time_s"]["mid"]
    assert better["gain"] == pytest.approx(1 - better["estimate"]["step_time_s"]["mid"] / own) and better["gain"] > 0.1
    assert found["search"]["limit_s"] == 10 and found["search"]["certificate"]["status"] == "complete"
    assert better["export"][:3] == ["autoplan", "export", str(plan)]
    assert run(*better["export"][1:-1], str(out)).exit_code == 0
    again = checked(str(out), *TASK)
    assert again["estimate"]["step_time_s"]["mid"] == pytest.approx(better["estimate"]["step_time_s"]["mid"])
    assert again["status"] == "ok" and again["better"] is None


def test_the_commands_that_are_shown_write_the_better_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("check", titan(tmp_path, tp=8, dp=2), *TASK)
    assert shown.exit_code == 0 and "legal, fits" in shown.stdout
    text = shown.stdout.partition("BETTER")[2].replace("\\\n", "")
    estimate, export = (shlex.split(line) for line in text.splitlines() if line.strip().startswith("autoplan"))
    assert estimate[-2:] == [">", "better.json"]
    (tmp_path / "better.json").write_text(run(*estimate[1:-2]).stdout)
    assert run(*export[1:]).exit_code == 0 and (tmp_path / "better.toml").read_text()


def test_an_export_of_json_does_not_overwrite_the_plan_that_it_is_made_of(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(
        '{"per_device_train_batch_size": 4, "fsdp": "full_shard", "bf16": true, "gradient_checkpointing": true}'
    )
    command = checked(str(path), *TASK[:3], "--seq-len", "4k")["better"]["export"]
    assert command[2] == "better.json" and command[-2:] == ["--out", "better_transformers.json"]


def test_what_the_target_refuses_is_named_with_the_nearest(tmp_path: Path) -> None:
    found = checked(titan(tmp_path, tp=3, dp=8), *TASK, "--no-better", code=1)
    assert found["status"] == "illegal" and found["fits"] is None and found["estimate"] is None
    assert "but there are 16 devices; nearest:" in found["faults"][0]
    shown = run("check", titan(tmp_path, tp=3, dp=8), *TASK, "--no-better")
    assert shown.exit_code == 1 and "ILLEGAL for torchtitan" in shown.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers-per-virtual-pipeline-stage 3", "does not divide the 16 layers; nearest: 2 or 4 layers"),
        ("--num-virtual-stages-per-pipeline-rank 8", "into 32 equal stages; nearest: 16 stages"),
        ("--context-parallel-size 3", "does not divide the 16 devices; nearest:"),
        ("--global-batch-size 63 --context-parallel-size 2", "is not a multiple of"),
        ("--decoder-first-pipeline-num-layers 17", "nearest: 4 layers in each of the others and 4 in this"),
    ],
)
def test_megatron_names_the_nearest(flags: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --bf16 --seq-length 4096 "
        f"--micro-batch-size 1 --global-batch-size 64 {flags}"
    )
    found = checked(str(path), *TASK, "--no-better", code=1)
    assert found["status"] == "illegal" and message in found["faults"][0]


def test_what_the_model_cannot_take_is_named_with_the_nearest(tmp_path: Path) -> None:
    """Its own target takes the file; the rules of the planner do not."""
    path = tmp_path / "run.sh"
    path.write_text(
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 4 --bf16 "
        "--seq-length 4100 --micro-batch-size 1 --global-batch-size 64"
    )
    found = checked(str(path), *TASK, "--no-better", code=1)
    assert found["status"] == "illegal" and "nearest legal:" in found["faults"][0], found["faults"]


def test_a_file_that_does_not_fit_says_what_is_missing(tmp_path: Path) -> None:
    words = ("llama-3.1-70b", "--cluster", CLUSTER)
    found = checked(titan(tmp_path, tp=1, dp=16, mbs=4), *words, "--no-better", code=1)
    assert (found["status"], found["fits"], found["faults"]) == ("infeasible", False, [])
    assert "more than a device has; its largest term is" in found["shortage"]
    shown = run("check", titan(tmp_path, tp=1, dp=16, mbs=4), *words, "--no-better")
    assert shown.exit_code == 1 and "DOES NOT FIT" in shown.stdout and "memory per device, GB" in shown.stdout


def test_faults_are_said_before_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 7}, "train_micro_batch_size_per_gpu": "two"}')
    found = checked(str(path), *TASK, code=1)
    assert "request" not in found and found["better"] is None
    assert any("zero_optimization.stage=7 does not exist; nearest: 3" in fault for fault in found["faults"])
    assert any("train_micro_batch_size_per_gpu='two' must be" in fault for fault in found["faults"])


def test_a_better_plan_is_one_that_the_target_can_say(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n")
    found = checked(str(path), *TASK, *RUN, "--mbs", "1")
    assert found["status"] == "ok" and found["better"]["plan"]["pp"] == 1
    pins = found["search"]["certificate"]["restrictions"]
    assert "pp pinned to 1" in pins and "ep pinned to 1" in pins
    kept = checked(str(path), *TASK, *RUN, "--mbs", "1", "--pin", "zero_stage=0")
    assert kept["better"] is None or kept["better"]["plan"]["zero_stage"] == 0


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x: 1\n", TASK, "is not recognised as the input of a framework"),
        ("parallelism: [", TASK, "is not YAML"),
        ("distributed_type: FSDP\n", TASK, "does not say seq_len; give --seq-len"),
        ("distributed_type: FSDP\n", TASK[:1], "--cluster is missing"),
        ("distributed_type: FSDP\n", ("lama", *TASK[1:], *RUN), "lama"),
        ("distributed_type: FSDP\n", (*TASK, *RUN, "--pin", "tpp=2"), "tpp"),
        ("distributed_type: FSDP\n", (*TASK, *RUN, "--no-better", "--pin", "tp=2"), "which --no-better leaves out"),
        ("distributed_type: FSDP\n", (*TASK, *RUN, "--no-better", "--out", "p.json"), "which --no-better leaves out"),
    ],
)
def test_bad_input_is_not_an_illegal_file(text: str, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    result = run("check", str(path), *words)
    assert result.exit_code == 2, result.output
    assert message in next(line for line in result.stderr.splitlines() if line.startswith("error: "))


def test_there_must_be_a_file() -> None:
    assert "/nowhere/plan.py" in one_line_error(run("check", "/nowhere/plan.py", *TASK), 2)


# As public files have them: LLaMA-Factory's examples/deepspeed/ds_z3_config.json, TRL's accelerate_configs/fsdp2.yaml
PUBLIC_DEEPSPEED = """
{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
 "gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
 "zero_optimization": {"stage": 3, "overlap_comm": false, "sub_group_size": SIZE, "reduce_bucket_size": "auto",
                       "stage3_max_live_parameters": 1e9}}
"""
PUBLIC_ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config: {fsdp_activation_checkpointing: false, fsdp_reshard_after_forward: true, fsdp_version: 2}
mixed_precision: bf16
num_machines: 1
num_processes: 16
"""


def test_files_as_they_are_published_are_legal(tmp_path: Path) -> None:
    """DeepSpeed's pydantic models take 1e9 for an integer, but no fraction; accelerate writes 'no' for a switch."""
    given = (*TASK, *RUN, "--micro-batch-size", "1", "--no-better")
    path = tmp_path / "ds.json"
    for size, faults in (("1e9", []), ("1.5", ["zero_optimization.sub_group_size=1.5 must be of type int or str"])):
        path.write_text(PUBLIC_DEEPSPEED.replace("SIZE", size))
        found = checked(str(path), *given, code=1 if faults else 0)
        assert (found["faults"], found["target"]) == (faults, "deepspeed")
    path = tmp_path / "accelerate.yaml"
    path.write_text(PUBLIC_ACCELERATE)
    assert checked(str(path), *given)["faults"] == []


# As src/megatron/bridge/perf_recipes has them
RECIPE = """
def qwen3_pretrain_64gpu_h100_bf16_config():
    cfg = qwen3_pretrain_config()
    cfg.mixed_precision = _perf_precision("bf16")
    _common(cfg)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.expert_model_parallel_size = 4
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    cfg.model.seq_length = 4096
    set_qwen3_pipeline_model_parallel_layout(cfg.model, LAYOUT)
    cfg.ddp.overlap_grad_reduce = False
    return cfg
"""


def test_what_a_recipe_of_bridge_leaves_to_functions_is_as_in_the_stack(tmp_path: Path) -> None:
    """ZeRO, etp and the overlap of tensor parallelism are set by functions that are not read, and are so named."""
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("LAYOUT", '"Etttttttttttttttt|ttttttttttttttttL"'))
    found = checked(str(path), "mixtral-8x7b", "--cluster", CLUSTER, "--no-better")
    plan = found["plan"]
    assert (found["target"], found["faults"], plan["zero_stage"], plan["etp"]) == ("megatron-bridge", [], 1, 1)
    assert plan["stages"] == [16, 16] and found["request"]["precision"] == "bf16-grad16"
    unread = [f"{call} = settings of this function" for call in ("qwen3_pretrain_config()", "_common(cfg)")]
    assert set(read_config(path, graph=load_model("mixtral-8x7b"), cluster=CLUSTER).not_read) == set(unread)
    path.write_text(
        RECIPE.replace("    set_qwen3_pipeline_model_parallel_layout(cfg.model, LAYOUT)\n", "").replace(
            "parallel_size = 2\n    cfg.model.expert", "parallel_size = 3\n    cfg.model.expert"
        )
    )
    faults = checked(str(path), "mixtral-8x7b", "--cluster", CLUSTER, "--no-better", code=1)["faults"]
    assert faults == ["tp x pp x cp = 6 does not divide the 16 devices; nearest: 12 or 18 devices"]
