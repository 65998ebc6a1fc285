"""Encoder-decoders and skip connections: two sequence lengths, several tensors between stages, equal to one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from parity import (
    SEQ,
    TARGET,
    Case,
    cluster_of,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    graph_of,
    is_hf,
    make_model,
    reference,
    run_simulated,
    spread_out,
    worst,
)
from typer.testing import CliRunner

from autoplan.capture.export import capture
from autoplan.capture.frontend.lengths import example_lengths, length_symbols
from autoplan.cli import app
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.memory.ranks import MemoryModel
from autoplan.cost_models.work import Workload
from autoplan.errors import CaptureError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.symbols import Expr
from autoplan.program.activation_bytes import Activations, saved_bytes_of
from autoplan.program.activations import activations
from autoplan.program.facts import layer_calls, pipeline_units
from autoplan.program.lower import BlockLowering
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import ProgramSpec, evaluate_terms
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import PlanRequest, search_plan
from experiments.shared.default_plans import make_plan, read_pins

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

TOLERANCE = 1e-12
FAMILIES = ["encdec", "t5", "bart", "skips"]


def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))
    return scaled


def eager(family: str, batch: Mapping[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model itself, in float64."""
    model = make_model(family, 0.0).double()
    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm":  # its own forward goes through float32
            module.forward = functools.partial(rms_norm, module)
    if is_hf(family):
        loss = model(**batch).loss
    else:
        inputs = {n: x for n, x in batch.items() if n != "labels"}
        loss = models.gpt_loss(model(**inputs), batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", spread_out(FAMILIES, 2))
def test_the_program_of_one_device_is_the_model(family: str) -> None:
    loss, gradients = reference(Case(family), batch=global_batch(Case(family)))
    want_loss, want = eager(family, global_batch(Case(family)))
    assert loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert worst(gradients, want)[0] < TOLERANCE


CASES = [
    Case("encdec", dp=2, labels="unequal", num_micro_batches=3),
    Case("encdec", tp=2, prices="latency"),
    Case("encdec", tp=4, dp=2, num_micro_batches=2, recompute="full"),
    Case("encdec", pp=2, stages=(1, 3), num_micro_batches=2),  # cut inside the encoder
    Case("encdec", pp=2, tp=2, stages=(3, 1), num_micro_batches=2, labels="unequal"),  # and inside the decoder
    Case("encdec", pp=4, tp=2, dp=2, num_micro_batches=3, recompute="full"),
    Case("t5", dp=2, pp=2, stages=(1, 3), num_micro_batches=3, labels="unequal"),
    Case("t5", tp=2, pp=4, num_micro_batches=2, recompute="full"),
    Case("t5", tp=4, prices="latency"),
    Case("bart", dp=2, tp=2, labels="unequal", recompute="full"),
    Case("bart", pp=4, tp=2, num_micro_batches=2, prices="latency"),
    Case("skips", dp=2, tp=2, recompute="full"),
    Case("skips", pp=2, stages=(1, 4), num_micro_batches=2),
    Case("skips", pp=4, tp=2, num_micro_batches=3, labels="unequal", prices="latency"),
]


@pytest.mark.parametrize("case", spread_out(CASES, 4), ids=str)
def test_every_plan_equals_one_device(case: Case) -> None:
    loss, gradients = run_simulated(case)
    want_loss, want = reference(case, batch=global_batch(case))
    assert loss == pytest.approx(want_loss, rel=TOLERANCE)
    error, name = worst(gradients, want)
    assert error < TOLERANCE, name


# -- two lengths ------------------------------------------------------------------------------------------------------


def test_source_and_target_have_sizes_of_their_own() -> None:
    graph = graph_of("encdec", 0.0)
    shapes = {n: [str(s) for s in graph.values[n].shape] for n in graph.inputs}
    assert shapes == {"source": ["b", "s"], "target": ["b", "t"], "labels": ["b", "t"], "loss_denominator": []}
    assert graph.has_target and not graph_of("skips", 0.0).has_target and not graph_of("llama", 0.0).has_target
    assert graph.call_counts()["layer"] == graph.call_counts()["layer1"] == 2
    assert ModelGraph.from_json(graph.to_json()) == graph


def test_equal_lengths_in_the_example_are_one_size() -> None:
    graph = capture(models.make_encoder_decoder(), models.translation_batch(2, 9, 9), models.gpt_loss)
    assert not graph.has_target and {str(graph.values[n].shape[1]) for n in ("source", "labels")} == {"s"}


def test_which_inputs_are_sequences() -> None:
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    floats = torch.zeros(2, 5)
    assert length_symbols({"a": ids, "b": ids}, frozenset()) == {"a": "s", "b": "s"}
    assert length_symbols({"a": ids, "b": floats}, frozenset()) == {"a": "s"}  # features, not tokens
    assert length_symbols({"a": ids, "b": mask, "c": floats[..., None]}, frozenset()) == {"a": "s", "b": "t", "c": "t"}
    assert length_symbols({"a": ids[:, 0], "b": ids}, frozenset()) == {}
    assert length_symbols({"a": ids, "labels": ids}, frozenset({"labels"})) == {"a": "s", "labels": "t"}
    classes = {"a": ids, "labels": ids[:, 0]}  # of a classifier that makes its target of the source
    assert length_symbols({**classes, "mask": ids}, frozenset({"mask", "labels"})) == {"a": "s", "mask": "s"}
    assert length_symbols({**classes, "mask": mask}, frozenset({"mask", "labels"})) == {"a": "s", "mask": "t"}
    with pytest.raises(CaptureError, match=r"inputs a \(2, 9\) and b \(2, 5\) belong to one sequence"):
        length_symbols({"a": ids, "b": mask, "labels": ids}, frozenset({"labels"}))
    assert example_lengths(models.make_encoder_decoder(), models.translation_batch(2, 9, 7)) == (9, 7)
    assert example_lengths(models.make_gpt(), {"ids": ids}) == (9, None)


def one_device(case: Case) -> ParallelModel:
    program = compiled(case)
    params, buffers = full_tensors(case, torch.float64)
    return ParallelModel(program.spec, program.sources, params, buffers, dtype=torch.float64)


def test_lengths_change_from_step_to_step() -> None:
    with fake_group(1):
        pm = one_device(Case("encdec"))
        for source, target in ((16, 12), (5, 30), (8, 8), (30, 3)):
            batch = models.translation_batch(4, source, target, seed=source)
            loss = pm.step(batch)
            want_loss, want = eager("encdec", batch)
            assert loss.item() == pytest.approx(want_loss, rel=TOLERANCE)
            assert worst(pm.gradients(), want)[0] < TOLERANCE


def test_lengths_that_do_not_fit_are_named() -> None:
    with fake_group(1):
        pm = one_device(Case("encdec"))
        batch = models.translation_batch(4, 8, 6)
        with pytest.raises(ValueError, match=r"labels has shape \(4, 5\); with b=4, s=8, t=6 .* takes \(4, 6\)$"):
            pm.step({**batch, "labels": batch["labels"][:, :5]})


# -- between stages ---------------------------------------------------------------------------------------------------


def crossing(spec: ProgramSpec, **sizes: int) -> list[list[tuple[int, ...]]]:
    """Shapes of what leaves each stage."""
    return [[tuple(evaluate_terms(s, sizes) for s in c.shape) for c in stage.carried_out] for stage in spec.stages]


def test_the_output_of_the_encoder_goes_to_every_decoder_layer() -> None:
    spec = compiled(Case("encdec", pp=4, stages=(1, 1, 1, 1), num_micro_batches=4)).spec
    shapes = crossing(spec, b=2, s=SEQ, t=TARGET)
    source, target = (2, SEQ, 32), (2, TARGET, 32)
    assert shapes == [[source], [source, target], [source, target], []]
    sent = [e for e in spec.ledger if e.kind == "send_recv" and e.phase == "forward"]
    back = [e for e in spec.ledger if e.kind == "send_recv" and e.phase == "backward"]
    assert len(sent) == len(back) == 5
    memory = spec.stages[1].carried_out[0].name
    assert [c.name for s in spec.stages for c in s.carried_in if c.name == memory] == [memory] * 2  # passed on as it is


def test_t5_sends_the_bias_of_positions_beside_what_it_is_added_in() -> None:
    """The first layer of a stack has the table, the others take what it made of it: [1, heads, s, s]."""
    spec = compiled(Case("t5", pp=4, stages=(1, 1, 1, 1), num_micro_batches=4)).spec
    source, target = (2, SEQ, 32), (2, TARGET, 32)
    found = [sorted(shapes) for shapes in crossing(spec, b=2, s=SEQ, t=TARGET)]
    wanted = [[source, (1, 4, SEQ, SEQ)], [source, target], [source, target, (1, 4, TARGET, TARGET)], []]
    assert found == [sorted(shapes) for shapes in wanted]
    (tied,) = spec.tied
    assert tied.name == "shared.weight"
    assert [place.stage for place in tied.places] == [0, 1, 3]  # encoder, decoder, head


@pytest.mark.parametrize("kind", spread_out(["t5", "bart"], 2))
def test_hugging_face_inputs_of_equal_length_are_two_sequences(kind: str) -> None:
    """By their names; the target's first token is the start token, the labels move right by one."""
    ids = models.token_batch(2, SEQ)
    graph = capture(make_model(kind, 0.0), ids)
    assert [str(s) for s in graph.values["labels"].shape] == ["b", "t"]
    assert graph.content_hash == graph_of(kind, 0.0).content_hash
    given = {**ids, "decoder_input_ids": ids["input_ids"][:, :TARGET], "labels": ids["labels"][:, :TARGET]}
    graph = capture(make_model(kind, 0.0), given)
    assert {n: str(graph.values[n].shape[1]) for n in given} == {
        "input_ids": "s", "labels": "t", "decoder_input_ids": "t"
    }  # fmt: skip


def test_a_gated_t5() -> None:
    """T5 1.1 and Flan-T5: a gated activation."""
    graph = capture(models.make_t5(feed_forward_proj="gated-gelu"), models.token_batch(4, SEQ))
    assert sum(n.op == "tanh" for b in graph.blocks.values() for n in b.nodes) == 4  # gelu as T5 writes it, per block
    assert len(layer_calls(graph)) == 4


@pytest.mark.parametrize("model", [models.make_bart(attention_dropout=0.1), models.make_t5(dropout_rate=0.1)])
def test_dropout_inside_attention_is_an_op(model: torch.nn.Module) -> None:
    """Of the encoder, the decoder and between them."""
    for batch in (models.token_batch(2, SEQ), models.with_documents(models.token_batch(2, SEQ), packed=False)):
        graph = capture(model, batch)
        ops = [
            [n.op for n in graph.blocks[call.block].nodes] for call in graph.calls if call.name in layer_calls(graph)
        ]
        assert [names.count("dropped_attention") for names in ops] == [1, 1, 2, 2]
        assert not any("softmax" in names for names in ops)


def test_a_skip_travels_only_to_where_it_is_needed() -> None:
    """5 layers: what 0 gives is added behind 3, what 1 gives behind 2."""
    spec = compiled(Case("skips", pp=4, stages=(1, 1, 2, 1), num_micro_batches=4)).spec
    assert [len(s.carried_out) for s in spec.stages] == [1, 2, 1, 0]  # 0's goes on past 1 and is added behind 3
    whole = compiled(Case("skips", pp=2, stages=(4, 1), num_micro_batches=2)).spec
    assert [len(s.carried_out) for s in whole.stages] == [1, 0]


# -- prices -----------------------------------------------------------------------------------------------------------


def request(family: str, seq_len: int, target_len: int | None, world: int = 1, **pins: int) -> PlanRequest:
    return PlanRequest(
        graph_of(family, 0.0), cluster_of(world, "bandwidth"), seq_len, 12, pins, precision="native",
        memory_risk=0.5, equal_within=0.0, gap=0.0, executed=True, target_len=target_len,
    )  # fmt: skip


def test_prices_know_both_lengths() -> None:
    """Bytes that cross, and arithmetic: of the encoder by s, of the decoder by t, of attention across by both."""
    work = {(s, t): LayoutCache(request("encdec", s, t)).get(1, 2).workload for s, t in ((16, 12), (16, 24), (32, 12))}  # type: ignore[union-attr]
    token = 2 * 32 * 4  # bytes of one place of two sequences
    for (s, t), w in work.items():
        assert w.cut_bytes == (s * token, s * token + t * token, s * token + t * token)
        # matrices of the encoder 12 h^2, of the decoder 14 h^2 for a target token and 2 h^2 for a source token
        h, vocab, layers = 32, 96, 2
        encoder = layers * (12 * h * h * s + 2 * h * s * s)
        decoder = layers * (14 * h * h * t + 2 * h * h * s + 2 * h * t * t + 2 * h * s * t) + vocab * h * t
        assert w.model_flops == 2 * 6 * (encoder + decoder)
    assert work[16, 24].unit_saved[0] == work[16, 12].unit_saved[0] < work[32, 12].unit_saved[0]
    assert work[16, 24].unit_saved[-1] > work[16, 12].unit_saved[-1]


def test_the_target_is_as_long_as_the_source_if_nobody_says() -> None:
    plain, same = (search_plan(request("encdec", 16, t)).plans[0] for t in (None, 16))
    assert plain.estimate.step_time_s == same.estimate.step_time_s
    shorter = search_plan(request("encdec", 16, 4)).plans[0]
    assert shorter.estimate.step_time_s.mid < plain.estimate.step_time_s.mid
    assert shorter.estimate.peak_memory_bytes.mid < plain.estimate.peak_memory_bytes.mid


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(PinError, match=r"target_len=0: must be a whole number of at least 1"):
        search_plan(request("encdec", 16, 0))
    with pytest.raises(PinError, match=r"target_len=8, but SkipGPT has no second sequence .* target_len=16"):
        search_plan(request("skips", 16, 8))
    with pytest.raises(PinError, match=r"target_len=65, but EncoderDecoder has 64 learned positions"):
        search_plan(request("encdec", 16, 65))
    with pytest.raises(PinError, match=r"pin cp=2: attention at models.py:\d+ cannot be computed for a part"):
        search_plan(replace(request("encdec", 16, 12, 2), pins={"cp": 2}))


def test_a_pipeline_may_be_cut_between_all_layers() -> None:
    graph = graph_of("encdec", 0.0)
    assert [unit[-1] for unit in pipeline_units(graph)] == ["encoder.0", "glue1", "decoder.0", "head"]
    assert layer_calls(graph) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert Expr.symbol("t") in graph.factors.values()


# -- the command line -------------------------------------------------------------------------------------------------


def answer(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "300"})
    return result.exit_code, result.output


TASK = ("--cluster", "1x2xh100-sxm5-80gb", "--seq-len", "32", "--global-batch-size", "8")


def test_a_factory_on_the_command_line() -> None:
    """One length for both, unless the target's is given."""
    model = "models:encoder_decoder_task"
    sizes = []
    for more in ((), ("--target-len", "32"), ("--target-len", "8")):
        code, text = answer("plan", model, *TASK, "--json", *more)
        data = json.loads(text)
        assert code == 0 and data["model"]["num_layers"] == 4
        assert data["request"].get("target_len") == (int(more[1]) if more else None)
        sizes.append(data["estimate"]["stages"][0]["memory_bytes"]["mid"])
    assert sizes[0] == sizes[1] > sizes[2]
    code, text = answer("plan", model, *TASK, "--target-len", "8")
    assert code == 0 and "32 tokens (target 8) x 8 sequences" in text and text.count("--target-len 8") == 3
    code, text = answer("estimate", model, *TASK, "--cp", "2", "--micro-batch-size", "8")
    assert code == 2 and "cannot be computed for a part of the sequence" in text
    code, text = answer("plan", "gpt2", *TASK, "--target-len", "8")
    assert code == 2 and "has no second sequence with a length of its own; nearest legal: target_len=32" in text


@pytest.mark.slow
def test_the_config_of_a_t5(tmp_path: Path) -> None:
    settings = models.make_t5().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    memory = []
    for rate in (0.0, 0.1):  # that of attention, too, is priced
        (tmp_path / "config.json").write_text(json.dumps({**settings, "dropout_rate": rate}))
        code, text = answer("estimate", str(tmp_path), *TASK, "--target-len", "16", "--dp", "2", "--json")
        assert code == 0 and json.loads(text)["model"]["name"] == "T5ForConditionalGeneration"
        memory.append(json.loads(text)["estimate"]["memory_bytes"][0]["activations"]["mid"])
    assert memory[1] > memory[0]


# -- memory -----------------------------------------------------------------------------------------------------------


def saved_blocks(case: Case) -> dict[str, Activations]:
    """Activations of every block for 12 samples on one device."""
    graph = graph_of(case.family, 0.0)
    _, layouts, _ = make_plan(graph, cluster_of(1, case.prices), read_pins({}, 1), {"b": 2, "s": SEQ, "t": TARGET})
    lowered = {n: BlockLowering(graph, b, layouts.selection, layouts.axes).run() for n, b in graph.blocks.items()}
    sizes = {"b": 12, "s": SEQ, "t": TARGET}
    return {n: activations(low, sizes) for n, low in lowered.items()}


def model_of(work: Workload, pp: int, mode: Mode = Mode.EAGER) -> MemoryModel:
    config = ParallelConfig(pp=pp, num_micro_batches=pp)
    return MemoryModel(work, config, precision_of("native"), cluster_of(pp, "bandwidth"), mode)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_holds_what_several_units_keep_once(family: str) -> None:
    """All units on one device: as much as autograd keeps (test_saved.py), with full recompute one copy of each
    input of the layers."""
    graph = graph_of(family, 0.0)
    request_ = request(family, SEQ, TARGET if graph.has_target else None)
    work = LayoutCache(request_).get(1, 12).workload  # type: ignore[union-attr]
    assert work.shared
    blocks = saved_blocks(Case(family))
    n, memory = len(work.units), model_of(work, 1)
    assert sum(work.unit_saved) + work.free_saved + memory.held_once(0, n) == saved_bytes_of(graph.calls, blocks)
    layers = set(layer_calls(graph))
    mine = [c for c in graph.calls if c.name in {name for unit in work.unit_calls for name in unit}]
    each = sum(blocks[c.block].kept_bytes if c.name in layers else blocks[c.block].saved_bytes for c in mine)
    again = sum(work.unit_kept) + memory.held_once(0, n)
    assert again < each


def test_a_value_that_passes_is_held_once_on_every_stage() -> None:
    """Encoder output m and target y: received, used, sent on."""
    work = LayoutCache(request("encdec", SEQ, TARGET)).get(1, 2).workload  # type: ignore[union-attr]
    memory, (m, y) = model_of(work, 4), (2 * SEQ * 32 * 4, 2 * TARGET * 32 * 4)
    (value,) = work.shared
    assert (value.made, value.last, value.num_bytes, value.kept, value.kept_recomputed) == (1, 3, m, (2, 3), (2, 3))
    assert work.cut_bytes == (m, m + y, m + y) and memory.ends.sizes == (m, y, y)
    assert [memory.held_once(u, u + 1) for u in range(4)] == [0, m, m, m]
    assert memory.held_once(0, 4) == memory.held_once(2, 4) == m
    fused = model_of(work, 4, Mode.FUSED)  # lets go of what it sent
    assert [fused.held_once(u, u + 1) for u in range(4)] == [0, 0, m, m]


def test_decoders_have_no_such_values() -> None:
    assert LayoutCache(request("llama", SEQ, None)).get(1, 2).workload.shared == ()  # type: ignore[union-attr]


def test_a_skip_that_a_stage_only_passes_on() -> None:
    """What layer 0 gives, kept by layer 1 and by the product that scales it, behind layer 3."""
    work = LayoutCache(request("skips", SEQ, None)).get(1, 2).workload  # type: ignore[union-attr]
    first = next(v for v in work.shared if v.made == 0)
    assert (first.last, first.kept) == (3, (1, 3))
    memory = model_of(work, 5)
    assert memory.held_once(2, 3) >= first.num_bytes  # neither made nor kept there
