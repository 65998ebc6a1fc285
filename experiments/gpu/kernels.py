"""The operations of the runtime on the device against float64 on the CPU, and what masks cost there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime import cuda_source
from autoplan.runtime.attention import attention
from autoplan.runtime.context import _of_chunk
from autoplan.runtime.dropout import _fused_arguments, dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.experts import experts
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.mesh import AxisMesh, current_mesh, use_mesh
from autoplan.runtime.norm import power_sum, scale_
from autoplan.runtime.optim import on_local_shards
from autoplan.runtime.parts import Part, attend, attend_backward, join
from autoplan.runtime.precision import LossScaler
from experiments.gpu.rows import Run, difference, worst_difference

Tensors = dict[str, torch.Tensor]
# Relative L2 error that one operation in this dtype may have against float64: rounding of inputs, sums in float32.
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One operation: `make` gives its tensors in float64, `run` its result from them (integers stay integers).

    differentiable: names of the tensors whose gradients are compared.
    """

    name: str
    make: Callable[[], Tensors]
    run: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    differentiable: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def _routing(tokens: int, num_experts: int, top_k: int) -> Tensors:
    scores = torch.rand(tokens, num_experts, dtype=torch.float64)
    weights, index = scores.softmax(-1).topk(top_k)
    return {"index": index, "weights": weights}


def _expert_case(num_experts: int, tokens: int, hidden: int, inner: int) -> Case:
    def make() -> Tensors:
        given = {"hidden": _normal(tokens, hidden), **_routing(tokens, num_experts, 2)}
        given["gate_up"] = _normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5)
        given["down"] = _normal(num_experts, hidden, inner, scale=inner**-0.5)
        return given

    def run(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return experts(
            x["hidden"], x["index"], x["weights"], x["gate_up"], x["down"], activation="silu", gated=True
        )  # fmt: skip

    return Case(f"experts {num_experts}", make, run, ("hidden", "weights", "gate_up", "down"))


def _attention_case(name: str, batch: int, heads: int, groups: int, length: int, head: int, **how: Any) -> Case:
    def make() -> Tensors:
        given = {n: _normal(batch, h, length, head) for n, h in (("q", heads), ("k", groups), ("v", groups))}
        if how.get("documents"):
            given["documents"] = (torch.arange(length) * 5 // length).expand(batch, -1).contiguous()
        if how.get("mask"):
            kept = torch.rand(batch, 1, length, length) > 0.2
            given["mask"] = kept | torch.eye(length, dtype=torch.bool)
        if how.get("sinks"):
            given["sinks"] = _normal(heads)
        if how.get("dropout_p"):
            given["rng"] = torch.tensor([7, 3, 11])
        if how.get("key_bias"):  # the slopes of ALiBi
            slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
            given["key_bias"] = (slopes[:, None] * torch.arange(length))[None, :, None]
        return given

    def run(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        window = how.get("window")
        return attention(
            x["q"], x["k"], x["v"], causal=how.get("causal", True), scale=None, window=window,
            documents=x.get("documents"), mask=x.get("mask"), sinks=x.get("sinks"), softcap=how.get("softcap"),
            key_bias=x.get("key_bias"), dropout_p=how.get("dropout_p", 0.0), rng=x.get("rng"), site=5,
            index=((batch, batch, "batch"), (heads, heads, ())),
        )  # fmt: skip

    return Case(f"attention {name}", make, run, ("q", "k", "v", *(("sinks",) if how.get("sinks") else ())))


def _gathered_case(name: str, heads: int, groups: int, length: int, head: int, window: int | None) -> Case:
    """The last part of the queries over all keys, as a rank has them that gathered keys."""

    def make() -> Tensors:
        sizes = (("q", heads, length // 4), ("k", groups, length), ("v", groups, length))
        return {n: _normal(1, h, size, head) for n, h, size in sizes}

    def run(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _of_chunk(x["q"], x["k"], x["v"], None, window, None, None)

    return Case(f"attention {name}", make, run, ("q", "k", "v"))


def _cases(quick: bool) -> list[Case]:
    tokens, hidden, classes = (64, 32, 96) if quick else (2048, 1024, 32000)
    length, head, heads = (64, 16, 4) if quick else (1024, 64, 16)

    def logits() -> Tensors:
        target = torch.randint(0, classes, (tokens,))
        target[::7] = -100
        return {"logits": _normal(tokens, classes), "target": target}

    def table() -> Tensors:
        return {"ids": torch.randint(0, classes, (tokens,)), "weight": _normal(classes, hidden)}

    shapes = (2, heads, heads // 4, length, head)
    return [
        Case("cross entropy", logits, lambda x: cross_entropy_sum(x["logits"], x["target"]), ("logits",)),
        Case(
            "vocabulary-parallel cross entropy",
            logits,
            lambda x: vocab_parallel_cross_entropy_sum(x["logits"], x["target"], "tp", label_smoothing=0.1),
            ("logits",),
        ),
        Case(
            "vocabulary-parallel embedding",
            table,
            lambda x: vocab_parallel_embedding(x["ids"], x["weight"], "tp"),
            ("weight",),
        ),
        _expert_case(16, tokens, hidden, 2 * hidden),
        _expert_case(128, tokens, hidden // 2, hidden // 2),
        _attention_case("causal", *shapes),
        _attention_case("window", *shapes, window=length // 3),
        _attention_case("packed", *shapes, documents=True),
        _attention_case("packed, window", *shapes, documents=True, window=length // 3),
        _attention_case("mask", *shapes, mask=True),
        _attention_case("dropout", *shapes, dropout_p=0.1),
        _attention_case("dropout, packed", *shapes, dropout_p=0.1, documents=True),
        _attention_case("alibi", 2, heads, heads, length, head, key_bias=True),
        _attention_case("sinks", *shapes, sinks=True),
        _attention_case("sinks, window", *shapes, sinks=True, window=length // 3),
        _attention_case("sinks, packed, window", *shapes, sinks=True, documents=True, window=length // 3),
        _attention_case("soft-capped", *shapes, softcap=2.0),
        _gathered_case("over gathered keys", heads, heads // 4, length, head, None),
        _gathered_case("over gathered keys, window", heads, heads // 4, length, head, length // 3),
    ]


def _arrived(out: torch.Tensor) -> torch.Tensor:
    """A gradient of a result, the same numbers on every device and in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) if out.ndim else torch.ones_like(out)
    )


def _differentiated(
    case: Case, given: Tensors, arrived: Callable[[torch.Tensor], torch.Tensor] = _arrived
) -> tuple[torch.Tensor, Tensors]:
    """Result and gradients. arrived: gives the gradient of the result."""
    taken = {n: t.detach().requires_grad_(n in case.differentiable) for n, t in given.items()}
    out = case.run(taken)
    torch.autograd.backward(out, arrived(out))
    gradients = {n: g for n in case.differentiable if (g := taken[n].grad) is not None}
    return out.detach(), gradients


def _again(case: Case, given: Tensors) -> Callable[[], object]:
    """What is timed, and whose peak is read: forward and backward, with the gradient of the result made before."""
    kept = _arrived(case.run(given))
    return lambda: _differentiated(case, given, lambda out: kept)


def kernels(run: Run) -> None:
    """Result and gradients of every operation in float32 and bfloat16 on the device; times, and bytes at the peak."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    with use_mesh(AxisMesh([("tp", 1)], device_type=run.device_type)):
        for case in _cases(run.quick):
            torch.manual_seed(0)
            exact = case.make()
            for dtype in case.dtypes:
                name = f"{case.name}, {str(dtype)[6:]}"
                with run.case(name):
                    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in exact.items()}
                    # the truth has the rounded inputs, so that only the operation's own error is left
                    truth = {n: t.double() if t.is_floating_point() else t for n, t in rounded.items()}
                    out, gradients = _differentiated(case, truth)
                    here = {n: t.to(run.device) for n, t in rounded.items()}
                    mine, found = _differentiated(case, here)
                    errors = {"forward": difference(mine, out), "backward": worst_difference(found, gradients)}
                    again, repeated = _differentiated(case, here)
                    alike = torch.equal(mine, again) and all(torch.equal(found[n], repeated[n]) for n in found)
                    both = _again(case, here)
                    seconds, peak = run.median_s(both), run.peak_bytes(both)
                    run.write(
                        name, max(errors.values()) <= LIMITS[dtype], "" if alike else "two runs differ in some bits",
                        **errors, ms=1e3 * seconds, peak_mb=peak / 1e6,
                    )  # fmt: skip
        _dropouts(run)
    _of_all_parameters(run)
    _updates(run)
    dist.destroy_process_group()


def _of_all_parameters(run: Run) -> None:
    """What works on the gradients of all parameters by foreach operators: norm, scaling, the check of float16."""
    shapes = [(16, 8), (33,), (1,)] * 5 if run.quick else [(2048, 2048), (2048,), (1,)] * 20
    for dtype in (torch.float32, torch.bfloat16):
        name = f"norm and scaling of {len(shapes)} gradients, {str(dtype)[6:]}"
        with run.case(name):
            torch.manual_seed(2)
            gradients = [torch.randn(*shape).to(dtype) for shape in shapes]
            here = [g.to(run.device, copy=True) for g in gradients]
            norm = torch.stack([g.double().square().sum() for g in gradients]).sum()
            errors = {"norm": difference(power_sum(here, 2, run.device), norm)}
            scale_(here, torch.full((), 0.5, dtype=torch.float64, device=run.device))
            errors["scaled"] = max(difference(mine, 0.5 * g.double()) for mine, g in zip(here, gradients, strict=True))
            seconds = run.median_s(lambda: power_sum(here, 2, run.device))  # noqa: B023
            run.write(name, errors["norm"] < 1e-12 and errors["scaled"] == 0, **errors, ms=1e3 * seconds)
    with run.case("gradients of float16 unscaled, and refused"):
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=run.device)) for shape in shapes]
        found = []
        for value, skipped in ((3.0, False), (math.inf, True)):
            for p in parameters:
                p.grad = torch.full_like(p, 2.0)
            parameters[-1].grad = torch.full_like(parameters[-1], value)
            scaler = LossScaler(scale=2.0)
            scaler.unscale_(parameters, run.device, 1)
            first = parameters[0].grad
            found.append(scaler.skipped is skipped and (first is None if skipped else bool((first == 1.0).all())))
        run.write("gradients of float16 unscaled, and refused", all(found))


def _updates(run: Run) -> None:
    """AdamW as the runtime lets torch run it: one kernel, with the values of an update one by one."""
    shapes = [(16, 8), (33,), (1,)] if run.quick else [(2048, 2048), (2048,), (1,)] * 5
    name = f"AdamW of {len(shapes)} parameters"
    with run.case(name):
        torch.manual_seed(3)
        start = [torch.randn(*shape) for shape in shapes]
        gradients = [[torch.randn(*shape) for shape in shapes] for _ in range(3)]

        def updated(device: torch.device, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
            parameters = [torch.nn.Parameter(x.to(device, dtype, copy=True)) for x in start]
            optimizer = on_local_shards(lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1), parameters)
            for step in gradients:
                for p, g in zip(parameters, step, strict=True):
                    p.grad = g.to(device, dtype)
                optimizer.step()
            return [p.detach() for p in parameters], optimizer

        want, _ = updated(torch.device("cpu"), torch.float64)
        got, optimizer = updated(run.device, torch.float32)
        error = max(difference(mine, whole) for mine, whole in zip(got, want, strict=True))
        seconds = run.median_s(optimizer.step)
        fused = optimizer.param_groups[0]["fused"] is True
        run.write(name, error < LIMITS[torch.float32] and fused, error=error, ms=1e3 * seconds)


def _dropouts(run: Run) -> None:
    """The mask on the device is that of the CPU, element by element; bytes per second of a forward and a backward."""
    sizes = (8, 24, 32) if run.quick else (8, 2048, 4096)
    batch, length, hidden = sizes
    rng = torch.tensor([3, 5, 2])
    index = ((batch, batch, "batch"), (length, length, ("tp",)), (hidden, hidden, ()))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"dropout, {str(dtype)[6:]}"
        with run.case(name):
            x = torch.ones(sizes, dtype=dtype)
            expected = dropout(x, 0.1, rng, 4, index)  # type: ignore[arg-type]
            here, numbers = x.to(run.device).requires_grad_(), rng.to(run.device)
            out = dropout(here, 0.1, numbers, 4, index)  # type: ignore[arg-type]
            torch.autograd.backward(out, torch.ones_like(out))
            assert here.grad is not None
            equal = torch.equal(out.detach().cpu(), expected) and torch.equal(here.grad.cpu(), expected)

            def both(here: torch.Tensor = here, numbers: torch.Tensor = numbers) -> None:
                made = dropout(here, 0.1, numbers, 4, index)  # type: ignore[arg-type]
                torch.autograd.backward(made, torch.ones_like(made))

            seconds = run.median_s(both)
            native = run.median_s(lambda: torch.nn.functional.dropout(here, 0.1).sum().backward())  # noqa: B023
            run.write(
                name, equal, ms=1e3 * seconds, native_ms=1e3 * native, gb_per_s=4 * x.nbytes / seconds / 1e9,
                dropped=float((expected == 0).double().mean()),
            )  # fmt: skip
            if run.cuda:  # the kernel of GPUs without Triton
                arguments = _fused_arguments(current_mesh(), index, 0.1, 4)  # type: ignore[arg-type]

                def written() -> torch.Tensor:
                    return cuda_source.dropout(here.detach(), numbers, *arguments)  # noqa: B023

                equal = torch.equal(written().cpu(), expected)
                run.write(f"{name}, CUDA C++", equal, forward_ms=1e3 * run.median_s(written))


def masks(run: Run) -> None:
    """Grouped heads with masks: the peak must be far from that of scores, and halves of a ring must join."""
    heads, groups, length, head = (4, 2, 128, 16) if run.quick else (32, 8, 8192, 128)
    dtype = torch.bfloat16 if run.cuda else torch.float32
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    with use_mesh(AxisMesh([("cp", 1)], device_type=run.device_type)):
        documents, window = {"documents": True}, {"window": length // 4}
        for how in ({}, window, documents, documents | window, {"sinks": True}, {"sinks": True} | window):
            name = " ".join(how) or "causal"
            with run.case(name):
                case = _attention_case(name, 1, heads, groups, length, head, **how)
                given = {n: t.to(run.device, dtype) if t.is_floating_point() else t.to(run.device)
                         for n, t in case.make().items()}  # fmt: skip
                both = _again(case, given)
                peak, seconds = run.peak_bytes(both), run.median_s(both)
                scores = heads * length * length * given["q"].element_size()
                run.write(
                    name, peak < scores / 2 if run.cuda else None,
                    f"scores of all heads would be {scores / 1e6:.4g} MB", ms=1e3 * seconds, peak_mb=peak / 1e6,
                )  # fmt: skip
        _ring(run, heads, groups, min(length, 2048), head, dtype)
    dist.destroy_process_group()


def _ring(run: Run, heads: int, groups: int, length: int, head: int, dtype: torch.dtype) -> None:
    """Causal attention from its parts: two chunks of queries, keys in the order in which they come around."""
    with run.case("halves of a ring joined"):
        torch.manual_seed(1)
        q, k, v = (_normal(1, h, length, head) for h in (heads, groups, groups))
        arrived, scale, half = _normal(1, heads, length, head), 1 / math.sqrt(head), length // 2
        given = {n: x.clone().requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
        truth = attention(given["q"], given["k"], given["v"], causal=True, scale=scale)
        truth.backward(arrived)
        q, k, v, arrived = (x.to(run.device, dtype) for x in (q, k, v, arrived))
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        low, high = slice(0, half), slice(half, length)
        parts = ((low, low, "causal"), (high, low, "full"), (high, high, "causal"))
        whole = Part((0, half), (0, half), "causal")
        for rows, columns, kind in parts:
            part = replace(whole, kind=kind)
            found = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], part, scale)
            join(out[:, :, rows], lse[:, :, rows], *found)
        result = out.to(dtype)
        gradients = {n: torch.zeros_like(x, dtype=wide) for n, x in (("q", q), ("k", k), ("v", v))}
        for rows, columns, kind in parts:
            part = replace(whole, kind=kind)
            found_back = attend_backward(
                arrived[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], result[:, :, rows],
                lse[:, :, rows], part, scale,
            )  # fmt: skip
            for (n, where), x in zip((("q", rows), ("k", columns), ("v", columns)), found_back, strict=True):
                gradients[n][:, :, where] += x
        errors = {"forward": difference(result, truth)}
        errors["backward"] = worst_difference(gradients, {n: x.grad for n, x in given.items()})
        run.write("halves of a ring joined", max(errors.values()) <= LIMITS[dtype], **errors)
