"""Random cases: the same for a seed and a number."""

from __future__ import annotations

import math
import random
from typing import Any

from experiments.compatibility.plan_fuzz.cases import Case, Optimizer, Plan, Step
from experiments.compatibility.plan_fuzz.loop import OPTIMIZERS
from experiments.compatibility.plan_fuzz.models import BY_SAMPLES, LOSSES
from experiments.compatibility.plan_fuzz.stateful_models import DRAWING, STATES
from experiments.compatibility.plan_fuzz.transformers_models import DROPS, EAGER

_WORLDS = {2: 24, 4: 16, 8: 1}  # and how often
_SCHEDULES = {  # virtual stages, and micro-batches per rank of the pipeline
    "1F1B": (1, 1), "GPipe": (1, 1), "Interleaved1F1B": (2, 1), "ZB-H1": (1, 1), "InterleavedZeroBubble": (2, 1),
    "ZBV": (2, 1), "DualPipeV": (2, 2),
}  # fmt: skip
_RECOMPUTE = (
    "none", "none", "none", "full", "selective", "attention", "mlp", "norms", "attention+mlp", "attention+mlp+norms",
    "offload",
)  # fmt: skip
_OFFLOAD = ("none", "activations", "optimizer", "parameters", "activations+optimizer", "optimizer+parameters")
_SCALES = (0.0, 0.0, 2.0**4, 2.0**6, 2.0**18, 2.0**21, 2.0**24, 2.0**40)  # of a loss
_CONTEXT = ("gather", "ring", "ulysses", "ulysses2xring2")
_MODELS = (
    ("gpt", 8), ("causal", 9), ("encoder_decoder", 2), ("translator", 2), ("vision", 2), ("residual", 3),
    ("perceptron", 2), ("recurrent", 1), ("drawing", 5), ("updating", 7), ("fourier", 1), ("divided", 4),
)  # fmt: skip


_PER_MODEL = 6  # cases of one model, which is captured once


def draw_case(seed: int, number: int) -> Case:
    """Return case `number` of a seed."""
    r = random.Random(f"{seed}:{number // _PER_MODEL}")
    model = r.choices([m for m, _ in _MODELS], [w for _, w in _MODELS])[0]
    options, frozen = _draw_model(r, model)
    traits = _Traits.of(model, options)
    precision = r.choices(["native", "bf16", "bf16-grad16", "fp32", "fp16", "fp16-grad16"], [16, 1, 1, 1, 4, 3])[0]
    if traits.experts or traits.drops or traits.coupled:
        precision = "native"  # a router jumps where it rounds
    example_form = r.choices(["", "strided", "turned", "int32"], [12, 1, 1, traits.sequence])[0]
    dtype = "float64"
    if precision == "native" and not (traits.experts or traits.drops or traits.jumps) and r.random() < 0.2:
        dtype = r.choice(["float32", "float32", "bfloat16"])
    extra = model not in ("causal", "encoder_decoder") and r.random() < 0.2  # transformers' forwards would take it
    model_seed, example = r.randrange(1000), (r.choice([2, 4, 6]), r.choice([8, 16, 24]))

    r = random.Random(f"{seed}:{number}")
    world = r.choices(list(_WORLDS), list(_WORLDS.values()))[0]
    next_world = r.choice([w for w in (1, 2, 2, 4) if w != world])
    maybe = lambda p: r.random() < p  # noqa: E731
    plan, other, next_plan = (_draw_plan(r, w, traits) for w in (world, world, next_world))
    scaled = precision.startswith("fp16")
    compression = r.choice(["bf16", "fp16", *([] if scaled else ["powersgd"] * 2)]) if maybe(0.12) else ""
    if compression:
        alone = dict(zero_stage=0, zero_replicas=1, offload="none")
        plan, other, next_plan = (_with(p, **alone) for p in (plan, other, next_plan))
    door = r.choices(["search", "plan", "file", "program"], [7, 1, 1, 1])[0]
    compile = "aot_eager" if r.random() < 0.04 and not traits.slow else ""
    if compile and "+" in str(plan.pins.get("recompute")):
        plan = _with(plan, recompute="full")
    plan = Plan(plan.pins, plan.latency_s, plan.bytes_per_s, door, compile, plan.batch)
    return Case(
        seed=model_seed,
        world=world,
        model=model,
        options=options,
        example=example,
        example_form=example_form,
        frozen=frozen,
        start=r.choice(["meta", "init", "weights", "unequal"] if model == "causal" else ["unequal"])
        if r.random() < 0.15
        else "",
        precision=precision,
        dtype=dtype,
        twin=(twin := maybe(0.1)),
        compression=compression,
        verify=r.random() < 0.1,
        optimizer=(optimizer := _draw_optimizer(r, (plan, other, next_plan), traits, dtype)),
        plan=plan,
        other=other,
        next_plan=next_plan,
        next_world=next_world,
        extra=extra,
        growth_interval=r.choice([0, 1, 1, 2]) if scaled else 0,
        steps=_draw_steps(
            r, traits, optimizer, precision, 3 * (compression == "powersgd"), "move" if twin else "restart"
        ),
    )


def _with(plan: Plan, **pins: Any) -> Plan:
    return Plan({**plan.pins, **pins}, plan.latency_s, plan.bytes_per_s, plan.door, plan.compile, plan.batch)


class _Traits:
    """What a model can be asked for."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        kind = options.get("kind", "")
        self.experts = {"Mixtral": 4, "Qwen3Moe": 8, "DeepseekV3": 8, "GptOss": 4}.get(kind, 0)
        self.layers = int(options.get("layers", options.get("units", options.get("num_hidden_layers", 2))))
        if model in ("translator", "encoder_decoder"):
            self.layers = 4
        self.layers = 1 if model in ("perceptron", "recurrent") else 3 if model == "divided" else self.layers
        stateful = model in ("drawing", "updating", "fourier", "divided")
        self.heads = 0 if model in ("residual", "perceptron", "recurrent", "fourier") else int(options.get("heads", 4))
        self.heads = 2 if stateful and self.heads else self.heads
        cut = options.get("loss") != "shifted" and options.get("documents") != "padded"
        cut = cut and not (stateful and (kind in ("masked", "convolutions") or model == "fourier"))
        self.attention = (model in ("gpt", "causal") or stateful) and cut
        self.sequence = model not in ("vision", "residual", "perceptron")
        self.coupled = options.get("aux", False) or (model == "residual" and options.get("groups") == 0)
        self.coupled = self.coupled or model == "updating" or bool(options.get("norm"))
        self.by_samples = options.get("loss") in BY_SAMPLES or model == "perceptron" or self.coupled
        self.by_samples = self.by_samples or (stateful and kind != "masked")
        self.norms_and_biases = model in ("gpt", "translator", "vision") or kind in ("Bart", "Qwen2")
        calls = {"gpt": "blocks.%d", "vision": "blocks.%d", "causal": "model.layers.%d"}
        self.calls = "transformer.h.%d" if kind in ("GPT2", "Bloom") else calls.get(model, "")
        self.drops = bool(options.get("dropout")) or model == "drawing" or any(options.get(name) for name in DROPS)
        self.jumps = model == "updating" and kind in ("codebook", "router")
        self.outputs = options.get("returns") != "object"  # which has no names
        self.slow = model in ("causal", "encoder_decoder")

    @classmethod
    def of(cls, model: str, options: dict[str, Any]) -> _Traits:
        """Return the traits of a model with options."""
        return cls(model, options)


def _draw_model(r: random.Random, model: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    maybe = lambda p: r.random() < p  # noqa: E731
    frozen: tuple[str, ...] = ()
    if maybe(0.15):
        frozen = (r.choice(["*norm*", "*.0.*", "*bias", "*tok*", "*embed*", "*up*", "*.1.*", "head*", "*q*"]),)
    if model == "gpt":
        heads = r.choice([2, 3, 4, 4])
        out: dict[str, Any] = {
            "layers": r.choice([1, 2, 3, 4, 4, 5]), "heads": heads, "dim": heads * r.choice([4, 6, 10]),
            "kv": r.choice([k for k in (1, 2, 3, 4) if heads % k == 0]), "vocab": r.choice([32, 33, 37, 50]),
            "inner": r.choice([48, 50, 52, 35]),
        }  # fmt: skip
        out["loss"] = "mean" if maybe(0.3) else r.choice(list(LOSSES))
        if maybe(0.3):
            out["returns"] = r.choice(["dict", "nested", "object"])
        for name, p in (
            ("tied", 0.4),
            ("sinus", 0.3),
            ("head_bias", 0.2),
            ("skips", 0.15),
            ("unused", 0.1),
            ("shared", 0.12),
            ("single", 0.08),
            ("number", 0.12),
        ):
            if maybe(p):
                out[name] = True
        if out.get("tied"):
            out.pop("head_bias", None)
        if maybe(0.25):
            out["dropout"] = 0.2
        return out, frozen
    if model == "causal":
        kind = r.choice(
            [
                "Llama",
                "Llama",
                "Mistral",
                "Qwen2",
                "GPT2",
                "Mixtral",
                "Mixtral",
                "Qwen3Moe",
                "Qwen3Moe",
                "DeepseekV3",
                *EAGER,
            ]
        )
        out = {"kind": kind}
        layers = r.choice([1, 2, 3, 4])
        out["n_layer" if kind in ("GPT2", "Bloom") else "num_hidden_layers"] = layers
        if kind in EAGER:
            out["attn_implementation"] = "eager"
        if kind == "DeepseekV3":
            out["num_hidden_layers"] = max(2, layers)
        if maybe(0.3):
            out["own"] = True
        if kind in ("Mixtral", "Qwen3Moe") and maybe(0.25):
            out["aux"] = True
        elif kind not in ("GPT2", "DeepseekV3", *EAGER) and maybe(0.4):  # padded Gemma 2 is not finite in eager
            out["documents"] = r.choice(["padded", "packed", "left"])
        if kind in ("Llama", "Qwen2", "Mixtral") and maybe(0.3):
            out["tie_word_embeddings"] = True
        if kind == "Mixtral" and maybe(0.3):
            out["num_local_experts"] = r.choice([2, 3, 6])
        if kind == "GPT2" and maybe(0.5):
            out.update(r.choice([dict(resid_pdrop=0.2, embd_pdrop=0.1), dict(attn_pdrop=0.2)]))
        if kind in ("Bloom", "Llama", "Mistral", "Gemma2") and maybe(0.3):
            out["attention_dropout"] = 0.2
        return out, frozen
    if model == "encoder_decoder":
        out = {"kind": r.choice(["T5", "Bart"])}
        if maybe(0.7):
            out["documents"] = r.choice(["padded", "left", "both"])
        return out, frozen
    if model == "translator":
        return {"layers": r.choice([1, 2]), "vocab": r.choice([32, 33])}, frozen
    if model == "vision":
        return {"layers": r.choice([1, 2, 4]), "classes": r.choice([7, 8]), "pooled": maybe(0.5)}, frozen
    if model == "residual":
        return {"width": r.choice([6, 8, 12]), "groups": r.choice([0, 1, 2]), "units": r.choice([1, 2, 4])}, frozen
    if model == "drawing":
        out = {"kind": r.choice(list(DRAWING)), "layers": r.choice([1, 2, 4])}
        return {**out, "causal": maybe(0.5), **({"dropout": 0.2} if maybe(0.3) else {})}, frozen
    if model == "updating":
        where = r.choice(["before", "between", "in", "in", "beside", "behind"])
        return {"kind": r.choice(list(STATES)), "where": where, "layers": r.choice([1, 2, 4])}, frozen
    if model == "fourier":
        return {"filtered": maybe(0.6), "layers": r.choice([1, 2, 4])}, frozen
    if model == "divided":
        kind = r.choice(["attributes", "convolutions"])
        return {"kind": kind, "norm": maybe(0.4), **({"again": maybe(0.4)} if kind == "attributes" else {})}, frozen
    if model == "perceptron":
        return {"dropout": 0.2} if maybe(0.3) else {}, frozen
    return {"kind": r.choice(["lstm", "gru"])}, frozen


def _split(r: random.Random, world: int) -> dict[str, int]:
    """Give every factor 2 of the world to a degree."""
    out = {"dp": 1, "tp": 1, "pp": 1, "cp": 1}
    while world > 1:
        out[r.choices(["dp", "tp", "pp", "cp"], [4, 3, 3, 2])[0]] *= 2
        world //= 2
    return out


def _draw_plan(r: random.Random, world: int, traits: _Traits) -> Plan:
    degrees = _split(r, world)
    if not traits.attention:
        degrees["dp"], degrees["cp"] = degrees["dp"] * degrees["cp"], 1
    if degrees["pp"] > traits.layers and r.random() < 0.95:
        degrees["tp"], degrees["pp"] = degrees["tp"] * degrees["pp"], 1
    if traits.heads % degrees["tp"] and r.random() < 0.95:
        degrees["dp"], degrees["tp"] = degrees["dp"] * degrees["tp"], 1
    pins: dict[str, Any] = dict(degrees)
    for name in ("tp", "pp", "dp"):
        if r.random() < 0.1:
            del pins[name]  # it is searched
    pins["num_micro_batches"] = r.choice([1, 2, 3]) if degrees["pp"] == 1 else degrees["pp"] * r.choice([1, 1, 2])
    if r.random() < 0.7:
        pins["micro_batch_size"] = r.choice([1, 2, 2, 3])
    stage = r.choice([0, 0, 1, 2, 3, 3])
    if degrees["pp"] > 1:
        _draw_schedule(r, pins, degrees["pp"], traits.layers)
        if pins.get("schedule") in ("ZB-H1", "InterleavedZeroBubble", "ZBV", "DualPipeV"):
            stage = min(stage, 2)
    if degrees["dp"] > 1 or r.random() < 0.1:
        if r.random() < 0.9:
            pins["zero_stage"] = stage
        if degrees["dp"] > 2 and stage and r.random() < 0.5:
            pins["zero_replicas"] = 2
    pins["recompute"] = r.choice(_RECOMPUTE)
    if r.random() < 0.25 and traits.calls:
        pins["recompute"] = {traits.calls % k: r.choice(_RECOMPUTE) for k in range(traits.layers) if r.random() < 0.6}
    if degrees["cp"] > 1 and r.random() < 0.8:
        whole = traits.heads // degrees["tp"] % degrees["cp"] == 0
        pins["context_method"] = r.choice(_CONTEXT[: 2 if not whole else 3 if degrees["cp"] < 4 else 4])
    if traits.experts and r.random() < 0.7:
        ep = r.choice([d for d in (1, 2, 4) if degrees["dp"] * degrees["cp"] * degrees["tp"] % d == 0])
        pins["ep"] = ep
        if r.random() < 0.4:
            pins["etp"] = r.choice([1, 2])
    if r.random() < 0.2:
        moves = degrees["dp"] * degrees["cp"] > 1 and pins.get("zero_stage", 0) > 0
        pins["offload"] = r.choice([x for x in _OFFLOAD if moves or "parameters" not in x])
        if "activations" in pins["offload"]:
            pins.pop("recompute")
    return Plan(
        {n: list(x) if isinstance(x, tuple) else x for n, x in pins.items()},
        r.choice([0.0, 1e-6, 1e-3]),
        r.choice([1e6, 1e9, 1e9, 1e12]),
        batch=r.choice([1, 2, 4]),
    )


def _draw_schedule(r: random.Random, pins: dict[str, Any], pp: int, layers: int) -> None:
    schedule = r.choice(list(_SCHEDULES))
    virtual, least = _SCHEDULES[schedule]
    if layers < pp * virtual:
        schedule, virtual, least = r.choice(["1F1B", "GPipe", "ZB-H1"]), 1, 1
    pins["schedule"] = schedule
    if virtual > 1 and r.random() < 0.7:
        pins["virtual_stages"] = virtual
    pins["num_micro_batches"] = max(pins["num_micro_batches"], least * pp * (2 if virtual > 1 and least > 1 else 1))
    parts = pp * virtual
    if r.random() < 0.5 and layers > parts:
        cuts = sorted(r.sample(range(1, layers), parts - 1))
        pins["stages"] = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


def _draw_optimizer(r: random.Random, plans: tuple[Plan, ...], traits: _Traits, dtype: str) -> Optimizer:
    plain = all(p.pins.get("pp", 2) == 1 for p in plans)
    own = r.random() < 0.15
    return Optimizer(
        # DTensors have no fused SGD, and torch's own is wrong in bf16 on the CPU
        kind=r.choice([k for k in OPTIMIZERS if not ((own or dtype == "bfloat16") and k == "fused sgd")]),
        groups=r.choices(["", "patterns", "function"], [7, 2 * traits.norms_and_biases, 2])[0],
        clip=r.choice([0.0, 0.3, 0.05]),
        norm_type=r.choice([2.0, 2.0, 2.0, 1.0, 3.0, 0.5, math.inf]),
        finite=r.random() < 0.3,
        clip_some=0.05 if plain and r.random() < 0.15 else 0.0,
        schedule=r.random() < 0.25,
        own=own,
    )


def _draw_steps(
    r: random.Random, traits: _Traits, optimizer: Optimizer, precision: str, more: int, restart: str
) -> tuple[Step, ...]:
    """Return turns, `more` than usual: PowerSGD sends whole gradients at first. `restart`: what is done for it."""
    # torch's fused SGD fails if only some parameters have had a gradient
    left_out = "step" if optimizer.kind == "fused sgd" else "leave out"
    weights = "move" if traits.drops else "weights only"  # dropout would begin again
    afters = {"": 5, **dict.fromkeys(["state dict", "some state", "optimizer state", "eval", "checkpoint", "dcp"], 1)}
    afters = {**afters, "move": 2, restart: 2 + 2 * (restart == "move")}
    afters[weights] = afters.get(weights, 0) + 1
    befores = {"": 8, "eval": 1, "odd": 1, **dict.fromkeys(["outputs", "own outputs", "reduced"], traits.outputs)}
    out = []
    for _ in range(more + r.choice([1, 2, 3, 3, 4])):
        out.append(
            Step(
                batches=1 if traits.slow and traits.coupled else r.choices([1, 2, 3], [6, 2, 1])[0],
                units=r.choice([1, 1, 2]),
                unequal=not traits.by_samples and r.random() < 0.3,
                length=r.choice([8, 16, 16, 16, 24, 24, 12, 15]) if traits.sequence else 16,
                form=r.choices(["", "strided", "turned", "int32"], [8, 1, 1, traits.sequence])[0],
                before=r.choices(list(befores), list(befores.values()))[0],
                update=r.choices(["step", "skip", left_out, "eval", "not finite"], [12, 1, 1, 1, 1])[0],
                after=r.choices(list(afters), list(afters.values()))[0],
                scale=r.choice(_SCALES) if precision.startswith("fp16") else 0.0,
            )
        )
    return tuple(out)
