"""Models without lists of layers: blocks that are attributes, stages of a ResNet, a U-Net, sequences, functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from trained_jobs import TrainedCase, normal, square


class Block(nn.Module):
    """A transformer block of one head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        out: torch.Tensor = x + self.mlp(x)
        return out


class Attributes(nn.Module):
    """Blocks that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.block1, self.block2, self.block3 = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block3(self.block2(self.block1(self.first(x)))))
        return out


class UsedAgain(nn.Module):
    """One block that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.block = nn.Linear(8, 16), nn.Linear(16, 4), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        out: torch.Tensor = self.head(x)
        return out


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or before != 2 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, 2 * width, 1, stride, bias=False), nn.BatchNorm2d(2 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        found: torch.Tensor = self.relu(out)
        return found


class Residual(nn.Module):
    """A ResNet whose blocks are attributes of stages of different widths, which are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)
        self.layer1, self.layer2 = Stage(8, 4, 1), Stage(8, 8, 2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        out: torch.Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class Stage(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = Bottleneck(before, width, stride), Bottleneck(2 * width, width)
        self.c = Bottleneck(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.b(self.a(x)))
        return out


class DoubleConv(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.convs(x)
        return out


class Up(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(before, after, 2, stride=2), DoubleConv(2 * after, after)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(torch.cat([skip, self.up(x)], dim=1))
        return out


class UNet(nn.Module):
    """A U-Net (arXiv 1505.04597): what goes down is read on the way up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inc, self.pool, self.outc = DoubleConv(3, width), nn.MaxPool2d(2), nn.Conv2d(width, 2, 1)
        self.down1, self.down2 = DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width)
        self.up1, self.up2 = Up(4 * width, 2 * width), Up(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inc(x)
        second = self.down1(self.pool(first))
        x = self.up2(self.up1(self.down2(self.pool(second)), second), first)
        out: torch.Tensor = self.outc(x)
        return out


class Functions(nn.Module):
    """Parameters and functions, no modules."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(16, 16) / 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = torch.tanh(F.linear(x, self.get_parameter(f"w{i}")))
        return x


def unlike() -> nn.Sequential:
    """A convolutional network as one sequence, no two modules of which are alike."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 4, 10), nn.ReLU()),
        nn.Linear(10, 4),
    )


class Recurrent(nn.Module):
    """A language model of one nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
        return out


def _ids(size: int, seed: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 32, (size, 6), generator=torch.Generator().manual_seed(seed))}


def next_token(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


CASES = {
    "attributes": TrainedCase(Attributes, normal(6, 8), square),
    "used-again": TrainedCase(UsedAgain, normal(6, 8), square),
    "residual": TrainedCase(Residual, normal(3, 8, 8), square),
    "u-net": TrainedCase(UNet, normal(3, 8, 8), square),
    "unlike": TrainedCase(unlike, normal(3, 8, 8, name="input"), square),
    "functions": TrainedCase(Functions, normal(16), square),
    "recurrent": TrainedCase(Recurrent, _ids, next_token),
}
