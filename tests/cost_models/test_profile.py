"""Profiles as data: schema, lookups, curves, merging; the time of an operation from measured, fitted or assumed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.kernels.operations import interpolated_s, op_s
from autoplan.cost_models.kernels.products import phase_bytes, phase_flops
from autoplan.cost_models.network.collectives import group_collective_s
from autoplan.cost_models.profile import ErrorStats, LinkRecord, MeasuredOp, Profile, Timing, known
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.work import OpWork
from autoplan.errors import ProfileError
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_record

DEVICE = Cluster.local(1).device


def linear(m: int, k: int, n: int, grads: tuple[bool, bool] = (True, True)) -> OpWork:
    x, w = TensorFacts((m, k), "float32", grads[0]), TensorFacts((n, k), "float32", grads[1])
    y = TensorFacts((m, n), "float32", any(grads))
    return OpWork("linear", (x, w), (y,), (), 2.0 * m * k * n, float(x.num_bytes + w.num_bytes + y.num_bytes))


def pointwise(op: str, n: int) -> OpWork:
    t = TensorFacts((n,), "float32", True)
    return OpWork(op, (t,), (t,), (), float(n), 2.0 * t.num_bytes)


def at(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 7)


def link(kind: str, num_bytes: int, seconds: float, size: int = 2, stride: int = 1) -> LinkRecord:
    return LinkRecord(kind, size, stride, num_bytes, at(seconds))


def make(**changes: Any) -> Profile:
    attention = OpWork(
        "attention",
        (TensorFacts((1, 2, 8, 4), "bfloat16", True),) * 3,
        (),
        (("causal", True), ("dims", (0, 1))),
        1e3,
        64.0,
    )
    ids = OpWork(
        "eq_scalar", (TensorFacts((5,), "int64"),), (TensorFacts((5,), "bool"),), (("scalar", 2.5),), 5.0, 45.0
    )
    fields: dict[str, Any] = {
        "name": "toy",
        "device_type": "cpu",
        "world_size": 2,
        "num_threads": 1,
        "hardware": {"cpu": "abacus", "cores": 2},
        "software": {"torch": "2.13.0"},
        "date": "2026-01-02",
        "ops": (
            MeasuredOp(linear(8, 16, 32), at(1e-5), at(2e-5)),
            MeasuredOp(attention, at(3e-5), at(5e-5)),
            MeasuredOp(ids, at(1e-6)),
        ),
        "links": (link("all_reduce", 1024, 1e-4), link("all_reduce", 1 << 20, 2e-3), link("send_recv", 64, 5e-5)),
        "overheads": {"step_s": 3e-4},
        "held_out": {"linear forward": ErrorStats(3, 0.1, 0.2, 0.3)},
        "notes": ("measured by hand",),
    }
    return Profile(**{**fields, **changes})


def edited(path: list[Any], value: Any) -> str:
    data = json.loads(make().to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


def test_text_form_round_trip(tmp_path: Path) -> None:
    profile = make()
    again = Profile.from_json(profile.to_json())
    assert again.to_json() == profile.to_json()
    assert again.by_key.keys() == profile.by_key.keys()
    assert again.by_key[linear(8, 16, 32).key].work == linear(8, 16, 32)
    for record in profile.ops:
        assert again.by_key[record.work.key].work.attrs == record.work.attrs
    path = tmp_path / "folder" / "toy.json"
    profile.save(path)
    assert Profile.load(path).to_json() == profile.to_json()
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["ops", 2, "forward_s", "median"], "fast", r'ops\[2\].forward_s.median must be a positive number, got "fast"'),
        (["ops", 0, "forward_s", "median"], 0, r"ops\[0\].forward_s.median must be a positive number, got 0"),
        (["ops", 0, "forward_s", "high"], 0.0, r"ops\[0\].forward_s must be low <= median <= high"),
        (["ops", 1, "inputs", 0], "float33[2]", r"ops\[1\].inputs\[0\] must be a tensor such as"),
        (["ops", 1, "attrs"], [], r"ops\[1\].attrs must be an object"),
        (["ops", 1, "flops"], True, r"ops\[1\].flops must be a number"),
        (["ops", 1, "op"], KeyError, r"ops\[1\].op is missing; ops\[1\] has inputs"),
        (["ops", 1, "color"], "red", r"ops\[1\].color is not known; known: op, inputs"),
        (["ops"], {}, r"ops must be a list, got \{\}"),
        (["links", 0, "kind"], "whisper", r"links\[0\].kind must be one of all_reduce, "),
        (["links", 0, "bytes"], 1.5, r"links\[0\].bytes must be a whole number of at least 1, got 1.5"),
        (["overheads", "lunch_s"], 1.0, r"overheads.lunch_s is not known; known: step_s"),
        (["overheads", "step_s"], 10**400, r"overheads.step_s must be a number of at least 0"),
        (["overheads", "step_s"], -1.0, r"overheads.step_s must be a number of at least 0"),
        (["held_out", "linear forward", "p90"], None, r"held_out.linear forward.p90 must be a number"),
        (["device_type"], "tpu", r"device_type must be one of cpu, cuda, got \"tpu\""),
        (["schema"], 7, r"schema must be 2, the version this autoplan reads, got 7"),
        (["world_size"], 0, r"world_size must be a whole number of at least 1"),
        (["notes"], [3], r"notes\[0\] must be a text"),
        (["software", "torch"], 2, r"software.torch must be a text"),
    ],
)
def test_bad_field_is_named(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ProfileError, match="profile x.json: " + message):
        Profile.from_json(edited(path, value), "profile x.json")


def test_not_json() -> None:
    with pytest.raises(ProfileError, match=r"profile x.json is not JSON: .*line 1"):
        Profile.from_json("{", "profile x.json")
    with pytest.raises(ProfileError, match=r"profile x.json is not JSON: it is nested too deep"):
        Profile.from_json("[" * 100_000, "profile x.json")
    with pytest.raises(ProfileError, match="the file must be an object, got 3"):
        Profile.from_json("3")


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    make(name="mine").save(tmp_path / "profiles" / "mine.json")
    assert "mine" in known()
    assert Profile.load("mine").name == "mine"
    with pytest.raises(ProfileError, match=r"profile 'yours' is not known; known: .*mine"):
        Profile.load("yours")
    with pytest.raises(ProfileError, match="is not known"):
        Profile.load("../profiles/mine")
    with pytest.raises(ProfileError, match=r"'absent.json' is not a file"):
        Profile.load("absent.json")


def test_shipped_profiles_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    assert known(), "no profile ships"
    for name in known():
        profile = Profile.load(name)
        assert profile.name == name
        assert profile.ops and profile.held_out
        assert len(profile.to_json()) < 300_000


def test_measured_op() -> None:
    profile = make()
    found = profile.op_s(linear(8, 16, 32), "backward")
    assert found is not None
    assert (found.low, found.mid, found.high, found.tag) == (1.8e-5, 2e-5, 2.4e-5, Tag.MEASURED)
    assert profile.op_s(linear(8, 16, 33), "forward") is None
    assert profile.op_s(make().ops[2].work, "backward") is None
    with pytest.raises(ProfileError, match="phase 'sideways' is not known; use forward or backward"):
        profile.op_s(linear(8, 16, 32), "sideways")


def test_collective_curve() -> None:
    profile = make()

    def mid(num_bytes: float) -> float:
        found = profile.collective_s("all_reduce", num_bytes, 2, 1)
        assert found is not None
        return found.mid

    assert mid(1024) == pytest.approx(1e-4) and mid(1 << 20) == pytest.approx(2e-3)
    assert mid(1) == pytest.approx(1e-4)  # the latency
    assert mid(32 << 10) == pytest.approx(math.sqrt(1e-4 * 2e-3))  # half way in logarithms
    assert mid(4 << 20) == pytest.approx(8e-3)  # the bandwidth of the largest
    measured, between = (profile.collective_s("all_reduce", n, 2, 1) for n in (1024, 4096))
    assert measured is not None and measured.tag is Tag.MEASURED and measured.high == pytest.approx(1.2e-4)
    assert between is not None and between.tag is Tag.FITTED and between.high >= 1.5 * between.mid
    assert profile.collective_s("all_reduce", 1024, 4, 1) is None
    assert profile.collective_s("all_reduce", 1024, 2, 2) is None
    assert profile.collective_s("broadcast", 1024, 2, 1) is None
    with pytest.raises(ProfileError, match="unknown collective 'shout'; known: all_reduce"):
        profile.collective_s("shout", 1024, 2, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 1e10), min_size=2, max_size=20),
)
def test_collective_time_never_falls_with_bytes(times: list[float], sizes: list[float]) -> None:
    records = tuple(link("all_gather", 64 * 8**i, t) for i, t in enumerate(times))
    profile = make(links=records, held_out={})
    found = [profile.collective_s("all_gather", n, 2, 1) for n in sorted(sizes)]
    known = [q for q in found if q is not None]
    assert found == [*known, *[None] * (len(found) - len(known))]  # beyond small messages nothing is known
    for a, b in itertools.pairwise(known):
        assert a.low <= a.mid <= a.high
        assert a.mid <= b.mid * (1 + 1e-9)
    if times == sorted(times):  # nothing to smooth: exact where it was measured
        for r in records:
            exact = profile.collective_s("all_gather", r.num_bytes, 2, 1)
            assert exact is not None and exact.mid == pytest.approx(r.time_s.median)


def test_merged() -> None:
    old = make()
    newer = MeasuredOp(linear(8, 16, 32), at(9e-5), at(9e-4))
    more = MeasuredOp(linear(64, 16, 32), at(4e-5))
    new = make(
        name="new",
        date="2026-03-01",
        ops=(newer, more),
        links=(link("all_reduce", 1024, 7e-4),),
        overheads={"clip_s": 1e-5},
    )
    both = old.merged(new)
    assert both.name == "new" and both.date == "2026-03-01"
    assert len(both.ops) == 4 and both.by_key[newer.work.key] == newer
    assert both.overheads == {"step_s": 3e-4, "clip_s": 1e-5}
    assert len(both.links) == 3
    found = both.collective_s("all_reduce", 1024, 2, 1)
    assert found is not None and found.mid == pytest.approx(7e-4)
    assert both.notes == ("measured by hand",)
    with pytest.raises(ProfileError, match="differ in world_size: 2 and 4"):
        old.merged(make(world_size=4))
    with pytest.raises(ProfileError, match=r"differ in hardware.cpu: 'abacus' and 'slide rule'"):
        old.merged(make(hardware={"cpu": "slide rule"}))


# -- compute -----------------------------------------------------------------------------------------------------------


def law(work: OpWork, phase: str) -> float:
    return 5e-6 + phase_flops(work, phase) / 40e9 + phase_bytes(work, phase) / 8e9


def lawful(*works: OpWork) -> tuple[MeasuredOp, ...]:
    return tuple(MeasuredOp(w, at(law(w, "forward")), at(law(w, "backward"))) for w in works)


GRID = [linear(m, k, n) for m in (64, 256, 1024) for k in (64, 512) for n in (64, 512)]


def test_order_of_sources() -> None:
    profile = make(ops=lawful(*GRID), held_out={"linear forward": ErrorStats(5, 0.05, 0.1, 0.2)})
    measured = op_s(GRID[0], "forward", DEVICE, profile, Mode.EAGER)
    assert measured.tag is Tag.MEASURED and measured.mid == pytest.approx(law(GRID[0], "forward"))
    between = linear(100, 300, 200)
    fitted = op_s(between, "forward", DEVICE, profile, Mode.EAGER)
    assert fitted.tag is Tag.FITTED and fitted.mid == pytest.approx(law(between, "forward"), rel=1e-3)
    assert fitted.high / fitted.mid >= 1.1 and fitted.mid / fitted.low >= 1.1  # the held-out error
    assumed = op_s(pointwise("silu", 1000), "forward", DEVICE, profile, Mode.EAGER)
    assert assumed.tag is Tag.ASSUMED and assumed.high > 1.5 * assumed.mid
    assert op_s(between, "forward", DEVICE, None, Mode.EAGER).tag is Tag.ASSUMED
    with pytest.raises(ProfileError, match="phase 'sideways'"):
        op_s(between, "sideways", DEVICE, None, Mode.EAGER)


def test_interpolation_is_exact_at_measured_shapes() -> None:
    bumpy = tuple(MeasuredOp(w, at(law(w, "forward") * (1.5 if i % 3 else 0.8)), None) for i, w in enumerate(GRID))
    profile = make(ops=bumpy)
    for record in bumpy:
        found = interpolated_s(record.work, "forward", profile)
        assert found is not None and found.mid == pytest.approx(record.forward_s.median)


def test_far_from_measured_shapes_the_interval_widens() -> None:
    profile = make(ops=lawful(*GRID), held_out={})
    near, far = (interpolated_s(linear(n, 512, 512), "forward", profile) for n in (800, 1 << 20))
    assert near is not None and far is not None
    assert far.high / far.mid > near.high / near.mid
    assert far.mid == pytest.approx(law(linear(1 << 20, 512, 512), "forward"), rel=0.01)


def test_classes_share_a_curve_and_dtypes_do_not() -> None:
    profile = make(ops=lawful(*(pointwise("mul_scalar", 10**k) for k in range(2, 7))))
    assert op_record("mul_scalar").measured_as == op_record("neg").measured_as != op_record("silu").measured_as
    assert op_s(pointwise("neg", 5000), "forward", DEVICE, profile, Mode.EAGER).tag is Tag.FITTED
    half = TensorFacts((5000,), "bfloat16", True)
    other = OpWork("neg", (half,), (half,), (), 5e3, 2e4)
    assert op_s(other, "forward", DEVICE, profile, Mode.EAGER).tag is Tag.ASSUMED


def test_backward() -> None:
    def backward(work: OpWork) -> float:
        return op_s(work, "backward", DEVICE, None, Mode.EAGER).mid

    big = (8192, 8192, 8192)
    forward = op_s(linear(*big), "forward", DEVICE, None, Mode.EAGER).mid
    assert backward(linear(*big)) == pytest.approx(2 * forward, rel=0.01)
    assert backward(linear(*big, grads=(False, True))) == pytest.approx(forward, rel=0.01)
    assert backward(linear(*big, grads=(False, False))) == 0.0
    t = TensorFacts((8, 16, 4096, 128), "float32", True)
    attention = OpWork("attention", (t, t, t), (t,), (), 1e12, 4.0 * t.num_bytes)
    ratio = backward(attention) / op_s(attention, "forward", DEVICE, None, Mode.EAGER).mid
    assert ratio == pytest.approx(2.5, rel=0.01)
    ratio = backward(pointwise("silu", 10**8)) / op_s(pointwise("silu", 10**8), "forward", DEVICE, None, Mode.EAGER).mid
    assert ratio == pytest.approx(2.0, rel=0.01)


def test_modes() -> None:
    t = TensorFacts((8, 8), "float32", True)
    view = OpWork("transpose", (t,), (t,), (), 0.0, 0.0)
    eager, compiled = (op_s(view, "forward", DEVICE, None, mode).mid for mode in (Mode.EAGER, Mode.COMPILED))
    assert eager > 0 and compiled == 0
    times = [op_s(pointwise("add", 10**7), "forward", DEVICE, None, mode).mid for mode in Mode]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    measured = make(ops=lawful(pointwise("add", 10**7)))
    fused = op_s(pointwise("add", 10**7), "forward", DEVICE, measured, Mode.FUSED)
    assert (
        fused.tag is Tag.ASSUMED
        and fused.mid < op_s(pointwise("add", 10**7), "forward", DEVICE, measured, Mode.EAGER).mid
    )
    product = make(ops=lawful(*GRID))
    assert op_s(GRID[3], "forward", DEVICE, product, Mode.COMPILED).tag is Tag.MEASURED


def test_small_messages_tell_no_bandwidth() -> None:
    """A curve that was cut off early must not make a large message 2,000 times as long as a small one."""
    small = make(links=(link("all_reduce", 64, 2e-3), link("all_reduce", 4096, 2e-3)))
    assert small.collective_s("all_reduce", 4096, 2, 1) is not None
    assert small.collective_s("all_reduce", 1 << 20, 2, 1) is None
    cluster = Cluster.local(2)
    assumed = group_collective_s("all_reduce", 1 << 20, Group(2, 1), cluster)
    found = group_collective_s("all_reduce", 1 << 20, Group(2, 1), cluster, small)
    assert found.mid == pytest.approx(assumed.mid + 2e-3) and found.tag is Tag.ASSUMED
