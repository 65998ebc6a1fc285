"""SolvedLayout layouts on disk: a search that finds them there makes the same plan, and a file is right or not used."""

from __future__ import annotations

import functools
import os
import pwd
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoplan import catalog
from autoplan.config.planning import NO_CACHE_VARIABLE
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.files import CACHE_VARIABLE, keep_cached, read_cached
from autoplan.ir.layout import AxisType, I, P, R
from autoplan.search import layout_files
from autoplan.search.certificate import Certificate
from autoplan.search.intra import LayoutProgram, solve
from autoplan.search.layout_files import LayoutFiles, SolvedLayout, folder_of_layouts
from autoplan.search.layout_problem import layout_problem, prices_key
from autoplan.search.layout_store import LayoutStore
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest

CUT = (4, 1, 1, False)  # tp, micro-batch size, cp, own dispatch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of layouts of a user who has none yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(NO_CACHE_VARIABLE)
    return folder_of_layouts()


def _request(nodes: int = 1, model: str = "gpt2", at: str = "", **more: Any) -> PlanRequest:
    settings = {"seq_len": 1024, "global_batch_size": 64} | more
    return PlanRequest(catalog.load_model(model), Cluster.parse(f"{nodes}x4xh100-sxm5-80gb{at}"), **settings)


def _solved(request: PlanRequest, cut: Any = CUT) -> SolvedLayout:
    axes, problem = layout_problem(request, request.costs, cut)
    return axes, solve(problem)


@functools.cache
def _usual() -> SolvedLayout:
    return _solved(_request())


def _never() -> SolvedLayout:
    raise AssertionError("was solved")


def _untimed(certificate: Certificate) -> Certificate:
    return replace(certificate, solve_time_s=0.0, by_phase_s={})


def test_a_warm_search_makes_the_cold_plan_to_the_last_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = _request(pins={"pp": 1, "micro_batch_size": 1})
    alone = search_plan(replace(request, cache=False))
    assert not folder.exists()
    cold = search_plan(replace(request, layouts=LayoutStore()))
    assert len(list(folder.iterdir())) > 1
    monkeypatch.setattr(LayoutProgram, "__init__", lambda *_: pytest.fail("was solved"))
    warm = search_plan(replace(request, layouts=LayoutStore()))
    for other in (cold, warm):
        assert [(p.config, p.estimate, p.point) for p in other.plans] == [
            (p.config, p.estimate, replace(p.point, solution=o.point.solution))
            for p, o in zip(alone.plans, other.plans, strict=True)
        ]
        assert other.equals == alone.equals
        assert _untimed(other.certificate) == _untimed(alone.certificate)
    assert [p.point.solution.selection for p in warm.plans] == [p.point.solution.selection for p in alone.plans]


@pytest.mark.parametrize(
    ("model", "cut"), [("gpt2", CUT), ("gpt2", (1, 2, 1, False)), ("mixtral-8x7b", (8, 1, 1, True))]
)
def test_a_layout_is_read_back_as_it_was(tmp_path: Path, model: str, cut: Any) -> None:
    request = _request(2, model)
    solved, prices = _solved(request, cut), prices_key(request, request.costs, cut)
    assert LayoutFiles(tmp_path).get(prices, 3, lambda: solved) is solved
    read = LayoutFiles(tmp_path).get(prices, 3, _never)
    assert read == solved
    assert list(read[1].selection) == list(solved[1].selection)
    plain = {id(each) for each in (R, I, P)}
    types: list[AxisType] = [t for o in read[1].selection.values() for _, layout in o.provides for t in layout]
    assert all(id(t) in plain for t in types if not t.is_shard)  # code compares them by identity


def test_none_is_kept_as_well(tmp_path: Path) -> None:
    def refused() -> SolvedLayout:
        raise InfeasibleError("no room")

    for solved in (refused, _never):
        with pytest.raises(InfeasibleError, match="no room"):
            LayoutFiles(tmp_path).get("prices", 1, solved)


def test_a_stopped_layout_is_not_kept(tmp_path: Path) -> None:
    axes, solution = _usual()
    stopped = axes, replace(solution, status="stopped by time limit")
    for _ in range(2):
        assert LayoutFiles(tmp_path).get("prices", 1, lambda: stopped) is stopped
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"1", b"2", 1),
        lambda data: data[:-1] + b"\xff",
        lambda data: data + b" ",
    ],
)
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    solved = _usual()
    LayoutFiles(tmp_path).get("prices", 1, lambda: solved)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert LayoutFiles(tmp_path).get("prices", 1, lambda: solved) is solved
    assert path.read_bytes() == whole


def test_a_file_under_another_name_is_not_read(tmp_path: Path) -> None:
    first, other = (_solved(_request(**{"seq_len": n})) for n in (1024, 512))
    LayoutFiles(tmp_path).get("prices", 1, lambda: first)
    (path,) = tmp_path.iterdir()
    LayoutFiles(tmp_path).get("prices", 2, lambda: other)
    (second,) = (p for p in tmp_path.iterdir() if p != path)
    second.write_bytes(path.read_bytes())
    assert LayoutFiles(tmp_path).get("prices", 2, lambda: other) is other


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"at": "@nic=100"}, True),  # four ranks of a node send nothing over it
        ({"model": "gpt2-xl"}, False),
        ({"seq_len": 512}, False),
        ({"at": "@memory_gb_s=1000"}, False),
        ({"at": "@scaleup=100"}, False),
        ({"precision": "fp8"}, False),
        ({"pins": {"state_slack": 1.5}}, False),
    ],
)
def test_a_file_is_found_by_what_its_layout_depends_on(tmp_path: Path, change: dict[str, Any], same: bool) -> None:
    solved = _usual()
    for request in (_request(), _request(**change)):
        LayoutFiles(tmp_path).get(prices_key(request, request.costs, CUT), 5, lambda: solved)
    assert len(list(tmp_path.iterdir())) == (1 if same else 2)


def test_files_of_other_code_and_other_numbers_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = _usual()
    for number in (1, 2):
        LayoutFiles(tmp_path).get("prices", number, lambda: solved)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(layout_files, "_versions", lambda: ("another checkout",))
    LayoutFiles(tmp_path).get("prices", 1, lambda: solved)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_has_no_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object has no content"):
        LayoutFiles(tmp_path).get(object(), 1, _never)


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.delenv(NO_CACHE_VARIABLE)
    found = LayoutCache(_request()).get(*CUT[:3])
    assert found is not None
    assert found.solution.selection == _usual()[1].selection


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> Any:
        raise KeyError(user)

    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not keep_cached(folder_of_layouts() / "layout", "text")
    assert read_cached(folder_of_layouts() / "layout") is None
    monkeypatch.setenv(CACHE_VARIABLE, "here")
    assert folder_of_layouts() == Path("here") / "layouts"


def test_the_files_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = _usual()
    for number in range(6):
        LayoutFiles(tmp_path).get("prices", number, lambda: solved)
    files = sorted(tmp_path.iterdir())
    for age, path in enumerate(files):
        os.utime(path, (10**9 - age, 10**9 - age))
    size = files[0].stat().st_size
    monkeypatch.setattr(layout_files, "MOST_BYTES", 4 * size + 100)
    LayoutFiles(tmp_path).get("prices", 6, lambda: solved)
    assert [path for path in files if path.exists()] == files[:2]
    assert len(list(tmp_path.iterdir())) == 3


def test_several_write_the_same_file_at_once(tmp_path: Path) -> None:
    solved, found = _usual(), []
    together = threading.Barrier(4)

    def one() -> None:
        together.wait()
        for number in range(20):
            found.append(LayoutFiles(tmp_path).get("prices", number, lambda: solved))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(each == solved for each in found)
    assert len(list(tmp_path.iterdir())) == 20


def test_the_switch_and_the_variable_turn_it_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LayoutCache(_request(cache=False)).get(*CUT[:3])
    monkeypatch.setenv(NO_CACHE_VARIABLE, "1")
    LayoutCache(_request()).get(*CUT[:3])
    assert not folder.exists()
    monkeypatch.setenv(NO_CACHE_VARIABLE, "")
    LayoutCache(_request()).get(*CUT[:3])
    assert any(folder.iterdir())
