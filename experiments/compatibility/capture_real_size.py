"""How long does the capture of a model of real size take, and how much memory? The families of docs/model_zoo.md.

    python -m experiments.compatibility.capture_real_size [--only REGEX] [--json FILE]

Classes of transformers in the sizes of their default config or of a published model, those of packages on PyPI
(experiments/compatibility/packages.py) in published sizes, and layers of torch.nn at the size of a large transformer.
No parameter has a value. Every model has a process of its own, one at a time; one line per family:
processor seconds of the capture (wall in brackets), peak memory of the process, and the refusal if there is one. Aims:
3 s and 2 GB. Exits with an error if a capture fails otherwise than by a refusal.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from autoplan.capture.export import capture
from autoplan.capture.frontend.config_file import model_from_config
from autoplan.capture.frontend.inputs import LossFn
from autoplan.capture.source import _example
from autoplan.errors import CaptureError
from autoplan.profiler.processes import run_ranks
from autoplan.runtime.host_memory import peak_resident_bytes
from experiments.compatibility import families
from experiments.compatibility.architectures import plain
from experiments.shared.measure import environment, write_json

Batch = dict[str, torch.Tensor]
BATCH, TOKENS, IMAGE, CLASSES, VOCAB = 2, 1024, 224, 1000, 32000


@dataclass(frozen=True)
class Real:
    """A model of real size. `make` returns it with its inputs and its loss."""

    name: str
    make: Callable[[], tuple[nn.Module, Batch, LossFn | None]]


def _ids(*names: str, longest: int = TOKENS) -> Batch:
    return {n: torch.zeros(BATCH, longest, dtype=torch.long) for n in (*names, "labels")}


def _images(name: str, size: int = IMAGE, classes: bool = True) -> Batch:
    out = {name: torch.zeros(BATCH, 3, size, size)}
    return {**out, "labels": torch.zeros(BATCH, dtype=torch.long)} if classes else out


def _hf(name: str, changes: Mapping[str, Any]) -> tuple[nn.Module, Batch, LossFn | None]:
    """Return a class of transformers in its default sizes, but for `changes`."""
    config = getattr(transformers, name).config_class(**changes)
    model = model_from_config({**config.to_dict(), "architectures": [name]}, name)
    return model, _example(model), None


def _pairs(name: str, loss: LossFn) -> tuple[nn.Module, Batch, LossFn | None]:
    config = getattr(transformers, name).config_class()
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        model = getattr(transformers, name)(config)
    length = config.text_config.max_position_embeddings
    ids = torch.zeros(BATCH, length, dtype=torch.long)
    return model, {"input_ids": ids, **_images("pixel_values", classes=False)}, loss


def _llava(with_images: bool) -> tuple[nn.Module, Batch, LossFn | None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig())
    return model, {**_ids("input_ids"), **(_images("pixel_values", 336, False) if with_images else {})}, None


def _plain(
    make: Callable[[], nn.Module], batch: Callable[[], Batch], loss: LossFn
) -> tuple[nn.Module, Batch, LossFn | None]:
    return make(), batch(), loss


def _of(path: str, *given: Any, **arguments: Any) -> nn.Module:
    module, _, name = path.rpartition(".")
    made: nn.Module = getattr(import_module(module), name)(*given, **arguments)
    return made


def _still(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model without dropout and without samples that layers leave out, which a capture refuses."""
    model = make()
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


_DRAWING = "normal_ uniform_ erfinv_ mul_ add_ clamp_".split()


@contextmanager
def _without_values() -> Iterator[None]:
    """Make modules without initial values, so that the memory of their parameters is never touched."""

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    with patch.multiple(torch.Tensor, **dict.fromkeys(_DRAWING, kept)):
        yield


def _torch_nn(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of architectures/plain.py at the size of a large transformer."""
    sizes = {"VOCAB": VOCAB, "DIM": 1024, "HEADS": 16, "LAYERS": 24, "INNER": 4096, "LONGEST": TOKENS}
    with patch.multiple(plain, **sizes):
        return make()


def _litgpt(name: str) -> nn.Module:
    litgpt = import_module("litgpt")
    with FakeTensorMode(allow_non_fake_inputs=True):
        made: nn.Module = litgpt.GPT(litgpt.Config.from_name(name))
    return made


def _x(**layers: Any) -> nn.Module:
    inner = _of("x_transformers.Decoder", dim=2048, depth=24, heads=16, **layers)
    return _of("x_transformers.TransformerWrapper", num_tokens=VOCAB, max_seq_len=TOKENS, attn_layers=inner)


# What the default config of a class lacks, or has in a small size.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "WhisperForConditionalGeneration": {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
    },
    "T5ForConditionalGeneration": {"d_model": 1024, "num_layers": 24, "num_heads": 128, "d_kv": 128, "d_ff": 65536},
}  # fmt: skip
_SLOWER = {"drop_path_rate": 0.0}


def _hf_names() -> list[str]:
    found = (f.name for f in families.families() if f.group == "transformers")
    return [n for n in found if "(" not in n and n not in ("CLIPModel", "SiglipModel")]


def models() -> list[Real]:
    """Return every model."""
    out = [Real(n, partial(_hf, n, _CHANGES.get(n, {}))) for n in _hf_names()]
    out += [
        Real("Qwen2VLForConditionalGeneration", partial(_hf, "Qwen2VLForConditionalGeneration", {})),
        Real("CLIPModel", partial(_pairs, "CLIPModel", families.contrastive_loss)),
        Real("SiglipModel", partial(_pairs, "SiglipModel", families.sigmoid_loss)),
        Real("LlavaForConditionalGeneration (text only)", partial(_llava, False)),
        Real("LlavaForConditionalGeneration (with images)", partial(_llava, True)),
    ]

    def tokens(name: str, make: Callable[[], nn.Module], *inputs: str) -> None:
        out.append(Real(name, partial(_plain, make, partial(_ids, *inputs), families.token_loss)))

    def images(name: str, make: Callable[[], nn.Module], takes: str = "x", size: int = IMAGE) -> None:
        out.append(Real(name, partial(_plain, make, partial(_images, takes, size), families.class_loss)))

    tokens("nn.TransformerEncoder, causal", partial(_torch_nn, plain.EncoderLM), "src")
    tokens("nn.Transformer with tgt_mask", partial(_torch_nn, plain.Seq2Seq), "src", "tgt")
    tokens("nn.LSTM language model", partial(_torch_nn, plain.RecurrentLM), "ids")
    for name in ("resnet50", "convnext_base", "vit_l_16", "swin_b", "mobilenet_v2", "densenet121"):
        images(f"torchvision {name}", partial(_still, partial(_of, f"torchvision.models.{name}")))
    for name in (
        "vit_large_patch16_224 eva02_large_patch14_224 mixer_b16_224 swin_base_patch4_window7_224 "
        "beit_large_patch16_224 cait_s36_384 xcit_medium_24_p16_224"
    ).split():
        images(f"timm {name}", partial(_of, "timm.create_model", name, **_SLOWER), size=int(name.split("_")[-1]))
    large = {"dim": 1024, "depth": 24, "heads": 16, "mlp_dim": 4096, "image_size": IMAGE, "patch_size": 16}
    for name in ("ViT", "SimpleViT"):
        images(f"vit-pytorch {name}", partial(_of, f"vit_pytorch.{name}", num_classes=CLASSES, **large), "img")
    tokens("x-transformers, absolute", _x, "x")
    tokens("x-transformers, ALiBi", partial(_x, alibi_pos_bias=True), "x")
    tokens("x-transformers, flash", partial(_x, attn_flash=True), "x")
    for name in "pythia-12b Llama-3.1-70B Gemma-2-27b Gemma-3-27b-it Mixtral-8x7B-v0.1 Qwen3-32B phi-2".split():
        tokens(f"litgpt {name}", partial(_litgpt, name), "idx")
    return out


def measure(rank: int, world: int, name: str) -> dict[str, Any]:
    """Capture one model in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    (model,) = (m for m in models() if m.name == name)
    try:
        with _without_values():
            module, batch, loss = model.make()
    except ImportError as exc:
        return {"model": name, "outcome": f"not installed: {exc.name}"}
    row: dict[str, Any] = {"model": name, "params": sum(p.numel() for p in module.parameters()), "outcome": ""}
    begun = time.process_time(), time.perf_counter()
    try:
        graph = capture(module, batch, loss)
        row |= {"calls": len(graph.calls), "nodes": sum(len(b.nodes) for b in graph.blocks.values())}
    except CaptureError as exc:
        row["outcome"] = f"refused: {exc}"
    row |= {"cpu_s": time.process_time() - begun[0], "wall_s": time.perf_counter() - begun[1]}
    return {**row, "peak_rss_bytes": peak_resident_bytes()}


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table in Markdown."""
    if "cpu_s" not in row:
        return f"| {row['model']} | | | | | {row['outcome']} |"
    size = f"{row['params'] / 1e9:.2f}"
    seconds = f"{row['cpu_s']:.1f} ({row['wall_s']:.1f})"
    return (
        f"| {row['model']} | {size} | {row.get('nodes', '')} | {seconds} | {row['peak_rss_bytes'] / 1e6:.0f} | "
        f"{' '.join(row['outcome'].split())[:200]} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--timeout-s", type=float, default=150.0, help="of one model")
    args = parser.parse_args()
    rows, failed = list[dict[str, Any]](), False
    print("| model | B params | nodes | capture s (wall) | MB | |\n|---|---|---|---|---|---|")
    for model in models():
        if re.search(args.only, model.name):
            try:
                rows += run_ranks(measure, 1, model.name, timeout_s=args.timeout_s)
            except Exception as exc:  # the next families are measured all the same
                failed = True
                rows.append({"model": model.name, "outcome": f"failed: {type(exc).__name__} {str(exc)[-300:]}"})
            print(line(rows[-1]), flush=True)
    write_json(args.json, "capture_real_size", environment(), rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
