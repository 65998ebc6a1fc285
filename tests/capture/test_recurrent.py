"""Recurrent layers of PyTorch as one op."""

from __future__ import annotations

from typing import Any

import models
import plain_models
import pytest
import recurrent_models
import torch
from harness import pool
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autoplan.capture.export import capture
from autoplan.capture.frontend.inputs import LossModule
from autoplan.capture.frontend.recurrences import find_scans
from autoplan.errors import CaptureError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


@pytest.mark.parametrize("name", list(recurrent_models.LAYERS))
def test_recurrent_layers_are_one_op_of_every_length(name: str) -> None:
    model, batch = recurrent_models.made(name), models.token_batch(4, 16)
    graph = capture(model, batch, recurrent_models.loss)
    (node,) = [n for b in graph.blocks.values() for n in b.nodes if n.op == "recurrent"]
    assert node.attrs["kind"] in recurrent_models.KINDS and "s" not in graph.bounds
    outcome = verify_whole(VerifyTask(model, graph, batch, recurrent_models.loss), limit_s=60.0)
    assert outcome.done and "s=" in outcome.text, outcome.text


@pytest.mark.parametrize("pins", [{"dp": 2, "zero_stage": 3}, {"tp": 2}], ids=["dp", "tp"])
def test_two_ranks_train_a_recurrent_model(pins: dict[str, Any]) -> None:
    for loss, gradients in pool(2).run(recurrent_models.errors, "lstm", pins, timeout_s=180):
        assert loss < 1e-12 and gradients < 1e-10


@pytest.mark.parametrize("layers", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_stands_between_ops_of_one_layer(layers: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = recurrent_models.LanguageModel(layers(32, 16, 3, dropout=0.25, batch_first=True, bidirectional=True))
    batch = models.token_batch(4, 16)
    graph = capture(model, batch, recurrent_models.loss)
    ops = [n.op for b in graph.blocks.values() for n in b.nodes]
    assert ops.count("recurrent") == 3 and ops.count("dropout") == 2
    outcome = verify_whole(VerifyTask(model, graph, batch, recurrent_models.loss), limit_s=60.0)
    assert outcome.done and "in float64" in outcome.text, outcome.text
    evaluated = capture(model.eval(), batch, recurrent_models.loss)
    assert [n.op for b in evaluated.blocks.values() for n in b.nodes].count("dropout") == 0


class Packed(nn.Module):
    """Classes and tags of samples by length, with everything that a packed sequence gives."""

    def __init__(self, total: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.total = nn.Embedding(96, 8), nn.Linear(24, 6), total
        self.both = nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True)
        self.first = nn.GRU(8, 8)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        total = x.shape[1] if self.total else None
        rows, (_, cells) = self.both(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        tokens, _ = pad_packed_sequence(rows, batch_first=True, padding_value=0.5, total_length=total)
        _, last = self.first(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False))
        every = torch.cat([cells[-1], cells[0], last[0]], -1).unsqueeze(1).expand(-1, x.shape[1], -1)
        return self.head(torch.cat([tokens, every], -1))


def _samples() -> dict[str, torch.Tensor]:
    batch = {"ids": torch.randint(96, (4, 7)), "labels": torch.randint(6, (4, 7))}
    return batch | {"lengths": torch.tensor([4, 7, 1, 5])}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_packed_sequences_are_packed_by_every_rank(dropout: float) -> None:
    torch.manual_seed(0)
    model, batch = plain_models.filled(Packed()), _samples()
    model.both.dropout = dropout
    if dropout:
        graph = capture(model, batch, recurrent_models.loss)
    else:
        graph = plain_models.assert_equal(model, batch, recurrent_models.loss, ("tp 2", "dp 2 ZeRO 3"))
    outcome = verify_whole(VerifyTask(model, graph, batch, recurrent_models.loss), limit_s=60.0)
    assert outcome.done, outcome.text
    nodes = [n for b in graph.blocks.values() for n in b.nodes if n.op == "recurrent"]
    assert all(n.attrs["by_length"] for n in nodes) and len(nodes) == (3 if dropout else 2)


def test_a_length_of_the_batch_at_hand_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"as long as the longest of a batch.*give total_length=x\.shape\[1\]"):
        capture(Packed(total=False), _samples(), recurrent_models.loss)


def test_a_scan_inside_a_module_is_found() -> None:
    """As in the model itself: it is one op, and no loop is traced."""
    from transformers import MambaConfig, MambaForCausalLM

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.lm(input_ids=input_ids, labels=labels)

    graph = capture(Inside(), models.token_batch(2, 512))
    assert sum(n.op == "scan" for b in graph.blocks.values() for n in b.nodes) == 1


def running_mean(x: torch.Tensor) -> torch.Tensor:
    """A loop over the sequence."""
    out, state = [], torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        state = 0.9 * state + x[:, k]
        out.append(state)
    return torch.stack(out, 1)


class Step(nn.Module):
    def __init__(self, held: bool) -> None:
        super().__init__()
        self.norm, self.function = nn.LayerNorm(8), running_mean if held else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.function or running_mean)(self.norm(x))


@pytest.mark.parametrize("held", [True, False])
def test_a_function_that_a_module_holds_is_no_endless_search(held: bool) -> None:
    """Another function of its name changes nothing: it is refused. By its name it is found."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Step(held)])[0])
    model.layers = nn.ModuleList([model[1]])
    run, example = LossModule(model, ("input",), lambda out, _: out.square().mean()), {"input": torch.zeros(2, 64, 8)}
    if held:
        with pytest.raises(CaptureError, match=r"layers\.0 \(Step of LayerNorm\) goes along the sequence step by step"):
            find_scans(model, run, example)
    else:
        assert [scan.name for scan in find_scans(model, run, example)] == ["running_mean"]
