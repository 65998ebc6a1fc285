"""Published kernel timings as plain data, for kernel_accuracy.py: one row per measurement."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.kernels.gpu import KernelKind
from autoplan.errors import PinError

# name in the data -> id of the catalog
DEVICES: dict[str, str] = {
    "a100_sxm": "a100-sxm4-80gb",
    "A100": "a100-sxm4-80gb",
    "NVIDIA A100 SXM": "a100-sxm4-80gb",
    "NVIDIA A100 PCIe": "a100-pcie-80gb",
    "l40s": "l40s-48gb",
    "h100_sxm": "h100-sxm5-80gb",
    "H100": "h100-sxm5-80gb",
    "NVIDIA H100 SXM": "h100-sxm5-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "NVIDIA H200 SXM": "h200-sxm-141gb",
    "H800": "h800-sxm-80gb",
    "b200_sxm": "b200-sxm-180gb",
    "B200": "b200-sxm-180gb",
    "NVIDIA B200 SXM": "b200-sxm-180gb",
    "b300_sxm": "b300-sxm-288gb",
    "NVIDIA B300 SXM": "b300-sxm-288gb",
    "gb200": "gb200-nvl72",
    "NVIDIA GB200 SXM": "gb200-nvl72",
    "rtx_pro_6000_server": "rtx-pro-6000-server-96gb",
    "gb300": "gb300-nvl72",
    "GB300": "gb300-nvl72",
    "AMD MI300X": "mi300x-192gb",
    "AMD MI325X": "mi325x-256gb",
    "AMD MI355X": "mi355x-288gb",
}
KINDS: dict[str, tuple[KernelKind, str]] = {
    "bf16": (KernelKind.HALF, "bfloat16"),
    "fp16/bf16": (KernelKind.HALF, "bfloat16"),
    "fp8": (KernelKind.FP8, "float8"),
    "mxfp8": (KernelKind.FP8, "float8"),
    "nvfp4": (KernelKind.FP4, "float4"),
}
SOURCES: tuple[tuple[str, str], ...] = (  # pattern -> name; of aiconfigurator every device's table is a source
    (r"aiconfigurator systems/data/(\w+)/", r"aiconfigurator \1"),
    (r"stas00/ml-engineering", "MAMF"),
    (r"DeepGEMM", "DeepGEMM"),
    (r"flash-attention", "FlashAttention"),
    (r"pytorch/ao", "torchao"),
    (r"nnscaler", "nnscaler"),
    (r"ubergemm|Azure", "ubergemm"),
)
# DeepSeek-Coder-V2-Lite, whose rows nnscaler gives without sizes: hidden, inner, experts per token, products.
_LITE = (2048, 1408, 6, 3)


@dataclass(frozen=True)
class Timing:
    """One measurement. Products: rows of all groups, columns, depth. Attention: `sequences` of `length`, causal half.

    `casts`: the timing holds the cast of the left operand (inference runtimes, 8 and 4 bits). `runtime`: attention with
    what a runtime does around it (cache write). `passes`: forward, or with backward.
    """

    op: str
    device: str
    kind: KernelKind
    source: str
    seconds: float
    flops: float
    products: tuple[tuple[float, float, float], ...] = ()  # rows per group, columns, depth; each run `groups` times
    groups: int = 1
    heads: float = 0.0  # of all sequences
    queries: float = 0.0
    head_dim: float = 0.0
    head_bytes: float = 0.0  # queries, keys, values and outputs of the forward
    causal: bool = False
    backward: bool = False
    casts: bool = False
    runtime: bool = False


def source_of(text: str) -> str:
    """Short name of a source; itself if it is not among SOURCES."""
    for pattern, name in SOURCES:
        if match := re.search(pattern, text):
            return match.expand(name)
    return text


def read_timings(path: Path) -> tuple[list[Timing], Counter[str]]:
    """Rows that can be compared, and how many cannot by reason. PinError: a file without the columns."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = {"gpu", "dtype", "op", "m", "n", "k", "seq", "tflops", "source"} - set(reader.fieldnames or ())
        if missing:
            raise PinError(f"{path} has no column {', '.join(sorted(missing))}")
        rows = list(reader)
    out: list[Timing] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        found = timing_of(row)
        if isinstance(found, str):
            skipped[found] += 1
        else:
            out.append(found)
    return out, skipped


def timing_of(row: Mapping[str, str]) -> Timing | str:
    """One row, or why it cannot be compared."""
    if row["gpu"] not in DEVICES:
        return f"{row['gpu']} is not in the hardware catalog"
    if row["dtype"] not in KINDS:
        return f"{row['dtype']} has no constants"
    device, (kind, dtype), source = DEVICES[row["gpu"]], KINDS[row["dtype"]], source_of(row["source"])
    if dtype not in catalog.device(device).peak_flops_by_dtype:
        return f"{device} has no peak for {dtype}"
    rate, inference = float(row["tflops"]) * 1e12, source.startswith("aiconfigurator")
    both = row["pass"] == "fwd+bwd"
    if row["op"].startswith("attention"):
        return _attention(row, device, kind, source, rate, both, inference)
    if row["op"].startswith("gemm (ubergemm"):
        return Timing("sustained", device, kind, source, 1.0, rate)
    if row["op"] == "gemm":
        m, n, k = (float(row[x]) for x in "mnk")
        flops = 2 * m * n * k
        casts = inference and kind is not KernelKind.HALF
        return Timing("gemm", device, kind, source, flops / rate, flops, ((m, n, k),), casts=casts)
    if row["op"].startswith("grouped_gemm"):
        return _grouped(row, device, kind, source, rate, both)
    return f"op {row['op']} is not known"


def _attention(
    row: Mapping[str, str], device: str, kind: KernelKind, source: str, rate: float, both: bool, inference: bool
) -> Timing:
    batch, seq, heads, kv, dim = (float(row[x]) for x in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    causal = float(row["causal"] or 0) > 0
    flops = 4 * batch * heads * seq * seq * dim * (0.5 if causal else 1.0)
    total = flops * (3.5 if both else 1.0)
    kernel = re.search(r"\((\w+)\)", row["op"])
    return Timing(
        op="attention",
        device=device,
        kind=kind,
        source=f"{source} {kernel.group(1)}" if kernel else source,
        seconds=total / rate,
        flops=flops,
        heads=batch * heads,
        queries=seq,
        head_dim=dim,
        head_bytes=batch * seq * dim * 2 * (2 * heads + 2 * kv),
        causal=causal,
        backward=both,
        runtime=inference,
    )


def _grouped(
    row: Mapping[str, str], device: str, kind: KernelKind, source: str, rate: float, both: bool
) -> Timing | str:
    """DeepGEMM gives rows per group, torchao those of all; nnscaler the tokens of the whole layer and its time."""
    count = re.search(r"\((\d+) (?:groups|experts)\)", row["op"])
    if count is None:
        return "grouped product without a number of groups"
    groups, m = int(count.group(1)), float(row["m"])
    if row["n"] and row["k"]:
        n, k = float(row["n"]), float(row["k"])
        each = m if "per group" in row["notes"] else m / groups
        forward: Sequence[tuple[float, float, float]] = [(each, n, k)]
    else:
        hidden, inner, taken, _ = _LITE
        each = m * taken / groups
        forward = [(each, 2 * inner, hidden), (each, hidden, inner)]
    products = list(forward)
    if both:
        products += [p for r, n, k in forward for p in ((r, k, n), (n, k, r))]
    flops = sum(2 * groups * r * n * k for r, n, k in products)
    return Timing("grouped", device, kind, source, flops / rate, flops, tuple(products), groups)
