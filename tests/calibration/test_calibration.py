"""Constants from measured steps: what steps determine is found, what they do not stays, and held out means refitted."""

import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from autoplan.calibration.fit import (
    Fitted,
    MeasuredStep,
    Question,
    fit_constants,
    group_errors,
    held_out_errors,
    objective,
    priced_by,
    range_of,
)
from autoplan.calibration.steps import functions, read_steps
from autoplan.calibration.tables import constants_table, rounded, stored
from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.config.choices import options_of
from autoplan.config.parallel import Attention, Dispatcher, Launch, Mode
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.estimate import Estimate
from autoplan.errors import AutoplanError, PinError, ProfileError
from autoplan.report.degrees import config_of
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest
from experiments.published import calibrate as experiment
from experiments.published import validate as validate_published
from experiments.published.calibrate import merged_constants
from experiments.published.intervals import groups_table, interval, interval_text, macro, stored_intervals
from experiments.published.rows import COLUMNS, Row, Shapes, Task, interpret

START = Constants()
TRUE = START.with_({"sustained_hopper": 0.85, "host_fused_s": 4.5e-4, "overlap": 0.6})
PLAIN = {"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}
Model = Callable[[Constants], float]


def step_model(compute: float, calls: float, traffic: float) -> Model:
    """Seconds of a step as sums of parts that one constant each scales, with a maximum as real steps have."""
    return lambda c: (
        max(compute / c.sustained_hopper, calls * c.host_fused_s)
        + 0.3 * calls * c.host_fused_s
        + traffic * (1 - c.overlap)
    )


def synthetic(groups: int, seed: int = 0, noise: float = 0.0) -> tuple[list[MeasuredStep], list[Model]]:
    """Six steps of every group, as the model has them at TRUE."""
    random = np.random.default_rng(seed)
    steps, models = [], []
    for g in range(groups):
        for k in range(6):
            model = step_model(random.uniform(0.2, 1), random.uniform(100, 800), random.uniform(0.1, 2))
            models.append(model)
            steps.append(
                MeasuredStep(f"{g}-{k}", f"campaign{g}", model(TRUE) * math.exp(noise * random.standard_normal()))
            )
    return steps, models


def fitted_to(steps: Sequence[MeasuredStep], models: Sequence[Model], **settings: object) -> Fitted:
    return fit_constants(steps, priced_by(models), START, **{"rounds": 8, "looseness": 4.0, **settings})  # type: ignore[arg-type]


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_the_constants_that_made_the_steps_are_found() -> None:
    steps, models = synthetic(8)
    found = fitted_to(steps, models)
    for name in ("sustained_hopper", "host_fused_s", "overlap"):
        row = found.rows[name]
        assert row.value == pytest.approx(TRUE.values[name], rel=0.02)
        assert row.fitted and row.determined and len(row.groups) == 8 and row.before == START.values[name]
        assert getattr(found.constants, name) == row.value
    assert macro(steps, found.after) < 0.01 < 0.1 < macro(steps, found.before)
    for name, row in found.rows.items():
        if not row.groups:  # all others
            assert not row.fitted and row.value == START.values[name] and row.num_steps == 0
    assert fitted_to(steps, models).constants == found.constants  # the same again


def test_the_errors_of_the_constants_cover_the_truth_when_steps_scatter() -> None:
    steps, models = synthetic(12, seed=3, noise=0.08)
    found = fitted_to(steps, models)
    for name in ("sustained_hopper", "host_fused_s", "overlap"):
        row = found.rows[name]
        assert abs(math.log(row.value / TRUE.values[name])) < 3 * row.standard_error < 3 * row.prior_width


def test_one_wild_step_does_not_decide() -> None:
    steps, models = synthetic(8)
    wild = [MeasuredStep(s.name, s.group, s.measured_s * (30 if i == 7 else 1)) for i, s in enumerate(steps)]
    found = fitted_to(wild, models)
    assert found.constants.sustained_hopper == pytest.approx(TRUE.sustained_hopper, rel=0.05)


def test_a_group_counts_once_however_many_steps_it_has() -> None:
    model = step_model(1.0, 0.0, 0.0)
    slow = [MeasuredStep(f"s{i}", "large", model(START) * 1.06) for i in range(50)]
    few = [MeasuredStep(f"f{i}", f"small{i}", model(START)) for i in range(4)]
    found = fitted_to([*slow, *few], [model] * 54)
    assert found.constants.sustained_hopper == pytest.approx(START.sustained_hopper, rel=0.015)


def test_a_constant_of_two_campaigns_is_not_fitted() -> None:
    steps, models = synthetic(3)
    plain = step_model(1.0, 0.0, 0.0)
    models = [m if s.group != "campaign2" else plain for s, m in zip(steps, models, strict=True)]
    steps = [s if s.group != "campaign2" else MeasuredStep(s.name, s.group, plain(TRUE)) for s in steps]
    found = fitted_to(steps, models)
    assert found.rows["sustained_hopper"].fitted
    for name in ("host_fused_s", "overlap"):
        row = found.rows[name]
        assert row.groups == ("campaign0", "campaign1") and not row.fitted and not row.determined
        assert row.value == START.values[name] == getattr(found.constants, name)
    assert fitted_to(steps, models, least_groups=2).rows["overlap"].fitted


def test_the_prior_holds_what_steps_do_not_determine() -> None:
    weak = [step_model(1.0, 0.0, 0.05 * (1 + i)) for i in range(4)]  # overlap is 1 to 4 % of a step
    steps = [MeasuredStep(str(i), str(i), m(TRUE)) for i, m in enumerate(weak)]
    found = fit_constants(steps, priced_by(weak), START, looseness=0.2)
    row = found.rows["overlap"]
    assert row.fitted and not row.determined and row.value == pytest.approx(START.overlap, rel=0.02)
    assert row.standard_error > 0.9 * row.prior_width
    only = fitted_to(steps, weak, names=["overlap"])
    assert list(only.rows) == ["overlap"] and only.constants.sustained_hopper == START.sustained_hopper


def test_bounds_hold_and_are_reported() -> None:
    models = [step_model(1.0, 0.0, 0.0)] * 4
    steps = [MeasuredStep(str(i), str(i), 0.3) for i in range(4)]  # faster than any share could explain
    row = fitted_to(steps, models).rows["sustained_hopper"]
    assert row.value == pytest.approx(range_of("sustained_hopper", 0.96).high) and row.at_bound


def test_every_shipped_constant_has_a_range_that_it_may_take() -> None:
    for name, value in Constants.shipped().values.items():
        found = range_of(name, value)
        assert found.low <= value <= found.high and found.width > 0
        for end in (found.low, found.high):
            START.with_({name: end})  # raises where it may not


@pytest.mark.parametrize(
    ("given", "names", "says"),
    [
        ([], [], "at least one"),
        ([1.0], ["overlp"], "'overlp' is not known; known are sustained_ampere"),
        ([math.nan], [], "step 0: the predicted time nan is not above 0 s"),
    ],
)
def test_a_fit_says_what_is_wrong(given: list[float], names: list[str], says: str) -> None:
    steps = [MeasuredStep(str(i), "g", 1.0) for i in range(len(given))]
    with pytest.raises(AutoplanError, match=re.escape(says)):
        fit_constants(steps, priced_by([lambda _, v=v: v for v in given]), START, names=names)


def test_limits_of_a_fit_are_checked() -> None:
    one, price = [MeasuredStep("a", "g", 1.0)], priced_by([lambda _: 1.0])
    with pytest.raises(AutoplanError, match="step b: measured_s=0"):
        MeasuredStep("b", "g", 0.0)
    with pytest.raises(AutoplanError, match="least_groups=0"):
        fit_constants(one, price, START, least_groups=0)
    with pytest.raises(AutoplanError, match="looseness=-1"):
        fit_constants(one, price, START, looseness=-1.0)
    with pytest.raises(ProfileError, match="'overlap' is 0"):
        fit_constants(one, price, START.with_({"overlap": 0.0}), names=["overlap"])
    with pytest.raises(AutoplanError, match="only g"):
        held_out_errors(fit_constants(one, price, START), one, price)


# -- held out ----------------------------------------------------------------------------------------------------------


def test_held_out_errors_are_those_of_a_fit_without_the_group() -> None:
    steps, models = synthetic(5, seed=1)
    # one campaign's machines are slower than the others'
    steps = [MeasuredStep(s.name, s.group, s.measured_s * (1.2 if s.group == "campaign4" else 1.0)) for s in steps]
    found = fitted_to(steps, models)
    asked: list[Question] = []

    def price(questions: Sequence[Question]) -> Sequence[Sequence[float]]:
        asked.extend(questions)
        return priced_by(models)(questions)

    held = held_out_errors(found, steps, price)
    assert len(asked) <= 5 * 4  # at most so many prices of all steps
    for g in range(5):
        rest = [i for i, s in enumerate(steps) if s.group != f"campaign{g}"]
        again = fitted_to([steps[i] for i in rest], [models[i] for i in rest])
        constants = held.constants[f"campaign{g}"]
        for name in ("sustained_hopper", "host_fused_s", "overlap"):
            assert constants.values[name] == pytest.approx(again.constants.values[name], rel=0.03)
            low, high = held.span[name]
            assert low <= constants.values[name] <= high
        for i, (s, model) in enumerate(zip(steps, models, strict=True)):
            if s.group == f"campaign{g}":
                assert held.errors[i] == pytest.approx(math.log(model(constants) / s.measured_s), abs=1e-9)
    assert macro(steps, held.errors) > macro(steps, found.after)


def test_a_fit_without_a_group_does_not_go_where_the_rest_gets_worse() -> None:
    """The host is 3 % of most steps, which are 25 % slower than said: in the linear model it has to be 400 times
    slower, which makes them 13 times slower in truth. Only the group that is left out said so."""
    models: list[Model] = [lambda c: 0.5 + 1e4 * c.host_fused_s] + [lambda c: 1 + 600 * c.host_fused_s] * 3
    steps = [MeasuredStep(f"{i}", f"{i}", models[i](START) * (1.25 if i else 1.0)) for i in range(4)]
    found = fitted_to(steps, models, names=["host_fused_s"], looseness=10.0, rounds=1)
    constants = held_out_errors(found, steps, priced_by(models)).constants["0"]
    assert 1 < models[1](constants) / models[1](START) < 1.25**2  # nearer to what was measured


def test_a_constant_that_lacks_groups_without_one_goes_back() -> None:
    steps, models = synthetic(3)
    found = fitted_to(steps, models)
    assert found.rows["overlap"].fitted
    held = held_out_errors(found, steps, priced_by(models))  # two campaigns are left: nothing may be fitted
    for constants in held.constants.values():
        assert constants.values == pytest.approx(START.values)
    assert held.errors == pytest.approx(found.before)


def test_an_interval_covers_what_it_aims_at() -> None:
    random = np.random.default_rng(5)
    steps = [MeasuredStep(f"{i}", f"g{i % 20}", 1.0) for i in range(2000)]
    errors = 0.1 + 0.2 * random.standard_normal(2000)
    found = interval(steps, errors, 0.8)
    assert found.covered == pytest.approx(0.8, abs=0.03)
    # log(measured / predicted) is normal around -0.1
    assert found.low == pytest.approx(math.exp(-0.1 - 1.2816 * 0.2), rel=0.03)
    assert found.high == pytest.approx(math.exp(-0.1 + 1.2816 * 0.2), rel=0.03)
    assert found.width == pytest.approx(found.high - found.low) and "80%" in interval_text(found)
    with pytest.raises(AutoplanError, match=r"aimed=1\.5"):
        interval(steps, errors, 1.5)
    with pytest.raises(AutoplanError, match="two groups"):
        interval(steps[:1], errors[:1], 0.8)


def test_a_group_of_few_steps_is_no_tail_of_an_interval() -> None:
    """One step far off among 5 campaigns of 60 counts as a 20th of one, not as a sixth of all."""
    random = np.random.default_rng(7)
    steps = [MeasuredStep(f"{i}", f"g{i % 5}", 1.0) for i in range(300)] + [MeasuredStep("far", "alone", 1.0)]
    errors = np.concatenate([0.05 * random.standard_normal(300), [-1.0]])
    found = interval(steps, errors, 0.9)
    assert found.high == pytest.approx(math.exp(1.645 * 0.05), rel=0.03)
    many = [
        *steps[:300],
        *(MeasuredStep(f"far {i}", "alone", 1.0) for i in range(60)),
    ]  # as large as the others it counts
    assert interval(many, np.concatenate([errors[:300], -np.ones(60)]), 0.9).high == pytest.approx(math.e, rel=0.01)


def test_errors_count_every_group_once() -> None:
    steps = [MeasuredStep("a", "x", 1.0), MeasuredStep("b", "x", 1.0), MeasuredStep("c", "y", 1.0)]
    logs = np.array([0.1, -0.3, 0.4])
    assert group_errors(steps, logs) == pytest.approx({"x": 0.2, "y": 0.4}) and macro(steps, logs) == pytest.approx(0.3)
    one, zero = np.ones(1), np.zeros(1)
    # squared below the corner of 0.5 x 0.1, by the absolute value beyond
    assert objective(np.array([0.02]), one, zero, zero, one) == pytest.approx(0.2**2 / 2)
    assert objective(np.array([0.3]), one, zero, zero, one) == pytest.approx(0.5 * (3 - 0.25))
    assert objective(zero, one, one, zero, one) == pytest.approx(0.5)


def test_the_file_holds_values_and_where_they_come_from(tmp_path: Path) -> None:
    steps, models = synthetic(8)
    found = fitted_to(steps, models)
    held = held_out_errors(found, steps, priced_by(models))
    data = stored(
        steps,
        found,
        held,
        {"intervals": stored_intervals([interval(steps, held.errors, 0.9)]), "date": "2026-01-02"},
    )
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(data))
    assert Constants.load(path).values == rounded(found.constants).values
    assert Constants.load(path).step_intervals == Constants.shipped().step_intervals  # where the file has none
    entry = data["constants"]["overlap"]
    assert entry["before"] == 0.8 and entry["fitted"] and entry["groups"] == [f"campaign{g}" for g in range(8)]
    assert 0 < entry["standard_error"] < entry["prior_width"] and entry["held_out_error"] < 0.05
    assert data["error"]["in_sample"] < data["error"]["before"] and data["date"] == "2026-01-02"
    assert data["errors"]["campaign0"]["steps"] == 6 and data["intervals"][0]["aimed"] == 0.9
    assert not data["constants"]["imbalance"]["fitted"] and data["constants"]["imbalance"]["standard_error"] is None
    assert constants_table(found, held, "campaign").row_count == 3  # of those that a step depends on
    assert groups_table(steps, found, held, "campaign").row_count == 9


# -- a user's steps ----------------------------------------------------------------------------------------------------

STEPS = """
- &base
  name: dp
  model: gpt2
  cluster: 1x4xh100-sxm5-80gb
  seq_len: 1k
  global_batch_size: 64
  degrees: {micro_batch_size: 16}
  step_time_s: 0.13
- <<: *base
  name: tp
  mode: fused
  options: {attention: flash2, launch: graphs, overlap: [tp]}
  degrees: {tp: 2, micro_batch_size: 8, recompute: full}
  step_time_s: 0.15
"""


def write_steps(folder: Path, text: str = STEPS) -> Path:
    path = folder / "steps.yaml"
    path.write_text(text)
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env=PLAIN, prog_name="autoplan")


def test_steps_of_a_file_are_priced_as_estimate_prices_them(tmp_path: Path) -> None:
    steps = read_steps(write_steps(tmp_path), START)
    request = PlanRequest(
        graph=load_model("gpt2"),
        cluster=Cluster.parse("1x4xh100-sxm5-80gb"),
        seq_len=1024,
        global_batch_size=64,
        mode=Mode.FUSED,
        options=options_of({"attention": "flash2", "launch": "graphs", "overlap": "tp"}),
        constants=START,
    )
    config = config_of(4, 64, {"tp": 2, "micro_batch_size": 8, "recompute": "full"})
    assert (config.dp, config.num_micro_batches) == (2, 4)
    assert steps[1].planned.request.options == request.options
    assert [m.step.group for m in steps] == ["dp", "tp"]
    expected = estimate_config(request, config).estimate.step_time_s.mid
    assert functions(steps)[1](START) == pytest.approx(expected, rel=1e-12)
    slower = START.with_({"sustained_hopper": 0.8})
    assert functions(steps)[1](slower) > 1.03 * expected


def test_every_run_option_may_stand_in_a_step(tmp_path: Path) -> None:
    given = "{launch: graphs, dispatcher: flex, fused_experts: true, narrow_gather: true}"
    text = STEPS.replace("{attention: flash2, launch: graphs, overlap: [tp]}", given)
    options = read_steps(write_steps(tmp_path, text), START)[1].planned.request.options
    assert (options.launch, options.dispatcher) == (Launch.GRAPHS, Dispatcher.FLEX)
    assert options.fused_experts and options.narrow_gather and options.sequence_parallel


def test_chunks_without_layers_are_priced_as_estimate_prices_them(tmp_path: Path) -> None:
    degrees = "{pp: 2, micro_batch_size: 8, stages: [0, 12]}"  # the embedding alone, then all layers
    (only,) = read_steps(
        write_steps(tmp_path, STEPS[: STEPS.index("- <<")].replace("{micro_batch_size: 16}", degrees)), START
    )
    expected = estimate_config(only.planned.request, only.planned.config).estimate.step_time_s.mid
    assert only.planned.step_s(START) == pytest.approx(expected, rel=1e-12)


def test_calibrate_shows_errors_and_writes_a_file_that_plans_use(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = run("calibrate", str(write_steps(tmp_path)), "--write", str(out))
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for text in ("predicted / measured", "before", "after", "without it", "do not determine", "No step depends on:"):
        assert text in words
    assert re.search(r"dp .*0\.13 s .*%", result.stdout) and "sustained_hopper" in words and "host_experts_s" in words
    data = json.loads(out.read_text())
    assert data["sources"] == ["steps.yaml"] and data["errors"]["tp"]["steps"] == 1
    assert Constants.load(out).sustained_hopper < 0.96  # slower than shipped constants say
    task = ("gpt2", "-c", "1x4xh100-sxm5-80gb", "--seq-len", "1k", "--gbs", "64", "--mbs", "16", "--json")
    before, after = (
        json.loads(run("estimate", *task, *more).stdout)
        for more in ((), ("--constants", str(out), "--launch", "graphs"))
    )
    assert after["estimate"]["step_time_s"]["mid"] > before["estimate"]["step_time_s"]["mid"]
    assert (before["request"]["constants"], after["request"]["constants"]) == (None, str(out))
    assert (before["request"]["launch"], after["request"]["launch"]) == ("async", "graphs")
    assert before["request"]["attention"] == "flash2"


def test_calibrate_fits_only_what_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = run("calibrate", str(write_steps(tmp_path)), "--only", "memory_share", "--write", str(out))
    assert result.exit_code == 0, result.output
    found = Constants.load(out)
    shipped = rounded(Constants.shipped())
    assert found.memory_share < shipped.memory_share
    assert found.values == shipped.with_({"memory_share": found.memory_share}).values


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1", "must be a list of at least one step"),
        ("[]", "must be a list of at least one step"),
        ("- 3", "step 1: 3 must be a mapping"),
        ("- {model: gpt2}", "step 1: cluster is missing"),
        (STEPS + "  tokens: 3\n", "step 2: unknown key 'tokens'"),
        (STEPS.replace("0.13", "-1"), "step 1: step_time_s=-1"),
        (STEPS.replace("0.13", "fast"), "step 1: step_time_s='fast'"),
        (STEPS.replace("0.13", "1" + "0" * 400), "step 1: step_time_s=1000"),
        (STEPS.replace("name: tp", "name: dp"), "2 steps have the name 'dp'"),
        (STEPS.replace("launch: graphs", "launch: graph"), "launch 'graph' is not known; use async, graphs"),
        (STEPS.replace("flash2", "flash9"), "attention 'flash9' is not known; use unfused"),
        (STEPS.replace("[tp]", "[dp]"), "overlap of 'dp' is not known; use tp, ep, pp"),
        (STEPS.replace("[tp]", "3"), "overlap=3 must be a list"),
        (STEPS.replace("overlap: [tp]", "dispatcher: deep"), "dispatcher 'deep' is not known; use alltoall"),
        (STEPS.replace("launch:", "lunch:"), "unknown option 'lunch'; did you mean 'launch'"),
        (STEPS.replace("mode: fused", "mode: fast"), "mode 'fast' is not known; use eager"),
        (STEPS.replace("{tp: 2", "{tp: 3"), "step 2: tp=3 does not divide the 4 devices"),
        (STEPS.replace("{tp: 2", "{pt: 2"), "step 2: unknown degree 'pt'"),
        (STEPS.replace("seq_len: 1k", "seq_len: 2k"), "nearest legal: seq_len=1024"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_works(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PinError, match=re.escape(says)):
        read_steps(write_steps(tmp_path, text), START)


def test_bad_options_of_the_command_line(tmp_path: Path) -> None:
    steps = str(write_steps(tmp_path))
    task = ("estimate", "gpt2", "-c", "1x4xh100-sxm5-80gb", "--seq-len", "1k", "--gbs", "64")
    for words, says in (
        (("calibrate", str(tmp_path / "none.yaml")), "steps file"),
        (("calibrate", steps, "--only", "speed"), "constant 'speed' is not known"),
        (("calibrate", steps, "--write", str(tmp_path / "no" / "c.json")), "there is no folder"),
        ((*task, "--constants", str(tmp_path / "none.json")), "cannot be read"),
        ((*task, "--launch", "graph"), "launch 'graph' is not known"),
        ((*task, "--attention", "flash"), "attention 'flash' is not known"),
        ((*task, "--overlap", "tp,dp"), "overlap of 'dp' is not known"),
    ):
        result = run(*words)
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2 and line.startswith("error: ") and says in line


def test_run_options_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"constants": {"memory_share": 0.7}}')
    given = ("--attention", "flash1", "--launch", "blocking", "--overlap", "pp,tp", "--constants", str(file))
    result = run("plan", "gpt2", "-c", "1x2xh100-sxm5-80gb", "--seq-len", "1k", "--gbs", "4", "--verbose", *given)
    words = " ".join(result.stdout.replace("\\", "").split())
    assert "eager, flash1 attention, blocking launch, overlap of pp and tp, constants of" in words
    assert f"--attention flash1 --launch blocking --overlap pp,tp --constants {file}" in words  # to price it again
    options = options_of({"attention": "flash1", "launch": "blocking", "overlap": "tp, pp"})
    assert (options.attention, options.launch) == (Attention.FLASH1, Launch.BLOCKING)
    assert options.overlap == frozenset({"tp", "pp"}) and options_of({"launch": "async"}).attention is None


# -- published steps ---------------------------------------------------------------------------------------------------

NAMES = (
    "id campaign source trust layers hidden ffn_hidden heads kv_heads vocab seq_len gpu gpu_mem_gb n_gpus "
    "gpus_per_node tp pp vpp dp cp zero_stage micro_batch global_batch recompute precision step_time_s"
).split()
VALUES = "a|made-up|X/y a.md:3|A|16|2048|8192|32|8|128256|4096|H100|80|16|8|1|1|1|16|1|1|1|64|none|BF16|0.5".split("|")


def published(**fields: str) -> dict[str, str]:
    return {c: {**dict(zip(NAMES, VALUES, strict=True)), **fields}.get(c, "") for c in COLUMNS}


@pytest.fixture
def catalog_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load_model("llama-3.2-1b")
    monkeypatch.setattr(validate_published, "graph_of", lambda shape: graph)


def prices(tasks: Sequence[Task]) -> list[Estimate]:
    return [validate_published.price(task).estimates[0] for task in tasks]


def test_the_experiment_answers_every_question_in_order(catalog_graph: None) -> None:
    rows = [Row(i, published(seq_len=n)) for i, n in enumerate(("4096", "2048", "1024"))]
    tasks = [interpret(row, Shapes(rows)).task for row in rows]
    refused = interpret(Row(9, published(pp="16", vpp="8", dp="1")), Shapes(rows)).task
    pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
    workers = experiment.Workers(tasks, pools)
    begin = Constants.shipped()
    slow = begin.with_({"sustained_hopper": 0.7})
    steps = [0, 1, 2, 0]  # steps may share a task
    (first, second) = workers.price(steps, [(begin, [3, 2, 1]), (slow, [0])])
    alone = [estimate.step_time_s.mid for estimate in prices(tasks)]
    assert first == pytest.approx([alone[0], alone[2], alone[1]], rel=1e-9) and second[0] > 1.1 * first[0]
    short = [estimate.breakdown["launch"].mid / estimate.step_time_s.mid > 0.2 for estimate in prices(tasks)]
    assert workers.classes(steps, begin) == ["host" if short[i] else "dense of hopper" for i in steps]
    assert experiment.planned(refused) is None  # more chunks than layers


def test_the_experiment_writes_constants_with_sources(catalog_graph: None, tmp_path: Path) -> None:
    data, out, rows = tmp_path / "data.csv", tmp_path / "constants.json", tmp_path / "rows.json"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for c in range(4):
            writer.writerow(published(id=f"{c}a", campaign=f"c{c}", source=f"X/y{c % 2} docs/a.md:{c}"))
            writer.writerow(published(id=f"{c}b", campaign=f"c{c}", source="Korthikanti et al., 2022, Table 4"))
        writer.writerow(published(id="unread", campaign="c9", layers=""))
        writer.writerow(published(id="other", campaign="c9", trust="C"))
        writer.writerow(published(id="full", campaign="c9", step_time_s="", notes="OOM"))
    experiment.main(data, write=out, json_path=rows, only="sustained_hopper,overlap", jobs=1, date="2026-01-02")
    found = json.loads(out.read_text())
    assert found["sources"] == ["Korthikanti et al., 2022", "X/y0", "X/y1"] and found["date"] == "2026-01-02"
    assert list(found["errors"]) == ["c0", "c1", "c2", "c3"] and len(json.loads(rows.read_text())["rows"]) == 8
    entry = found["constants"]["sustained_hopper"]
    assert entry["fitted"] and entry["groups"] == ["c0", "c1", "c2", "c3"] and entry["value"] != entry["before"] == 0.96
    assert list(found["unseen_models"]) == ["dense"]  # all rows are of one model: the same as the mean of its campaigns
    assert found["unseen_models"]["dense"] == pytest.approx(sum(found["unseen"].values()) / 4)
    assert str(tmp_path) not in out.read_text()
    assert Constants.load(out).sustained_hopper == entry["value"]
    assert {"dense", "dense of hopper"} <= found["step_intervals"].keys() <= {"dense", "host", "dense of hopper"}
    assert found["error"]["in_sample"] < found["error"]["before"]
    for more, words in (
        ({"family": "hopper"}, "--start"),
        ({"family": "blackwell", "start": out}, "only hopper"),
        ({"family": "hopper", "experts": True, "start": out}, "one part"),
    ):
        with pytest.raises(typer.BadParameter, match=words):
            experiment.main(data, jobs=1, **more)


def test_a_fit_of_some_steps_keeps_what_it_says_nothing_about() -> None:
    def file(values: dict[str, tuple[float, bool]], steps: dict[str, int], **more: Any) -> dict[str, Any]:
        constants = {n: {"value": v, "fitted": fitted} for n, (v, fitted) in values.items()}
        errors = {g: {"steps": n, "in_sample": 0.1} for g, n in steps.items()}
        return {"constants": constants, "errors": errors, "unseen": dict.fromkeys(steps, 0.2), **more}

    before = file({"a": (1.0, True), "b": (2.0, True)}, {"dense": 5, "both": 7}, date="then")
    now = file({"a": (9.0, False), "b": (3.0, True), "new": (4.0, False)}, {"both": 3, "experts": 2}, date="now")
    found = merged_constants(before, now, {"both"})
    assert {n: e["value"] for n, e in found["constants"].items()} == {"a": 1.0, "b": 3.0, "new": 4.0}
    assert {g: e["steps"] for g, e in found["errors"].items()} == {"dense": 5, "both": 3, "experts": 2}
    assert set(found["unseen"]) == {"dense", "experts"}  # of what has steps in both fits it is not known
    assert found["date"] == "then" and found["fitted_apart"]["date"] == "now"
    assert found["fitted_apart"]["constants"] == ["b"]
