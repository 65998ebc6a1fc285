"""Of experiments/gpu: training at one rank, over NCCL where there is a GPU."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoplan
from autoplan.cost_models.profile import Profile
from autoplan.runtime.model import ParallelModel
from experiments.gpu.models import PlainLlama
from experiments.gpu.rows import Run, difference, worst_difference
from experiments.shared.measure import compare, interleave
from experiments.shared.models import Size, llama_config, make_llama, make_mixtral, token_batch

# Error of the program in 16 bits, against float32, over that of the eager model: both round, in another order.
MOST_OF_EAGER = 1.3
FP32_LIMIT = 1e-4
LOSS_ROUNDING = 1e-3  # of a loss in bfloat16, where the eager model's happens to be exact
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)
STEP_SIZE = Size(2048, 8, 2048, 4, 32000, 16, 4)  # of the part `step`
Batch = dict[str, torch.Tensor]


@contextmanager
def one_rank(run: Run) -> Iterator[None]:
    """A process group of one rank: NCCL on a GPU."""
    warnings.filterwarnings("ignore")
    backend = "nccl" if run.cuda else "gloo"
    device = run.device if run.cuda else None
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), device_id=device)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _compiler(run: Run) -> bool | str:
    """Inductor on the GPU; on the CPU what needs no C++ compiler."""
    return True if run.cuda else "aot_eager"


def program(
    run: Run,
    model: nn.Module,
    batch: Batch,
    *,
    compile: bool | str = False,
    profile: str | None = None,
    optimizer: bool = True,
    **pins: Any,
) -> ParallelModel:
    """The model as autoplan runs it at one rank; every degree is pinned."""
    cluster = autoplan.Cluster.local(1, run.device_type)
    if run.cuda:
        cluster = cluster.with_(memory_gb=torch.cuda.get_device_properties(0).total_memory / 1e9)
    pins = {"num_micro_batches": 1, "recompute": "none"} | pins
    if "activations" in pins.get("offload", ""):
        del pins["recompute"]
    return autoplan.parallelize(
        model, cluster, optimizer=OPTIMIZER if optimizer else None, example_inputs=batch, pins=pins, profile=profile,
        global_batch_size=len(batch["input_ids"]), compile=compile, verify=False, device=run.device,
    )  # fmt: skip


def free(run: Run) -> None:
    """Give back what the last case held."""
    gc.collect()
    if run.cuda:
        torch.cuda.empty_cache()


def _batch(run: Run, size: Size) -> Batch:
    return {n: x.to(run.device) for n, x in token_batch(size).items()}


def _make(run: Run, family: str, size: Size, num_experts: int = 8) -> nn.Module:
    with torch.device(run.device):
        return make_mixtral(size, num_experts, 2) if family == "mixtral" else make_llama(size)


# -- parity ------------------------------------------------------------------------------------------------------------


def _eager(model: nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    for p in model.parameters():
        p.grad = None
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def parity(run: Run) -> None:
    """Llama and Mixtral in float32 and bfloat16: the program against the eager model, both against float32."""
    size = Size(64, 2, 32, vocab=256) if run.quick else Size(1024, 4, 1024, 4, 32000, 16, 4)
    with one_rank(run):
        for family in ("llama", "mixtral"):
            with run.case(family):
                _parity_of(run, family, size)
            free(run)


def _parity_of(run: Run, family: str, size: Size) -> None:
    given = _make(run, family, size).to(torch.bfloat16)
    batch = _batch(run, size)
    exact = copy.deepcopy(given).float()
    loss, gradients = _eager(exact, batch)
    norm = float(torch.stack([g.double().norm() for g in gradients.values()]).norm())
    truth = {n: g.detach().cpu() for n, g in gradients.items()}
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        name = f"{family}, {str(dtype)[6:]}{', compiled' * compiled}"
        with run.case(name):
            model = exact if dtype == torch.float32 else given
            eager_loss, eager = _eager(model, batch)
            eager_peak = run.peak_bytes(lambda: _eager(model, batch))  # noqa: B023
            theirs = worst_difference(eager, truth)
            for p in model.parameters():
                p.grad = None
            pm = program(run, model, batch, optimizer=False, compile=_compiler(run) if compiled else False)
            found = float(pm.step(batch))
            my_norm = float(pm.grad_norm())
            mine = worst_difference(pm.gradients(), truth)
            peak = run.peak_bytes(functools.partial(pm.step, batch))
            limit = FP32_LIMIT if dtype == torch.float32 else MOST_OF_EAGER * theirs
            away = abs(found - loss) / abs(loss)
            theirs_away = abs(eager_loss - loss) / abs(loss)
            most = FP32_LIMIT if dtype == torch.float32 else MOST_OF_EAGER * theirs_away + LOSS_ROUNDING
            run.write(
                name, mine <= limit and away <= most, loss_error=away, gradient_error=mine,
                eager_gradient_error=theirs, norm_error=abs(my_norm - norm) / norm, peak_mb=peak / 1e6,
                eager_peak_mb=eager_peak / 1e6,
            )  # fmt: skip
            del pm
        free(run)


# -- host syncs --------------------------------------------------------------------------------------------------------


def _syncs(step: Callable[[], object]) -> list[str]:
    """Where the host waited for the device: torch's own warnings, file and line of each."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in found if "synchroniz" in str(w.message)]


def sync(run: Run) -> None:
    """Host syncs of a step with 2 and with 4 layers: one, for the count of labels; none may come with a layer."""
    if not run.cuda:
        run.write("host syncs", note="counted on a GPU only; test_device_budgets.py counts what would wait")
        return
    with one_rank(run):
        for family in ("llama", "mixtral"):
            with run.case(family):
                counted: list[list[str]] = []
                for layers in (2, 4):
                    size = Size(256, layers, 256, 4, 1024)
                    batch = _batch(run, size)
                    pm = program(run, _make(run, family, size).to(torch.bfloat16), batch, num_micro_batches=2)

                    def step(pm: ParallelModel = pm, batch: Batch = batch) -> None:
                        pm.step(batch)
                        pm.clip_grad_norm_(1.0)
                        pm.optimizer.step()

                    step()
                    step()
                    counted.append(_syncs(step))
                    free(run)
                few, more = counted
                run.write(
                    family, len(more) == len(few) == 1, ", ".join(sorted(set(more))), of_2_layers=len(few),
                    of_4_layers=len(more),
                )  # fmt: skip


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One training at one rank."""

    family: str
    size: Size
    num_micro_batches: int = 1
    recompute: str = "none"
    compiled: bool = False

    def __str__(self) -> str:
        more = "" if self.recompute == "none" else f" recompute {self.recompute}"
        return f"{self.family} {self.size} m{self.num_micro_batches}{more}{' compiled' * self.compiled}"


def trainings(quick: bool) -> list[Training]:
    """Return what is predicted and measured, in bfloat16."""
    if quick:
        small = Size(64, 2, 32, 4, 256)
        return [
            Training("llama", small),
            Training("llama", small, 2, "full"),
            Training("llama", small, compiled=True),
            Training("mixtral", small),
        ]
    base, wide = Size(2048, 8, 2048, 8, 32000, 16, 4), Size(4096, 4, 4096, 2, 32000, 32, 8)
    narrow = Size(1024, 16, 1024, 16, 32000, 16, 4)
    return [
        Training("llama", base, 1),
        Training("llama", base, 4),
        Training("llama", base, 2, "full"),
        Training("llama", base, 2, "attention+mlp+norms"),
        Training("llama", narrow, 4),
        Training("llama", wide, 2),
        Training("mixtral", replace(narrow, num_layers=4, batch=8), 2),
        # last: compiling takes long, and if time runs out the others are there
        Training("llama", base, 2, compiled=True),
        Training("llama", narrow, 4, compiled=True),
    ]


def profile(run: Run) -> None:
    """Measure this device: what the trainings run, fixed costs, general shapes; written to the folder."""
    from autoplan.capture.export import capture
    from autoplan.profiler.run import graph_tasks, measure_in_job

    tasks: dict[str, Any] = {}
    for t in trainings(run.quick):
        few = replace(t.size, num_layers=2, batch=t.size.batch // t.num_micro_batches)
        with torch.device("meta"):
            model = make_mixtral(few, 8, 2) if t.family == "mixtral" else make_llama(few)
        graph = capture(model.to(torch.bfloat16), token_batch(few))
        for task in graph_tasks(graph, [1], {"b": few.batch, "s": few.seq}):
            tasks.setdefault(task.work.key, task)
    torch.set_num_threads(1)  # as torchrun
    with one_rank(run), run.case("profile"):
        budget_s = min(max(10.0, run.left_s - 5.0), 10.0 if run.quick else 300.0)
        asked = list(tasks.values())
        found = measure_in_job(asked, budget_s, dtypes=("bfloat16",), progress=False, device=run.device)
        found.save(run.profile)
        run.write(
            "profile", len(found.ops) > 0, "; ".join(found.notes)[:400], operations=len(found.ops),
            collectives=len(found.links), asked=len(tasks), device=str(found.machine.get("gpu", found.device_type)),
        )  # fmt: skip
        _speeds(run, found)


def _speeds(run: Run, found: Profile) -> None:
    """The fastest products that were measured."""
    rates = {}
    for record in found.ops:
        if record.work.op in ("linear", "matmul") and record.forward_s.median > 0:
            rates[record.work.key] = record.work.flops / record.forward_s.median
    if rates:
        best = max(rates, key=lambda k: rates[k])
        run.write("fastest product", None, best, tflop_per_s=rates[best] / 1e12)


def predicted(run: Run) -> None:
    """Every training: the plan's step and peak beside what is measured."""
    known = str(run.profile) if run.profile.is_file() else None
    if known is None:
        run.write("profile", False, "no profile in the folder: run the part `profile` first")
        return
    with one_rank(run):
        for t in trainings(run.quick):
            with run.case(str(t)):
                batch = _batch(run, t.size)
                model = _make(run, t.family, t.size).to(torch.bfloat16)
                pm = program(
                    run, model, batch, compile=_compiler(run) if t.compiled else False, profile=known,
                    num_micro_batches=t.num_micro_batches, recompute=t.recompute,
                )  # fmt: skip
                del model
                free(run)

                def step(pm: ParallelModel = pm, batch: Batch = batch) -> None:
                    pm.step(batch)
                    pm.optimizer.step()

                step()
                seconds = run.median_s(step)
                figures = _peak(run, step)
                estimate = pm.plan.estimate
                assert estimate is not None
                expected, most = estimate.step_time_s, estimate.peak_memory_bytes
                inside = expected.low <= seconds <= expected.high
                run.write(
                    str(t), None, "in the interval" if inside else "outside the interval", ms=1e3 * seconds,
                    predicted_ms=1e3 * expected.mid, ratio=expected.mid / seconds, predicted_peak_gb=most.mid / 1e9,
                    **figures,
                )  # fmt: skip
                del pm, step
            free(run)


def _peak(run: Run, step: Callable[[], object]) -> dict[str, float]:
    """GB of tensors at the peak, of the allocator, and of the device with its context."""
    if not run.cuda:
        return {"step_peak_gb": run.peak_bytes(step) / 1e9}
    torch.cuda.reset_peak_memory_stats()
    step()
    run.wait()
    free_bytes, total = torch.cuda.mem_get_info()
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "of_the_device_gb": (total - free_bytes) / 1e9,
    }


def _peak_of_all(run: Run, step: Callable[[], object]) -> float:
    """Bytes of all tensors on the device at the peak, those that were there before among them."""
    if not run.cuda:
        return float(run.peak_bytes(step))
    return 1e9 * _peak(run, step)["allocated_gb"]


# -- the step against others -------------------------------------------------------------------------------------------


def step(run: Run) -> None:
    """Whole steps in turn: the program, Hugging Face's model and one as torchtitan has it; eager and compiled."""
    size = Size(64, 2, 32, 4, 256) if run.quick else STEP_SIZE
    batch = _batch(run, size)
    contenders: dict[str, Callable[[], object]] = {}

    def of_program(pm: ParallelModel) -> Callable[[], object]:
        return lambda: (pm.step(batch), pm.optimizer.step())

    def of_module(module: Callable[..., Any], parameters: list[nn.Parameter]) -> Callable[[], object]:
        optimizer = OPTIMIZER(parameters)

        def train() -> None:
            optimizer.zero_grad()
            out = module(**batch)
            (out if isinstance(out, torch.Tensor) else out.loss).backward()
            optimizer.step()

        return train

    def plain() -> nn.Module:
        config: Any = llama_config(size)
        with torch.device(run.device):
            return PlainLlama(size, config.intermediate_size).to(torch.bfloat16)

    def eager() -> nn.Module:
        return _make(run, "llama", size).to(torch.bfloat16)

    backend = "inductor" if run.cuda else "aot_eager"
    with one_rank(run):
        for name, how in (("program", False), ("program, compiled", _compiler(run))):
            with run.case(name):
                contenders[name] = of_program(program(run, eager(), batch, compile=how))
        for name, make, compiled in (
            ("Hugging Face", eager, False),
            ("Hugging Face, compiled", eager, True),
            ("as torchtitan", plain, False),
            ("as torchtitan, compiled", plain, True),
        ):
            with run.case(name):
                module = make()
                parameters = list(module.parameters())
                called = functools.partial(module, use_cache=False) if make is eager else module
                contenders[name] = of_module(torch.compile(called, backend=backend) if compiled else called, parameters)
        ready: dict[str, Callable[[], object]] = {}  # what fails, or has no time left to be compiled, is not timed
        for name in sorted(contenders, key=lambda n: "compiled" in n):
            if run.left_s < 20.0 and ready:
                run.write(name, None, "no time left")
                continue
            with run.case(name):
                contenders[name]()
                contenders[name]()
                ready[name] = contenders[name]
        if not ready:
            return
        waited = {name: functools.partial(_waited, run, work) for name, work in ready.items()}
        times = interleave(waited, budget_s=max(5.0, run.left_s - 10.0), min_repeats=3 if run.quick else 7,
                           max_repeats=4 if run.quick else 20)  # fmt: skip
        tokens = size.batch * size.seq
        for name, t in times.items():
            figures: dict[str, float | str] = {"ms": 1e3 * t.median_s, "tokens_per_s": tokens / t.median_s}
            for other in ("as torchtitan", "Hugging Face"):
                if other in times and other != name:
                    figures[f"over {other}"] = str(compare(t, times[other]))
            run.write(name, None, **figures)


def _waited(run: Run, work: Callable[[], object]) -> None:
    work()
    run.wait()


# -- what waits on the host --------------------------------------------------------------------------------------------


def offload(run: Run) -> None:
    """Activations, and the optimizer, on the host: the same losses and parameters, a lower peak, how much slower."""
    size = Size(64, 2, 32, 4, 256) if run.quick else STEP_SIZE
    with one_rank(run):
        model, batch = _make(run, "llama", size), _batch(run, size)
        base: tuple[list[float], Mapping[str, torch.Tensor], float, float] | None = None
        for name in ("none", "activations", "optimizer"):
            with run.case(name):
                pm = program(run, model, batch, **({} if name == "none" else {"offload": name}))

                def train(pm: ParallelModel = pm) -> float:
                    loss = float(pm.step(batch))
                    pm.optimizer.step()
                    return loss

                losses = [train() for _ in range(3)]
                state = {n: t.detach().cpu().clone() for n, t in pm.state_dict().items()}
                seconds, peak = run.median_s(train, 3 if run.quick else 5), _peak_of_all(run, train)
                if name == "none":
                    base = losses, state, seconds, peak
                    run.write("nothing", None, ms=1e3 * seconds, peak_mb=peak / 1e6)
                elif base is not None:
                    apart = max(difference(state[n], base[1][n]) for n in base[1])
                    away = max(abs(a - b) / abs(b) for a, b in zip(losses, base[0], strict=True))
                    run.write(
                        name, apart <= FP32_LIMIT and away <= FP32_LIMIT, loss_error=away, parameter_error=apart,
                        ms=1e3 * seconds, slower=seconds / base[2], peak_mb=peak / 1e6, of_peak=peak / base[3],
                    )  # fmt: skip
                del pm, train
            free(run)
