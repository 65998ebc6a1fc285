"""What is typed counts instead of what a file says, and what is wrong with that of the file is not said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from configurations import CLUSTER, graph_of, request

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, export_setup, read_config
from autoplan.exporters.record import near_multiples, near_parts
from autoplan.exporters.setup import Setup
from autoplan.exporters.targets import TARGETS, target_of

DOCS = Path(__file__).parents[2] / "docs"
TITAN = """
[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 8
"""


def read(folder: Path, old: str, new: str, **given: Any) -> ConfigFile:
    path = folder / "train.toml"
    assert old in TITAN
    path.write_text(TITAN.replace(old, new))
    return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, given=given, lenient=True)


@pytest.mark.parametrize(
    ("old", "new", "given", "fault"),
    [
        ("degree = 2", "degree = 3", {"tp": 2}, "pp = 24, but there are 16 devices"),
        ("degree = 2", "degree = 0", {"tp": 2}, "tensor_parallel_degree=0 must be at least 1"),
        ("degree = 2", "degree = 'x'", {"tp": 2}, "tensor_parallel_degree='x' must be a whole number"),
        ("size = 64", "size = 63", {"global_batch_size": 64}, "global_batch_size=63 is not a multiple"),
        ("degree = 2\ndata_parallel_shard_degree = 8", "degree = 3", {"tp": 2}, "does not divide the 16 devices"),
    ],
)
def test_a_typed_choice_counts_instead_of_a_wrong_one(
    old: str, new: str, given: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    assert any(fault in text for text in read(tmp_path, old, new).faults)
    assert any(fault in text for text in read(tmp_path, old, new, schedule="1F1B").faults)
    found = read(tmp_path, old, new, **given)
    assert found.faults == () and found.says["dp"] == 8


def test_another_fault_stays(tmp_path: Path) -> None:
    found = read(tmp_path, "degree = 2\ndata_parallel_shard_degree = 8", "degree = 3\nexpert_parallel_degree = 0", tp=2)
    assert found.faults == ("parallelism.expert_parallel_degree=0 must be at least 1; nearest: "
                            "parallelism.expert_parallel_degree=1",)  # fmt: skip


def test_neighbours_that_are_equal_are_named_once() -> None:
    assert [near_multiples(8, n) for n in (3, 8, 12)] == ["8", "8 or 16", "8 or 16"]
    assert [near_parts(12, n) for n in (5, 12, 13)] == ["4 or 6", "6 or 12", "12"]


def test_versions_that_the_pages_name_are_known() -> None:
    text = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    named = {found for found in re.findall(r"([a-z-]+)@([\d.]*\d)", text) if found[0] in TARGETS}
    assert ("accelerate", "1.5.0") in named
    for name, version in named:
        assert target_of(f"{name}@{version}")[0].name == name


@pytest.mark.parametrize("to", ["accelerate@1.5.0", "torchtitan@0.1.0", "torchtitan@0.2.2"])
def test_releases_that_the_pages_name_are_written(to: str) -> None:
    config = ParallelConfig(dp=16, zero_stage=3, micro_batch_size=1, num_micro_batches=4)
    assert export_setup(Setup.of(request("llama-3.1-8b", to), config), to).text


def test_the_first_release_of_torchtitan_has_its_own_names() -> None:
    """torchtitan/config_manager.py at v0.1.0: split points, and `compile` in the section training."""
    to = "torchtitan@0.1.0"
    config = ParallelConfig(dp=8, pp=2, zero_stage=3, micro_batch_size=1, num_micro_batches=8, stages=(17, 15))
    text = export_setup(Setup.of(request("llama-3.1-8b", to, mode="compiled"), config), to).text
    assert 'pipeline_parallel_split_points = ["layers.17"]' in text and "compile = true" in text
    assert "module_fqns_per_model_part" not in text and "[compile]" not in text
    experts = ParallelConfig(dp=16, ep=8, zero_stage=3, micro_batch_size=1, num_micro_batches=4)
    with pytest.raises(PinError, match=r"ep=8: torchtitan@25\.06 cannot \(experts are spread over ranks since 25\.10"):
        export_setup(Setup.of(request("mixtral-8x7b", to), experts), to)


@pytest.mark.parametrize("to", ["deepspeed", "lightning"])
def test_kernels_that_a_target_has_not_are_not_set_elsewhere(to: str) -> None:
    config = ParallelConfig(dp=16, zero_stage=3, micro_batch_size=1, num_micro_batches=4)
    plain = Setup.of(request("llama-3.1-8b", to), config)
    found = export_setup(Setup(plain.task, config, plain.options, Mode.FUSED, "bf16", 4096, 64), to)
    assert not any(line.startswith("mode=") for line in found.elsewhere)
    assert any(line.startswith("mode=fused") and "it runs eager" in line for line in found.not_said)
