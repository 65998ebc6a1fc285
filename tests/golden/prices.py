"""Freeze what `autoplan estimate` and `autoplan plan` answer, and say what has changed since.

    python tests/golden/prices.py --check            # every frozen answer again: bit-equal, or a line says what is not
    python tests/golden/prices.py --check --every 9  # every ninth of them
    python tests/golden/prices.py --check --only moe # those whose words hold this
    python tests/golden/prices.py --write            # freeze what is answered now (after a change that means to)
    python tests/golden/prices.py --write --new      # freeze the answers of requests that are new here, and no other
    python tests/golden/prices.py --write --only moe # and so for --write

How prices may change. A change that only moves or renames code leaves every answer as it is. Where a cost model is
corrected, `--check` lists what the correction changes; look whether that is what was meant and nothing else (the other
models, modes and dimensions are on the list as a check of this), then `--write`, and commit the new answers together
with the correction and with the figures of experiments/**/README.md that follow from it. Never refreeze to make a test
pass whose difference has no explanation.

`make quick` asks every 40th estimate again, `make test` every 23rd, `make test-all` every ninth,
`make exhaustive` all of them, plans included.

Frozen are the models of MODELS (later ones of the catalog are other sizes of their classes) under the configurations of
CONFIGURATIONS, and the plans of PLANS: step time, memory and a digest of every number of the answer. Left out are the
certificate of a search, the program (names of layouts) and what is only repeated from the request. A configuration that
is refused for a model is frozen as refused, without words.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from autoplan.cli import app

FROZEN = Path(__file__).with_name("prices.json.gz")
# Repeated from the words that were asked; how far a search came depends on the load of the machine.
_LEFT_OUT = ("schema", "command", "model", "cluster", "request", "asked", "made_for", "certificate", "program")

MODELS = (
    "bert-large deepseek-v3 falcon-180b falcon-40b falcon-7b gemma-3-27b gpt-22b gpt-oss-120b gpt-oss-20b gpt2 "
    "gpt2-xl gpt3-175b llama-2-13b llama-2-70b llama-2-7b llama-3.1-405b llama-3.1-70b llama-3.1-8b llama-3.2-1b "
    "llama-3.2-3b llama-4-maverick llama-4-scout megatron-1t megatron-530b mistral-7b mixtral-8x22b mixtral-8x7b "
    "nemotron-4-15b nemotron-4-340b nemotron-h-8b phi-3-medium phi-3-mini phi-4 qwen2.5-32b qwen2.5-72b qwen2.5-7b "
    "qwen3-235b-a22b qwen3-30b-a3b qwen3-32b qwen3-8b t5-11b whisper-large-v3"
).split()
CONFIGURATIONS: tuple[str, ...] = (
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --zero 0",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --zero 2 --tp 4",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --zero 3 --recompute full",
    "--cluster 8x8xh100-sxm5-80gb --seq 8k --gbs 128 --zero 3 --zero-replicas 4 --recompute selective",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 8 --pp 4 --mbs 1",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 2 --pp 4 --schedule GPipe --recompute full",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 2 --pp 4 --virtual-stages 2",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --pp 2 --schedule ZB-H1",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --pp 2 --schedule ZBV",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --pp 2 --schedule DualPipeV --mode fused",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 2 --pp 2 --schedule InterleavedZeroBubble --virtual-stages 2",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 2 --pp 4 --schedule DualPipe --mode fused",
    "--cluster 16x8xh100-sxm5-80gb --seq 32k --gbs 64 --tp 4 --cp 4 --context-method ring --recompute full",
    "--cluster 16x8xh100-sxm5-80gb --seq 32k --gbs 64 --tp 4 --cp 4 --context-method ulysses",
    "--cluster 16x8xh100-sxm5-80gb --seq 32k --gbs 64 --tp 2 --cp 2 --context-method gather --zero 3",
    "--cluster 16x8xh100-sxm5-80gb --seq 32k --gbs 64 --tp 2 --cp 4 --context-method ulysses2xring2 --overlap cp",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --ep 8 --zero 1",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --ep 8 --etp 1 --zero 2",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --ep 2 --etp 4",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --ep 8 --pp 2 --mode fused --dispatcher flex --fused-experts",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --ep 8 --mode fused --dispatcher flex_fp8 --overlap ep",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 8 --zero 3 --offload parameters",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --offload optimizer",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --zero 3 --offload activations",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --recompute attention+norms --mode compiled",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --recompute modules:core_attn,mlp --mode fused",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --recompute 0-1=full,2=mlp --mbs 2",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --precision fp8 --mode fused --narrow-gather --zero 3",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --precision mxfp8 --mode fused --attention flash2",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --precision bf16-grad16-mom16 --no-overlap-zero",
    "--cluster 8x8xh100-sxm5-80gb --seq 4k --gbs 128 --tp 4 --precision fp32 --no-overlap-gather --zero 2",
    "--cluster 8x8xb200-sxm-180gb --seq 4k --gbs 128 --tp 4 --precision fp4 --mode fused --launch graphs",
    "--cluster 16x8xa100-sxm4-80gb --seq 2k --gbs 512 --tp 8 --pp 4 --attention unfused --launch blocking",
    "--cluster 16x8xa100-sxm4-80gb --seq 2k --gbs 512 --tp 4 --no-sequence-parallel --overlap tp --mode fused",
    "--cluster 16x8xa100-sxm4-80gb --seq 2k --gbs 512 --zero 3 --zero-by-tensor",
    "--cluster 8x8xh100-sxm5-80gb --seq 8k --gbs 128 --tp 4 --document-len 2k --fused-loss flash --mode fused",
    "--cluster 128x8xh100-sxm5-80gb --seq 8k --gbs 1024 --tp 8 --pp 8 --virtual-stages 2 --overlap tp,pp --mode fused",
    "--cluster 128x8xh100-sxm5-80gb --seq 8k --gbs 1024 --tp 8 --zero 3 --tokens 1T --recompute full",
    "--cluster 128x8xh100-sxm5-80gb --seq 8k --gbs 1024 --ep 64 --pp 4 --mode fused --launch full_graphs",
)

PLANS: tuple[str, ...] = (
    "gpt2 --cluster 1x4xh100-sxm5-80gb --seq 1k --gbs 16",
    "gpt2-xl --cluster 1x8xa100-sxm4-40gb --seq 1k --gbs 64",
    "llama-3.2-1b --cluster 1x8xh100-sxm5-80gb --seq 4k --gbs 64 --mode compiled",
    "llama-3.2-1b --cluster 2x8xh100-sxm5-80gb --seq 128k --gbs 8",
    "llama-3.1-8b --cluster 1x8xh100-sxm5-80gb --seq 8k --gbs 64",
    "llama-3.1-8b --cluster 2x8xh100-sxm5-80gb --seq 8k --gbs 64 --runnable",
    "llama-3.1-8b --cluster 2x8xa100-sxm4-40gb --seq 4k --gbs 128 --pin pp=2",
    "llama-3.1-8b --cluster 8x8xh100-sxm5-80gb --seq 8k --gbs 256 --mode fused --precision fp8",
    "llama-3.1-8b --cluster 2x8xh100-sxm5-80gb --seq 8k --gbs 32 --pin zero_stage=3 --pin recompute=full",
    "llama-2-7b --cluster 1x8xa100-sxm4-40gb --seq 4k --gbs 64 --pin offload=optimizer",
    "llama-2-13b --cluster 4x8xa100-sxm4-80gb --seq 4k --gbs 256 --mode fused",
    "llama-3.1-70b --cluster 8x8xh100-sxm5-80gb --seq 8k --gbs 128",
    "llama-3.1-70b --cluster 32x8xh100-sxm5-80gb --seq 8k --gbs 512 --mode fused",
    "qwen2.5-7b --cluster 1x8xh100-sxm5-80gb --seq 4k --gbs 64 --pin cp=2",
    "qwen3-8b --cluster 2x8xh100-sxm5-80gb --seq 16k --gbs 32 --pin schedule=ZBV --pin pp=2",
    "qwen3-30b-a3b --cluster 2x8xh100-sxm5-80gb --seq 4k --gbs 128 --mode fused --pin ep=8",
    "mixtral-8x7b --cluster 4x8xh100-sxm5-80gb --seq 4k --gbs 128 --mode fused --pin tp=1",
    "phi-4 --cluster 2x8xh100-sxm5-80gb --seq 4k --gbs 128 --top 3",
    "mistral-7b --cluster 1x8xh200-sxm-141gb --seq 8k --gbs 64 --pin tp=2",
    "gpt3-175b --cluster 16x8xa100-sxm4-80gb --seq 2k --gbs 256 --mode fused --pin tp=8",
)


def requests() -> Iterator[str]:
    """The words of every frozen command."""
    for model in MODELS:
        yield from (f"estimate {model} {words}" for words in CONFIGURATIONS)
    yield from (f"plan {words}" for words in PLANS)


def answer(words: str) -> dict[str, Any]:
    """What a command answers: its exit code, and of a priced one the step time, the memory and a digest of the rest."""
    patient = ["--time-limit", "600", "--gap", "0"] if words.startswith("plan") else []
    result = CliRunner().invoke(app, [*words.split(), *patient, "--json"], prog_name="autoplan")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if not result.stdout.strip():
        return {"exit": result.exit_code}
    data = _without(json.loads(result.stdout))
    text = json.dumps(data, sort_keys=True)
    found = {"exit": result.exit_code, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    estimate = data.get("estimate")
    if estimate is not None:
        found |= {"step_time_s": estimate["step_time_s"]["mid"], "memory_bytes": estimate["memory_bytes"]}
    if "plan" in data and words.startswith("plan"):
        found["plan"] = {k: v for k, v in data["plan"].items() if k not in ("recompute", "stages")}
    return found


def _without(data: Any) -> Any:
    """An answer without what is repeated from the request and what differs from run to run."""
    if isinstance(data, dict):
        return {k: _without(v) for k, v in data.items() if k not in _LEFT_OUT}
    return [_without(v) for v in data] if isinstance(data, list) else data


def frozen() -> dict[str, dict[str, Any]]:
    """The frozen answers by command."""
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(FROZEN.read_bytes()))
    return found


def answers(words: Collection[str]) -> dict[str, dict[str, Any]]:
    """What these commands answer now, on two cores."""
    with ProcessPoolExecutor(2) as pool:
        return dict(zip(words, pool.map(answer, words, chunksize=8), strict=True))


def write(only: str = "", new: bool = False) -> str:
    """Freeze what is answered now: of all commands, or of those that hold `only` or are `new`. Return what was done."""
    before = frozen() if only or new else {}
    chosen = [w for w in requests() if only in w and not (new and w in before)]
    now = before | answers(chosen)
    made = {w: now[w] for w in requests() if w in now}
    FROZEN.write_bytes(gzip.compress(json.dumps(made, indent=0).encode(), 9, mtime=0))
    priced = sum("digest" in v for v in made.values())
    return f"{len(chosen)} of {len(made)} answers anew; {priced} priced, {FROZEN.stat().st_size:,} bytes"


def differences(every: int = 1, start: int = 0, plans: bool = True, only: str = "") -> list[str]:
    """A line for each frozen answer that is not given any more.

    Args:
        every: look at each `every`-th answer only, from `start` on.
        plans: also at those of PLANS, which take most of the time.
        only: look at the commands that hold this only.
    """
    known = {k: v for k, v in frozen().items() if only in k and (plans or not k.startswith("plan"))}
    chosen = dict(list(known.items())[start::every])
    now = answers(chosen)
    lines = []
    for words, before in chosen.items():
        if now[words] != before:
            keys = [k for k in before | now[words] if before.get(k) != now[words].get(k)]
            said = "; ".join(f"{k} {before.get(k)} -> {now[words].get(k)}" for k in keys)
            lines.append(f"{words}: {said}")
    return lines


def main() -> int:
    """Freeze, or compare. Exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--no-plans", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--new", action="store_true")
    given = parser.parse_args()
    if given.write:
        print(write(given.only, given.new))
    if given.check:
        lines = differences(given.every, plans=not given.no_plans, only=given.only)
        print("\n".join(lines) or "nothing differs")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
