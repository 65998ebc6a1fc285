"""Random tensors: the published generator and formulas, the same under every layout, distributed as they should be."""

import math
from typing import Any

import pytest
import torch
from dropout_cases import GENERATORS, INDICES
from random_numbers import number
from spmd_types import SpmdTypeError
from spmd_types.checker import typecheck
from test_runtime_ops import mesh_of, types_of
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture.draws import FORMS
from autoplan.ops.saved import OpFacts, TensorFacts
from autoplan.ops.table import op_record
from autoplan.runtime.convert import I, P, R, V, typed
from autoplan.runtime.draws import DISTRIBUTIONS, draw
from autoplan.runtime.random_bits import Factor
from autoplan.verify.drawn import known_numbers

PARAMETERS: dict[str, tuple[float, ...]] = {"bernoulli": (0.3,), "integers": (-3, 7)}
NAMES = list(DISTRIBUTIONS)


def drawn(name: str, index: tuple[Factor, ...], rng: Any = (5, 2, 0), site: int = 3, dtype: Any = None) -> torch.Tensor:
    x = torch.empty([local for local, _, _ in index], dtype=dtype or torch.float64)
    return draw(x, name, PARAMETERS.get(name, ()), torch.tensor(rng), site, index)


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_their_definition(name: str) -> None:
    with mesh_of([("tp", 1)]):
        for rng in GENERATORS:
            found = drawn(name, ((3, 3, "batch"), (5, 5, ()), (7, 7, ())), rng, 77).flatten()
            want = [number(name, rng, 77, rng[2] * 35 + i, *PARAMETERS.get(name, ())) for i in range(105)]
            torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_that_of_the_whole(name: str) -> None:
    """Also in micro-batches, and in blocks; without its place (the negative control) it is another."""
    whole, local = ((6, 6, "batch"), (4, 4, ()), (8, 8, ())), ((2, 6, "batch"), (4, 4, ()), (4, 8, ("tp",)))
    with mesh_of([("tp", 1)]):
        want = drawn(name, whole)
        long = drawn(name, ((1 << 19, 1 << 19, ()),))[-9:]
        assert torch.equal(drawn(name, ((9, 9, "batch"),), (5, 2, (1 << 19) - 9)), long)
    for rank in range(2):
        with mesh_of([("tp", 2)]) as mesh:
            mesh.coordinate = lambda axis, at=rank: at if axis else 0  # type: ignore[assignment,misc]
            mesh.index_tensor = lambda axis, device, at=rank: torch.tensor(at)  # type: ignore[assignment,misc]
            for first in (0, 2, 4):
                got = drawn(name, local, (5, 2, first))
                assert torch.equal(got, want[first : first + 2, :, 4 * rank : 4 * rank + 4])
                unplaced = drawn(name, ((2, 2, ()), (4, 4, ()), (4, 4, ())), (5, 2, first))
                assert not torch.equal(got, unplaced)


def test_each_distribution_has_its_moments_and_draws_anew() -> None:
    """Mean and variance; seeds, steps, sites and neighbours are not correlated."""
    n = 1 << 17
    moments = {"uniform": (0.5, 1 / 12), "normal": (0, 1), "exponential": (1, 1), "bernoulli": (0.3, 0.21)}
    moments["integers"] = (1.5, 99 / 12)
    with mesh_of([("tp", 1)]):
        for name, (mean, variance) in moments.items():
            keys = [((0, 0, 0), 0), ((0, 0, 0), 1), ((0, 1, 0), 0), ((1, 0, 0), 0)]
            found = [(drawn(name, ((n, n, ()),), rng, site) - mean) / math.sqrt(variance) for rng, site in keys]
            for i, a in enumerate(found):
                assert abs(float(a.mean())) < 5 / math.sqrt(n)
                assert abs(float(a.square().mean()) - 1) < 5 * float(a.square().std()) / math.sqrt(n)
                for b in (*found[:i], a.roll(1), a.roll(8), a.roll(4096)):
                    assert abs(float((a * b).mean())) < 5 / math.sqrt(n)
        # tails, and a test of the whole distribution (Kolmogorov and Smirnov, at 1e-6)
        for name, low, high in (("normal", -6.5, 6.5), ("exponential", 0, 20)):
            a = drawn(name, ((n, n, ()),)).sort().values
            cdf = torch.special.ndtr(a) if name == "normal" else -torch.expm1(-a)
            apart = (cdf - (torch.arange(n) + 0.5) / n).abs().max()
            assert float(apart) < 2.7 / math.sqrt(n) and low < float(a[0]) < float(a[-1]) < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_numbers_are_the_wide_ones_rounded(dtype: torch.dtype) -> None:
    """And uniform ones stay below 1: 24 bits in float32. What is exponential is neither 0 nor infinite."""
    with mesh_of([("tp", 1)]):
        for name in NAMES:
            wide, got = (drawn(name, ((1 << 15, 1 << 15, ()),), dtype=d) for d in (torch.float64, dtype))
            assert got.dtype == dtype and bool(got.isfinite().all())
            step = torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), wide, rtol=4 * step, atol=4 * max(step, 2**-20))
        fine = drawn("uniform", ((1 << 15, 1 << 15, ()),), dtype=dtype)
        assert float(fine.max()) < 1 and (dtype is not torch.float32 or len(fine.unique()) > 32_000)
        assert float(drawn("exponential", ((1 << 15, 1 << 15, ()),), dtype=dtype).min()) > 0


def test_its_price_counts_the_operations_of_each_distribution() -> None:
    """What the record says of a distribution is within a tenth of what torch is told to do."""

    class Counted(TorchDispatchMode):
        num, num_bytes = 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not any(view in str(func) for view in ("view", "expand", "squeeze", "split", "detach", "select")):
                self.num += 1
                tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
                self.num_bytes += sum(x.numel() * x.element_size() for x in tensors)
            return out

    n = 1 << 18
    for name in NAMES:
        x = TensorFacts((n,), "float32")
        assert op_record("draw").inside is not None
        said = op_record("draw").inside(OpFacts("draw", {"distribution": name}, (x,), (x,)))  # type: ignore[misc]
        with mesh_of([("tp", 1)]), Counted() as counted:
            drawn(name, ((n, n, ()),), dtype=torch.float32)
        assert abs(counted.num / said.kernels - 1) < 0.1 and abs(counted.num_bytes / said.moved_bytes - 1) < 0.1, name


def test_what_draw_refuses() -> None:
    x, rng, index = torch.empty(4), torch.tensor([0, 0, 0]), ((4, 4, "batch"),)
    with mesh_of([("tp", 1)]):
        for arguments, message in (
            (("gamma", (), rng, 0, index), "no distribution 'gamma'; known: uniform, normal"),
            (("normal", (1.0,), rng, 0, index), r"its parameters are \(\)"),
            (("bernoulli", (1.5,), rng, 0, index), r"must be in \[0, 1\]"),
            (("integers", (5, 5), rng, 0, index), "below the second"),
            (("normal", (), None, 0, index), "draws nothing"),
            (("normal", (), rng, 0, ((4, 4, ("tp",)), (2, 2, ()))), "4 elements"),
        ):
            with pytest.raises(ValueError, match=message):
                draw(x, *arguments)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="floating"):
            draw(x.long(), "normal", (), rng, 0, index)
        assert draw(x.bool(), "bernoulli", (1.0,), rng, 0, index).all()


def test_types_of_draws() -> None:
    whole, cut = ((4, 4, "batch"), (6, 6, ())), ((4, 4, "batch"), (6, 12, ("tp",)))
    with mesh_of([("dp", 2), ("tp", 2)]):
        for kind, index, ok in ((I, whole, True), (R, whole, True), (V, cut, True), (I, cut, False), (P, whole, False)):
            with typecheck():
                x, rng = typed(torch.randn(4, 6), tp=kind, dp=V), typed(torch.randint(9, (3,)), tp=R, dp=V)
                if ok:
                    assert types_of(draw(x, "normal", (), rng, 0, index)) == {"tp": kind, "dp": V}
                else:
                    with pytest.raises(SpmdTypeError):
                        draw(x, "normal", (), rng, 0, index)


def test_every_place_has_its_number() -> None:
    """Cut in several ways, no two elements of different places have equal numbers."""
    for index in INDICES.values():
        with mesh_of([("dp", 2), ("tp", 2), ("cp", 2)]):
            found = drawn("normal", index).flatten()
            assert len(found.unique()) == found.numel()


def test_what_torch_draws_has_its_distribution() -> None:
    """The forms of ops that are not one draw: choices by weights, permutations, geometric and Cauchy's numbers."""
    weights = torch.tensor([0.1, 0.2, 0.0, 0.7]).double().expand(20_000, 4)
    for replacement in (False, True):
        chosen = FORMS["aten.multinomial.default"](known_numbers, weights, 2, replacement)
        share = (chosen[:, 0] == torch.arange(4)[:, None]).double().mean(1)
        assert float((share - weights[0]).abs().max()) < 0.015
        assert bool((chosen[:, 0] != chosen[:, 1]).all()) is not replacement
    assert FORMS["aten.randperm.default"](known_numbers, 100).sort().values.tolist() == list(range(100))
    x = torch.empty(50_000, dtype=torch.float64)
    trials = FORMS["aten.geometric.default"](known_numbers, x, 0.25)
    assert float(trials.min()) == 1 and abs(float(trials.mean()) - 4) < 0.1
    cauchy = FORMS["aten.cauchy.default"](known_numbers, x, 1.0, 2.0)
    assert abs(float(cauchy.median()) - 1) < 0.1 and abs(float(cauchy.quantile(0.75)) - 3) < 0.15
    a = torch.randn(1000, 20).double()
    kept = FORMS["aten.alpha_dropout.default"](known_numbers, a, 0.3, True)
    assert abs(float(kept.mean())) < 0.05 and abs(float(kept.std()) - 1) < 0.05
