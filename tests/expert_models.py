"""Small models with experts of every form: stacked as Hugging Face has them, and in loops over modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from one_step import errors_of_a_step
from torch import nn
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.beam.modeling_beam import BeamExperts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4Router, Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import autoplan

HIDDEN, EXPERTS = 16, 4
_SIZES = dict(
    hidden_size=HIDDEN, intermediate_size=24, moe_intermediate_size=24, num_local_experts=EXPERTS,
    moe_num_experts=EXPERTS, n_routed_experts=EXPERTS, moe_latent_size=None, swiglu_alpha=1.7, swiglu_limit=0.5,
    moe_hidden_size=HIDDEN, post_norm_eps=1e-5, num_experts=EXPERTS,
)  # fmt: skip


def config(**more: Any) -> transformers.PreTrainedConfig:
    """Sizes of small experts by the names of several config classes."""
    made = transformers.PreTrainedConfig(**_SIZES, **more)
    made._experts_implementation = "eager"
    return made


class Routed(nn.Module):
    """A router and stacked experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        out: torch.Tensor = self.experts(flat, index, weights).view_as(x)
        return out


@autoplan.experts_forward(
    gate_up="w_in", down="w_out", gate_up_bias="b_in", down_bias="b_out", activation="gelu", gated=False,
    transposed=True, scales_inputs=True,
)  # fmt: skip
class ScaledExperts(nn.Module):
    """Routing weights scale what experts take, as in Llama 4; with biases, which they do not scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.b_in = (nn.Parameter(torch.empty(EXPERTS, *s, 24)) for s in ((HIDDEN,), ()))
        self.w_out, self.b_out = (nn.Parameter(torch.empty(EXPERTS, *s, HIDDEN)) for s in ((24,), ()))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for k in range(index.shape[1]):
            at, rows = index[:, k], (hidden * weights[:, k, None]).unsqueeze(1)
            inner = F.gelu(rows @ self.w_in[at] + self.b_in[at, None])
            out = out + (inner @ self.w_out[at]).squeeze(1) + self.b_out[at]
        return out


class WideRouter(Llama4Router):
    """The router of Llama 4 with its sigmoid in the dtype of the model; theirs rounds float64 to float32."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(x, self.weight)
        values, index = torch.topk(logits, self.top_k, dim=1)
        return torch.full_like(logits, float("-inf")).scatter_(1, index, values).sigmoid(), logits


class OfEveryToken(nn.Module):
    """The layer of Llama 4, which computes every expert for every token."""

    def __init__(self) -> None:
        super().__init__()
        sizes = config(hidden_act="silu", num_experts_per_tok=2)
        self.moe = Llama4TextMoe(sizes)
        self.moe.router = WideRouter(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.moe(x)[0]
        return out.view_as(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class _Loop(nn.Module):
    """A router and experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, HIDDEN)
        probs, index = self.router(flat).softmax(-1).topk(2, -1)
        return flat, probs, index


class AsLitgpt(_Loop):
    """`y[tokens] += ...` for the mask of every expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, probs, index = self.choose(x)
        masks = (index.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
        y = torch.zeros_like(flat)
        for mask, expert in zip(masks, self.experts, strict=True):
            tokens, places = torch.where(mask)
            y[tokens] += probs[tokens, places, None] * expert(flat[tokens])
        return y.view_as(x)


class AsMixtral(_Loop):
    """`index_add_` for the experts that were hit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, probs, index = self.choose(x)
        y = torch.zeros_like(flat)
        mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            places, tokens = torch.where(mask[hit].squeeze(0))
            rows = flat[None, tokens].reshape(-1, HIDDEN)
            y.index_add_(0, tokens, self.experts[hit[0]](rows) * probs[tokens, places, None])
        return y.view_as(x)


class ByMask(_Loop):
    """A mask of tokens per expert; experts without tokens are skipped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, probs, index = self.choose(x)
        y = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            mask = (index == k).any(-1)
            if not mask.any():
                continue
            share = (probs * (index == k)).sum(-1)
            y[mask] += expert(flat[mask]) * share[mask].unsqueeze(-1)
        return y.view_as(x)


class TopOne(_Loop):
    """`nonzero` of the tokens of one expert, whose rows are written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, _, _ = self.choose(x)
        probs, index = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            tokens = (index == k).nonzero().squeeze(-1)
            if tokens.numel() > 0:
                y[tokens] = expert(flat[tokens]) * probs[tokens, None]
        return y.view_as(x)


class Coupled(_Loop):
    """The tokens of an expert meet: no dense form is the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, probs, index = self.choose(x)
        y = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            tokens, places = torch.where(index == k)
            rows = flat[tokens]
            y.index_add_(0, tokens, expert(rows - rows.mean(0)) * probs[tokens, places, None])
        return y.view_as(x)


class Model(nn.Module):
    """Two layers of experts with skip connections."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


STACKED: Mapping[str, Callable[[], nn.Module]] = {
    "biases, transposed, interleaved, clamped": lambda: Routed(GptOssExperts(config())),
    "transposed": lambda: Routed(AriaExperts(config())),
    "relu squared, not gated": lambda: Routed(NemotronHExperts(config(mlp_hidden_act="relu2"))),
    "tanh-approximated gelu": lambda: Routed(MixtralExperts(config(hidden_act="gelu_pytorch_tanh"))),
    "clamped": lambda: Routed(DeepseekV4Experts(config(hidden_act="silu"))),
    "biases, transposed, not gated, scaled inputs": lambda: Routed(ScaledExperts()),
    "Llama 4": OfEveryToken,
}
ROUNDED: Mapping[str, Callable[[], nn.Module]] = {  # to float32 also in float64, so that ranks differ by its digits
    "gate in float32": lambda: Routed(BeamExperts(config(hidden_act="silu"))),
}
NORMED: Mapping[str, Callable[[], nn.Module]] = {
    "a norm behind": lambda: Routed(MuseSparkExperts(config(hidden_act="silu")))
}
LOOPS: Mapping[str, Callable[[], nn.Module]] = {c.__name__: c for c in (AsLitgpt, AsMixtral, ByMask, TopOne)}
MAKERS = {**STACKED, **ROUNDED, **NORMED, **LOOPS}


def made(name: str) -> nn.Module:
    """A model with random weights that make the choice of experts matter."""
    torch.manual_seed(0)
    model = Model(MAKERS[name])
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3)
    return model


def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return out.square().mean()


def batch_of(size: int = 2) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 6, HIDDEN, generator=torch.Generator().manual_seed(1))}


def errors(rank: int, world: int, name: str, pins: dict[str, Any]) -> tuple[float, float, str]:
    """Relative error of the loss, the worst of a gradient, and the program."""
    model, batch = made(name).double(), {n: x.double() for n, x in batch_of(4).items()}
    pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss, pins=pins)
    loss_error, gradient, _ = errors_of_a_step(pm, model, batch, lambda: loss(model(**batch), batch))
    assert all(p.grad is not None for p in model.parameters())
    return loss_error, gradient, "".join(pm.source.values())
