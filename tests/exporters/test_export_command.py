"""`autoplan export` and `estimate --from`: a plan leaves the planner and comes back with its price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import one_line_error, run

import autoplan
from autoplan.errors import PinError
from autoplan.exporters.targets import TARGETS

CLUSTER = "2x8xh100-sxm5-80gb"
TASK = ("llama-3.2-1b", "--cluster", CLUSTER, "--seq-len", "4k", "--global-batch-size", "64")
DEGREES = {
    "megatron-lm": ("--tp", "2", "--pp", "2", "--recompute", "selective"),
    "megatron-bridge": ("--tp", "2", "--pp", "2", "--virtual-stages", "2", "--launch", "async"),
    "torchtitan": ("--tp", "2", "--zero", "3", "--zero-replicas", "2"),
    "torchtitan@0.2.2": ("--tp", "2", "--pp", "2", "--zero", "1"),
    "deepspeed": ("--zero", "3", "--offload", "optimizer"),
    "accelerate": ("--tp", "2", "--zero", "3", "--mbs", "2", "--recompute", "full"),
    "transformers": ("--zero", "3", "--mbs", "2", "--recompute", "full"),
    "lightning": ("--zero", "3", "--mbs", "2"),
    "nanotron": ("--tp", "2", "--pp", "2", "--zero", "1"),
    "maxtext": ("--tp", "2", "--zero", "3", "--recompute", "full"),
    "automodel": ("--tp", "2", "--pp", "2", "--zero", "1", "--recompute", "full"),
}


def plan_file(to: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    name, _, version = to.partition("@")
    like = TARGETS[name].stack + ("@26.02" if version else "")
    result = run("estimate", *TASK, "--like", like, *DEGREES[to], "--json")
    assert result.exit_code == 0, result.output
    path = folder / "plan.json"
    path.write_text(result.stdout)
    return path, json.loads(result.stdout)


@pytest.mark.parametrize("to", DEGREES)
def test_a_plan_comes_back_with_its_price(to: str, tmp_path: Path) -> None:
    path, first = plan_file(to, tmp_path)
    out = tmp_path / f"out{TARGETS[to.partition('@')[0]].syntax(2020.0 if '@' in to else 2026.6).suffix}"
    result = run("export", str(path), "--to", to, "--out", str(out))
    assert result.exit_code == 0 and f"wrote {out}" in result.stdout, result.output
    assert "not said" not in result.stderr
    left = [] if to not in ("accelerate", "lightning") else ["--mbs", "2"]
    run_words = ["--seq-len", "4k", "--global-batch-size", "64"] if to in ("accelerate", "lightning") else []
    run_words = ["--seq-len", "4k"] if to in ("deepspeed", "transformers") else run_words
    again = run("estimate", TASK[0], "--cluster", CLUSTER, "--from", str(out), *left, *run_words, "--json")
    assert again.exit_code == 0, again.output
    second = json.loads(again.stdout)
    assert second["request"]["like"].startswith(TARGETS[to.partition("@")[0]].stack)
    assert second["estimate"]["step_time_s"] == first["estimate"]["step_time_s"]
    assert second["estimate"]["memory_bytes"] == first["estimate"]["memory_bytes"]


def test_adapters_that_no_file_holds_are_said(tmp_path: Path) -> None:
    """The file alone would train the whole model."""
    path = tmp_path / "plan.json"
    words = ("llama-3.2-1b", *TASK[1:], "--dp", "16", "--zero", "3", "--mbs", "1", "--adapters", "lora:16", "--json")
    path.write_text(run("estimate", *words).stdout)
    for to in ("accelerate", "megatron-lm", "automodel"):
        result = run(
            "export", str(path), "--to", to, "--out", str(tmp_path / f"{to}{TARGETS[to].syntax(2026.6).suffix}")
        )
        assert result.exit_code == 0 and "adapters=lora:16" in result.stderr, result.output


@pytest.mark.parametrize("etp", [1, 2])
def test_a_file_says_whether_experts_are_split(etp: int, tmp_path: Path) -> None:
    """Also where that is not what its stack does by default."""
    task = ("qwen3-30b-a3b", "--cluster", CLUSTER, "--seq-len", "4k", "--global-batch-size", "64")
    words = (*task, "--like", "megatron-bridge", "--tp", "2", "--ep", "1", "--etp", str(etp), "--json")
    first = json.loads(run("estimate", *words).stdout)
    path, out = tmp_path / "plan.json", tmp_path / "out.py"
    path.write_text(json.dumps(first))
    assert run("export", str(path), "--to", "megatron-bridge", "--out", str(out)).exit_code == 0
    again = run("estimate", task[0], "--cluster", CLUSTER, "--from", str(out), "--json")
    second = json.loads(again.stdout)  # it does not fit, and is priced all the same
    assert second["plan"]["etp"] == first["plan"]["etp"] == etp
    assert second["estimate"]["step_time_s"] == first["estimate"]["step_time_s"]


def test_what_is_typed_overrides_the_file(tmp_path: Path) -> None:
    path, _ = plan_file("megatron-lm", tmp_path)
    out = tmp_path / "run.sh"
    run("export", str(path), "--to", "megatron-lm", "--out", str(out))
    words = ("estimate", TASK[0], "--cluster", CLUSTER, "--from", str(out), "--json")
    plain, other = (json.loads(run(*words, *more).stdout) for more in ((), ("--tp", "4", "--precision", "fp16")))
    assert (plain["plan"]["tp"], other["plan"]["tp"], other["plan"]["dp"]) == (2, 4, 2)
    assert plain["request"]["precision"] == "bf16" and other["request"]["precision"].startswith("fp16")
    # what it prints is a plan file of its own, without the file
    again = tmp_path / "again.json"
    again.write_text(json.dumps(plain))
    assert json.loads(run("estimate", str(again), "--json").stdout)["estimate"] == plain["estimate"]


def test_json_says_everything(tmp_path: Path) -> None:
    path, _ = plan_file("deepspeed", tmp_path)
    data = json.loads(run("export", str(path), "--to", "accelerate", "--json").stdout)
    assert (data["schema"], data["command"], data["to"], data["version"]) == (1, "export", "accelerate", "26.08")
    assert any(line.startswith("micro_batch_size=1: the training script") for line in data["elsewhere"])
    assert "distributed_type: DEEPSPEED" in data["text"] and data["launch"][0].startswith("HEAD_NODE=")
    assert 'accelerate launch --config_file plan.yaml --machine_rank "$SLURM_NODEID"' in data["launch"][1]
    shown = run("export", str(path), "--to", "accelerate")
    assert shown.stdout == data["text"] and "note: set elsewhere: micro_batch_size=1" in shown.stderr


def test_the_door_exports_and_reads(tmp_path: Path) -> None:
    path, first = plan_file("torchtitan", tmp_path)
    export = autoplan.export_plan(path, "torchtitan")
    assert "torchrun --nnodes 2 --nproc-per-node 8" in export.launch[1]
    file = tmp_path / "plan.py"
    file.write_text(export.text)
    read = autoplan.read_config(file, graph=autoplan.load_model(TASK[0]), cluster=CLUSTER)
    assert {n: read.says[n] for n in ("tp", "dp", "zero_stage", "zero_replicas")} == {
        n: first["plan"][n] for n in ("tp", "dp", "zero_stage", "zero_replicas")
    }
    assert (read.target, read.version, read.faults) == ("torchtitan", "26.08", ())


def test_the_door_names_what_is_missing_or_unknown(tmp_path: Path) -> None:
    request = autoplan.PlanRequest(autoplan.load_model("gpt2"), autoplan.Cluster.parse("1xh100"), 1024, 16)
    with pytest.raises(PinError, match="give config="):
        autoplan.export_plan(request, "torchtitan")
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    with pytest.raises(PinError, match=r"given: unknown choice 'tpp'; did you mean 'tp'\?"):
        autoplan.read_config(file, given={"tpp": 2})


def test_help_lists_all_targets() -> None:
    listed = " ".join(run("export", "--help").stdout.split())
    assert f"of a framework: {', '.join(sorted(TARGETS))}." in listed.replace("- ", "-")


def test_a_format_needs_a_file() -> None:
    said = one_line_error(run("estimate", *TASK, "--format", "torchtitan"), 2)
    assert "--format torchtitan is of the file of --from, which is missing" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "torchtita"), "'torchtita' is not a target; did you mean 'torchtitan'?"),
        (
            ("--to", "torchtitan@9"),
            "version '9' of torchtitan is not known; write YY.MM, for example 26.08 or a release",
        ),
        (("--to", "accelerate"), "pp=2: accelerate@26.08 cannot (accelerate has no pipelines"),
        (("--to", "megatron-lm", "--out", "/nowhere/run.sh"), "there is no folder /nowhere"),
        (("--to", "megatron-lm", "--out", "run.out"), "ends in .sh, by which it is found; nearest: run.sh"),
        (("--to", "megatron-bridge", "--out", "run.json"), "ends in .py, by which it is found; nearest: run.py"),
    ],
)
def test_what_cannot_be_exported_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path, _ = plan_file("megatron-lm", tmp_path)
    assert message in one_line_error(run("export", str(path), *words), 2)


def test_a_plan_of_another_stack_names_what_changes(tmp_path: Path) -> None:
    result = run("estimate", *TASK, "--tp", "2", "--recompute", "attention+norms", "--json")
    path = tmp_path / "plan.json"
    path.write_text(result.stdout)
    said = run("export", str(path), "--to", "megatron-lm", "--out", str(tmp_path / "run.sh")).stderr
    assert "not said: mode=eager: megatron-lm@26.08 cannot" in said and "it runs fused" in said
    assert "not said: recompute=attention+norms: megatron-lm@26.08 cannot" in said and "it runs full" in said


def test_megatron_lm_has_its_own_loss_since_june_2026(tmp_path: Path) -> None:
    """What is priced with Transformer Engine's loss is written with its own, and said; a file with that is refused."""
    path, script = tmp_path / "plan.json", tmp_path / "train.sh"
    path.write_text(run("estimate", *TASK, "--tp", "2", "--like", "megatron-bridge", "--json").stdout)
    assert json.loads(path.read_text())["request"]["fused_loss"] == "online"
    for to, word in (("megatron-lm@25.11", "te"), ("megatron-lm", "native")):
        result = run("export", str(path), "--to", to, "--out", str(script))
        assert result.exit_code == 0 and f"--cross-entropy-fusion-impl {word}\n" in script.read_text()
        assert ("not said: fused_loss=online" in result.stderr) == (word == "native")
    assert "it runs compiled" in result.stderr
    script.write_text(script.read_text().replace("fusion-impl native", "fusion-impl te"))
    said = one_line(run("estimate", TASK[0], "--cluster", CLUSTER, "--from", str(script)))
    assert "cross_entropy_fusion_impl=te is refused since June 2026; nearest: cross_entropy_fusion_impl=native" in said


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x: 1\n", "a.yaml", "is not recognised as the input of a framework"),
        ("parallelism: [", "b.yaml", "is not YAML"),
        ("parallelism: 2026-13-45", "b.yaml", "is not YAML: month must be in"),
        ("[" * 3000, "b.yaml", "is not YAML: it is nested too deep"),
        ("{", "c.json", "is not JSON"),
        ('{"zero_optimization": {"stage": 7}}', "d.json", "zero_optimization.stage=7"),
        ('{"zero_optimization": {"stge": 2, "stage": 1}}', "e.json", "did you mean 'zero_optimization.stage'?"),
        ("parallelism:\n  dp: 16\n  tp: 2\n  pp: 1\n", "f.yaml", "there are 16 devices; nearest: parallelism.dp=8"),
        ("def f(cfg):\n    cfg.model.tensor_model_parallel_size = 'two'\n", "g.py", "must be a whole number"),
        ("[parallelism]\ntensor_parallel_degree = 3\n", "h.toml", "does not divide the 16 devices"),
        ("distributed_type: FSDP\nnum_processes: 8\n", "i.yaml", "num_processes=8, but the cluster has 16 devices"),
        ("--tensor-model-parallel-size 2 --bf16\n", "j.sh", "does not say seq_len; give --seq-len"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    said = one_line(run("estimate", TASK[0], "--cluster", CLUSTER, "--from", str(path)))
    assert message in said


def one_line(result: Any) -> str:
    assert result.exit_code == 2, result.output
    return next(line for line in result.stderr.splitlines() if line.startswith("error: "))
