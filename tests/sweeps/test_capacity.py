"""Whole runs and the capacity table: failures, energy, critical batch by hand; the file and its errors, the frame."""

import errno
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import autoplan
from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.config import numbers
from autoplan.config.parallel import Dispatcher, Launch, ParallelConfig, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.parts import Price
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.whole_run import (
    FIGURES,
    Assumptions,
    critical_batch_tokens,
    daly_interval_s,
    device_watts,
    goodput_of,
    useful_share,
    whole_run,
)
from autoplan.errors import InfeasibleError, PinError
from autoplan.report import timeline
from autoplan.report.arguments import read_assumptions
from autoplan.report.files import CsvFile, check_writable, write_text
from autoplan.search.planner import PlanRequest, estimate_config
from autoplan.sweeps import capacity as fleet
from autoplan.sweeps import whatif as sweep

ROOT = Path(__file__).resolve().parents[2]
H100 = "1x4xh100-sxm5-80gb"
STEP = Quantity(5.0, 10.0, 20.0, Tag.FITTED)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_interval_is_the_best() -> None:
    """Daly's interval against a scan of his own model, and Young's first order where failures are rare."""
    for checkpoint, restart, mtbf in ((5.0, 60.0, 3600.0), (60.0, 600.0, 86400.0), (300.0, 600.0, 7200.0)):
        best = daly_interval_s(checkpoint, mtbf)
        share = useful_share(best, checkpoint, restart, mtbf)
        scanned = max(useful_share(best * 1.02**k, checkpoint, restart, mtbf) for k in range(-200, 200))
        assert 0 < share < 1 and share == pytest.approx(scanned, rel=1e-4)
    assert daly_interval_s(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert daly_interval_s(10.0, 5.0) == 5.0
    assert useful_share(100.0, 1.0, 0.0, 1e12) == pytest.approx(100 / 101)
    assert useful_share(1.0, 1.0, 1e6, 1.0) == 0.0


def test_goodput_of_a_published_run() -> None:
    """Llama 3 405B on 16,384 H100: a failure every 3 hours, more than 90 % of the time effective."""
    cluster = Cluster.parse("2048x8xh100-sxm5-80gb")
    found = goodput_of(cluster, 405e9 * 14, Assumptions())
    assert found is not None and found.mtbf_s.mid == pytest.approx(54 * 86400 / 419)
    assert 0.9 < found.share.mid < 0.95 and found.share.low < found.share.mid < found.share.high < 1
    assert found.share.tag is Tag.ASSUMED and found.checkpoint_s.mid == pytest.approx(405e9 * 14 / 2e12)
    assert found.interval_s.low < found.interval_s.mid < found.interval_s.high


def test_failures_lengthen_time_money_and_energy_alike() -> None:
    cluster = Cluster.parse("2x8xh100-sxm5-80gb@price=2")
    own = Assumptions.of({"mtbf_device_days": 16, "restart_s": 3600, "storage_gb_s": 1, "usd_per_kwh": 0.1})
    run = whole_run(STEP, 1e6, 8.64e9, cluster, state_bytes=60e9, assumptions=own)
    assert (run.days.low, run.days.mid, run.days.high) == pytest.approx((0.5, 1.0, 2.0))
    good = run.goodput
    assert good is not None and good.checkpoint_s.mid == 60 and good.mtbf_s.mid == 86400
    assert good.share.low == good.share.mid == good.share.high  # all of it given
    share = useful_share(daly_interval_s(60, 86400), 60, 3600, 86400)
    assert good.share.mid == pytest.approx(share) and run.num_failures == pytest.approx(1 / share)
    for ideal, real in (
        (run.days, run.days_with_failures),
        (run.usd, run.usd_with_failures),
        (run.kwh, run.kwh_with_failures),
    ):
        assert ideal is not None and real is not None
        assert (real.low, real.mid, real.high) == pytest.approx([v / share for v in (ideal.low, ideal.mid, ideal.high)])
    assert run.kwh is not None and run.usd_energy is not None
    assert run.usd_energy.mid == pytest.approx(0.1 * run.kwh.mid)


def test_energy_by_hand() -> None:
    cluster = Cluster.parse(H100)
    given = {"busy_share": 1.0, "waiting_share": 0.5, "host_share": 0.25, "pue": 1.2}
    watts = device_watts(cluster, 0.5, Assumptions.of(given))
    assert watts is not None and watts.mid == pytest.approx(700 * (0.75 + 0.25) * 1.2) == watts.low == watts.high
    run = whole_run(STEP, 1e6, 8.64e9, cluster, busy=0.5, assumptions=Assumptions.of(given))
    assert run.kwh is not None and run.kwh.mid == pytest.approx(4 * 24 * 0.84) and run.kwh.tag is Tag.ASSUMED
    node = device_watts(Cluster.parse("1x8xh100-sxm5-80gb"), 1.0, Assumptions.of({"pue": 1}))
    assert node is not None and 8 * node.mid == pytest.approx(0.76 * 10_200, rel=0.01)  # Newkirk et al. 2025


def test_what_is_not_known_stays_unknown() -> None:
    """No power in the catalog, no failure rate of CPUs, no bound where failures come first: None and a note."""
    run = whole_run(STEP, 1e6, 1e12, Cluster.parse("1x4xtpu-v5p"), state_bytes=1e12)
    assert run.kwh is None and run.usd_energy is None and run.goodput is not None
    assert "no source states the power of tpu-v5p" in run.notes[0]
    given = whole_run(STEP, 1e6, 1e12, Cluster.parse("1x4xtpu-v5p"), assumptions=Assumptions.of({"power_w": 400}))
    assert given.kwh is not None and "the size of a checkpoint is not known" in given.notes[0]
    doubted = whole_run(STEP, 1e6, 1e12, Cluster.parse("1x8xh800-sxm-80gb"), state_bytes=1e12)
    assert doubted.kwh is not None and "no source confirms the power of h800-sxm-80gb" in doubted.notes[0]
    local = whole_run(STEP, 1e6, 1e9, Cluster.local(2), state_bytes=1e9)
    assert local.goodput is None and local.days_with_failures is None and local.num_failures is None
    assert "give mtbf_device_days" in local.notes[1] and local.usd is None
    often = Assumptions.of({"mtbf_device_days": 0.01, "restart_s": 1e5})
    hopeless = whole_run(STEP, 1e6, 1e9, Cluster.parse(H100), state_bytes=1e9, assumptions=often)
    assert hopeless.goodput is None and "failures may come faster than progress" in hopeless.notes[0]


def test_every_assumption_has_a_source_and_holds_its_range() -> None:
    for name, figure in FIGURES.items():
        assert figure.source and figure.what, name
        if figure.default is not None:
            assert figure.default.tag is Tag.ASSUMED and figure.default.low <= figure.default.mid <= figure.default.high
            for value in (figure.default.low, figure.default.high):
                figure.legal.check(value, name)
    with pytest.raises(PinError, match="unknown name 'mtbf'; did you mean 'mtbf_device_days'"):
        Assumptions.of({"mtbf": 3})
    with pytest.raises(PinError, match=r"pue=0\.5 must be a number from 1 to 10"):
        Assumptions.of({"pue": 0.5})
    with pytest.raises(PinError, match="usd_per_kwh has no default"):
        Assumptions().value("usd_per_kwh")
    assert read_assumptions(["pue=1.1,restart_s=60", "busy_share=1"]).given == {
        "pue": 1.1,
        "restart_s": 60.0,
        "busy_share": 1.0,
    }
    for bad, message in ((["pue"], "not name=number"), (["pue=1", "pue=2"], "given twice"), (["pue=nan"], "pue=nan")):
        with pytest.raises(PinError, match=message):
            read_assumptions(bad)


def test_critical_batch() -> None:
    """Kaplan et al. 2020: L = 2 gives 2e8 / 2^(1/0.21) tokens; more data and parameters make it larger."""
    n_of_loss_2 = 8.8e13 / 2 ** (1 / 0.076)
    assert critical_batch_tokens(n_of_loss_2, 1e30) == pytest.approx(2e8 / 2 ** (1 / 0.21), rel=1e-6)
    assert critical_batch_tokens(8e9, 1e12) < critical_batch_tokens(70e9, 1e12) < critical_batch_tokens(70e9, 1e13)
    request = PlanRequest(load_model("gpt2"), Cluster.parse(H100), 1024, 8192)
    warning = sweep.batch_warning(request, 1e9)
    assert warning is not None and "8.39 M tokens is beyond" in warning and "Kaplan et al. 2020" in warning
    assert sweep.batch_warning(replace(request, global_batch_size=64), 1e9) is None
    assert sweep.batch_warning(request, None) is None
    assert sweep.critical_batch(load_model("mixtral-8x7b"), 1e9) is None  # the law is of dense models


def test_a_checkpoint_is_parameters_and_optimizer_once() -> None:
    graph = load_model("gpt2")
    assert sweep.checkpoint_bytes(graph, "bf16") == graph.num_params * (2 + 12)
    assert sweep.checkpoint_bytes(graph, "fp32") == graph.num_params * (4 + 8)


# -- the table ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def planned() -> Any:
    request = PlanRequest(load_model("gpt2"), Cluster.parse(H100), 1024, 16)
    return estimate_config(request, ParallelConfig(dp=4, micro_batch_size=2, num_micro_batches=2))


def fake_search(request: PlanRequest) -> Any:
    """A plan that is priced once; one device is too few, and Ctrl-C comes at 3 nodes."""
    if request.cluster.num_devices == 1:
        raise InfeasibleError("nothing fits: 3 GB too much")
    if request.cluster.num_nodes == 3:
        raise KeyboardInterrupt
    if request.pins.get("tp") == 3:
        raise PinError("pin tp=3 does not divide the 4 devices; nearest legal: 2 or 4")
    complete = SimpleNamespace(status="complete", gap=0.25)
    return SimpleNamespace(plans=[planned()], certificate=complete, request=request)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = sweep.points
    monkeypatch.setattr("autoplan.sweeps.capacity.points", lambda base, vary, search: real(base, vary, fake_search))


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


FILE = """
models: [gpt2, gpt2-xl]
clusters: [1x4xh100-sxm5-80gb, 1x1xh100-sxm5-80gb, "1x4xtpu-v5p"]
tokens: [1B, 2.0e12]
seq_len: 1k
global_batch_size: 16
assumptions: {pue: 1.1, usd_per_kwh: 0.1}
"""


def run_file(path: Path, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["capacity", str(path), *words], env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110"}
    )


def test_capacity_is_a_frame_of_all_combinations(no_search: None) -> None:
    assert autoplan.capacity is fleet.capacity
    frame = autoplan.capacity(["gpt2", load_model("gpt2-xl")], [H100, Cluster.parse(H100)], "1T", [1024, "2k"], 16)
    assert list(zip(frame["model"], frame["cluster"], frame["seq_len"], strict=True)) == [
        (m, c, s) for m in ("gpt2", "gpt2-xl") for c in (H100, "1 x 4 x h100-sxm5-80gb") for s in (1024, 2048)
    ]
    assert (frame["status"] == "ok").all() and (frame["gap"] == 0.25).all() and set(frame["tokens"]) == {1e12}
    for name in ("days", "usd", "kwh", "goodput", "days_with_failures", "usd_with_failures", "kwh_with_failures"):
        assert (frame[f"{name}_low"] <= frame[name]).all() and (frame[name] <= frame[f"{name}_high"]).all(), name
    assert (frame["days"] < frame["days_with_failures"]).all() and (frame["memory_margin_bytes"] > 0).all()
    assert "compute assumed" in frame["evidence"][0] and frame["plan"][0].startswith("dp4")
    assert frame["usd"][0] == pytest.approx(frame["days"][0] * 24 * 4 * 6.88)
    assert frame["critical_batch_tokens"][0] > 0


def test_the_command_keeps_every_row(no_search: None, tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    result = run_file(path, "--csv", str(tmp_path / "c.csv"))
    assert result.exit_code == 0, result.output
    out = result.stdout
    assert all(len(line) <= 110 for line in out.splitlines()), out
    assert "goodput" in out and "does not fit [1]" in out and "[1] nothing fits: 3 GB too much" in out
    assert "no source states the power of tpu-v5p" in out and "pue 1.10 (given)" in out
    assert "seq_len 1,024, global_batch_size 16, precision bf16, mode eager" in out
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 1 + 2 * 3 * 2
    data = json.loads(run_file(path, "--json").stdout)
    assert (data["schema"], data["status"], data["command"]) == (1, "ok", "capacity")
    assert [r["status"] for r in data["rows"]] == (["ok"] * 2 + ["does not fit"] * 2 + ["ok"] * 2) * 2
    assert [r["tokens"] for r in data["rows"][:2]] == [1e9, 2e12]
    assert data["rows"][2]["days"] is None and data["rows"][4]["kwh"] is None and data["rows"][0]["usd_energy"] > 0
    assert data["assumptions"]["pue"]["given"] and "419 unexpected" in data["assumptions"]["mtbf_device_days"]["source"]


def test_the_answer_says_whose_settings_it_takes(no_search: None, tmp_path: Path) -> None:
    head = "models: gpt2\nclusters: 1x4xh100-sxm5-80gb\ntokens: 1B\nseq_len: 1k\nglobal_batch_size: 16\n"
    path = write(tmp_path, f"{head}like: torchtitan")
    name = json.loads(run_file(path, "--json").stdout)["like"]
    assert name.startswith("torchtitan@") and f", like {name}" in run_file(path).stdout
    assert json.loads(run_file(write(tmp_path, head), "--json").stdout)["like"] is None


def test_exit_codes_are_those_of_a_sweep(no_search: None, tmp_path: Path) -> None:
    head = "models: gpt2\ntokens: 1B\nseq_len: 1k\nglobal_batch_size: 16\n"
    for rest, code, status in (
        ("clusters: 1x1xh100-sxm5-80gb", 3, "infeasible"),
        ("clusters: 1x4xh100-sxm5-80gb\npins: {tp: 3}", 2, "illegal"),
        ("clusters: [3x4xh100-sxm5-80gb, 1x4xh100-sxm5-80gb]", 130, "interrupted"),
    ):
        result = run_file(write(tmp_path, head + rest), "--json")
        assert result.exit_code == code, result.output
        data = json.loads(result.stdout)
        assert data["status"] == status and len(data["rows"]) == 1 and data["rows"][0]["reason"]


BAD = [
    ("models: [gpt2", "cannot be read"),
    ("- gpt2", "must be a mapping with the keys models"),
    (FILE + "model: gpt2", "unknown key 'model'; did you mean 'models'"),
    (FILE.replace("seq_len: 1k", ""), "seq_len is missing"),
    (FILE.replace("gpt2-xl", "gtp2"), r"models\[1\]: unknown model 'gtp2'; did you mean gpt2"),
    (FILE.replace("[gpt2, gpt2-xl]", "[]"), "models is an empty list"),
    (FILE.replace("gpt2-xl", "3"), r"models\[1\]: 3 is not a model"),
    (
        FILE.replace("1x1xh100-sxm5-80gb", "1x1xh100-smx5-80gb"),
        r"clusters\[1\]: device 'h100-smx5-80gb' is not in the hardware catalog; nearest: h100-sxm5",
    ),
    (FILE.replace("1x1xh100-sxm5-80gb", "other.yaml"), r"clusters\[1\]: cluster file .*other.yaml does not exist"),
    (FILE.replace("1B", "lots"), r"tokens\[0\]: tokens 'lots' must be a number above 0"),
    (FILE.replace("1B", "-3"), r"tokens\[0\]: tokens=-3 must be a number above 0"),
    (FILE.replace("1k", "1.5"), r"seq_len: seq_len=1\.5 must be a whole number"),
    (FILE.replace("size: 16", "size: true"), "global_batch_size: global_batch_size=True must be a whole number"),
    (FILE + "mode: turbo", "mode: mode 'turbo' is not known; use eager, fused, compiled"),
    (FILE + "precision: [bf16, int4]", r"precision\[1\]: precision 'int4' is not known; use native"),
    (FILE + "pins: tp=8", "pins='tp=8' must be a mapping"),
    (FILE + "pins: {pt: 8}", "unknown pin 'pt'; known: "),
    (FILE + "launch: graph", "launch 'graph' is not known; use async, graphs"),
    (FILE + "dispatcher: deep", "dispatcher 'deep' is not known; use alltoall, flex"),
    (FILE + "overlap: [dp]", "overlap of 'dp' is not known; use tp, ep"),
    (FILE + "narrow_gather: 1", "narrow_gather=1 must be true or false"),
    (FILE + "constants: none.json", r"constants: constants .*none.json cannot be read"),
    (FILE + "constants: 3", "constants: 3 is not a file"),
    (FILE + "time_limit_s: -1", "time_limit_s=-1 must be a finite number of at least 0"),
    (FILE + "profile: nobody", "profile: profile 'nobody' is not known"),
    (FILE + "profile: cpu-2core-gloo-w2", "was measured on cpu devices, cluster 1x4xh100-sxm5-80gb has cuda devices"),
    (FILE.replace("pue: 1.1", "pue: 0"), "assumptions: pue=0 must be a number from 1 to 10"),
    (FILE.replace("pue: 1.1", "eup: 2"), "assumptions: unknown name 'eup'; known: mtbf_device_days"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_file_is_one_line_that_names_it(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    result = run_file(path)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: capacity file {path}") and re.search(message, line), line


def test_files_that_a_file_names_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("nodes: 1\ndevices_per_node: 4\ndevice: h100-sxm5-80gb\n")
    path = write(tmp_path, FILE.replace("1x1xh100-sxm5-80gb", "own.yaml@price=3"))
    (_, cluster) = fleet.read_task(path).clusters[1]
    assert cluster.num_devices == 4 and cluster.price is not None and cluster.price.usd_per_device_hour == 3
    with pytest.raises(PinError, match=r"capacity file nowhere.yaml does not exist"):
        fleet.read_task("nowhere.yaml")


OPTIONS = "launch: graphs\noverlap: [tp, cp]\ndispatcher: flex\nsequence_parallel: false\nnarrow_gather: true\n"


def test_options_and_constants_reach_every_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[PlanRequest] = []

    def search(request: PlanRequest) -> Any:
        seen.append(request)
        return fake_search(request)

    real: Callable[..., Any] = sweep.points
    monkeypatch.setattr("autoplan.sweeps.capacity.points", lambda base, vary, _: real(base, vary, search))
    (tmp_path / "mine.json").write_text('{"constants": {"memory_share": 0.7}}')
    path = write(tmp_path, FILE + OPTIONS + "constants: mine.json\n")
    wanted = RunOptions(
        None, Launch.GRAPHS, frozenset({"tp", "cp"}), Dispatcher.FLEX, sequence_parallel=False, narrow_gather=True
    )
    out = " ".join(run_file(path).stdout.split())
    assert "graphs launch, overlap of cp and tp, flex dispatcher, no sequence parallelism, weights gathered" in out
    assert f"constants of {tmp_path / 'mine.json'}" in out
    data = json.loads(run_file(path, "--json").stdout)
    assert data["options"]["dispatcher"] == "flex" and data["options"]["sequence_parallel"] is False
    assert data["constants"] == str(tmp_path / "mine.json") and data["pins"] == {} and data["profile"] is None
    assert all((r.options, r.constants.memory_share) == (wanted, 0.7) for r in seen) and len(seen) == 2 * 6
    del seen[:]
    autoplan.capacity("gpt2", H100, "1T", 1024, 16, options=wanted, constants=Constants().with_({"overlap": 0.5}))
    autoplan.capacity("gpt2", H100, "1T", 1024, 16, options={"launch": "graphs"})
    assert [r.options for r in seen] == [wanted, RunOptions(launch=Launch.GRAPHS)]
    assert [r.constants.overlap for r in seen] == [0.5, Constants.shipped().overlap]


def test_the_command_refuses_a_missing_folder_before_it_plans(tmp_path: Path) -> None:
    result = run_file(write(tmp_path, "models: [not read]"), "--csv", str(tmp_path / "nowhere" / "c.csv"))
    assert result.exit_code == 2 and f"there is no folder {tmp_path / 'nowhere'}" in result.stderr


def test_the_files_that_are_shown_are_legal(tmp_path: Path) -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("planning.md", "clusters.md"))
    shown, of_cluster, of_fabric = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert fleet.read_task(write(tmp_path, shown)).num_searches == 4
    assert fleet.read_task(ROOT / "experiments" / "capacity.yaml").num_searches == 6
    path = tmp_path / "cluster.yaml"
    path.write_text(of_cluster)
    cluster = Cluster.parse(str(path))
    assert cluster.num_devices == 512 and cluster.price == Price(2.5, "our contract", "2026-11-01")
    path.write_text(re.sub("devices_per_node.*\ndevice:.*\n", "instance: p5.48xlarge\n", of_cluster))
    assert Cluster.parse(str(path)).levels == cluster.levels
    path.write_text(of_fabric)
    assert Cluster.parse(str(path)).num_devices == 128


def test_energy_and_uptime_in_words() -> None:
    assert [numbers.uptime(v) for v in (0.926, 0.99961, 0.9999999, 1.0)] == ["92.6 %", "99.96 %", "100.0 %", "100.0 %"]
    assert [numbers.energy(v) for v in (812, 12_300, 1.21e9, 0.5)] == ["812 kWh", "12.3 MWh", "1,210 GWh", "0.500 kWh"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "a.txt", tmp_path / "link.txt"
    write_text(file, "one")
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o600)
    link.symlink_to(file)
    write_text(link, "two")
    assert file.read_text() == "two" and link.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    with CsvFile(file, ["a", "b"]) as rows:
        assert file.read_bytes() == b"a,b\r\n"
        rows.add({"a": 1, "b": None})
        assert file.read_bytes() == b"a,b\r\n1,\r\n"  # before it is closed
        with pytest.raises(ValueError, match="are not those of"):
            rows.add({"a": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(PinError, match=rf"cannot write {file}: No space left"):
        write_text(file, "three")
    with pytest.raises(PinError, match=r"t.json: No space left"):
        timeline.write(SimpleNamespace(events=(), step_time_s=SimpleNamespace(mid=1.0)), tmp_path / "t.json")  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == [file, link] and file.read_bytes().startswith(b"a,b")


def test_what_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(PinError, match="it is a folder; name a file in it"):
        check_writable(tmp_path)
    with pytest.raises(PinError, match="there is no folder"):
        CsvFile(tmp_path / "a" / "b.csv", ["a"])
    check_writable(tmp_path / "new")
    write_text("/dev/null", "a device stays one")
    assert not Path("/dev/null").is_file() and not list(tmp_path.iterdir())


def test_a_fleet_may_be_fine_tuned_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[PlanRequest] = []

    def search(request: PlanRequest) -> Any:
        seen.append(request)
        return fake_search(request)

    real: Callable[..., Any] = sweep.points
    monkeypatch.setattr("autoplan.sweeps.capacity.points", lambda base, vary, _: real(base, vary, search))
    head = "models: gpt2\nclusters: 1x4xh100-sxm5-80gb\ntokens: 1B\nseq_len: 1k\nglobal_batch_size: 16\n"
    path = write(tmp_path, f"{head}runnable: true\nadapters: lora:16\ntarget_len: 1k\n")
    assert ", adapters lora:16, target 1,024 tokens, runnable" in " ".join(run_file(path).stdout.split())
    data = json.loads(run_file(path, "--json").stdout)
    assert (data["runnable"], data["adapters"], data["target_len"]) == (True, "lora:16", 1024)
    autoplan.capacity("gpt2", H100, "1B", 1024, 16, runnable=True, adapters="lora:16", target_len=1024)
    assert {(r.executed, r.adapters, r.target_len) for r in seen} == {(True, "lora:16", 1024)}
    assert any(not p.trainable for p in seen[-1].graph.params.values()) and len(seen) == 3
    for wrong in ("runnable: 1", "adapters: lora", "target_len: 0"):
        result = run_file(write(tmp_path, f"{head}{wrong}\n"))
        assert result.exit_code == 2 and wrong.partition(":")[0] in result.stderr, result.output
