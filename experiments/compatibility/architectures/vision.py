"""Models of images as others write them, after the published sources: the same operations in the same order, small.

ResNet      torchvision's ResNet with basic blocks: convolutions, batch norm, max pooling, adaptive pooling
TorchViT    torchvision's ViT: convolution as patch embedding, nn.MultiheadAttention, class token, dropout 0
TimmViT     timm's ViT: fused qkv with unbind, layer scale
ConvNeXt    depthwise convolution, LayerNorm over channels by permute, layer scale
SwinBlocks  window partition, cyclic shift by roll, relative position bias by index
Mixer       MLP-Mixer: transposed MLPs over patches
DiT         adaptive norms with chunked modulation, sinusoidal time embedding, unpatchify by einsum, mean square
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

IMAGE, PATCH, DIM, HEADS, LAYERS, CLASSES = 16, 4, 32, 4, 2, 8
HEAD, PATCHES = DIM // HEADS, (IMAGE // PATCH) ** 2


class BasicBlock(nn.Module):
    """torchvision's BasicBlock: two 3 x 3 convolutions, in-place relu."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        done: torch.Tensor = self.relu(out)
        return done


class ResNet(nn.Module):
    """torchvision's ResNet, two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1), BasicBlock(16, 16, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        out: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


class EncoderBlock(nn.Module):
    """torchvision's EncoderBlock: nn.MultiheadAttention and an MLP in nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Dropout(0.0), nn.Linear(48, DIM), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        y = y + x
        out: torch.Tensor = y + self.mlp(self.ln_2(y))
        return out


class TorchViT(nn.Module):
    """torchvision's VisionTransformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embedding = nn.Parameter(torch.empty(1, PATCHES + 1, DIM).normal_(std=0.02))
        self.layers = nn.Sequential(*(EncoderBlock() for _ in range(LAYERS)))
        self.ln, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.shape
        x = self.conv_proj(x).reshape(n, DIM, (h // PATCH) * (w // PATCH)).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(n, -1, -1), x], dim=1)
        x = self.ln(self.layers(x + self.pos_embedding))
        out: torch.Tensor = self.head(x[:, 0])
        return out


class TimmAttention(nn.Module):
    """timm's Attention: one projection, reshaped, permuted and unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.proj(x.transpose(1, 2).reshape(b, n, c))
        return out


class Mlp(nn.Module):
    """timm's Mlp."""

    def __init__(self, dim: int = DIM, inner: int = 48) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    """timm's Block with layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(DIM, eps=1e-6), TimmAttention(), LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(DIM, eps=1e-6), Mlp(), LayerScale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: torch.Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class TimmViT(nn.Module):
    """timm's VisionTransformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.randn(1, PATCHES + 1, DIM) * 0.02)
        self.blocks = nn.Sequential(*(TimmBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        out: torch.Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7 convolution, norm and MLP over the last dim, layer scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + x.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """ConvNeXt's LayerNorm of [b, channels, h, w], by mean and square."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXt(nn.Module):
    """Two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), ChannelNorm(16))
        self.stage1 = nn.Sequential(ConvNeXtBlock(16), ConvNeXtBlock(16))
        self.down = nn.Sequential(ChannelNorm(16), nn.Conv2d(16, 32, 2, 2))
        self.stage2 = nn.Sequential(ConvNeXtBlock(32), ConvNeXtBlock(32))
        self.norm, self.head = nn.LayerNorm(32, eps=1e-6), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        out: torch.Tensor = self.head(self.norm(x.mean([-2, -1])))
        return out


def window_partition(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut [b, h, w, c] into windows, [b * windows, size * size, c]."""
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, c)


def window_reverse(windows: torch.Tensor, size: int, h: int, w: int) -> torch.Tensor:
    """Undo `window_partition`."""
    x = windows.view(-1, h // size, w // size, size, size, windows.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, h, w, windows.shape[-1])


class SwinBlock(nn.Module):
    """Attention in windows of 2 x 2 patches, shifted if `shift`, with a relative position bias."""

    relative_position_index: torch.Tensor
    attn_mask: torch.Tensor | None
    size = 2

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, size, side = shift, self.size, IMAGE // PATCH
        self.norm1, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm2, self.mlp = nn.LayerNorm(DIM), Mlp()
        self.bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, HEADS) * 0.02)
        coords = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + size - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * size - 1) + relative[..., 1])
        mask = None
        if shift:
            regions = torch.zeros(1, side, side, 1)
            cuts = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
            for i, (a, b) in enumerate((a, b) for a in cuts for b in cuts):
                regions[:, a, b] = i
            windows = window_partition(regions, size).squeeze(-1)
            mask = windows.unsqueeze(1) - windows.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        self.register_buffer("attn_mask", mask)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * HEAD**-0.5) @ k.transpose(-2, -1)
        bias = self.bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.attn_mask is not None:
            windows = self.attn_mask.shape[0]
            attn = attn.view(b // windows, windows, HEADS, n, n) + self.attn_mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, HEADS, n, n)
        out: torch.Tensor = self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = IMAGE // PATCH
        b, length, c = x.shape
        shortcut = x
        x = self.norm1(x).view(b, side, side, c)
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        x = window_reverse(self.attend(window_partition(x, self.size)), self.size, side, side)
        if self.shift:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x.view(b, length, c)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class SwinBlocks(nn.Module):
    """One stage of Swin: a block of windows and a block of shifted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.blocks = nn.Conv2d(3, DIM, PATCH, PATCH), nn.Sequential(SwinBlock(0), SwinBlock(1))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.proj(x).flatten(2).transpose(1, 2)))
        out: torch.Tensor = self.head(F.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1))
        return out


class MixerBlock(nn.Module):
    """An MLP over patches and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.token_mixing = nn.LayerNorm(DIM), Mlp(PATCHES, 24)
        self.norm2, self.channel_mixing = nn.LayerNorm(DIM), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token_mixing(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.channel_mixing(self.norm2(x))
        return out


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, DIM, PATCH, PATCH), nn.Sequential(*(MixerBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        out: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return out


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale every token of a sample alike."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """A block whose norms are modulated by the condition, six parts of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6), TimmAttention()
        self.norm2, self.mlp = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6), Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        out: torch.Tensor = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return out


class DiT(nn.Module):
    """Diffusion transformer: predicts noise from a noisy image, a time and a class."""

    pos_embed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.t_embedder = nn.Sequential(nn.Linear(16, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.y_embedder = nn.Embedding(CLASSES + 1, DIM)
        self.register_buffer("pos_embed", torch.randn(1, PATCHES, DIM) * 0.02)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(LAYERS))
        self.norm_final = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 2 * DIM))
        self.linear = nn.Linear(DIM, PATCH * PATCH * 3)

    def time(self, t: torch.Tensor) -> torch.Tensor:
        freqs = torch.exp(-math.log(10000) * torch.arange(8, dtype=t.dtype, device=t.device) / 8)
        args = t[:, None] * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(self.time(t)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = self.linear(modulate(self.norm_final(x), shift, scale))
        side = IMAGE // PATCH
        x = x.reshape(x.shape[0], side, side, PATCH, PATCH, 3)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 3, IMAGE, IMAGE)
