"""A setup that is written as the input of a target and read from the file is the same setup; what is not is named.

The grid of configurations.py is large: the default run takes every 11th setup, the slow run all.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, VERSIONS, given_of, graph_of, request, runs, setups

from autoplan.config.parallel import Attention, Dispatcher, FusedLoss, Launch, Mode, ParallelConfig
from autoplan.errors import PinError
from autoplan.exporters.door import Export, export_setup, read_config
from autoplan.exporters.record import base_of
from autoplan.exporters.setup import ESSENTIAL, Setup, values
from autoplan.exporters.targets import TARGETS, target_of
from autoplan.schedules.schedule import SCHEDULES
from autoplan.stacks.like import read_like
from autoplan.stacks.limits import Limit
from autoplan.stacks.records import year_of

# What of the grid a target can at least say, of every 11th setup
LEAST = {
    **{"megatron-lm": 60, "megatron-bridge": 60, "torchtitan": 35, "torchtitan@0.2.2": 35, "torchtitan@0.2.0": 35},
    "torchtitan@0.1.0": 30,
    **{
        "deepspeed": 18,
        "accelerate": 6,
        "accelerate@1.9.0": 1,
        "accelerate@25.01": 1,
        "transformers": 2,
        "lightning": 4,
    },
    **{"nanotron": 14, "maxtext": 6, "automodel": 30, "gpt-neox": 7, "torchtune": 8, "llm-foundry": 2, "olmo": 2},
}
WHOLE = {"llm-foundry": 16, "olmo": 16}  # of the whole grid, where that is fewer than ten times as many


def kept(export: Export, folder: Path) -> Path:
    path = folder / f"plan{Path(export.file).suffix}"
    path.write_text(export.text)
    return path


def compare(setup: Setup, to: str, folder: Path) -> bool:
    """Export, read the file, compare. False if the target refuses, which it must do by the name of a choice."""
    try:
        export = export_setup(setup, to)
    except PinError as error:
        if "cannot run this plan" in str(error):
            assert "nearest" in str(error)
            return False
        assert any(name in ESSENTIAL for name in error.names), error
        assert error.names[0] in str(error) and "cannot" in str(error)
        return False
    wanted = values(setup)
    found = runs(kept(export, folder), to, setup.task.model, given_of(setup, to))
    differ = {name for name in wanted if wanted[name] != found[name] and wanted[name] is not None}
    named = {line.partition("=")[0] for line in export.not_said}
    assert differ == named, (export.not_said, {n: (wanted[n], found[n]) for n in differ ^ named})
    assert not named & set(ESSENTIAL)
    return True


@pytest.mark.parametrize("to", VERSIONS)
def test_what_is_written_is_read_back(to: str, tmp_path: Path) -> None:
    said = sum(compare(setup, to, tmp_path) for setup in itertools.islice(setups(to), 0, None, 11))
    assert said >= LEAST[to]


@pytest.mark.parametrize("to", VERSIONS)
def test_nothing_that_was_written_is_called_unread(to: str, tmp_path: Path) -> None:
    """What an export writes decides something, or is the same in every export; of these another value is named."""
    said = 0
    for setup in itertools.islice(setups(to), 0, None, 11):
        try:
            export = export_setup(setup, to)
        except PinError:
            continue
        graph, given = graph_of(setup.task.model), given_of(setup, to)
        found = read_config(kept(export, tmp_path), to, graph=graph, cluster=CLUSTER, given=given)
        assert not found.not_read, (setup.config, found.not_read)
        said += 1
    assert said >= LEAST[to]


@pytest.mark.parametrize(("to", "was", "now", "name", "counts"), [
    ("deepspeed", '"gradient_clipping": 1.0', '"gradient_clipping": 0.5', "gradient_clipping", False),
    ("accelerate", "SHARDED_STATE_DICT", "FULL_STATE_DICT", "fsdp_config.fsdp_state_dict_type", False),
    ("maxtext", "weight_dtype: float32", "weight_dtype: bfloat16", "weight_dtype", True),
])  # fmt: skip
def test_another_value_of_what_an_export_fixes_is_named(
    to: str, was: str, now: str, name: str, counts: bool, tmp_path: Path
) -> None:
    """What changes time or memory is named, everything else counted."""
    config = ParallelConfig(dp=16, zero_stage=3, num_micro_batches=4)
    path = kept(export_setup(Setup.of(request("llama-3.1-8b", to), config), to), tmp_path)
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now))
    found = read_config(path, to, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)
    assert (found.not_read, name in found.idle) == ((name,) if counts else (), not counts)


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if target.stack == name])
def test_a_target_says_what_its_stack_can(to: str) -> None:
    """A plan that was searched with --like is one that export writes: every ZeRO stage and schedule of the record."""
    asked, can = request("llama-3.1-8b", to), read_like(to).can
    plain = ParallelConfig(dp=16, num_micro_batches=4)
    shards = Limit.BF16_SHARDS in can.limits  # the precision asked for is bf16
    tried = [plain.but(zero_stage=stage) for stage in can.zero_stages if stage or not shards]
    for name in can.schedules if "pp" in can.degrees else ():
        stages = max(SCHEDULES[name].virtual_stages[0], 1)
        half = plain.but(dp=8, pp=2, num_micro_batches=8, zero_stage=0 if to == "nanotron" else 1)
        tried.append(half.but(schedule=name, virtual_stages=stages))
    for config in tried:
        assert export_setup(Setup.of(asked, config), to).text


def test_layers_that_cannot_be_cut_as_the_target_cuts_them_are_refused() -> None:
    config = ParallelConfig(dp=2, pp=8, schedule="Interleaved1F1B", virtual_stages=3, num_micro_batches=32)
    with pytest.raises(PinError, match=r"= 24, but the model has 32 layers; nearest: num_pipeline_repeats=2 with"):
        export_setup(Setup.of(request("llama-3.1-8b", "maxtext"), config), "maxtext")


@pytest.mark.parametrize(("to", "word"), [
    ("megatron-lm", "--cp-comm-type a2a"), ("accelerate", "cp_comm_strategy: alltoall"),
    ("torchtitan@0.2.2", 'context_parallel_rotate_method = "alltoall"'), ("maxtext", "strategy: ring"),
])  # fmt: skip
def test_the_method_of_a_searched_plan_is_said(to: str, word: str) -> None:
    """A search names the method of each block, also where all have one."""
    method = "ulysses" if to == "megatron-lm" else "ring"
    config = ParallelConfig(dp=8, cp=2, num_micro_batches=8, zero_stage=3, context_method={"layer": method})
    export = export_setup(Setup.of(request("llama-3.1-8b", to), config), to)
    assert word in export.text and not any(line.startswith("context_method") for line in export.not_said)


def test_long_lists_are_counted() -> None:
    config = ParallelConfig(dp=4, pp=4, num_micro_batches=16, zero_stage=1, recompute=(8, 5, 0, 0))
    said = export_setup(Setup.of(request("llama-3.1-8b", "megatron-lm"), config), "megatron-lm").not_said
    assert said[0].startswith("recompute=full x13, none x19: megatron-lm@26.08 cannot")


@pytest.mark.slow
@pytest.mark.parametrize("to", VERSIONS)
def test_all_of_the_grid_is_read_back(to: str, tmp_path: Path) -> None:
    assert sum(compare(setup, to, tmp_path) for setup in setups(to)) >= 8 * LEAST[to]


def altered(setup: Setup) -> list[tuple[str, Setup]]:
    """The setup with one run option changed."""
    from dataclasses import replace

    o = setup.options
    options: dict[str, Any] = {
        "launch": Launch.ASYNC if o.launch is not Launch.ASYNC else Launch.GRAPHS,
        "attention": Attention.UNFUSED,
        "overlap": frozenset(),
        "dispatcher": Dispatcher.ALL_TO_ALL if o.dispatcher is not Dispatcher.ALL_TO_ALL else Dispatcher.FLEX,
        "sequence_parallel": False,
        "fused_experts": not o.fused_experts,
        "narrow_gather": not o.narrow_gather,
        "expandable_segments": not o.expandable_segments,
        "fused_accumulation": not o.fused_accumulation,
        "fused_loss": FusedLoss.COMPILED if o.fused_loss is FusedLoss.NO else FusedLoss.NO,
        "overlap_zero": not o.overlap_zero,
        "document_len": 512,
    }
    out = [(name, replace(setup, options=replace(o, **{name: value}))) for name, value in options.items()]
    modes = [replace(setup, mode=mode) for mode in (Mode.EAGER, Mode.COMPILED)]
    precisions = ("bf16", "bf16-grad16", "bf16-grad16-mom16", "fp16", "fp32", "fp8", "mxfp8", "fp4")
    out += [("mode", changed) for changed in modes]
    return out + [("precision", replace(setup, precision=name)) for name in precisions]


@pytest.mark.parametrize("to", VERSIONS)
def test_options_are_read_back_or_named(to: str, tmp_path: Path) -> None:
    """Each option of a run, alone."""
    config = ParallelConfig(dp=8, tp=2, zero_stage=3, num_micro_batches=8, recompute="full")
    if to.startswith(("accelerate@", "transformers", "lightning", "nanotron", "llm-foundry", "olmo")):
        config = config.but(dp=16, tp=1, num_micro_batches=4, zero_stage=0 if to == "nanotron" else 3)
    mixed = request("mixtral-8x7b", to)
    ep = 2 if to.startswith(("megatron", "deepspeed", "torchtitan", "automodel")) else 1
    ep = 1 if to == "torchtitan@0.1.0" else ep
    for _, setup in altered(Setup.of(mixed, config.but(ep=ep, etp=1 if ep > 1 else None))):
        assert compare(setup, to, tmp_path)


@pytest.mark.parametrize("to", VERSIONS)
def test_every_value_of_a_file_counts(to: str, tmp_path: Path) -> None:
    """The negative control: a file with another value is another setup, or is refused."""
    target, version = target_of(to)
    year = year_of(version)
    idle = {"gradient_clipping", "machine_rank", "moe_grouped_gemm", "model.moe_grouped_gemm", "hardware"}
    idle |= {"ckpt_format", "checkpoint.ckpt_format", "dataset.seq_length", "num_machines", "num_nodes"}
    idle |= {
        "data_parallel_size",
        "deepspeed_config.zero3_init_flag",
        "parallelism_config.parallelism_config_sp_seq_length",
    }
    found = itertools.islice((setup for setup in setups(to) if can(setup, to)), 0, 24, 4)
    tried = 0
    for setup in found:
        export = export_setup(setup, to)
        path = kept(export, tmp_path)
        wanted = runs(path, to, setup.task.model, given_of(setup, to))
        syntax = target.syntax(year)
        written = {p: v for p, v in syntax.read(export.text, str(path)).items() if not p.startswith("?")}
        for name, value in written.items():
            other = another(value)
            if other is None or name in idle or name in target.base or name not in target.schema.entries:
                continue
            text = syntax.write({**written, name: other}, (), setup)
            path.write_text(text)
            tried += 1
            try:
                got = runs(path, to, setup.task.model, given_of(setup, to))
            except (PinError, ValueError):
                continue
            if relevant(name, setup):
                assert got != wanted, (name, value, other)
    assert tried > 4


@pytest.mark.parametrize("to", VERSIONS)
def test_numbers_that_cannot_be_are_refused_by_name(to: str, tmp_path: Path) -> None:
    """Zero, less and words where a file has a number: a PinError, no other exception, or a value with a meaning."""
    target, version = target_of(to)
    syntax, refused = target.syntax(year_of(version)), 0
    for setup in itertools.islice((setup for setup in setups(to) if can(setup, to)), 0, 4, 3):
        path = kept(export_setup(setup, to), tmp_path)
        written = {p: v for p, v in syntax.read(path.read_text(), str(path)).items() if not p.startswith("?")}
        for name in (n for n, v in written.items() if isinstance(v, int | float) and not isinstance(v, bool)):
            for value in (0, -7, "abc"):
                path.write_text(syntax.write({**written, name: value}, (), setup))
                try:
                    runs(path, to, setup.task.model, given_of(setup, to))
                except PinError as error:
                    refused += 1
                    assert any(part in str(error) for part in ("must be", "nearest", "not", "give")), error
    assert refused > 3


def can(setup: Setup, to: str) -> bool:
    try:
        export_setup(setup, to)
    except PinError:
        return False
    return True


def another(value: object) -> object:
    """Another value of the same kind; None for texts, which have few legal ones."""
    if isinstance(value, bool):
        return not value
    return (value * 2 or 1) if isinstance(value, int) else None


def relevant(name: str, setup: Setup) -> bool:
    """False for a value that makes no difference to this setup, as the overlap of what is not sent."""
    c = setup.config
    last = name.rpartition(".")[2]
    if "overlap" in last or last.startswith("tp_linear"):
        return False  # by the degrees: test_options_are_read_back_or_named
    if last == "use_distributed_optimizer" and c.zero_stage >= 2:
        return False  # Megatron-FSDP turns it on
    alone = c.dp * c.cp == 1 or (c.zero_stage == 0 and "optim" not in last)
    if alone and any(word in last for word in ("zero", "fsdp", "shard", "optimizer", "stage", "fp8")):
        return False
    if last in (
        "recompute_num_layers",
        "num_layers_per_pipeline_stage",
        "sequence_parallel",
        "enable_sequence_parallel",
    ):
        return False
    return not (last == "disable_cuda_graphs" and c.pp > 1) and last not in ("fp8_param_gather", "pin_memory")


def test_a_precision_has_one_base() -> None:
    assert [base_of(p) for p in ("bf16-grad16-mom16", "fp16-grad32", "fp4")] == ["bf16", "fp16", "fp4"]


def test_every_target_says_why_it_cannot() -> None:
    for target in TARGETS.values():
        assert all(target.cannot.values()) and "layouts" in target.why_not("state_slack")
