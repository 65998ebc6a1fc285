"""experiments/published/devices.py: every device of the catalog, however its name is written."""

from __future__ import annotations

import pytest
from made_up import case_of, row

from autoplan.cost_models.hardware.catalog import RANKS_PER_ROW, entries
from experiments.published.devices import cluster_of, clusters_of, device_of, variants
from experiments.published.table import Unpriced, Unstated


@pytest.mark.parametrize("device_id", entries())
def test_every_device_of_the_catalog_is_found_by_its_own_name(device_id: str) -> None:
    """Its id with and without the memory, in capitals, with spaces, behind its vendor."""
    found = entries()[device_id]
    memory = found.memory_gb * RANKS_PER_ROW.get(device_id, 1)
    bare = device_id.removesuffix(f"-{memory:g}gb")
    for text in (bare, bare.upper(), bare.replace("-", " "), f"{found.vendor} {bare}", bare.replace("-", "_")):
        match = device_of(text, memory)
        assert (match.device_id, match.overrides, match.assumed, match.notes) == (device_id, "", (), ())
    assert device_of(device_id, None).device_id == device_id  # the memory stands in the name
    cluster = cluster_of(row(gpu=bare, gpu_mem_gb=f"{memory:g}", n_gpus="8", gpus_per_node="", internode=""))
    assert cluster.device.name == device_id


@pytest.mark.parametrize(
    ("text", "device_id"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("A100-SXM-64GB", "leonardo-a100-64gb"),
        ("H100 64GB", "marenostrum5-h100-64gb"),
        ("h100pcie", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("a100_80gb_pcie", "a100-pcie-80gb"),
        ("A100 (80GB)", "a100-sxm4-80gb"),
        ("8x A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("Tesla V100-SXM3-32GB", "v100-sxm3-32gb"),
        ("AMD Instinct MI250X", "mi250x-128gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("4090", "rtx4090-24gb"),
        ("A6000", "rtx-a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server-96gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA A10G", "a10g-24gb"),
        ("TPUv4", "tpu-v4"),
        ("v5p", "tpu-v5p"),
        ("TPU v5litepod", "tpu-v5e"),
        ("Google TPU v6e (Trillium)", "tpu-v6e"),
        ("TPU7x (Ironwood)", "tpu-v7x"),
        ("TPU v7x", "tpu-v7x"),
        ("AWS Trainium2", "trainium2-96gb"),
        ("trn2", "trainium2-96gb"),
        ("DGX B200", "b200-sxm-180gb"),
        ("GB200 NVL72", "gb200-nvl72"),
    ],
)
def test_names_as_people_write_them(text: str, device_id: str) -> None:
    match = device_of(text, None)
    assert (match.device_id, match.assumed) == (device_id, ())


@pytest.mark.parametrize(
    ("gpu", "memory", "device_id"),
    [("MI250X", "64", "mi250x-128gb"), ("H100", "84", "h100-sxm5-80gb"), ("GB200", "192", "gb200-nvl72")],
)
def test_memory_is_counted_per_rank_or_package_and_in_either_unit(gpu: str, memory: str, device_id: str) -> None:
    match = device_of(gpu, float(memory))
    assert (match.device_id, match.notes) == (device_id, ())


def test_a_node_of_another_size_is_another_machine() -> None:
    """V100 in nodes of 16 are those of a DGX-2, with switches between them."""
    found = {n: case_of(gpu="V100", gpu_mem_gb="32", gpus_per_node=n, precision="fp16") for n in ("", "8", "16")}
    names = {n: case.task.cluster.device.name for n, case in found.items()}
    assert names == {"": "v100-sxm2-32gb", "8": "v100-sxm2-32gb", "16": "v100-sxm3-32gb"}
    assert found["16"].task.cluster.link.p2p_bytes_per_s is None


def test_a_name_without_memory_is_the_usual_variant_and_the_others_widen_the_interval() -> None:
    found = case_of(gpu="A100", gpu_mem_gb="")
    assert found.task.cluster.device.name == "a100-sxm4-80gb" and "gpu_mem_gb" in found.assumed
    others = [s.cluster.device.name for s in found.task.settings if s.cluster is not None]
    assert others == ["a100-sxm4-40gb", "a100-pcie-40gb", "a100-pcie-80gb"]
    of_form = device_of("A100 PCIe", None)
    assert (of_form.device_id, of_form.others) == ("a100-pcie-80gb", (("a100-pcie-40gb", ""),))
    assert "gpu_mem_gb" not in case_of(gpu="H200", gpu_mem_gb="").assumed  # there is one


def test_a_size_that_is_near_is_the_nearest_device_and_said() -> None:
    match = device_of("B300", 262.0)
    assert match.device_id == "b300-sxm-288gb" and match.assumed == ("gpu",)
    assert match.notes == ("gpu_mem_gb=262 is priced as the nearest B300, of 288 GB (SXM)",)
    assert case_of(gpu="B300", gpu_mem_gb="262").notes == match.notes
    form = device_of("V100 PCIe", 32.0)
    assert form.device_id == "v100-sxm2-32gb" and "the catalog has no PCIe of it" in form.notes[0]
    assert "priced as a MI355X" in device_of("MI350X", 288.0).notes[0]


@pytest.mark.parametrize(
    ("text", "memory"), [("H100", 50.0), ("A100", 55.0), ("L40S", 24.0), ("H100 PCIe", 40.0), ("V100", 24.0)]
)
def test_a_size_that_no_device_has_names_all_that_there_are(text: str, memory: float) -> None:
    name = text.split()[0]
    known = [v for v in variants() if v.name == name]
    with pytest.raises(Unpriced) as error:
        device_of(text, memory)
    message = str(error.value)
    assert message.startswith(f"no device {text} with {memory:g} GB is known; {name} is known with ")
    assert all(v.text in message for v in known) and message.count(" GB (") + message.count(" GB,") >= len(known) - 1
    assert all(v.off(memory) > 0.1 for v in known)  # or the message would be false


@pytest.mark.parametrize("text", ["MI999", "H1000", "MI300A", "TPU", "TPU9x", "RTX 2080", "A100X"])
def test_a_device_that_the_catalog_lacks_is_no_other_one(text: str) -> None:
    with pytest.raises(Unpriced, match=f"no device {text} in the catalog; "):
        device_of(text, None)
    with pytest.raises(Unstated, match="gpu is not stated"):
        device_of(" ", None)


def test_devices_that_do_not_fill_nodes_are_on_smaller_ones_and_said() -> None:
    found = clusters_of(row(n_gpus="15"))
    assert (found.cluster.num_nodes, found.cluster.devices_per_node) == (3, 5)
    assert "gpus_per_node" in found.assumed and "15 devices are not spread evenly" in found.notes[0]
    assert clusters_of(row(n_gpus="16")).assumed == ()
    # neither row nor catalog name a network
    assert clusters_of(row(gpu="MI355X", gpu_mem_gb="288", internode="")).assumed == ("internode",)


def test_a_missing_number_of_devices_is_that_of_all_degrees() -> None:
    found = case_of(n_gpus="", tp="2", dp="4", cp="2")
    assert found.task.cluster.num_devices == 16 and "n_gpus" in found.assumed
    with pytest.raises(Unstated, match="n_gpus is not stated"):
        case_of(n_gpus="", dp="")
    alone = case_of(tp="", pp="", dp="16")  # all devices are taken: the others are 1
    config = alone.task.settings[0].config
    assert (config.tp, config.pp, config.dp) == (1, 1, 16) and {"tp", "pp"} <= set(alone.assumed)
