"""Published fine-tuning runs on one to eight devices: full, LoRA and QLoRA.

    python -m experiments.published.fine_tuning [--only REGEX] [--verbose]

Each run is priced by `autoplan estimate` with the flags that its source states; no constant was fitted to any of them.
What a source calls memory is `allocated` (torch.cuda.max_memory_allocated, or active bytes), `reserved` (with what the
allocator keeps for later, so more than is needed) or `used` (nvidia-smi, with the context). The prediction is that of
the same: without the context and fragmentation for `allocated`, without the context for `reserved`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

GIB = 2**30 / 1e9
ALLOCATED, RESERVED, USED = "allocated", "reserved", "used"
_LEFT_OUT = {
    ALLOCATED: ("context and communicators", "fragmentation"),
    RESERVED: ("context and communicators",),
    USED: (),
}


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source: a name of SOURCES.
        flags: of `autoplan estimate`, without the model.
        step_s: seconds of an optimizer step.
        gb: 1e9 bytes of a device; `held` says what was measured.
    """

    source: str
    name: str
    model: str
    flags: tuple[str, ...]
    step_s: float | None = None
    gb: float | None = None
    held: str = ALLOCATED


# source -> where it was read, and what it says of its runs
SOURCES = {
    "torchtune": "README.md of pytorch/torchtune, 2024: bf16 states, compiled, 2 sequences per device, packed",
    "qwen": "README.md of QwenLM/Qwen, Profiling of Memory and Speed, 2023: A100, 8 micro-batches of 1",
    "litgpt": "tutorials/resource-tables.md of Lightning-AI/litgpt, 2023: A100 40 GB, LoRA of rank 8, 1,304 tokens",
    "litgpt-hub": "config_hub/finetune/README.md of Lightning-AI/litgpt: 512 tokens, LoRA of rank 32 or 16",
    "fsdp_qlora": "benchmarks_03_2024.md of AnswerDotAI/fsdp_qlora: 1,024 samples of 2,048 tokens, LoRA of rank 64",
    "peft": "method_comparison/MetaMathQA of huggingface/peft, July 2026: L40S, 4 sequences of 210 tokens (the mean)",
    "unsloth": "docs.unsloth.ai, benchmarks, 2024: the longest sequence of transformers on a device, QLoRA of rank 32",
}

# Qwen of 2023 and Yi, as Llama and Qwen 2 have them: hidden, inner, layers, heads, key heads, classes
_SHAPES = {
    "qwen-1.8b": ("qwen2", 2048, 5504, 24, 16, 16, 151936),
    "qwen-7b": ("qwen2", 4096, 11008, 32, 32, 32, 151936),
    "qwen-14b": ("qwen2", 5120, 13696, 40, 40, 40, 152064),
    "qwen-72b": ("qwen2", 8192, 24576, 80, 64, 64, 152064),
    "yi-34b": ("llama", 7168, 20480, 60, 56, 8, 64000),
}
_MLP = "gate_proj,up_proj,down_proj"
_ALL = f"q_proj,k_proj,v_proj,o_proj,{_MLP}"


def _config(name: str) -> dict[str, Any]:
    kind, hidden, inner, layers, heads, keys, classes = _SHAPES[name]
    return {
        "model_type": kind, "architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]],
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys, "vocab_size": classes, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _flags(
    cluster: str,
    seq: int,
    micro: int,
    like: str,
    *more: str,
    batch: int | None = None,
    recompute: str = "full",
    zero: int = 0,
    adapters: str | None = None,
    precision: str = "native",
) -> tuple[str, ...]:
    devices = int(cluster.split("x")[1])
    out = ["--cluster", cluster, "--seq-len", str(seq), "--mbs", str(micro), "--like", like]
    out += ["--global-batch-size", str(batch or micro * devices), "--recompute", recompute, "--zero", str(zero)]
    # DeepSpeed has masters of what is trained
    out += ["--precision", "bf16" if like.startswith("deepspeed") else precision]
    return (*out, *(() if adapters is None else ("--adapters", adapters)), *more)


def _torchtune() -> Iterator[Run]:
    """Llama 3.2 3B on an A100, 2 x 4,096 tokens, one technique after the other (`+` in the README's table), and models.

    LoRA and QLoRA have the inputs of their layers on the host, as the row before them, which cannot be said beside
    recompute: their memory is left out.
    """
    layers = f"q_proj,v_proj,o_proj,{_MLP}"
    for name, mode, loss, recompute, adapters, gib, tokens_per_s in (
        ("packed", "eager", "torch", "none", None, 60.0, 7075),
        ("compiled", "compiled", "torch", "none", None, 51.0, 8998),
        ("chunked loss", "compiled", "chunked", "none", None, 42.9, 9174),
        ("recompute", "compiled", "chunked", "full", None, 24.9, 7210),
        ("LoRA", "compiled", "chunked", "full", f"lora:64:{layers}", 0, 8210),
        ("QLoRA", "compiled", "chunked", "full", f"qlora:64:{layers}", 0, 8035),
    ):
        flags = _flags("1x1xa100-sxm4-80gb", 4096, 2, "torchtune@24.11", "--mode", mode, "--fused-loss", loss,
                       recompute=recompute, adapters=adapters)  # fmt: skip
        yield Run("torchtune", f"3B {name}", "llama-3.2-3b", flags, 2 * 4096 / tokens_per_s, gib * GIB or None)
    for cluster, model, kind, gib, tokens_per_s in (
        ("1x1xrtx4090-24gb", "llama-3.1-8b", "lora:8", 16.2, 3083),
        ("1x1xrtx4090-24gb", "llama-3.1-8b", "qlora:8", 7.4, 2413),
        ("1x8xa100-sxm4-80gb", "llama-3.1-70b", "lora:16", 27.6, 3497),
    ):
        devices = int(cluster.split("x")[1])
        flags = _flags(cluster, 2048, 2, "torchtune@24.11", "--mode", "compiled", zero=0 if devices == 1 else 3,
                       adapters=f"{kind}:{layers}")  # fmt: skip
        yield Run("torchtune", f"{model} {kind}", model, flags, 2 * 2048 * devices / tokens_per_s, gib * GIB)


_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def _qwen() -> Iterator[Run]:
    """LoRA of rank 64 beside all linear layers. QLoRA there is GPTQ's kernels, so that its times are left out."""
    for model, devices, kind, cells in (
        ("qwen-1.8b", 1, "lora", "6.7 1.0, 7.4 1.0, 8.4 1.1, 11.0 1.7, 16.2 3.3, 21.8 6.8"),
        ("qwen-7b", 1, "lora", "20.1 1.2, 20.4 1.5, 21.5 2.8, 23.8 5.2, 29.7 10.1, 36.6 21.3"),
        ("qwen-14b", 1, "lora", "34.6 1.6, 35.1 2.4, 35.3 4.4, 37.4 8.4, 42.5 17.0, 55.2 36.0"),
        ("qwen-72b", 4, "lora", "215.4 17.6, 217.7 20.5, 222.6 29.4, 228.8 45.7, 249.0 83.4, 289.2 161.5"),
        ("qwen-7b", 1, "qlora", "11.5 0, 11.5 0, 12.3 0, 13.9 0, 16.9 0, 23.5 0"),
        ("qwen-72b", 1, "qlora", "61.4 0, 61.4 0, 62.9 0, 64.1 0, 68.0 0, 75.6 0"),
    ):
        for seq, cell in zip(_LENGTHS, cells.split(","), strict=True):
            gb, seconds = map(float, cell.split())
            whole = devices == 1
            flags = _flags(f"1x{devices}xa100-sxm4-80gb", seq, 1, "accelerate@23.7" if whole else "deepspeed@23.7",
                           "--attention", "flash2", "--reruns", "whole", batch=8 * devices, zero=0 if whole else 3,
                           adapters=f"{kind}:64:{_ALL}")  # fmt: skip
            yield Run("qwen", f"{model} {kind} {seq}", model, flags, seconds or None, gb / devices * GIB, USED)


def _litgpt() -> Iterator[Run]:
    like, torch = "torch-eager@23.10", ("--mode", "eager", "--attention", "flash2", "--fused-loss", "torch")
    for model, kind, micro, gb in (
        ("llama-2-7b", "lora", 1, 21.30),
        ("llama-2-7b", "qlora", 1, 13.84),
        ("llama-2-7b", "lora", 2, 29.07),
        ("llama-2-13b", "lora", 1, 38.12),
        ("llama-2-13b", "qlora", 1, 22.55),
    ):
        flags = _flags("1x1xa100-sxm4-40gb", 1304, micro, like, *torch,
                       recompute="none", adapters=f"{kind}:8:q_proj,v_proj")  # fmt: skip
        yield Run("litgpt", f"{model} {kind} {micro}", model, flags, None, gb)
    for model, kind, rank, micro, gb in (
        ("llama-2-7b", "lora", 32, 2, 19.77),
        ("llama-2-7b", "qlora", 32, 2, 13.68),
        ("llama-3.1-8b", "lora", 32, 1, 19.73),
        ("llama-3.1-8b", "qlora", 32, 2, 17.41),
        ("mistral-7b", "lora", 16, 2, 20.66),
        ("mistral-7b", "qlora", 16, 2, 14.29),
    ):
        flags = _flags("1x1xa100-sxm4-40gb", 512, micro, like, *torch,
                       recompute="none", adapters=f"{kind}:{rank}:q_proj,v_proj")  # fmt: skip
        yield Run("litgpt-hub", f"{model} {kind} {micro}", model, flags, None, gb)


def _fsdp_qlora() -> Iterator[Run]:
    """FSDP of PyTorch 2.2 with checkpoints that run whole layers again; ZeRO 0 is its NO_SHARD, `off` its cpu_offload.

    The runs on two RTX 3090 with shards are left out: an older motherboard's slots, whose speed is not stated.
    """
    names = f"q_proj,k_proj,v_proj,{_MLP}"
    small, large, yi = "llama-2-7b", "llama-2-70b", "yi-34b"
    for device, devices, model, kind, micro, how, seconds, gib in (
        ("rtx3090-24gb", 2, small, "qlora", 8, "whole", 875, 20.94),
        ("rtx3090-24gb", 2, small, "lora", 4, "whole", 881, 22.04),
        ("rtx4090-24gb", 2, small, "lora", 4, "whole", 437, 22.04),
        ("rtx4090-24gb", 2, small, "lora", 6, "", 481, 21.35),
        ("rtx4090-24gb", 2, small, "lora", 10, "off", 482, 22.69),
        ("rtx4090-24gb", 2, small, "qlora", 8, "whole", 450, 20.94),
        ("rtx4090-24gb", 2, small, "qlora", 10, "", 466, 20.97),
        ("rtx4090-24gb", 2, small, "qlora", 12, "off", 464, 22.38),
        ("rtx4090-24gb", 2, yi, "qlora", 2, "", 2072, 23.05),
        ("rtx4090-24gb", 2, yi, "qlora", 4, "off", 2061, 22.98),
        ("rtx4090-24gb", 2, large, "qlora", 2, "off", 4399, 14.92),
        ("a100-sxm4-40gb", 2, large, "qlora", 1, "", 3277, 0),
        ("a100-sxm4-40gb", 4, large, "qlora", 4, "", 1266, 0),
        ("a100-sxm4-40gb", 8, large, "qlora", 4, "", 672, 0),
        ("h100-sxm5-80gb", 4, large, "qlora", 8, "", 667, 0),
        ("rtx-a5000-24gb", 4, large, "qlora", 1, "", 4829, 0),
        ("rtx-a5000-24gb", 8, large, "qlora", 1, "", 2613, 0),
        ("rtx6000-ada-48gb", 2, large, "qlora", 2, "", 5867, 0),
        ("rtx6000-ada-48gb", 4, large, "qlora", 3, "", 2904, 0),
    ):
        off = ("--offload", "parameters") if how == "off" else ()
        flags = _flags(f"1x{devices}x{device}", 2048, micro, "accelerate@24.2", "--reruns", "whole", "--no-reduce-once",
                       *off, zero=0 if how == "whole" else 3, adapters=f"{kind}:64:{names}")  # fmt: skip
        name = f"{devices} x {device} {model} {kind} {micro} {how}".strip()
        yield Run("fsdp_qlora", name, model, flags, seconds * devices * micro / 1024, gib * GIB or None, RESERVED)


def _peft() -> Iterator[Run]:
    """Times of 5,000 steps whose batches are cut to their longest sequence; the longest of all has 768 tokens."""
    model, cluster, like = "llama-3.2-3b", "1x1xl40s-48gb", "accelerate@26.8"
    for name, adapters, seconds, gb in (
        ("full", None, 2147.3, 38.87),
        ("lora 32", "lora:32:q_proj,v_proj", 942.0, 22.29),
        ("lora 64", "lora:64:q_proj,v_proj", 966.7, 22.55),
        ("lora 10 of the MLP", f"lora:10:{_MLP}", 1050.2, 24.70),
    ):
        mean, longest = (_flags(cluster, n, 4, like, recompute="none", adapters=adapters) for n in (210, 768))
        yield Run("peft", f"{name}, time", model, mean, seconds / 5000)
        yield Run("peft", f"{name}, longest", model, longest, None, gb, RESERVED)


def _unsloth() -> Iterator[Run]:
    for model, gib, seq in (
        *(("llama-3.1-8b", gib, seq) for gib, seq in ((12, 932), (16, 2551), (24, 5789), (40, 12264), (80, 28454))),
        ("llama-3.1-70b", 80, 6916),
    ):
        flags = _flags("1x1xa100-sxm4-80gb", seq, 1, "accelerate@24.11", adapters=f"qlora:32:{_ALL}",
                       precision="bf16-autocast")  # fmt: skip
        yield Run("unsloth", f"{model} {seq}", model, flags, None, gib * GIB, USED)


def runs() -> list[Run]:
    """Return all runs."""
    makers = (_torchtune, _qwen, _litgpt, _fsdp_qlora, _peft, _unsloth)
    return [run for maker in makers for run in maker()]


@dataclass(frozen=True)
class Priced:
    """What autoplan says of a run."""

    run: Run
    step_s: tuple[float, float, float]
    gb: float

    @property
    def time_error(self) -> float | None:
        """The relative error of the step; None if it was not measured."""
        return None if self.run.step_s is None else self.step_s[1] / self.run.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory; None if it was not measured."""
        return None if self.run.gb is None else self.gb / self.run.gb - 1


def priced(run: Run, folder: Path) -> Priced:
    """Price a run. Raises: BadParameter with the words of autoplan."""
    model = run.model
    if model in _SHAPES:
        model = str(folder / f"{run.model}.json")
    command = [sys.executable, "-m", "autoplan", "estimate", model, *run.flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, 3):  # 3: it does not fit, and is priced
        raise typer.BadParameter(f"{run.source} {run.name}: {done.stderr.strip()}")
    found = json.loads(done.stdout)["estimate"]
    seconds = found["step_time_s"]
    left_out = _LEFT_OUT[run.held]
    held = (sum(v["mid"] for name, v in m.items() if name not in left_out) for m in found["memory_bytes"])
    return Priced(run, (seconds["low"], seconds["mid"], seconds["high"]), max(held) / 1e9)


def _summary(what: str, errors: list[float]) -> str:
    bias = f"mean {fmean(map(abs, errors)):.1%}, median {median(map(abs, errors)):.1%}, bias {fmean(errors):+.1%}"
    return f"{what} of {len(errors)}: {bias}"


def main(
    only: Annotated[str, typer.Option(help="Runs whose source or name this regular expression finds.")] = ".",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Print what was measured and what autoplan says, and the errors by source."""
    chosen = [run for run in runs() if re.search(only, f"{run.source} {run.name}")]
    found: list[Priced] = []
    print("| source | run | step s | autoplan | error | GB | autoplan | error |\n" + "|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        for name in _SHAPES:
            (Path(place) / f"{name}.json").write_text(json.dumps(_config(name)))
        for p in pool.map(lambda run: priced(run, Path(place)), chosen):
            found.append(p)
            time = (
                ("", "", "")
                if p.time_error is None
                else (f"{p.run.step_s:.3g}", f"{p.step_s[1]:.3g}", f"{p.time_error:+.0%}")
            )
            held = (
                ("", "", "") if p.memory_error is None else (f"{p.run.gb:.1f}", f"{p.gb:.1f}", f"{p.memory_error:+.0%}")
            )
            print("| " + " | ".join((p.run.source, p.run.name, *time, *held)) + " |", flush=True)
    print()
    timed = [p for p in found if p.time_error is not None]
    for source in (*SOURCES, "all"):
        mine = [p for p in found if source in ("all", p.run.source)]
        steps = [p.time_error for p in mine if p.time_error is not None]
        held_by = {
            h: [p.memory_error for p in mine if p.run.held == h and p.memory_error is not None] for h in _LEFT_OUT
        }
        parts = [_summary("steps", steps)] if steps else []
        parts += [_summary(f"{h} bytes", errors) for h, errors in held_by.items() if errors]
        if parts:
            print(f"{source}: {'; '.join(parts)}")
    inside = sum(p.step_s[0] <= (p.run.step_s or 0) <= p.step_s[2] for p in timed)
    print(f"{inside} of {len(timed)} measured steps are inside autoplan's interval")


if __name__ == "__main__":
    typer.run(main)
