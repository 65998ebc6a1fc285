"""Plain PyTorch as tutorials write it: models of torch.nn's own layers.

EncoderLM     nn.TransformerEncoder under a causal mask, as in PyTorch's language model tutorial
Seq2Seq       nn.Transformer with a target mask, as in PyTorch's translation tutorial
RecurrentLM   nn.LSTM, as in PyTorch's word_language_model, batch first
DLRM          embedding bags, bottom and top MLP, pairwise products of features, binary cross-entropy
"""

from __future__ import annotations

import math

import torch
from torch import nn

VOCAB, DIM, HEADS, LAYERS, INNER, LONGEST = 96, 32, 4, 2, 48, 64


class Positions(nn.Module):
    """Sines and cosines added to the embedding, batch first."""

    pe: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(LONGEST).unsqueeze(1)
        factor = torch.exp(torch.arange(0, DIM, 2) * (-math.log(10000.0) / DIM))
        pe = torch.zeros(1, LONGEST, DIM)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * factor), torch.cos(position * factor)
        self.register_buffer("pe", pe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[:, : x.size(1)]


class EncoderLM(nn.Module):
    """nn.TransformerEncoder with a causal mask made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), Positions()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, INNER, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.embed(src) * math.sqrt(DIM))
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], dtype=x.dtype)
        out: torch.Tensor = self.head(self.encoder(x, mask=mask))
        return out


class EncoderClassifier(nn.Module):
    """nn.TransformerEncoder without a mask, averaged over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), Positions()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, INNER, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.positions(self.embed(src))).mean(1))
        return out


class Seq2Seq(nn.Module):
    """nn.Transformer with a causal mask of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM), Positions()
        self.transformer = nn.Transformer(DIM, HEADS, LAYERS, LAYERS, INNER, 0.0, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        x, y = self.positions(self.source(src)), self.positions(self.target(tgt))
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=x.dtype)
        out: torch.Tensor = self.head(self.transformer(x, y, tgt_mask=mask))
        return out


class RecurrentLM(nn.Module):
    """Two layers of nn.LSTM between an embedding and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(VOCAB, DIM), nn.LSTM(DIM, DIM, LAYERS, batch_first=True)
        self.drop, self.decoder = nn.Dropout(0.0), nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(self.drop(self.encoder(ids)))
        out: torch.Tensor = self.decoder(self.drop(output))
        return out


class DLRM(nn.Module):
    """Meta's recommendation model: sparse features in bags of 3, dense ones, products of all pairs."""

    def __init__(self, tables: int = 4, dense: int = 6) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(VOCAB, 16, mode="sum") for _ in range(tables))
        self.bot_l = nn.Sequential(nn.Linear(dense, DIM), nn.ReLU(), nn.Linear(DIM, 16), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top_l = nn.Sequential(nn.Linear(16 + pairs, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bot_l(dense)
        ly = [table(sparse[:, i]) for i, table in enumerate(self.emb_l)]
        batch, d = x.shape
        t = torch.cat([x, *ly], dim=1).view(batch, -1, d)
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        n = z.shape[1]
        li = torch.tensor([i for i in range(n) for _ in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        out: torch.Tensor = self.top_l(torch.cat([x, z[:, li, lj]], dim=1))
        return out.squeeze(1)
