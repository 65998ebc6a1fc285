"""Small transformers of images beside a text, in the forms of published ones, for tests/whole/test_joint_sequences.py.

Joint attention as in SD3 and Flux: queries, keys and values of two sequences are joined, and the result is taken apart.
Cross attention as in PixArt and Wan: queries of the image, keys and values of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CHANNELS = 16, 4, 3
MASKED = ("masked", "added", "pairs")  # of `Joint`


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,)) * (1 + scale[:, None]) + shift[:, None]


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class JointLayer(nn.Module):
    """Joint attention with tables of positions; `how` changes it (see `Joint`)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.emb = nn.Linear(WIDTH, 4 * WIDTH)
        self.qkv, self.text_qkv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.text_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, image: Tensor, text: Tensor, time: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shift, scale, text_shift, text_scale = self.emb(F.silu(time)).chunk(4, dim=-1)
        one = self.qkv(modulated(image, shift, scale)).chunk(3, dim=-1)
        two = self.text_qkv(modulated(text, text_shift, text_scale)).chunk(3, dim=-1)
        q, k, v = (heads_of(torch.cat((b, a), dim=1)) for a, b in zip(one, two, strict=True))
        if self.how == "turned":  # values in another order than keys
            v = heads_of(torch.cat((one[2], two[2]), dim=1))
        if self.how == "written":  # positions of the image alone, as in CogView4
            for x in (q, k):
                x[:, :, text.shape[1] :] = rotated(x[:, :, text.shape[1] :], cos[text.shape[1] :], sin[text.shape[1] :])
        else:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mask = None if seen is None else self.mask(seen, image)
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.how == "causal").transpose(1, 2).flatten(2)
        length = text.shape[1]
        if self.how == "sliced":
            for_text, for_image = found[:, :length], found[:, length:]
        elif self.how == "beside":  # not where the two are joined
            for_image, for_text = found.split((image.shape[1], length), dim=1)
        else:
            for_text, for_image = found.split((length, image.shape[1]), dim=1)
        return image + self.out(for_image), text + self.text_out(for_text)

    def mask(self, seen: Tensor, image: Tensor) -> Tensor:
        """Return a mask over the joined tokens, as QwenImage makes it; in other forms for `added` and `pairs`."""
        of_image = torch.ones(image.shape[:2], dtype=torch.bool)
        joined = torch.cat((seen, of_image), dim=1)[:, None, None]
        if self.how == "added":
            return torch.zeros(joined.shape, dtype=image.dtype).masked_fill(~joined, -1e4)
        return joined & joined.transpose(2, 3) if self.how == "pairs" else joined


class Joint(nn.Module):
    """Patches of an image, a learned and a fixed table of positions, joint layers, patches put together.

    Args:
        rows, columns: patches.
        text: tokens of the text.
        how: "split", "sliced", "written", and "masked", where tokens of the text that are not seen are keys of nobody.
            "causal", "turned", "beside", "added" and "pairs" cannot be computed in parts.
    """

    def __init__(self, rows: int, columns: int, text: int, how: str = "split") -> None:
        super().__init__()
        self.patch = nn.Conv2d(CHANNELS, WIDTH, 2, 2)
        self.learned = nn.Parameter(torch.randn(1, rows * columns, WIDTH) * 0.1)
        self.register_buffer("fixed", torch.randn(1, rows * columns, WIDTH) * 0.1)
        self.register_buffer("larger", torch.randn(rows + 2, columns + 3, WIDTH) * 0.1)  # its middle is used
        self.embed_text, self.time = nn.Linear(5, WIDTH), nn.Linear(1, WIDTH)
        angles = torch.rand(text + rows * columns, WIDTH // HEADS // 2)
        self.register_buffer("angles", torch.cat((angles, angles), dim=-1))
        self.layers = nn.ModuleList(JointLayer(how) for _ in range(2))
        self.head = nn.Linear(WIDTH, CHANNELS * 4)

    def forward(self, image: Tensor, text: Tensor, time: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.patch(image)
        rows, columns = x.shape[-2:]
        larger = torch.cat((self.larger[-1:], self.larger[: rows - 1]))  # joined of other pieces than the sequences
        middle = larger[:, 2 : columns + 2]
        x = x.flatten(2).transpose(1, 2) + self.learned + self.fixed + middle.flatten(0, 1)
        y, t = self.embed_text(text), self.time(time[:, None])
        cos, sin = self.angles.cos(), self.angles.sin()
        for layer in self.layers:
            x, y = layer(x, y, t, cos, sin, seen)
        out = self.head(x).unflatten(-1, (CHANNELS, 2, 2)).unflatten(1, (rows, columns))
        return out.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class CrossLayer(nn.Module):
    """Attention of the image to itself, then to a text, whose mask hides its end."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.kv, self.text_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in self.qkv(F.layer_norm(image, (WIDTH,))).chunk(3, dim=-1))
        image = image + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        q, (k, v) = heads_of(self.q(image)), (heads_of(x) for x in self.kv(text).chunk(2, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return image + self.text_out(seen)


class Cross(nn.Module):
    """Frames of patches that attend to themselves and to a text of an odd number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(CHANNELS, WIDTH), nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(CrossLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x, y = self.embed(image.permute(0, 2, 3, 4, 1).flatten(1, 3)), self.embed_text(text)
        mask = (text.sum(-1) * 0.1)[:, None, None]
        for layer in self.layers:
            x = layer(x, y, mask)
        return self.head(x).transpose(1, 2).unflatten(2, tuple(image.shape[2:]))


class Refiner(nn.Module):
    """Attention of a text to itself, under a mask over pairs of its tokens, as HunyuanVideo makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, pairs: Tensor, summary: Tensor) -> Tensor:
        q, k, v = (heads_of(x) for x in self.qkv(F.layer_norm(text, (WIDTH,))).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, pairs).transpose(1, 2).flatten(2)
        return text + self.out(found) * summary[:, None]


class Refined(Joint):
    """A text that passes layers of its own before joint layers. Its tokens that are not seen are keys of nobody.

    Args:
        layers: of the text alone.
    """

    def __init__(self, rows: int, columns: int, text: int, layers: int) -> None:
        super().__init__(rows, columns, text, "masked")
        self.positions = nn.Parameter(torch.randn(text, WIDTH) * 0.1)
        self.refiners = nn.ModuleList(Refiner() for _ in range(layers))

    def forward(self, image: Tensor, text: Tensor, time: Tensor, seen: Tensor) -> Tensor:
        x, y = self.patch(image).flatten(2).transpose(1, 2) + self.learned, self.embed_text(text) + self.positions
        summary = y.mean(dim=1)
        pairs = seen[:, None, None] & seen[:, None, :, None]
        pairs = pairs | torch.eye(text.shape[1], dtype=torch.bool)  # every token sees itself
        for refiner in self.refiners:
            y = refiner(y, pairs, summary)
        t, cos, sin = self.time(time[:, None]) + summary, self.angles.cos(), self.angles.sin()
        for layer in self.layers:
            x, y = layer(x, y, t, cos, sin, seen)
        rows, columns = (size // 2 for size in image.shape[2:])
        out = self.head(x).unflatten(-1, (CHANNELS, 2, 2)).unflatten(1, (rows, columns))
        return out.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def square_error(found: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(found, batch["target"])


def joint_batch(rows: int, columns: int, text: int, samples: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    image = (samples, CHANNELS, 2 * rows, 2 * columns)
    return {
        "image": torch.randn(*image, dtype=torch.float64),
        "text": torch.randn(samples, text, 5, dtype=torch.float64),
        "time": torch.rand(samples, dtype=torch.float64),
        "target": torch.randn(*image, dtype=torch.float64),
    }


def cross_batch(*patches: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    image = (2, CHANNELS, *patches)
    return {
        "image": torch.randn(*image, dtype=torch.float64),
        "text": torch.randn(2, 7, 5, dtype=torch.float64),
        "target": torch.randn(*image, dtype=torch.float64),
    }


def joint(rows: int, columns: int, text: int, how: str = "split") -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    batch = joint_batch(rows, columns, text)
    if how in MASKED:
        target = batch.pop("target")
        batch |= {"seen": torch.rand(2, text) < 0.5, "target": target}
    return Joint(rows, columns, text, how).double(), batch


def refined(rows: int, columns: int, text: int, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    batch = joint(rows, columns, text, "masked")[1]
    torch.manual_seed(0)
    return Refined(rows, columns, text, layers).double(), batch


def cross(*patches: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Cross().double(), cross_batch(*patches)
