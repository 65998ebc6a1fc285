"""experiments/published/validate.py: a bad row costs itself alone and is said; groups count what is refused."""

from __future__ import annotations

import codecs
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from made_up import LLAMA, QWEN, case_of, row, write_csv
from rich.console import Console

from autoplan.catalog import load_model
from autoplan.errors import AutoplanError
from experiments.published import summary as published_summary
from experiments.published import validate as tool
from experiments.published.rows import Case, Shapes
from experiments.published.table import COLUMNS, read_rows

GOOD = {"id": "good"}


@pytest.fixture(autouse=True)
def catalog_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped graph in place of captured ones: these tests are about what is done with it."""
    graph = load_model("llama-3.2-1b")
    monkeypatch.setattr(tool, "graph_of", lambda shape: graph)


def stored(data: Path, tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = tmp_path / "out.json"
    tool.main(data, out, jobs=1)
    found = json.loads(out.read_text())
    return found["rows"], found["summary"]


def shown(results: list[tool.Result]) -> str:
    console = Console(file=io.StringIO(), width=200)
    tool.show(results, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {"step_time_s": "0"},
        {"step_time_s": "-1.5"},
        {"step_time_s": "NaN"},
        {"step_time_s": "inf"},
        {"step_time_s": "fast"},
        {"step_time_s": "", "tokens_per_s_per_gpu": "0"},
        {"step_time_s": "", "tokens_per_s_per_gpu": "-3"},
        {"step_time_s": "", "tflops_per_gpu": "nan"},
        {"step_time_s": ""},
    ],
)
def test_a_result_that_no_run_has_is_not_compared_with_and_said(fields: dict[str, str], tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rows.csv", [{"id": "bad", **fields}, GOOD])
    (bad, good), summary = stored(data, tmp_path)
    column = next((c for c in fields if fields[c]), "nothing measured")
    assert bad["reason"].startswith("not compared: ") and column in bad["reason"]
    assert fields.get(column, "") in bad["reason"]  # the value
    assert not bad["stated"] and bad["measured_step_time_s"] is None
    assert bad["predicted_step_time_s"] == good["predicted_step_time_s"]  # what it is was priced all the same
    assert summary["all"]["num_stated"] == summary["all"]["num_priced"] == 1
    assert summary["all"]["mean"] == summary["all"]["mean_with_unpriced"]
    assert bad["reason"] in "".join(summary["not_stated"]) or "N" in "".join(summary["not_stated"])
    assert summary["feasibility"]["num_ran"] == 1  # nothing says that it ran


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tp": "2.5"}, "tp=2.5: must be a whole number"),
        ({"heads": "-32"}, "heads=-32: must be a whole number"),
        ({"global_batch": "0"}, "global_batch=0: must be at least 1"),
        ({"layers": "many"}, "layers='many' is not a number"),
        ({"hidden": "NaN"}, "must be finite"),
        ({"params_b": "0"}, "params_b=0: must be above 0"),
        ({"gpu": "?"}, "no device ? in the catalog"),
    ],
)
def test_a_row_that_says_what_cannot_be_is_refused_alone(fields: dict[str, str], why: str, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rows.csv", [{"id": "bad", **fields}, GOOD])
    (bad, good), summary = stored(data, tmp_path)
    assert why in bad["reason"] and bad["stated"] and bad["predicted_step_time_s"] is None
    assert not good["reason"] and summary["all"]["num_priced"] == 1 and summary["all"]["num_stated"] == 2
    assert summary["failed"] == 0


@pytest.mark.parametrize("where", ["interpret", "price"])
def test_an_exception_costs_one_row_and_is_counted_and_logged(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = getattr(tool, where)

    def broken(asked: Any, *rest: Any) -> Any:
        if (where == "interpret" and asked["id"] == "bad") or (where == "price" and asked.global_batch_size == 128):
            raise ZeroDivisionError("of nothing")
        return real(asked, *rest)

    monkeypatch.setattr(tool, where, broken)
    rows = read_rows(write_csv(tmp_path / "rows.csv", [{"id": "bad", "global_batch": "128"}, GOOD]))
    bad, good = tool.validate(rows, rows, 1)
    assert bad.reason == "failed: ZeroDivisionError: of nothing" and bad.stated and bad.failed and not good.reason
    assert "row bad cannot be priced" in caplog.text and "Traceback" in caplog.text
    text = shown([bad, good])
    assert "1 rows failed: exceptions" in text and "failed: ZeroDivisionError: of nothing" in text
    assert "rows failed" not in shown([good]) and tool.summary_of([bad, good])["failed"] == 1


def test_a_process_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = tool.result_of

    def dying(case: Case) -> tool.Result:
        if case.row["id"] == "bad":
            os._exit(9)  # as the kernel ends what takes too much memory
        return real(case)

    monkeypatch.setattr(tool, "result_of", dying)  # processes are forked, with this in them
    rows = read_rows(write_csv(tmp_path / "rows.csv", [{"id": "bad"}, GOOD, {"id": "other", "layers": "8"}]))
    bad, good, other = tool.validate(rows, rows, 2)
    assert bad.failed and "BrokenProcessPool" in bad.reason and not good.reason and not other.reason


def test_a_file_of_any_system_is_read(tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "plain.csv", [{**GOOD, "model": "a"}, {"id": "second"}]).read_bytes()
    assert b"\r\n" in plain  # as csv writes
    wanted = [r.fields for r in read_rows(tmp_path / "plain.csv")]
    for name, data in {
        "mark": codecs.BOM_UTF8 + plain,
        "unix": plain.replace(b"\r\n", b"\n"),
        "mac": plain.replace(b"\r\n", b"\r"),
        "padded": plain.replace(b"id,campaign", b" id , campaign").replace(b"\r\n", b"\r\n\r\n"),
    }.items():
        path = tmp_path / f"{name}.csv"
        path.write_bytes(data)
        assert [r.fields for r in read_rows(path)] == wanted, name
        assert all(not r.faults for r in read_rows(path))
    latin = tmp_path / "latin.csv"
    latin.write_bytes(plain.replace(b",a,", ",Zürich,".encode("latin-1"), 1) + "three,Köln\n".encode())
    first, second, third = read_rows(latin)
    assert first["model"] == "Zürich" and first.faults == ("line 2 is not UTF-8: read as Windows-1252",)
    assert not second.faults and third["campaign"] == "Köln" and "the rest is blank" in third.faults[0]
    (good, *_), _ = stored(latin, tmp_path)
    assert good["notes"] == list(first.faults) and not good["reason"]
    long = tmp_path / "long.csv"
    long.write_bytes(plain.replace(b"\r\n", b",x,y\r\n").replace(b",x,y", b"", 1))
    assert f"{len(COLUMNS) + 2} fields in a table of {len(COLUMNS)} columns" in read_rows(long)[0].faults[0]


def test_a_file_without_rows_or_without_anything_says_so(tmp_path: Path) -> None:
    rows, summary = stored(write_csv(tmp_path / "head.csv", []), tmp_path)
    assert rows == [] and summary["all"]["num_rows"] == 0 and summary["macro_mean"] is None
    empty = tmp_path / "empty.csv"
    for data, why in ((b"", "is empty"), (codecs.BOM_UTF8, "is empty"), ("id".encode("utf-16"), "no text in UTF-8")):
        empty.write_bytes(data)
        with pytest.raises(AutoplanError, match=why):
            read_rows(empty)
        with pytest.raises(typer.BadParameter, match=why):
            tool.main(empty, jobs=1)


def test_ids_that_come_twice_are_both_priced_and_said(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "rows.csv", [GOOD, {**GOOD, "global_batch": "128"}, {"id": "other"}])
    (first, second, _), summary = stored(data, tmp_path)
    assert first["id"] == second["id"] and second["predicted_step_time_s"] > first["predicted_step_time_s"]
    assert summary["duplicate_ids"] == ["good"] and summary["all"]["num_priced"] == 3
    rows = read_rows(data)
    assert "ids of more than one row, each priced and counted: good" in shown(tool.validate(rows, rows, 1))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_count_refused_rows_where_their_own_columns_say_the_group() -> None:
    lost = {"gpu": "MI999", "tp": "2", "dp": "8", "recompute": "full (each layer)"}
    rows = [
        row(2),
        row(3, **lost),
        row(4, **{**lost, **QWEN, "precision": "MXFP8", "ep": "8"}),
        row(5, **{**dict.fromkeys(LLAMA, ""), "id": "bare"}),
    ]
    results = tool.validate(rows, rows, 1)
    groups = tool.summary_of(results)["groups"]

    def counts(name: str) -> dict[str, tuple[int, int, int]]:
        return {k: (e["num_rows"], e["num_stated"], e["num_priced"]) for k, e in groups[name].items()}

    assert counts("precision") == {"bf16": (2, 2, 1), "fp8": (1, 1, 0), "not stated": (1, 0, 0)}
    assert counts("model") == {"dense": (2, 2, 1), "experts": (1, 1, 0), "not stated": (1, 0, 0)}
    assert counts("tp") == {"tp 2": (2, 2, 0), "tp 1": (1, 1, 1), "tp not stated": (1, 0, 0)}
    assert counts("ep") == {"ep not stated": (2, 1, 0), "ep 1": (1, 1, 1), "ep 8": (1, 1, 0)}
    assert counts("recompute") == {"full": (2, 2, 0), "none": (1, 1, 1), "not stated": (1, 0, 0)}
    assert groups["model"]["experts"]["mean_with_unpriced"] == 1.0
    assert all(sum(n for n, _, _ in counts(name).values()) == 4 for name in tool.GROUPS)
    assert "experts" in shown(results)


def test_groups_of_refused_rows_are_named_as_those_of_priced_ones() -> None:
    nemo = {"source": "NVIDIA-NeMo/Megatron-Bridge docs", "precision": "MXFP8", "gpu": "B200", "gpu_mem_gb": "180"}
    good, refused = row(2, **nemo), row(3, **nemo, global_batch="8")
    a, b = tool.validate([good, refused], [good, refused], 1)
    assert b.reason and not a.reason
    names = [name for name in tool.GROUPS if tool.GROUPS[name](a) != tool.GROUPS[name](b)]
    assert names in ([], ["cp", "ep"], ["ep"])  # what the row leaves blank is 1 where it is priced
    assert a.precision == b.precision == "mxfp8-grad16"


def test_a_memory_figure_that_is_not_compared_says_why() -> None:
    known = tool.result_of(case_of(peak_mem_gb="20", mem_kind="allocated GB"))
    unknown = tool.result_of(case_of(peak_mem_gb="20", mem_kind="as seen"))
    zero = tool.result_of(case_of(peak_mem_gb="0", mem_kind="allocated GB"))
    assert known.measured_bytes == 20e9 and not known.memory_reason and not unknown.reason
    assert "mem_kind 'as seen' does not say" in unknown.memory_reason and "peak_mem_gb=0" in zero.memory_reason
    text = shown([known, unknown, unknown, zero])
    assert "2 memory figures are not compared: mem_kind 'as seen'" in text
    assert sum(tool.summary_of([known, unknown, zero])["memory_not_compared"].values()) == 2


# -- what is held out --------------------------------------------------------------------------------------------------


def test_what_is_in_sample_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        "unseen": {"c": 0.2, "d": 0.1},
        "step_intervals": {"dense": {"covered": 0.87}, "dense of x": {"covered": 1}},
    }
    monkeypatch.setattr(published_summary, "_constants", lambda: held)
    found = published_summary.held_out_of(["c", "d", "other"])
    assert found["macro_mean"] == pytest.approx(0.15) and found["models"] is None and found["not_fitted"] == ["other"]
    text = "\n".join(published_summary.held_out_text(["c", "d", "other"]))
    assert "macro average over 2 of these campaigns 15.0%" in text
    assert "had no part in the constants, so that all of their figures are held out: other" in text
    assert "errors of rows with experts are not stored with the constants: those above are in sample" in text
    assert "steps within the intervals of their class: dense 87.0%; covered above is in sample" in text
    held["unseen_models"] = {"dense": 0.08, "experts": 0.21}
    assert "rows that the constants were fitted to: dense 8.0%, experts 21.0%" in "\n".join(
        published_summary.held_out_text(["c"])
    )
    del held["step_intervals"]
    assert "covered above is in sample" in published_summary.held_out_text(["c"])[-1]
    shipped = shown([tool.result_of(case_of())])
    assert "held out" in shipped or "in sample" in shipped


def test_the_shipped_constants_have_held_out_coverage() -> None:
    found = published_summary.held_out_of(["bloom", "not among them"])
    assert set(found["errors"]) == {"bloom"} and found["not_fitted"] == ["not among them"]
    assert {"dense", "experts"} <= found["covered"].keys() and all(0 < v <= 1 for v in found["covered"].values())


def test_shapes_of_bad_rows_leave_those_of_others(tmp_path: Path) -> None:
    """All rows of a file are read for the kinds of layers: what is wrong with one is its own."""
    bad = [row(3, params_b="0"), row(4, params_b="many"), row(5, heads="0"), row(6, params_b="1e-300")]
    good = row(2, params_b="1.2")
    assert Shapes([*bad, good]).of(good) == Shapes([good]).of(good)
