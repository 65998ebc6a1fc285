"""Shell scripts and Python files as people write them: what they set is read, what they take from elsewhere named."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config
from autoplan.exporters.shell import shell_commands

# As Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh has it: variables, arrays, a branch of a known value
MEGATRON = """#!/bin/bash
#SBATCH --nodes=2
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
DATA=${1:-"MOCK"}   # a comment with --micro-batch-size 64
# --seq-length 1 \\
GPUS_PER_NODE=8
TP_SIZE=2
BATCH=$((TP_SIZE * 32))
DTYPE="fp8"
mkdir -p "$(dirname "$DATA")"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $SLURM_NNODES
    --node_rank $NODE_RANK
)
MODEL_ARGS=(--num-layers 32 --seq-length 4096 --bf16)
TRAINING_ARGS="
    --micro-batch-size 1 \\
    --global-batch-size $BATCH
"
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS="$TRAINING_ARGS --fp8-format hybrid"
elif [ $DTYPE = fp4 ]; then
    MODEL_ARGS+=(--fp4-format e2m1)
fi
case $DTYPE in
  fp8) RECOMPUTE="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" ;;
  *) RECOMPUTE="" ;;
esac
if [ -n "$WANDB" ]; then MODEL_ARGS+=(--wandb-project x); fi
cat <<EOT > ds.json
{"--tensor-model-parallel-size": 8}
EOT
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py ${MODEL_ARGS[@]} $TRAINING_ARGS $RECOMPUTE \\
    --tensor-model-parallel-size ${TP_SIZE} --pipeline-model-parallel-size 1 --use-distributed-optimizer \\
    --data-path $DATA
"""


def read(text: str, folder: Path, name: str = "run.sh", **given: object) -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, given=given)


def test_a_script_with_variables_and_branches_is_read(tmp_path: Path) -> None:
    found = read(MEGATRON, tmp_path)
    said = {name: found.says[name] for name in ("tp", "pp", "dp", "micro_batch_size", "global_batch_size", "seq_len")}
    assert said == {"tp": 2, "pp": 1, "dp": 8, "micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096}
    assert (found.says["precision"], found.says["recompute"], found.says["zero_stage"]) == ("fp8-grad32", "full", 1)
    assert (found.target, found.faults, found.not_read) == ("megatron-lm", (), ())


def test_another_model_and_another_launch_are_said(tmp_path: Path) -> None:
    found = read(MEGATRON.replace("--num-layers 32", "--num-layers 80"), tmp_path)
    assert found.warnings == ("num_layers=80, but llama-3.1-8b has 32; its own are priced",)
    found = read(MEGATRON.replace("--nodes=2", "--nodes=4"), tmp_path)
    assert found.faults[0].startswith("torchrun starts 32 processes, but the cluster has 16 devices; nearest:")


def test_what_a_script_takes_from_its_caller_must_be_given(tmp_path: Path) -> None:
    text = MEGATRON.replace("TP_SIZE=2\nBATCH=$((TP_SIZE * 32))", "TP_SIZE=${10}\nBATCH=64").replace("fp8", "$2", 1)
    with pytest.raises(PinError, match=r"does not decide tensor_model_parallel_size=\$10; give --tp$"):
        read(text, tmp_path)
    found = read(text, tmp_path, tp=4)
    assert found.says["dp"] == 4 and "tp" not in found.says
    assert {"tp", "precision", "recompute"} <= set(found.open) and "fp8_format=hybrid" in found.open["precision"]


def commands(text: str) -> list[str]:
    """Return the commands of a script as texts; `?` before a word of a branch that may not be taken."""
    found = shell_commands(text, "a.sh").commands
    return [" ".join(word.text if word.sure else f"?{word.text}" for word in words) for words in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1\nif [ $A = 2 ]; then x; elif [ $A -lt 2 ]; then y; else z; fi; w", ["y", "w"]),
        ("if [ $A = 2 ]; then x; else z; fi; w", ["x", "z", "w"]),
        ("if [ $A = 2 ]; then B=1; fi; echo $B ${B:-4} $((3*4/5))", ["echo $B $B 2"]),
        ("if [ $A = 2 ]; then B=1; x $B; fi; x $B", ["x 1", "x $B"]),
        ("if [ $A = 2 ]; then B+=(--y); else B+=(--z); fi; x ${B[@]}", ["x ?--y ?--z"]),
        ('A="--x 1"\nrun $A --y "$C"', ["run --x 1 --y $C"]),
        ("A=(--x $((1 + 1)))\nA+=(--y)\nrun --z $E ${A[@]}", ["run --z $E --x 2 --y"]),
        ('E=""; B=(--x $A); run $E --y "${B[@]}"', ["run --y --x $A"]),
        ("A=1; [ $A = 2 ] && B=(--x\n--y) && z; w", ["[ 1 = 2 ]", "w"]),
        ("A=1; [ $A = 1 ] && B=(--x\n--y) || z; w ${B[@]}", ["[ 1 = 1 ]", "w --x --y"]),
        ("A=1; [ $A = 2 ] && y || z; w", ["[ 1 = 2 ]", "z", "w"]),
        ("A=1; test $A = 2 || A=3; x $A", ["test 1 = 2", "x 3"]),
        ("[ $B = 2 ] && A=3; x $A", ["[ $B = 2 ]", "x $A"]),
        ("A=1; [ $A = 2 ] && { y; z; }; w", ["[ 1 = 2 ]", "w"]),
        ("cd a b c d && x || exit 1; y", ["cd a b c d", "x", "y"]),
        ("f() { x --a $1; }\ng() {\n  y\n}\nf 3; w", ["x --a 3", "w"]),
        ('function f {\n  x "$@"\n}\nif [ $A = 1 ]; then f --b 2; fi', ["x --b 2"]),
        (
            "A=1; while [[ $# -gt 0 ]]; do case $1 in -a|--a) A=$2; shift ;; *) exit ;; esac; done; x $A",
            ["shift", "exit", "x $A"],
        ),
        ("A=1; for b in 1 2; do A=$((A * 2)); x $A; done; y $A", ["x $((A*2))", "y $A"]),
        ("x --a 1 > log 2>&1 | tee y#z # --c", ["x --a 1", "tee y#z"]),
        (
            "C='python a.py'; srun -N 2 bash -c \"cd x && $C --tp 2\"",
            ["srun -N 2 bash -c cd x", "srun -N 2 bash -c python a.py --tp 2"],
        ),
        ("(cd x; y --a 1)\nz", ["cd x", "y --a 1", "z"]),
    ],
)
def test_commands_of_a_script(text: str, found: list[str]) -> None:
    assert commands(text) == found


def test_quotes_that_do_not_close() -> None:
    with pytest.raises(PinError, match=r"a\.sh is not a shell script: No closing quotation"):
        commands('echo "a')


# Other commands with options of the same names: only those of the command that trains count
OTHERS = """#!/bin/bash
#SBATCH --nodes=2
TP=2
smoke() {
    torchrun --nproc-per-node 1 pretrain_gpt.py --tensor-model-parallel-size 1 --micro-batch-size 64
}
docker run --rm --micro-batch-size 8 image
python tools/preprocess_data.py --seq-length 1 --tensor-model-parallel-size 8 --workers 4
python tools/checkpoint/convert.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
while read -r host; do PP=4; done < hosts
srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 1 --seq-length 4096 --micro-batch-size 1 \\
    --global-batch-size 64 --use-distributed-optimizer --bf16 $EXTRA_ARGS > train.log 2>&1
python plot.py --micro-batch-size 3 --bf16 0
"""


def test_only_the_command_that_trains_counts(tmp_path: Path) -> None:
    found = read(OTHERS, tmp_path)
    names = ("tp", "pp", "dp", "micro_batch_size", "global_batch_size", "seq_len", "precision")
    assert [found.says[name] for name in names] == [2, 1, 8, 1, 64, 4096, "bf16-grad32"]
    assert (found.faults, found.not_read) == ((), ("$EXTRA_ARGS = more arguments",))
    with pytest.raises(PinError, match=r"pipeline_model_parallel_size=\$PP; give --pp$"):
        read(OTHERS.replace("parallel-size 1 --seq", "parallel-size $PP --seq"), tmp_path)


def test_nodes_of_the_launcher_are_those_of_the_run(tmp_path: Path) -> None:
    found = read(OTHERS.replace("--nnodes 2 --nproc_per_node 8", "--nnodes $SLURM_NNODES --nproc_per_node 4"), tmp_path)
    assert found.faults[0].startswith("torchrun starts") and "8 processes" in found.faults[0]
    direct = OTHERS.replace("--ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 8", "--ntasks-per-node 8 python")
    assert read(direct, tmp_path).faults == ()
    assert "32 processes" in read(direct.replace("srun --nodes 2", "srun -N 4"), tmp_path).faults[0]


def test_two_trainings_with_different_degrees_are_not_known(tmp_path: Path) -> None:
    twice = OTHERS.replace("docker run", "smoke\ndocker run")
    with pytest.raises(PinError, match=r"tensor_model_parallel_size=1 or 2; .*give .*--tp"):
        read(twice, tmp_path)


# As torchtitan/models/llama3/config_registry.py at b5bcd76c6
REGISTRY = """
from torchtitan.trainer import Trainer
LENGTH: int = 4096

def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(model_compile_enabled=True)])
    compile_config = CompileConfig(enable=True)
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * LENGTH, max_context_length=LENGTH, steps=10),
        dataloader=GrainDataLoader.Config(dataset=DATASETS["c4"]),
        activation_checkpoint=FullAC.Config(),
        compile=compile_config,
    )

def llama3_8b_tp() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.parallelism.tensor_parallel_degree = 2
    config.compile = CompileConfig(enable=True, components=["loss"])
    return config
"""


def test_a_registry_of_torchtitan_is_read(tmp_path: Path) -> None:
    (tmp_path / "config_registry.py").write_text(REGISTRY)

    def of(function: str) -> ConfigFile:
        path = f"{tmp_path / 'config_registry.py'}:{function}"
        return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)

    found = of("llama3_8b")
    assert (found.target, found.faults, found.not_read) == ("torchtitan", (), ())
    says = {name: found.says[name] for name in ("dp", "seq_len", "micro_batch_size", "precision", "recompute", "mode")}
    assert says == {
        **{"dp": 16, "seq_len": 4096, "micro_batch_size": 2, "precision": "fp8", "recompute": "full"},
        "mode": "compiled",
    }
    changed = of("llama3_8b_tp").says  # begins as the other function, without its converters; compiles the loss alone
    assert (changed["tp"], changed["precision"], changed["mode"]) == (2, "bf16", "eager")
    with pytest.raises(PinError, match="has several configurations; name one"):
        read_config(tmp_path / "config_registry.py")


def test_a_word_of_an_older_release_is_read_and_said(tmp_path: Path) -> None:
    """As GPU recipes of Google Cloud for MaxText have it."""
    text = "base_config: base.yml\nici_fsdp_parallelism: 8\ndcn_data_parallelism: 2\nremat_policy: minimal_flash\n"
    found = read(text, tmp_path, "llama.yaml")
    assert (found.says["recompute"], found.says["zero_replicas"], found.faults) == ("none", 2, ())
    (warning,) = found.warnings
    assert warning.endswith("nearest since: minimal")


def test_yaml_of_nemo_and_of_bridge_is_read(tmp_path: Path) -> None:
    """As Google Cloud's GPU recipes have NeMo 1, and Megatron Bridge's tutorials overrides of a recipe."""
    model = "tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, sequence_parallel: true"
    old = f"{{micro_batch_size: 1, global_batch_size: 64, encoder_seq_length: 4096, fp8: true, {model}"
    optim = "optim: {name: mcore_distributed_optim, grad_sync_dtype: bf16}"
    old = f"trainer: {{precision: bf16}}\nmodel: {old}, {optim}}}\n"
    found = read(old + "exp_manager: {name: '${run.name}'}\n", tmp_path, "nemo.yaml")
    says = {
        name: found.says[name] for name in ("tp", "pp", "dp", "seq_len", "zero_stage", "precision", "narrow_gather")
    }
    assert says == {
        **{"tp": 4, "pp": 2, "dp": 2, "seq_len": 4096, "zero_stage": 1, "precision": "fp8-grad16"},
        "narrow_gather": False,
    }
    assert (found.target, found.version, found.faults, found.not_read) == ("megatron-bridge", "24.11", (), ())
    new = f"train: {{micro_batch_size: 1, global_batch_size: 64}}\nmodel: {{seq_length: 4096, {model}}}\n"
    found = read(new, tmp_path, "bridge.yaml")
    assert found.says["tp"] == 4 and "zero_stage" not in found.says  # as in the recipe, read as the stack's
    assert found.not_read == ("the recipe that it overrides = settings of this function",)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", (7, 5)),
        ("--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4", (2, 4, 2, 4)),
        ("--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 6", (3, 3, 3, 3)),
    ],
)
def test_layers_of_the_first_and_the_last_rank(flags: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    """They are those of all virtual stages of the rank together, as Megatron-Core counts them."""
    path = tmp_path / "train.sh"
    sizes = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --seq-length 1024 --bf16"
    path.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} {flags}\n")
    found = read_config(path, graph=graph_of("gpt2"), cluster="1x8xh100-sxm5-80gb")
    assert found.faults == () and found.says["stages"] == stages
    path.write_text(
        path.read_text().replace(" 7 ", " 6 ").replace("layers 4", "layers 3").replace("layers 6\n", "layers 5\n")
    )
    faults = read_config(path, graph=graph_of("gpt2"), cluster="1x8xh100-sxm5-80gb", lenient=True).faults
    assert any("layers do not split" in fault or "layers of a rank do not split" in fault for fault in faults)
