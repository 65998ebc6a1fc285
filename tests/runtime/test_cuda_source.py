"""Dropout of CUDA C++: the text compiled for the host equals torch's operators; NVRTC compiles it for GPUs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dropout_cases import GENERATORS, INDICES

from autoplan.runtime import cuda_source, dropout, fused, private, random_bits
from autoplan.runtime.mesh import AxisMesh, use_mesh

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the text is compiled for the host")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

# what the text takes from CUDA
HOST = """
#define AUTOPLAN_ON_HOST
#define __device__
#define __global__
#include <cstring>
struct Dim { unsigned x; };
static Dim blockIdx, blockDim, threadIdx;
template <typename To, typename From> static To as(From x) { To out; std::memcpy(&out, &x, sizeof out); return out; }
static unsigned bits_of(float x) { return as<unsigned>(x); }
static float of_bits(unsigned x) { return as<float>(x); }
static float from_half(unsigned short x) { return (float)as<_Float16>(x); }
static unsigned short to_half(float x) { return as<unsigned short>((_Float16)x); }
"""
RUN = """
extern "C" void run_NAME(unsigned blocks, unsigned size, PARAMS) {
  blockDim.x = size;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < size; ++threadIdx.x) dropout_NAME(ARGS);
}
"""
Kernels = Callable[[torch.dtype, int, bool, torch.device], Callable[..., None]]


def name_of(dtype: torch.dtype, num_factors: int, narrow: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')}_{num_factors}_{int(narrow)}"


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """What compiles a kernel, for the CPU; a kernel takes arguments as torch.cuda._utils._CudaKernel does."""
    parts = [HOST]
    for dtype in DTYPES:
        for num_factors in range(1, 6):
            for narrow in (True, False):
                name = name_of(dtype, num_factors, narrow)
                text = cuda_source.source(dtype, num_factors, narrow).replace(" dropout(", f" dropout_{name}(")
                found = re.search(r"dropout_\w+\((.*?)\)", text)
                assert found
                args = ", ".join(param.split()[-1] for param in found[1].split(","))
                run = RUN.replace("NAME", name).replace("PARAMS", found[1]).replace("ARGS", args)
                parts.append(f"namespace n_{name} {{\n{text}\n{run}\n}}")
    folder = tmp_path_factory.mktemp("host")
    (folder / "kernels.cpp").write_text("\n".join(parts))
    library = folder / "kernels.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", "-o", library, folder / "kernels.cpp"], check=True)
    loaded = ctypes.CDLL(str(library))

    def compiled(dtype: torch.dtype, num_factors: int, narrow: bool, device: torch.device) -> Callable[..., None]:
        run = getattr(loaded, f"run_{name_of(dtype, num_factors, narrow)}")

        def kernel(grid: tuple[int, ...], block: tuple[int, ...], args: list[Any]) -> None:
            kinds: dict[type, Callable[[Any], Any]] = {
                torch.Tensor: lambda x: ctypes.c_void_p(x.data_ptr()),
                int: ctypes.c_int,
                float: ctypes.c_double,
            }
            run(grid[0], block[0], *(kinds[type(arg)](arg) for arg in args))

        return kernel

    return compiled


@pytest.fixture
def mesh() -> Iterator[AxisMesh]:
    dist.init_process_group("fake", rank=5, world_size=8)
    try:
        mesh = AxisMesh([("dp", 2), ("tp", 2), ("cp", 2)], {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()


@needs_compiler
@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_dropout_of_torchs_operators(
    on_host: Kernels, mesh: AxisMesh, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(cuda_source, "_compiled", on_host)
    index = INDICES[name]
    x = torch.randn([f[0] for f in index]).to(dtype)
    if x.numel():
        x.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), 1e-45])
    for p, site in [(0.1, 77), (0.5, 2**31 + 5), (1.0, 3)]:
        for generator in GENERATORS:
            rng = torch.tensor(generator)
            want = dropout.dropout(x, p, rng, site, index)
            arguments = dropout._fused_arguments(mesh, index, p, site)
            for few in (cuda_source._NARROW, 1):  # numbers of elements of 32 and of 64 bits
                monkeypatch.setattr(cuda_source, "_NARROW", few)
                torch.testing.assert_close(
                    cuda_source.dropout(x, rng, *arguments), want, rtol=0, atol=0, equal_nan=True
                )


@needs_compiler
def test_forward_and_backward_in_a_program(on_host: Kernels, mesh: AxisMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes it where there is no Triton, with the mask of torch's operators in both directions."""
    x, grad = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    rng, index = torch.tensor([7, 3, 16]), INDICES["sharded"]

    def run() -> list[torch.Tensor]:
        out = dropout.dropout(x, 0.4, rng, 5, index)
        return [out, *torch.autograd.grad(out, x, grad)]

    want = run()
    library = torch.library.Library("autoplan_fused", "IMPL")
    library.impl("dropout", lambda *args: fused._kernels("dropout").dropout(*args), "CPU")
    try:
        monkeypatch.setattr(fused, "has_triton", lambda: False)
        monkeypatch.setattr(cuda_source, "_compiled", on_host)
        monkeypatch.setattr(dropout, "one_dropout", lambda device: True)
        for a, b in zip(run(), want, strict=True):
            assert torch.equal(a, b)
    finally:
        library._destroy()


@needs_compiler
def test_it_is_trusted_after_a_trial(on_host: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that draws another mask, or that cannot be compiled, is left out, and the user is told once why."""

    def another(*what: Any) -> Callable[..., None]:
        return lambda grid, block, args: on_host(*what)(grid, block, [*args[:6], args[6] + 1, *args[7:]])

    def broken(*what: Any) -> Callable[..., None]:
        raise OSError("no libnvrtc")

    for compiled, message in ((on_host, None), (another, "another mask"), (broken, "OSError: no libnvrtc")):
        cuda_source.works.cache_clear()
        monkeypatch.setattr(cuda_source, "_compiled", compiled)
        try:
            with torch.device("meta"):  # a mode of whoever calls it
                if message is None:
                    assert cuda_source.works(torch.device("cpu"))
                    continue
                with pytest.warns(UserWarning, match=message):
                    assert not cuda_source.works(torch.device("cpu"))
                assert not cuda_source.works(torch.device("cpu")), "once"
        finally:
            cuda_source.works.cache_clear()


def test_a_gpu_without_triton_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    for has_triton in (True, False):
        for right in (True, False):
            monkeypatch.setattr(fused, "has_triton", lambda has=has_triton: has)
            monkeypatch.setattr(cuda_source, "works", lambda device, right=right: right)
            assert fused.one_dropout(gpu) is (has_triton or right)
            assert not fused.one_dropout(torch.device("cpu"))


@pytest.mark.skipif(torch.version.cuda is None, reason="NVRTC comes with torch's CUDA build")
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("toolkit", ["", None])
def test_nvrtc_compiles_it_without_a_toolkit(
    capability: tuple[int, int], toolkit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", toolkit)
    for dtype in DTYPES:
        for num_factors in (1, 3):
            code = private.compile_cubin(
                cuda_source.source(dtype, num_factors, num_factors == 1), "dropout", capability
            )
            assert b"dropout" in code
    with pytest.raises(RuntimeError, match="no_such_name"):
        private.compile_cubin('extern "C" __global__ void f() { no_such_name(); }', "f", capability)
    assert cpp_extension.CUDA_HOME is toolkit


def test_the_plain_generator_is_the_tensors_one(mesh: AxisMesh) -> None:
    """The trial's own arithmetic, in Python's integers."""
    rng = torch.tensor([2**62 + 11, 7, 0])
    index: tuple[random_bits.Factor, ...] = ((500, 500, ()),)
    state, start = random_bits.stream_state(rng, 3), random_bits.first_position(rng, mesh, index)
    kept = random_bits.drawn(state, start, index, lambda counters: dropout._is_kept(counters, 0.25))
    drawn = [cuda_source._drawn((2**62 + 11, 7), 3, i) < dropout.kept_below(0.25) for i in range(500)]
    assert kept.tolist() == drawn and 300 < sum(drawn) < 450
