"""nn.Transformer, its encoders and decoders, with masks: equal to the modules on several simulated devices."""

from __future__ import annotations

from collections.abc import Mapping

import plain_models
import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from experiments.compatibility.families import SEQ, token_loss, tokens

DIM = 16
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of forms that PyTorch has no fast kernels for


def _layer(**given: object) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, 4, 24, 0.0, **{"batch_first": True, **given})  # type: ignore[arg-type]


class Encoder(nn.Module):
    """An encoder with a mask: `causal` (made in the forward), `hint`, `table` (a buffer), or none."""

    table: torch.Tensor

    def __init__(self, mask: str = "", **given: object) -> None:
        super().__init__()
        self.mask, self.embed, self.head = mask, nn.Embedding(96, DIM), nn.Linear(DIM, 96)
        self.encoder = nn.TransformerEncoder(_layer(**given), 2)
        near = (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs() > 3
        self.register_buffer("table", near)

    def forward(self, src: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x, more = self.embed(src), {}
        if self.mask == "table":
            more = {"mask": self.table[: src.shape[1], : src.shape[1]]}
        elif self.mask:
            more = {"mask": nn.Transformer.generate_square_subsequent_mask(src.shape[1], dtype=x.dtype)}
        if self.mask == "changed":
            more["mask"][:, :2] = 0.0
        if self.mask == "hint":
            more["is_causal"] = True
        out: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=padding, **more))
        return out


class Decoder(nn.Module):
    """A decoder that reads a memory with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(96, DIM), nn.Embedding(96, DIM), nn.Linear(DIM, 96)
        layer = nn.TransformerDecoderLayer(DIM, 4, 24, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(DIM))

    def forward(self, src: torch.Tensor, tgt: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=torch.float64)
        found = self.decoder(self.target(tgt), self.source(src), mask, memory_key_padding_mask=padding)
        out: torch.Tensor = self.head(found)
        return out


def _padded(batch: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {**batch, "padding": torch.arange(SEQ) >= torch.tensor([[SEQ], [SEQ - 3], [SEQ - 5], [SEQ - 1]])}


def masked(graph: object) -> bool:
    """Return True if some attention of the graph has a tensor as mask."""
    nodes = [n for b in graph.blocks.values() for n in b.nodes]  # type: ignore[attr-defined]
    return any(op_kind(n.op) is OpKind.ATTENTION and len(n.tensor_inputs) > 3 for n in nodes)


@pytest.mark.parametrize("mask", ["causal", "hint", "table", "changed"])
def test_encoders_with_masks(mask: str) -> None:
    degrees = ("tp 2", "pp 2") if mask == "causal" else ("tp 2",)
    graph = plain_models.assert_equal(plain_models.filled(Encoder(mask)), tokens("src"), token_loss, degrees)
    assert masked(graph) == (mask in ("table", "changed"))


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_with_padding(norm_first: bool) -> None:
    model = plain_models.filled(Encoder("causal", norm_first=norm_first))
    plain_models.assert_equal(model, _padded(tokens("src")), token_loss, ("tp 2", "dp 2 ZeRO 3"))


def test_decoders_with_padding() -> None:
    plain_models.assert_equal(plain_models.filled(Decoder()), _padded(tokens("src", "tgt")), token_loss)


def test_evaluation_mode() -> None:
    """PyTorch's kernels for inference stay out, also where nothing of an encoder is trained."""
    model = plain_models.filled(Encoder(activation="gelu"), training=False)
    model.encoder.requires_grad_(False)
    model.embed.requires_grad_(False)
    assert torch.backends.mha.get_fastpath_enabled()
    plain_models.assert_equal(model, tokens("src"), token_loss, ("tp 2",))
    assert torch.backends.mha.get_fastpath_enabled()


def test_sequence_first() -> None:
    class SequenceFirst(Encoder):
        def forward(self, src: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
            x = self.embed(src).transpose(0, 1)
            mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], dtype=x.dtype)
            out: torch.Tensor = self.head(self.encoder(x, mask).transpose(0, 1))
            return out

    plain_models.assert_equal(plain_models.filled(SequenceFirst(batch_first=False)), tokens("src"), token_loss)


def test_every_length_of_a_causal_mask() -> None:
    assert "s" not in capture(Encoder("causal"), tokens("src"), token_loss).bounds
