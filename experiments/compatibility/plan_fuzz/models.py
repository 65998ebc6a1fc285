"""Small models of many kinds, with their batches and losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]
LossFn = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        make: makes the module (float32, with the weights of the current seed).
        batch: (samples, length, generator, dtype) -> a batch.
        loss: of the output and the batch; None: the model returns its loss.
        exact: True if it computes in float64 throughout, when its parameters are of it.
        coupled: True if the samples of a micro-batch depend on each other: one process runs each whole micro-batch.
        by_samples: True if the loss is a mean over samples, of which all ranks must have as many.
        evaluates: False if an evaluation depends on the micro-batches that its batch is cut into.
        draws: True if it draws random numbers, so that only autoplan on one device has the same ones.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.Generator, torch.dtype], Batch]
    loss: LossFn | None
    exact: bool = True
    coupled: bool = False
    by_samples: bool = False
    evaluates: bool = True
    draws: bool = False


# -- losses -----------------------------------------------------------------------------------------------------------


def mean_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, a mean over the labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())


def smoothed_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same with smoothed labels."""
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), label_smoothing=0.1)


def shifted_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The next token's."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["targets"][:, 1:].flatten())


def summed_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Summed over a sequence, its mean over the sequences, and a mean over all logits."""
    total = F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), reduction="sum")
    return total / batch["targets"].shape[0] + 0.1 * logits.square().mean()


def penalised_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A mean over valid labels, and one over all tokens."""
    return mean_loss(logits, batch) + 0.01 * logits.logsumexp(-1).square().mean()


def weighted_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Each token times its weight, over the sum of weights."""
    each = F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten().clamp(min=0), reduction="none")
    weights = batch["weights"].flatten()
    return (each * weights).sum() / weights.sum()


def two_losses(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Two heads, each over its own valid labels."""
    first, second = outputs
    one = F.cross_entropy(first.flatten(0, -2), batch["targets"].flatten())
    return one + 0.3 * F.cross_entropy(second.flatten(0, -2), batch["others"].flatten())


_CLASSES = torch.linspace(0.5, 2.0, 64, dtype=torch.float64)  # of the classes


def classes_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Classes have weights, by whose sum over the valid labels it is divided."""
    weight = _CLASSES[: logits.shape[-1]].to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), weight=weight)


def counted_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A sum over the number of valid labels, with a small share of the confident ones left out of the sum."""
    each = F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), reduction="none")
    valid = batch["targets"].flatten() != -100
    return ((1 - torch.exp(-each)) * each * valid).sum() / valid.sum()


def bits_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Every class by itself, a mean over all tokens and classes."""
    wanted = F.one_hot(batch["targets"].clamp(min=0), logits.shape[-1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, wanted) + F.kl_div(
        logits.log_softmax(-1), wanted * 0.9 + 0.1 / logits.shape[-1], reduction="batchmean"
    )


def samples_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Every sample's mean over its own valid labels, a mean over samples."""
    each = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    valid = batch["targets"] != -100
    return (each.sum(1) / valid.sum(1).clamp(min=1)).mean()


def halves_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A sum over both halves of the samples' tokens, over the number of valid labels in both."""
    half = logits.shape[1] // 2
    targets = batch["targets"]
    parts = (logits[:, :half], targets[:, :half]), (logits[:, half:], targets[:, half:])
    total = sum(F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in parts)
    loss: torch.Tensor = total / (targets != -100).sum()
    return loss


def valued_loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Over valid labels, and a number of every sample over samples."""
    logits, values = outputs
    return mean_loss(logits, batch) + 0.5 * F.mse_loss(values, batch["values"].to(values.dtype))


LOSSES: dict[str, LossFn] = {
    "samples": samples_loss,
    "halves": halves_loss,
    "valued": valued_loss,
    "classes": classes_loss,
    "counted": counted_loss,
    "bits": bits_loss,
    "mean": mean_loss,
    "smoothed": smoothed_loss,
    "shifted": shifted_loss,
    "summed": summed_loss,
    "penalised": penalised_loss,
    "weighted": weighted_loss,
    "two": two_losses,
}
BY_SAMPLES = ("summed", "penalised", "bits", "samples", "valued")


def tokens_of(samples: int, length: int, vocab: int, generator: torch.Generator, loss: str = "mean") -> Batch:
    """Return token ids and targets of which some are to be ignored, unequally in the samples."""
    shape = (samples, length)
    ids, targets, others = (torch.randint(0, vocab, shape, generator=generator) for _ in range(3))
    share = torch.rand(samples, 1, generator=generator) * 0.6
    targets[torch.rand(shape, generator=generator) < share] = -100
    if torch.rand((), generator=generator) < 0.2:  # whole ranks without a label
        targets[: samples // 2] = -100
    targets[-1, 1] = ids[-1, 1]  # one valid label at least
    others[torch.rand(shape, generator=generator) < 0.5] = -100
    others[0, 0] = ids[0, 0]
    out = {"ids": ids, "targets": targets}
    if loss == "two":
        out["others"] = others
    if loss == "weighted":
        out["weights"] = torch.rand(shape, generator=generator)
    if loss == "valued":
        out["values"] = torch.rand(samples, generator=generator)
    return out


# -- plain modules ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, or attention over another sequence, with grouped heads if `kv` is less than `heads`."""

    def __init__(self, dim: int, heads: int, kv: int, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.kv, self.causal = heads, kv, causal
        size = dim // heads
        self.q, self.out = nn.Linear(dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.k, self.v = nn.Linear(dim, kv * size, bias=False), nn.Linear(dim, kv * size, bias=bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        b, s, d = x.shape
        q = self.q(x).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = (f(memory).view(b, memory.shape[1], self.kv, -1).transpose(1, 2) for f in (self.k, self.v))
        if self.kv < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.out(a.transpose(1, 2).reshape(b, s, d))
        return out


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self, dim: int, heads: int, kv: int, inner: int, dropout: float, causal: bool, cross: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, kv, causal)
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.drop = nn.Dropout(dropout)
        if cross:
            self.norm3, self.cross = nn.LayerNorm(dim), Attention(dim, heads, heads, False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A decoder as one writes it by hand: learned or sinusoidal positions, a head that may be tied."""

    def __init__(
        self,
        vocab: int = 33,
        dim: int = 24,
        heads: int = 4,
        kv: int = 4,
        layers: int = 2,
        inner: int = 52,
        dropout: float = 0.0,
        tied: bool = False,
        sinus: bool = False,
        head_bias: bool = False,
        two: bool = False,
        skips: bool = False,
        unused: bool = False,
        shared: bool = False,
        single: bool = False,
        number: bool = False,
        valued: bool = False,
        returns: str = "",
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        if sinus:
            angles = torch.arange(64)[:, None] / 100 ** (torch.arange(dim) / dim)
            self.register_buffer("table", angles.sin(), persistent=True)
        else:
            self.pos = nn.Embedding(64, dim)
        self.register_buffer("temperature", torch.tensor(0.7), persistent=False)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, kv, inner, dropout, True, False) for _ in range(layers))
        if shared:
            self.blocks[-1].up = self.blocks[0].up
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=head_bias)
        self.skips = skips
        if single:  # a parameter that stays in float32
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        if number:
            self.number = nn.Parameter(torch.tensor(1.2))
        self.returns = returns
        if valued:
            self.value = nn.Linear(dim, 1)
        if two:
            self.second = nn.Linear(dim, vocab)
        if unused:
            self.unused = nn.Linear(3, 3)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> Any:
        length = ids.shape[1]
        places = self.pos(torch.arange(length, device=ids.device)) if hasattr(self, "pos") else self.table[:length]
        x = self.drop(self.tok(ids) + places)
        kept: list[torch.Tensor] = []
        for index, block in enumerate(self.blocks):
            if self.skips and index >= len(self.blocks) - len(self.blocks) // 2:
                x = x + 0.5 * kept.pop()
            x = block(x)
            if self.skips and index < len(self.blocks) // 2:
                kept.append(x)
        x = self.norm(x) * self.temperature
        if hasattr(self, "gain"):
            x = x * self.gain.to(x.dtype)
        if hasattr(self, "number"):
            x = x * self.number
        out = self.head(x)
        if hasattr(self, "second"):
            out = out, self.second(x)
        elif hasattr(self, "value"):
            out = out, self.value(x.mean(1)).squeeze(-1)
        return RETURNS[self.returns][0](out, x)


@dataclass
class _Returned:
    found: Any
    states: torch.Tensor


# how a forward returns what the loss takes, beside what it does not; and how the loss finds it
RETURNS: Mapping[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "": (lambda out, x: out, lambda given: given),
    "dict": (lambda out, x: {"states": x, "found": out}, lambda given: given["found"]),
    "nested": (lambda out, x: ([x], {"found": out}), lambda given: given[1]["found"]),
    "object": (lambda out, x: _Returned(out, x), lambda given: given.found),
}


def decoder(loss: str = "mean", **options: Any) -> Task:
    """A Decoder."""
    vocab = options.get("vocab", 33)

    def batch(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        found = tokens_of(samples, length, vocab, generator, loss)
        return {n: x.to(dtype) if x.is_floating_point() else x for n, x in found.items()}

    find = RETURNS[options.get("returns", "")][1]

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return LOSSES[loss](find(outputs), batch)

    return Task(
        lambda: Decoder(two=loss == "two", valued=loss == "valued", **options),
        batch,
        loss_fn,
        exact=not options.get("single"),
        by_samples=loss in BY_SAMPLES,
        draws=bool(options.get("dropout")),
    )


class Translator(nn.Module):
    """An encoder-decoder."""

    def __init__(self, vocab: int = 33, dim: int = 24, heads: int = 4, layers: int = 2, inner: int = 50) -> None:
        super().__init__()
        self.tok, self.target_tok = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(Block(dim, heads, heads, inner, 0.0, False, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(dim, heads, heads, inner, 0.0, True, True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.tok(source)
        for block in self.encoder:
            x = block(x)
        y = self.target_tok(target)
        for block in self.decoder:
            y = block(y, x)
        out: torch.Tensor = self.head(self.norm(y))
        return out


def translator(**options: Any) -> Task:
    """A Translator; its target is three quarters as long as its source."""
    vocab = options.get("vocab", 33)

    def batch(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        found = tokens_of(samples, length, vocab, generator)
        short = length * 3 // 4
        target = found["ids"].flip(1)[:, :short].contiguous()
        return {"source": found["ids"], "target": target, "targets": found["targets"][:, :short].contiguous()}

    return Task(lambda: Translator(**options), batch, mean_loss)


class Vision(nn.Module):
    """Patches, a class token, layers without a causal mask; classes of the images."""

    def __init__(self, dim: int = 24, heads: int = 4, layers: int = 2, classes: int = 7, pooled: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 10, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, heads, 46, 0.0, False, False) for _ in range(layers))
        self.norm, self.head, self.pooled = nn.LayerNorm(dim), nn.Linear(dim, classes), pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        out: torch.Tensor = self.head(x.mean(1) if self.pooled else x[:, 0])
        return out


class Unit(nn.Module):
    """A residual of two convolutions with a norm."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(groups, width) if groups else nn.BatchNorm2d(width)  # noqa: E731
        self.norm1, self.norm2 = norm(), norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


class Residual(nn.Module):
    """A small ResNet with group norm, or batch norm for `groups` of 0."""

    def __init__(self, width: int = 6, groups: int = 3, units: int = 2, classes: int = 7) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.units = nn.Sequential(*(Unit(width, groups) for _ in range(units)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.units(F.max_pool2d(self.stem(x), 2))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def _images(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    x = torch.randn(samples, 3, 12, 12, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 7, (samples,), generator=generator)
    return {"x": x, "targets": targets}


def _classes(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits, batch["targets"])


def _some_classes(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    found = _images(samples, length, generator, dtype)
    found["targets"][torch.rand(samples, generator=generator) < 0.3] = -100
    found["targets"][0] = 1
    return found


def vision(**options: Any) -> Task:
    """A Vision; some images have no label."""
    return Task(lambda: Vision(**options), _some_classes, _classes)


def residual(**options: Any) -> Task:
    """A Residual."""
    batch_norm = options.get("groups", 3) == 0
    return Task(
        lambda: Residual(**options),
        _images if batch_norm else _some_classes,
        _classes,
        coupled=batch_norm,
        by_samples=batch_norm,
    )


def perceptron(widths: tuple[int, ...] = (12, 21, 21, 5), dropout: float = 0.0) -> Task:
    """A sequence of layers of odd widths; squared errors."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(widths):
            layers.append(nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(o)))
        return nn.Sequential(*layers, nn.Linear(widths[-1], 3))

    def batch(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        x = torch.randn(samples, widths[0], generator=generator, dtype=torch.float64).to(dtype)
        return {"input": x, "targets": torch.randn(samples, 3, generator=generator, dtype=torch.float64).to(dtype)}

    def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(out, batch["targets"])

    return Task(make, batch, loss, by_samples=True, draws=dropout > 0)


class Recurrent(nn.Module):
    """An LSTM or GRU between an embedding and a head."""

    def __init__(self, vocab: int = 21, dim: int = 10, kind: str = "lstm", layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](dim, 14, layers, batch_first=True)
        self.head = nn.Linear(14, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(self.tok(ids))[0])
        return out


def recurrent(**options: Any) -> Task:
    """A Recurrent."""
    return Task(lambda: Recurrent(**options), lambda b, s, g, _: tokens_of(b, s, 21, g), mean_loss)
