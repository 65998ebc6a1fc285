"""Families of models on several simulated devices: is the sharded program's loss the module's, or is it refused?

Every model is small and untouched, with random values. It is captured once in float64; for every set of degrees the
layout is decided by the intra-op ILP, the program is compiled and runs with all ranks in one process
(experiments.shared.simulated); under context parallelism on two gloo processes. Loss and every gradient are compared
with the module's own.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.lengths import lengths_of
from autoplan.codegen.program import Program, compile_program
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.ir.graph import ModelGraph
from autoplan.profiler.processes import run_ranks
from autoplan.runtime.model import ParallelModel
from experiments.compatibility import hf_classes, packages
from experiments.compatibility.architectures import decoders, plain, vision
from experiments.compatibility.one_by_one import (
    CRASHED,
    EQUAL,
    NOT_RUN,
    OUTCOMES,
    REFUSED,
    WRONG,
    Row,
    Task,
    crash,
    escaped,
    short,
)
from experiments.shared.default_plans import make_plan, read_pins
from experiments.shared.simulated import SimulatedStep, run_simulated

BATCH, SEQ, TARGET = 4, 16, 12
Batch = Mapping[str, torch.Tensor]
Made = tuple[nn.Module, Batch]
Loss = Callable[[Any, Batch], torch.Tensor]

# Degrees: pins, and the micro-batches that the batch is cut into.
DEGREES: dict[str, tuple[dict[str, Any], int]] = {
    "tp 2": ({"tp": 2}, 1),
    "pp 2": ({"pp": 2}, 2),
    "dp 2 ZeRO 3": ({"dp": 2, "zero_stage": 3}, 1),
    "cp 2": ({"cp": 2}, 1),
}
ONE_DEVICE = "1 device"
NEEDED = tuple(DEGREES)[:3]  # cp where the model allows


@dataclass(frozen=True)
class Family:
    """A model, its batch and its loss. `make` returns them; `loss` None: the module's output has it."""

    group: str
    name: str
    make: Callable[[], Made]
    loss: Loss | None = None


def _value(model: nn.Module, batch: Batch, loss: Loss | None, inputs: Sequence[str]) -> torch.Tensor:
    if loss is None:
        takes = {"use_cache": False} if "use_cache" in _parameters(model) else {}
        found: torch.Tensor = model(**batch, **takes).loss
        return found
    return loss(model(**{n: batch[n] for n in inputs}), batch)


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def tokens(*names: str, labels: bool = True) -> dict[str, torch.Tensor]:
    """Return whole numbers [BATCH, SEQ] under every name, of `tgt` and what follows it [BATCH, TARGET]; and labels."""
    generator = torch.Generator().manual_seed(1)
    lengths = [SEQ if "tgt" not in names[: i + 1] else TARGET for i in range(len(names))]
    out = {n: torch.randint(3, 96, (BATCH, x), generator=generator) for n, x in zip(names, lengths, strict=True)}
    if labels:
        out["labels"] = torch.randint(3, 96, (BATCH, lengths[-1]), generator=generator)
    return out


def images(classes: int = vision.CLASSES) -> dict[str, torch.Tensor]:
    """Return images `x` [BATCH, 3, IMAGE, IMAGE] and labels [BATCH]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, vision.IMAGE, vision.IMAGE, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(classes, (BATCH,), generator=generator)}


def token_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def class_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over samples."""
    return F.cross_entropy(logits, batch["labels"])


def noise_loss(found: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean square of the difference to the noise."""
    return F.mse_loss(found, batch["noise"])


def click_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean binary cross-entropy over samples."""
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def contrastive_loss(found: Any, batch: Batch) -> torch.Tensor:
    """Return CLIP's loss over all pairs of the batch."""
    target = torch.arange(found.logits_per_text.shape[0])
    text, image = found.logits_per_text, found.logits_per_text.t()
    return (F.cross_entropy(text, target) + F.cross_entropy(image, target)) / 2


def sigmoid_loss(found: Any, batch: Batch) -> torch.Tensor:
    """Return SigLIP's loss over all pairs of the batch."""
    logits = found.logits_per_text
    eye = torch.eye(logits.size(0), dtype=logits.dtype)
    return -torch.sum(F.logsigmoid((2 * eye - 1) * logits), dim=-1).mean()


def filled(model: nn.Module) -> nn.Module:
    """Return the module with values under which every parameter matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, p[0].numel() ** -0.5)
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model.double()


def _plain(model: Callable[[], nn.Module], batch: Callable[[], Batch], training: bool = True) -> Made:
    torch.manual_seed(0)
    return filled(model()).train(training), batch()


def _hf(name: str, mapping: str) -> Made:
    (of,) = hf_classes.classes(list(hf_classes.MAPPINGS), f"^{name}$")
    truth = hf_classes.reference(of, BATCH)
    truth.model.zero_grad()
    return truth.model, truth.batch


def _configured(name: str, config: Any, batch: Batch) -> Made:
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others know no float64
    return filled(getattr(transformers, name)(config)).train(), batch


_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}


def _whisper() -> Made:
    config = transformers.WhisperConfig(
        vocab_size=96,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=SEQ,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    labels = tokens("tgt", labels=False)["tgt"]
    sound = torch.randn(BATCH, 8, 2 * SEQ, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _configured("WhisperForConditionalGeneration", config, {"input_features": sound, "labels": labels})


def _pairs(name: str, config: str) -> Made:
    made = getattr(transformers, config)(
        text_config={**_TEXT, "eos_token_id": 2, "projection_dim": 32}, vision_config=_EYES
    )
    ids = tokens("ids", labels=False)["ids"]
    ids[:, -1] = 2
    return _configured(name, made, {"input_ids": ids, "pixel_values": images()["x"]})


def _llava(with_images: bool) -> Made:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT, num_key_value_heads=2),
        vision_config=transformers.CLIPVisionConfig(**_EYES),
        image_token_index=95,
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 95, (BATCH, SEQ), generator=generator)
    batch = {"input_ids": ids, "labels": ids.roll(1, 0)}
    if with_images:
        ids[:, 1:5] = 95  # four patches
        batch["pixel_values"] = images()["x"]
    return _configured("LlavaForConditionalGeneration", config, batch)


def _qwen2_vl() -> Made:
    text = {**_TEXT, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    eyes = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=eyes)
    return _configured("Qwen2VLForConditionalGeneration", config, tokens("input_ids"))


def _deepseek_v2() -> Made:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    config = transformers.DeepseekV2Config(
        **_TEXT, **sizes, **experts, n_group=1, topk_group=1, first_k_dense_replace=1
    )
    return _configured("DeepseekV2ForCausalLM", config, tokens("input_ids"))


def _clicks() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "dense": torch.randn(BATCH, 6, generator=generator, dtype=torch.float64),
        "sparse": torch.randint(96, (BATCH, 4, 3), generator=generator),
        "clicked": torch.randint(2, (BATCH,), generator=generator).double(),
    }


def _noisy() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = images()["x"]
    return {
        "x": x,
        "t": torch.rand(BATCH, generator=generator, dtype=torch.float64) * 100,
        "y": torch.randint(vision.CLASSES, (BATCH,), generator=generator),
        "noise": torch.randn(x.shape, generator=generator, dtype=torch.float64),
    }


_DECODERS = """Llama Llama4 Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Gemma Gemma2 Gemma3 Phi Phi3 GPTJ
GPTNeoX OPT Falcon Bloom Mpt StableLm Olmo Olmo2 Olmoe Granite Cohere Cohere2 Glm4 Starcoder2 SmolLM3 Nemotron
DeepseekV3 GptOss Mamba Mamba2""".split()
_OTHERS = """GPT2LMHeadModel BertForMaskedLM RobertaForMaskedLM ModernBertForMaskedLM ElectraForMaskedLM
T5ForConditionalGeneration BartForConditionalGeneration ViTForImageClassification
Dinov2ForImageClassification""".split()


def families() -> list[Family]:
    """Return every family of the table."""
    names = [*(f"{n}ForCausalLM" for n in _DECODERS), *_OTHERS]
    hf = "transformers"
    out = [Family(hf, n, partial(_hf, n, "")) for n in names]
    out += [
        Family(hf, "DeepseekV2ForCausalLM", _deepseek_v2),
        Family(hf, "Qwen2VLForConditionalGeneration (text only)", _qwen2_vl),
        Family(hf, "WhisperForConditionalGeneration", _whisper),
        Family(hf, "CLIPModel", partial(_pairs, "CLIPModel", "CLIPConfig"), contrastive_loss),
        Family(hf, "SiglipModel", partial(_pairs, "SiglipModel", "SiglipConfig"), sigmoid_loss),
        Family(hf, "LlavaForConditionalGeneration (text only)", partial(_llava, False)),
        Family(hf, "LlavaForConditionalGeneration (with images)", partial(_llava, True)),
    ]

    def own(group: str, name: str, model: Callable[[], nn.Module], batch: Callable[[], Batch], loss: Loss) -> None:
        out.append(Family(group, name, partial(_plain, model, batch), loss))

    torch_, others = "torch.nn", "after the sources"
    own(torch_, "nn.TransformerEncoder, causal", plain.EncoderLM, partial(tokens, "src"), token_loss)
    classified = lambda: {**tokens("src", labels=False), "labels": images()["labels"]}  # noqa: E731
    own(torch_, "nn.TransformerEncoder, classifier", plain.EncoderClassifier, classified, class_loss)
    own(torch_, "nn.Transformer with tgt_mask", plain.Seq2Seq, partial(tokens, "src", "tgt"), token_loss)
    own(torch_, "nn.LSTM language model", plain.RecurrentLM, partial(tokens, "ids"), token_loss)
    own(others, "DLRM", plain.DLRM, _clicks, click_loss)
    out.append(
        Family(
            others, "torchvision ResNet (evaluation mode)", partial(_plain, vision.ResNet, images, False), class_loss
        )
    )
    own(others, "torchvision ResNet (training mode)", vision.ResNet, images, class_loss)
    own(others, "torchvision ViT", vision.TorchViT, images, class_loss)
    own(others, "timm ViT", vision.TimmViT, images, class_loss)
    own(others, "ConvNeXt", vision.ConvNeXt, images, class_loss)
    own(others, "Swin", vision.SwinBlocks, images, class_loss)
    own(others, "MLP-Mixer", vision.Mixer, images, class_loss)
    own(others, "DiT", vision.DiT, _noisy, noise_loss)
    own(others, "Meta Llama 3", decoders.MetaLlama, partial(tokens, "tokens"), token_loss)
    own(others, "torchtitan Llama 3", decoders.TorchtitanLlama, partial(tokens, "tokens"), token_loss)
    own(others, "gpt-fast", decoders.GptFast, partial(tokens, "idx"), token_loss)
    own(others, "Gemma 2 as in litgpt", decoders.lit_gemma, partial(tokens, "idx"), token_loss)
    own(others, "Mixtral as in litgpt", decoders.lit_mixtral, partial(tokens, "idx"), token_loss)
    own(others, "x-transformers", decoders.XTransformer, partial(tokens, "x"), token_loss)
    out += [_packaged(m) for m in packages.models()]
    return out


def _packaged(model: packages.Packaged) -> Family:
    batch: Callable[[], Batch] = partial(tokens, model.takes)
    if model.kind == packages.IMAGES:
        batch = lambda: {model.takes if n == "x" else n: x for n, x in images().items()}  # noqa: E731
    loss = {packages.IMAGES: class_loss, packages.TOKENS: token_loss, packages.OUTPUT: None}[model.kind]
    return Family("package", model.name, partial(_plain, model.make, batch), loss)


def eager(
    loss_fn: Loss | None, model: nn.Module, batch: Batch, num_parts: int = 1
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the module itself, means over `num_parts` micro-batches."""
    model.zero_grad()
    inputs, total = [n for n in batch if n in _parameters(model)], 0.0
    for part in range(num_parts):
        mine = {n: x.chunk(num_parts)[part] for n, x in batch.items()}
        loss = _value(model, mine, loss_fn, inputs) / num_parts
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def couples_samples(model: nn.Module) -> bool:
    """Return True if micro-batches compute something else than the whole batch: batch norm in training mode."""
    return any("running_mean" in m._buffers and m.training for m in model.modules())


@dataclass(frozen=True)
class Truth:
    """What a module computes."""

    model: nn.Module
    batch: Batch
    loss: float
    gradients: Mapping[str, torch.Tensor]

    def compared(self, loss: float, gradients: Mapping[str, torch.Tensor]) -> tuple[str, float]:
        """Return what is wrong with a program's loss and gradients ("" if nothing), and the worst gradient's error."""
        dtype = next(self.model.parameters()).dtype
        loss_tolerance, gradient_tolerance = hf_classes.TOLERANCES[dtype]
        if not abs(loss - self.loss) <= loss_tolerance * abs(self.loss):
            return f"loss {loss:.6f} instead of {self.loss:.6f}", 0.0
        worst, name = hf_classes.compare(gradients, self.gradients)
        return (f"gradient of {name} off by {worst:.1e}" if worst > gradient_tolerance else ""), worst


def _on_rank(rank: int, world: int, program: Program, step: SimulatedStep) -> tuple[float, dict[str, Any]]:
    """Run a step on this rank of real processes; every rank has the whole batch.

    Returns:
        The loss, and gradients as NumPy arrays: shared tensors would end with their process.
    """
    pm = ParallelModel(program.spec, program.sources, step.params, step.buffers, dtype=step.dtype)
    loss = float(pm.step(dict(step.batch)))
    return loss, {n: g.numpy() for n, g in pm.gradients().items()}


def of_parts(truth: Truth, loss_fn: Loss | None, degrees: str) -> Truth:
    """Return what the module computes from the micro-batches of these degrees."""
    _, num_parts = DEGREES.get(degrees, ({}, 1))
    if num_parts == 1 or not couples_samples(truth.model):
        return truth
    return Truth(truth.model, truth.batch, *eager(loss_fn, truth.model, truth.batch, num_parts))


def run(truth: Truth, graph: ModelGraph, degrees: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the program with these degrees: simulated, with cp on real processes."""
    pins, num_micro_batches = (DEGREES | {ONE_DEVICE: ({}, 1)})[degrees]
    num_ranks = 1 if degrees == ONE_DEVICE else 2
    pins = {"num_micro_batches": num_micro_batches, "recompute": "none", "state_slack": 1.0, **pins}
    cluster = Cluster(1, num_ranks, Device("made up", 1e12, 1e9, 1 << 36, "made up"), Level(0.0, 1e9, "made up"), "cpu")
    length, target = lengths_of(graph, truth.model, truth.batch)
    env = {
        "b": BATCH // num_micro_batches // pins.get("dp", 1),
        "s": length // pins.get("cp", 1),
        "t": target or length,
    }
    try:
        _, layouts, _ = make_plan(graph, cluster, read_pins(pins, num_ranks), env)
    except InfeasibleError:  # some of the state cannot be cut in two
        del pins["state_slack"]
        _, layouts, _ = make_plan(graph, cluster, read_pins(pins, num_ranks), env)
    params = {n: p.detach() for n, p in truth.model.named_parameters()}
    dtype = next(iter(params.values())).dtype
    step = SimulatedStep(params, dict(all_buffers(truth.model)), truth.batch, num_micro_batches, None, dtype)
    program = compile_program(graph, layouts)
    if "cp" in pins:
        loss, gradients = run_ranks(_on_rank, 2, program, step, timeout_s=90.0, start="fork")[0]
        return loss, {n: torch.from_numpy(g) for n, g in gradients.items()}
    return run_simulated(program, step)


def examine(family: Family) -> Row:
    """Return what became of one family: equal if it is at all the degrees of `NEEDED`."""
    try:
        model, batch = family.make()
        truth = Truth(model, batch, *eager(family.loss, model, batch))
        again, _ = eager(family.loss, model, batch)
    except Exception as exc:  # whatever the module says
        return Row(family.group, family.name, NOT_RUN, short(exc))
    if again != truth.loss:
        return Row(family.group, family.name, NOT_RUN, f"its loss is random: {truth.loss:.6f}, then {again:.6f}")
    model.zero_grad()
    start = time.perf_counter()
    try:
        graph = capture(model, batch, family.loss)
    except AutoplanError as exc:
        return Row(family.group, family.name, REFUSED, short(exc), capture_s=time.perf_counter() - start)
    except Exception as exc:
        return Row(family.group, family.name, CRASHED, crash(exc), truth.loss)
    capture_s = time.perf_counter() - start
    parity, reasons, errors = [], [], [0.0]
    for degrees in DEGREES:
        outcome, why = EQUAL, ""
        try:
            why, error = of_parts(truth, family.loss, degrees).compared(*run(truth, graph, degrees))
            outcome = WRONG if why else EQUAL
            errors.append(error)
        except AutoplanError as exc:
            outcome, why = REFUSED, short(exc)
        except Exception as exc:
            outcome, why = CRASHED, crash(exc)
        parity.append((degrees, outcome))
        if why:
            reasons.append(f"{degrees}: {why}")
    found = {o for d, o in parity if d in NEEDED or o in (WRONG, CRASHED)}
    worst = next(o for o in (WRONG, CRASHED, REFUSED, EQUAL) if o in found)
    reason = "; ".join(reasons)
    return Row(
        family.group, family.name, worst, reason, truth.loss, max(errors), capture_s=capture_s, parity=tuple(parity)
    )


def tasks(only: str) -> list[Task]:
    """Return the examination of every family whose name matches `only`."""
    return [Task(f.group, f.name, partial(examine, f)) for f in families() if re.search(only, f.name)]


_INTRODUCTION = """Every model is small, has random values, is not changed for autoplan, and is captured in float64.
`capture s` is wall time on a shared machine. A degree is equal if the sharded program has the
module's loss (relative 1e-6) and every gradient (1e-4, because many modules compute parts in float32); `error` is that
of the worst gradient.

tp 2, pp 2 (two micro-batches) and dp 2 ZeRO 3 run with all ranks in one process: the emitted program with real
numerics, but not the runtime's schedules and ZeRO shards, which tests/whole covers. cp 2 runs on two gloo processes. A
family is equal if it is at the first three; where only cp 2 is refused, the last column says why.

Models of the group `package` come from packages on PyPI (experiments/compatibility/packages.py). Models of the group
`after the sources` are written small after the published architecture, with its operations
(experiments/compatibility/architectures). A run of the command may try some families only, and keeps the lines of the
others, so that lines may come from different states of the code.
"""


def _cell(row: Row, degrees: str) -> str:
    found = dict(row.parity).get(degrees, "")
    return "" if found == REFUSED else found


def _line(row: Row) -> str:
    seconds = "" if row.capture_s is None else f"{row.capture_s:.1f}"
    error = "" if row.error is None else f"{row.error:.0e}"
    cells = [row.name, row.group, row.outcome, seconds, *(_cell(row, d) for d in DEGREES), error, escaped(row.why)]
    return "| " + " | ".join(cells) + " |"


def read_lines(page: str) -> dict[str, tuple[str, str]]:
    """Return the lines of a page of families: name -> (outcome, line)."""
    cells = ((line.split(" | "), line) for line in page.splitlines() if line.startswith("| "))
    return {c[0].removeprefix("| "): (c[2], line) for c, line in cells if len(c) > 2 and c[2] in OUTCOMES}


def page(rows: Sequence[Row], before: str, versions: str) -> str:
    """Return the text of docs/model_zoo.md. `before`: its text now, for families without a row."""
    found = {r.name: (r.outcome, _line(r)) for r in rows}
    names = [f.name for f in families()]
    known = {n: line for n, line in (read_lines(before) | found).items() if n in names}
    ran = [outcome for outcome, _ in known.values() if outcome != NOT_RUN]
    equal, absent = sum(outcome == EQUAL for outcome in ran), [n for n in names if n not in known]
    lines = [
        "# Model families",
        "",
        f"Generated by `python -m experiments.compatibility.model_zoo depth --write` ({versions}, CPU).",
        _INTRODUCTION,
        f"Equal: {equal} of {len(ran)} families." + (f" Never tried: {', '.join(absent)}." if absent else ""),
        "",
        "| family | group | outcome | capture s | " + " | ".join(DEGREES) + " | error | why |",
        "|---|---|---|---|" + "---|" * len(DEGREES) + "---|---|",
        *(known[n][1] for n in names if n in known),
    ]
    return "\n".join(lines) + "\n"
