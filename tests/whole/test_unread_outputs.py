"""Layers that are alike, of which the last one makes something that nobody reads, as the text beside an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.cost_models.hardware.cluster import Cluster

WIDTH, LAYERS = 32, 2


class Layer(nn.Module):
    """Changes an image by the text, and then the text by the image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.text_up, self.text_down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        image = image + self.down(F.gelu(self.up(image + text.mean(1, keepdim=True))))
        text = torch.tanh(text + image.mean(1, keepdim=True))
        return image, text + self.text_down(F.gelu(self.text_up(self.norm(text))))


class Both(nn.Module):
    """An image that is read in the end, and a text that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = self.embed(image), self.embed_text(text)
        for layer in self.layers:
            image, text = layer(image, text)
        return self.head(image)


def test_what_nobody_reads_sends_nothing_in_the_backward() -> None:
    """The last text has a forward, as in the module, and no backward: neither its input nor its parameters are
    summed, and the ledger says so."""
    batch = {"image": torch.randn(4, 16, 8), "text": torch.randn(4, 8, 8), "target": torch.randn(4, 16, 8)}
    plan = autoplan.plan(
        Both(), Cluster.local(2, "cpu"), example_inputs=batch, loss_fn=lambda found, b: F.mse_loss(found, b["target"]),
        global_batch_size=4, pins={"tp": 2, "num_micro_batches": 1}, verify=False,
    )  # fmt: skip
    report = autoplan.rehearse(plan, "0")
    times = {row.name: row.expected for row in report.ranks[0].rows if row.unit == "times"}
    of_text = f"{batch['text'].shape[0] * batch['text'].shape[1] * WIDTH * 4:,} bytes"
    assert times[f"all_reduce over tp, forward, {of_text}"] == LAYERS
    assert times[f"all_reduce over tp, backward, {of_text}"] == LAYERS - 1
