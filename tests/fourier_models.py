"""Models that mix their tokens, or a grid, by Fourier transforms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from trained_jobs import TrainedCase, normal, square


class Mixed(nn.Module):
    """A block of FNet (arXiv 2105.03824): the real part of a transform over tokens and features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        out: torch.Tensor = self.second(x + self.down(F.gelu(self.up(x))))
        return out


class Mixed2(Mixed):
    """As transformers' FNet without its kernels, and many others: one transform over both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + torch.fft.fft2(x, norm="ortho").real)
        out: torch.Tensor = self.second(x + self.down(F.gelu(self.up(x))))
        return out


class FNet(nn.Module):
    def __init__(self, block: type[Mixed]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(block(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class SpectralConv2d(nn.Module):
    """Of a Fourier neural operator (arXiv 2010.08895): complex weights on the lowest frequencies."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low, self.high = (
            nn.Parameter(torch.rand(width, width, modes, modes, dtype=torch.cfloat) / width) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, found = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(*x.shape[:2], x.size(-2), x.size(-1) // 2 + 1, dtype=found.dtype, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        back: torch.Tensor = torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))
        return back


class SpectralConv1d(nn.Module):
    """As of `neuraloperator`: padded at the end, real and imaginary parts as the last dim of the weight."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.weight = modes, nn.Parameter(torch.rand(width, width, modes, 2) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(x, dim=-1, norm="forward")[..., : self.modes]
        out = torch.einsum("bix,iox->box", found, torch.view_as_complex(self.weight))
        out = F.pad(out, (0, x.shape[-1] // 2 + 1 - self.modes))
        back: torch.Tensor = torch.fft.irfft(out, n=x.shape[-1], norm="forward")
        return back


class FNO2d(nn.Module):
    def __init__(self, width: int = 6, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(3, width), nn.Linear(width, 1)
        self.conv0, self.conv1 = SpectralConv2d(width, modes), SpectralConv2d(width, modes)
        self.w0, self.w1 = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x).permute(0, 3, 1, 2)
        x = F.gelu(self.conv0(x) + self.w0(x))
        x = self.conv1(x) + self.w1(x)
        out: torch.Tensor = self.project(x.permute(0, 2, 3, 1))
        return out


class FNO1d(nn.Module):
    def __init__(self, width: int = 6, modes: int = 4) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, width, 1), nn.Conv1d(width, 1, 1)
        self.convs = nn.ModuleList(SpectralConv1d(width, modes) for _ in range(2))
        self.ws = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for conv, w in zip(self.convs, self.ws, strict=True):
            x = F.gelu(conv(x) + w(x))
        out: torch.Tensor = self.project(x)
        return out


class GlobalFilter(nn.Module):
    """Of GFNet (arXiv 2107.00645): a weight for every frequency of the grid of patches, and every channel."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.complex_weight = nn.Parameter(torch.randn(height, height // 2 + 1, width, 2) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        side = int(tokens**0.5)
        grid = torch.fft.rfft2(x.view(batch, side, side, width), dim=(1, 2), norm="ortho")
        grid = grid * torch.view_as_complex(self.complex_weight)
        back: torch.Tensor = torch.fft.irfft2(grid, s=(side, side), dim=(1, 2), norm="ortho")
        return back.reshape(batch, tokens, width)


class AdaptiveFilter(nn.Module):
    """Of AFNO (arXiv 2111.13587): an MLP in blocks of channels on the frequencies, in real and imaginary parts."""

    def __init__(self, width: int, height: int, blocks: int = 4) -> None:
        super().__init__()
        self.blocks, self.size = blocks, width // blocks
        self.w1, self.w2 = (nn.Parameter(0.2 * torch.randn(2, blocks, self.size, self.size)) for _ in range(2))
        self.b1, self.b2 = (nn.Parameter(0.2 * torch.randn(2, blocks, self.size)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias, (batch, tokens, width) = x, x.shape
        side = int(tokens**0.5)
        grid = torch.fft.rfft2(x.reshape(batch, side, side, width), dim=(1, 2), norm="ortho")
        grid = grid.reshape(batch, grid.shape[1], grid.shape[2], self.blocks, self.size)
        a, b = grid.real, grid.imag

        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.einsum("...bi,bio->...bo", x, w)

        c = F.relu(product(a, self.w1[0]) - product(b, self.w1[1]) + self.b1[0])
        d = F.relu(product(b, self.w1[0]) + product(a, self.w1[1]) + self.b1[1])
        e = product(c, self.w2[0]) - product(d, self.w2[1]) + self.b2[0]
        f = product(d, self.w2[0]) + product(c, self.w2[1]) + self.b2[1]
        out = torch.view_as_complex(F.softshrink(torch.stack([e, f], dim=-1), lambd=0.01))
        out = out.reshape(batch, side, side // 2 + 1, width)
        back: torch.Tensor = torch.fft.irfft2(out, s=(side, side), dim=(1, 2), norm="ortho")
        return back.reshape(batch, tokens, width) + bias


class FilterBlock(nn.Module):
    def __init__(self, width: int, filter: nn.Module) -> None:
        super().__init__()
        self.norm1, self.filter, self.norm2 = nn.LayerNorm(width), filter, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm2(self.filter(self.norm1(x))))
        return out


class FilterNet(nn.Module):
    """Patches of an image, blocks of filters, a classifier."""

    def __init__(self, filter: type[GlobalFilter | AdaptiveFilter]) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, 5)
        self.position = nn.Parameter(torch.randn(1, 16, 8) * 0.1)
        self.blocks = nn.ModuleList(FilterBlock(8, filter(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x).mean(1))
        return out


class Autocorrelation(nn.Module):
    """Lags by the theorem of Wiener and Khinchin (Autoformer, arXiv 2106.13008), shifted to the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.fft.rfft(self.query(x).transpose(1, 2).contiguous(), dim=-1)
        k = torch.fft.rfft(self.key(x).transpose(1, 2).contiguous(), dim=-1)
        lags = torch.fft.fftshift(torch.fft.irfft(q * torch.conj(k), dim=-1), dim=-1)
        out: torch.Tensor = self.head(lags.transpose(1, 2))
        return out


CASES = {
    "fnet": TrainedCase(lambda: FNet(Mixed), normal(6, 8), square),
    "fnet-2d": TrainedCase(lambda: FNet(Mixed2), normal(6, 8), square),
    "fno-2d": TrainedCase(FNO2d, normal(8, 8, 3), square),
    "fno-1d": TrainedCase(FNO1d, normal(2, 16), square),
    "gfnet": TrainedCase(lambda: FilterNet(GlobalFilter), normal(3, 8, 8), square),
    "afno": TrainedCase(lambda: FilterNet(AdaptiveFilter), normal(3, 8, 8), square),
    "autocorrelation": TrainedCase(Autocorrelation, normal(6, 4), square),
}
