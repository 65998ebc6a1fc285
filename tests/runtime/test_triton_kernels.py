"""The Triton kernels: run by Triton's interpreter on the CPU, equal to torch's operators; compiled for GPUs.

Triton comes with torch's CUDA builds; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dropout_cases import GENERATORS, INDICES

from autoplan.runtime import dropout as dropouts
from autoplan.runtime import loss as losses
from autoplan.runtime.mesh import AxisMesh, use_mesh

triton = pytest.importorskip("triton")

from autoplan.runtime import triton_kernels as kernels  # noqa: E402

# Triton decides at its import whether it interprets or compiles.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_under_the_interpreter")


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


GPUS = {"V100": 70, "A100": 80, "RTX 4090": 89, "H100": 90, "B200": 100, "RTX 5090": 120}


@pytest.fixture(params=GPUS.values(), ids=GPUS)
def a_gpu(request: pytest.FixtureRequest) -> Iterator[int]:
    """A driver that says it has one, for compiling alone; its compute capability."""
    if INTERPRETED:
        pytest.skip("compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", request.param, 32)

        def get_current_device(self) -> int:
            return int(request.param)  # Triton keeps what it compiled by the number of the device

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(Driver())
    try:
        yield request.param
    finally:
        with contextlib.suppress(RuntimeError):  # without a GPU there was no driver before
            driver.reset_active()


def check_compiled(kernel: Any, capability: int, dtype: torch.dtype) -> None:
    """The kernel is machine code for this GPU, and reads 16 bytes at a time."""
    text = kernel.asm["ptx"]
    assert f".target sm_{capability}" in text and kernel.asm["cubin"].startswith(b"\x7fELF")
    assert ("ld.global.v2.b64" if dtype == torch.float64 else "ld.global.v4.b32") in text


@pytest.fixture
def mesh() -> Iterator[AxisMesh]:
    dist.init_process_group("fake", rank=5, world_size=8)
    try:
        mesh = AxisMesh([("dp", 2), ("tp", 2), ("cp", 2)], {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()


@interpreted
@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dropout_is_that_of_the_cpu(mesh: AxisMesh, name: str, dtype: torch.dtype) -> None:
    index = INDICES[name]
    x = torch.randn([f[0] for f in index]).to(dtype)
    for p, site in [(0.1, 77), (0.5, 0), (1.0, 3)]:
        for generator in GENERATORS:
            rng = torch.tensor(generator)
            want = dropouts.dropout(x, p, rng, site, index)
            got = kernels.dropout(x, rng, *dropouts._fused_arguments(mesh, index, p, site))
            assert torch.equal(got != 0, want != 0)
            if dtype == torch.bfloat16:  # the interpreter cuts bits off where the hardware rounds
                torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
            else:
                assert torch.equal(got, want)


@interpreted
def test_another_site_is_another_mask(mesh: AxisMesh) -> None:
    x, rng, index = torch.ones(3000), torch.tensor([1, 2, 3]), INDICES["flat"]
    first, second = (kernels.dropout(x, rng, *dropouts._fused_arguments(mesh, index, 0.5, site)) for site in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dropout_compiles_for_a_gpu(a_gpu: int, dtype: torch.dtype) -> None:
    for wide in (False, True):
        kernel = kernels._dropout.warmup(
            dtype,
            dtype,
            torch.int64,
            1 << 20,
            (1 << 14, 64),
            (1 << 40, 1),
            0,
            1 << 40,
            7,
            KEPT=1 << 52,
            SCALE=2.0,
            COMPUTE=kernels.tl.float64 if dtype == torch.float64 else kernels.tl.float32,
            INDEX=kernels.tl.int64 if wide else kernels.tl.int32,
            BLOCK=1024,
            grid=(1,),
        )
        check_compiled(kernel, a_gpu, dtype)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("classes", [5, 4096, 9000])
def test_the_loss_is_that_of_the_cpu(dtype: torch.dtype, smoothing: float, classes: int) -> None:
    """One block, several, and one that is not full; ignored, foreign and wrong targets; what is not finite."""
    generator = torch.Generator().manual_seed(classes)
    logits = (torch.randn(7, classes, generator=generator, dtype=torch.float64) * 5).to(dtype)
    first, total = classes, 3 * classes
    target = torch.tensor([first, first + classes - 1, 0, -100, total, -1, first + 2])
    logits[0, 1] = -math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    where = losses._Classes(classes, total, first, -100)
    want = losses._statistics(logits, target, where, smoothing > 0)
    got = kernels.loss_statistics(logits, target, first, total, -100, smoothing > 0)
    tolerance = dict(rtol=1e-13, atol=0.0) if dtype == torch.float64 else dict(rtol=1e-6, atol=1e-3)
    rows = [0, 1, 2, 4, 5, 6]  # what becomes of the ignored one is not asked
    assert want[2].isnan().tolist() == [False, False, False, False, True, True, False]
    torch.testing.assert_close(got[:, rows], want[:, rows], equal_nan=True, **tolerance)

    grad = torch.tensor(0.7, dtype=got.dtype)
    log_sum_exp = torch.randn(7, generator=generator, dtype=got.dtype) + 12
    want = losses._gradient(logits, target, log_sum_exp, grad, where, smoothing)
    got = kernels.loss_gradient(logits, target, log_sum_exp, grad, first, total, -100, smoothing)
    assert torch.count_nonzero(got[3]) == 0
    error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=error, atol=error * 1e-3)


@interpreted
def test_forward_and_backward_through_the_operators(mesh: AxisMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the runtime, on the CPU by torch's operators and by the interpreted kernels."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    logits = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    target = torch.tensor([[8, 15, -100], [9, 9, 3]])
    rng = torch.tensor([1, 2, 3])

    def gradients() -> list[torch.Tensor]:
        a, b = x.clone().requires_grad_(), logits.clone().requires_grad_()
        dropped = dropouts.dropout(a, 0.3, rng, 4, INDICES["sharded"])
        sharded = losses.vocab_parallel_cross_entropy_sum(b, target, "tp", label_smoothing=0.1)
        # as `labels[:, 0]`: what the kernel reads in order does not lie so
        column = torch.stack((target.reshape(6) % 8, target.reshape(6)), 1)[:, 0]
        whole = losses.cross_entropy_sum(b.reshape(6, 8), column, ignore_index=4)
        outs = [dropped, sharded, whole]
        return [*outs, *torch.autograd.grad([dropped.square().sum(), sharded + 3 * whole], [a, b])]

    want = gradients()
    library = torch.library.Library("autoplan_fused", "IMPL")
    for name in ("dropout", "loss_statistics", "loss_gradient"):
        library.impl(name, getattr(kernels, name), "CPU")
    try:
        monkeypatch.setattr(dropouts, "one_dropout", lambda device: True)
        monkeypatch.setattr(losses, "one_kernel", lambda device: True)
        got = gradients()
    finally:
        library._destroy()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_compiles_for_a_gpu(a_gpu: int, dtype: torch.dtype) -> None:
    wide, compute = torch.float64, kernels.tl.float64
    if dtype == torch.bfloat16:
        wide, compute = torch.float32, kernels.tl.float32
    i64 = torch.int64
    forward = kernels._loss_statistics.warmup(
        dtype,
        i64,
        wide,
        512,
        32000,
        32000,
        64000,
        -100,
        SUMMED=True,
        COMPUTE=compute,
        BLOCK=4096,
        num_warps=8,
        grid=(1,),
    )
    backward = kernels._loss_gradient.warmup(
        dtype, i64, wide, wide, dtype, 32000, 32000, -100, UNIFORM=0.1, HIT=0.9, COMPUTE=compute, BLOCK=4096,
        num_warps=8, grid=(1,),
    )  # fmt: skip
    for kernel in (forward, backward):
        check_compiled(kernel, a_gpu, dtype)
        assert "atom." not in kernel.asm["ptx"]
