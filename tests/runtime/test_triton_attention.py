"""The Triton kernels of attention with dropout: interpreted, equal to blocks of queries; compiled for GPUs.

Triton comes with torch's CUDA builds; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from autoplan.runtime import parts
from autoplan.runtime.dropout import Drops, kept_below
from autoplan.runtime.dropped_attention import _given
from autoplan.runtime.parts import PairInputs, Part, distances

triton = pytest.importorskip("triton")

from autoplan.runtime import triton_attention as kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton decides at its import
P, SCALE = 0.3, 0.4


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rN", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


CASES = {
    "causal": (Part((0, 100), (0, 100), "causal"), ""),
    "causal, learned bias": (Part((0, 90), (0, 90), "causal"), "bias"),
    "band": (Part((0, 80), (0, 150), "band", 60, 50, 3), ""),
    "documents": (Part((0, 70), (0, 140), "full"), "documents"),
    "mask, a query sees nothing": (Part((0, 70), (0, 90), "full"), "seen"),
    "learned mask of samples": (Part((0, 70), (0, 90), "full"), "of samples"),
}


@pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in CASES), ("causal, learned bias", torch.float16)]
)
def test_kernels_compute_what_blocks_of_queries_do(name: str, dtype: torch.dtype) -> None:
    """Result, log-sum-exp and gradients; fewer key heads, a head dim that fills no tile, another one of values."""
    torch.manual_seed(0)
    part, kind = CASES[name]
    s, t = part.queries[1], part.keys[1]
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, n, d in ((4, s, 12), (2, t, 12), (2, t, 20)))
    counts = [torch.randint(-(2**62), 2**62, shape) for shape in ((2, 4), (s,), (t,))]
    drops, documents, mask = Drops(P, *counts), None, None
    if kind == "documents":
        documents = torch.randint(1, 3, (2, s)), torch.randint(1, 3, (2, t))
        documents[0][:, 5] = -2
    elif kind == "seen":
        mask = torch.rand(2, 1, s, t) > 0.3
        mask[0, 0, 3] = False
    elif kind:
        mask = torch.randn((1, 4, s, t) if kind == "bias" else (2, 1, s, t)).to(dtype)
    added = mask if mask is not None and mask.is_floating_point() else None
    wide = parts.wide_of(dtype)
    for_mask = [None if added is None else torch.zeros_like(added, dtype=wide) for _ in range(2)]
    beside = PairInputs(documents, mask, drops)
    out, lse = parts._attend_plainly(q, k, v, part, SCALE, beside)
    grad = torch.randn_like(out)
    back = parts._attend_plainly_backward(grad, q, k, v, out, lse, part, SCALE, beside, for_mask[0])
    given = (*_given(drops, documents, mask), distances(part), SCALE, kept_below(P), drops.scale)
    found = torch.empty_like(out)
    ends = kernels.forward_kernel(q, k, v, found, *given)
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    mine = kernels.backward_kernels(grad, q, k, v, lse, delta, *given, for_mask[1])
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    pairs = [(found, out), (ends, lse), *zip(mine, back, strict=True)]
    if for_mask[0] is not None and for_mask[1] is not None:
        pairs.append((for_mask[1], for_mask[0]))
    for got, want in pairs:
        torch.testing.assert_close(got.to(wide), want.to(wide), **tolerance)


@pytest.mark.skipif(INTERPRETED, reason="compiles nothing")
@pytest.mark.slow  # half a minute
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile_for_gpus(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products on tensor cores, in the shared memory that the smallest of them has, 99 KB."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, device: int) -> int:
            return 0

    found: list[Any] = []
    for name in ("_forward", "_for_queries", "_for_keys", "_for_mask"):
        kernel = getattr(kernels, name)

        class Compiled:
            def __init__(self, kernel: Any) -> None:
                self.kernel = kernel

            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **how: found.append(self.kernel.warmup(*args, grid=grid, **how))

        monkeypatch.setattr(kernels, name, Compiled(kernel))
    driver.set_active(Driver())
    try:
        half = torch.float16
        q, out = (torch.empty(1, 4, 256, 128, dtype=half, device="meta") for _ in range(2))
        k, v = (torch.empty(1, 2, 256, 128, dtype=half, device="meta") for _ in range(2))
        mask = torch.empty(1, 4, 256, 256, dtype=half, device="meta")
        counts = tuple(torch.empty(n, dtype=torch.int64, device="meta") for n in (4, 256, 256))
        given = (None, mask, counts, (0, 0, 1 << 31), 0.1, kept_below(P), 1.4)
        lse = kernels.forward_kernel(q, k, v, out, *given)
        kernels.backward_kernels(out, q, k, v, lse, lse, *given, mask.float())
    finally:
        with contextlib.suppress(RuntimeError):
            driver.reset_active()
    assert len(found) == 4
    for kernel in found:
        assert "mma" in kernel.asm["ptx"] and "atom." not in kernel.asm["ptx"]
        assert kernel.metadata.shared <= 99 * 1024 or capability in (80, 90, 100)
